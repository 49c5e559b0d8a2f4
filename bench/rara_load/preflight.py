"""Before the load: the definitions are registered, and one run shows that somebody serves them."""

import contextlib
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final

from rara_client import Client, RaraError

from rara_load.plan import Form, Plan
from rara_load.shapes import definition
from rara_load.turns import LABEL, PLANNED, WARM_UP, run_request

_BEFORE: Final = timedelta(seconds=1)


class NotReady(Exception):
    """The load cannot begin; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Ready:
    """versions: of the definitions. since: a little before the first run, by the database's clock."""

    versions: dict[Form, int]
    since: datetime
    run_id: str
    step_id: str


async def prepare(client: Client, plan: Plan, load_id: str) -> Ready:
    """Raises NotReady, and RaraError for calls that fail."""
    versions = {}
    for form in sorted({*plan.forms, Form.SINGLE}):
        registered = await client.register_definition(definition(form, plan))
        versions[form] = registered.definition.version
    request = run_request(
        plan,
        Form.SINGLE,
        versions[Form.SINGLE],
        key=f"load-{load_id}-first",
        labels={LABEL: load_id, PLANNED: "succeeded", WARM_UP: "yes"},
        duration_s=0.0,
    )
    answer = await client.call(client.workflow.StartRun, request, is_repeatable=True)
    run_id = answer.run.workflow_run_id
    step = (await client.get_run(run_id, include_steps=True)).steps[0]
    try:
        await client.wait_run(run_id, timeout_s=plan.ready_s)
    except TimeoutError:
        why = await _why(client, run_id, step.step_run_id)
        raise NotReady(f"the first run had not ended after {plan.ready_s:g} s: {why}") from None
    created_at = answer.run.created_at.ToDatetime(UTC)
    return Ready(versions, created_at - _BEFORE, run_id, step.step_run_id)


async def _why(client: Client, run_id: str, step_run_id: str) -> str:
    """What is in the way of the first run, which is cancelled."""
    explained = await client.explain_step(step_run_id)
    with contextlib.suppress(RaraError, TimeoutError):
        await client.cancel_run(run_id, "the load did not begin")
    told = "; ".join(f"{one.code}: {one.message}" for one in explained.obstacles) or "nothing is in its way"
    return (
        f"{told}\nAn executor of this Rara must offer the load's steps: start one with"
        " RARA_EXECUTOR_MODULES=rara_testing.load (docs/how-to/load.md)"
    )
