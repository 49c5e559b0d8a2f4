"""What state machines over the store share: definitions to run, and what the database may never show after any act."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

TWICE = {"retry": {"max_attempts": 2}}
DEFINITIONS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "single": ("FAIL_FAST", {"a": {}}),
    "trio": ("FAIL_FAST", {"a": {}, "b": {}, "c": TWICE}),
    "chain": ("FAIL_FAST", {"a": TWICE, "b": {"depends_on": ["a"]}, "c": {"depends_on": ["b"]}}),
    "diamond": (
        "FAIL_FAST",
        {
            "a": {},
            "b": {"depends_on": ["a"]} | TWICE,
            "c": {"depends_on": ["a"]},
            "d": {"depends_on": ["b", "c"]},
        },
    ),
    "branches": (
        "CONTINUE",
        {"a": TWICE, "b": {"depends_on": ["a"]}, "x": TWICE, "y": {"depends_on": ["x"]}},
    ),
}

# Each query names what may never be; it must return nothing.
NEVER = {
    "a step stands in two places at once": """
        select step_run_id from (
            select step_run_id from rara.result union all select step_run_id from rara.lease
            union all select step_run_id from rara.ready union all select step_run_id from rara.waiting) p
        group by step_run_id having count(*) > 1""",
    "a token was granted twice, or a later attempt has a smaller one": """
        select a.step_run_id from (
            select step_run_id, attempt, lease_token from rara.step_attempt
            union all select step_run_id, attempt, lease_token from rara.result where lease_token is not null
            union all select step_run_id, attempt, lease_token from rara.lease) a
        join (
            select step_run_id, attempt, lease_token from rara.step_attempt
            union all select step_run_id, attempt, lease_token from rara.result where lease_token is not null
            union all select step_run_id, attempt, lease_token from rara.lease) b
          on (a.step_run_id, a.attempt) <> (b.step_run_id, b.attempt)
         and (a.lease_token = b.lease_token
              or (a.step_run_id = b.step_run_id and a.attempt < b.attempt and a.lease_token > b.lease_token))""",
    "a run's counters differ from its results": """
        select w.workflow_run_id from rara.workflow_run w
         cross join lateral (
            select count(*) filter (where x.state = 'succeeded') as succeeded,
                   count(*) filter (where x.state = 'terminal_failed' or x.state = 'cancelled'
                       and x.reason in ('DEADLINE_EXCEEDED', 'NO_CAPABLE_EXECUTOR')) as failed,
                   count(*) as closed
              from rara.result x where x.workflow_run_id = w.workflow_run_id) c
         cross join lateral (
            select count(*) as steps from rara.reused_step u where u.workflow_run_id = w.workflow_run_id) u
         where (w.steps_succeeded, w.steps_failed) <> (c.succeeded + u.steps, c.failed)
            or w.steps_succeeded + w.steps_failed + w.steps_cancelled <> c.closed + u.steps""",
    "a run's state is not what its steps say": """
        select workflow_run_id from rara.workflow_run
         where steps_total = steps_succeeded + steps_failed + steps_cancelled
           and state <> case when steps_failed > 0 then 'failed' when steps_cancelled > 0 then 'cancelled'
                             else 'succeeded' end
            or steps_total > steps_succeeded + steps_failed + steps_cancelled
           and state not in ('pending', 'running', 'cancelling')""",
    "a step waits in a run that is to be cancelled": """
        select q.step_run_id from (select step_run_id, workflow_run_id from rara.ready
                                   union all select step_run_id, workflow_run_id from rara.waiting) q
          join rara.workflow_run w using (workflow_run_id)
         where w.cancel_requested_at is not null or w.ended_at is not null""",
    "a lease of a run that is to be cancelled was not asked to end": """
        select l.step_run_id from rara.lease l join rara.workflow_run w using (workflow_run_id)
         where w.cancel_requested_at is not null and l.cancel_requested_at is null""",
    "a lease has no end": "select step_run_id from rara.lease where expires_at is null",
    "a step is stranded": """
        select s.step_run_id from rara.step_run s
         where not exists (select from rara.result x where x.step_run_id = s.step_run_id)
           and not exists (select from rara.lease x where x.step_run_id = s.step_run_id)
           and not exists (select from rara.ready x where x.step_run_id = s.step_run_id)
           and not exists (select from rara.waiting x where x.step_run_id = s.step_run_id)
           and not exists (
               select from rara.step_dependency d
                where d.step_run_id = s.step_run_id
                  and not exists (select from rara.result x where x.step_run_id = d.depends_on_step_run_id))""",
    "a step began before its dependencies had succeeded": """
        select d.step_run_id from rara.step_dependency d
          join (select step_run_id from rara.ready union all select step_run_id from rara.lease
                union all select step_run_id from rara.waiting
                union all select step_run_id from rara.result where state = 'succeeded') p using (step_run_id)
         where not exists (select from rara.result x
                            where x.step_run_id = d.depends_on_step_run_id and x.state = 'succeeded')""",
    "more failures than the budget": """
        select step_run_id from rara.step_state where failures > 3 or failures > attempt""",
    "events of one attempt lack a number that is not counted as a gap": """
        select l.step_run_id from rara.lease l
         where l.last_sequence - l.gaps <> (select count(*) from rara.step_event e
                where e.step_run_id = l.step_run_id and e.attempt = l.attempt)""",
}
ALL_NEVER = " union all ".join(
    "(select '{}' as what, count(*) as n from ({}) t having count(*) > 0)".format(
        name.replace("'", "''"), text
    )
    for name, text in NEVER.items()
)
FINAL = """
    select 'step ' || step_run_id::text as id, row(x.*)::text as facts from rara.result x
    union all
    select 'run ' || workflow_run_id::text, row(w.*)::text from rara.workflow_run w where ended_at is not null"""


class Loop:
    """An event loop in a thread of its own: the machine's rules are synchronous, the store is not."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="store of the machine")
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
