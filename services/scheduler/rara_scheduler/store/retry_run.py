"""Retrying a closed run: a new run that takes over what succeeded, and goes on with what did not."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rara_scheduler.domain.definition import DefinitionSpec
from rara_scheduler.domain.errors import Code, Fault
from rara_scheduler.domain.ids import run_not_found
from rara_scheduler.domain.start_command import retry_sha256
from rara_scheduler.domain.violations import Violations
from rara_scheduler.store.database import Conflict, Database, DataRefused
from rara_scheduler.store.definitions import DefinitionStore, Registered
from rara_scheduler.store.queries import query
from rara_scheduler.store.start import run_of_key
from rara_scheduler.store.step_rows import StepColumns, new_id
from rara_scheduler.telemetry.port import UNTRACED, Tracing

_TRIES: Final = 5


@dataclass(frozen=True, slots=True)
class EarlierStep:
    """A step of the closed run, its own or one that it reused."""

    step_run_id: str
    idempotency_key: str
    succeeded: bool


def steps_to_rerun(
    spec: DefinitionSpec, earlier: Mapping[str, EarlierStep], step_names: Sequence[str]
) -> set[str]:
    """All that did not succeed, and the steps named with all that depends on them."""
    unfinished = {name for name in spec.steps if name not in earlier or not earlier[name].succeeded}
    return unfinished | spec.downstream(step_names)


class RunRetrier:
    """Starts the retry of a run: at most one that has not ended, whoever asks and however many do."""

    def __init__(
        self,
        database: Database,
        definitions: DefinitionStore,
        *,
        on_ready: Callable[[], None],
        tracing: Tracing = UNTRACED,
    ) -> None:
        self._tracing = tracing
        self._database = database
        self._definitions = definitions
        self._on_ready = on_ready

    async def retry(
        self, workflow_run_id: str, step_names: Sequence[str] = (), *, idempotency_key: str | None = None
    ) -> tuple[str, bool]:
        """The new run's id, and whether it was there already: by the key, or as the run's live retry.

        A caller's key is remembered for the run that it got, also when another call started that one.
        Raises Fault: RUN_NOT_FOUND, RUN_NOT_RETRYABLE, FIELD_INVALID for an unknown step, IDEMPOTENCY_CONFLICT.
        """
        sha256 = retry_sha256(workflow_run_id, step_names)
        for _ in range(_TRIES):
            try:
                found = await self._try(workflow_run_id, step_names, idempotency_key, sha256)
            except (Conflict, DataRefused) as error:
                # 23505: another call stored the same key in the meantime, and has committed. 23503: retention has
                # removed the run in the meantime.
                if isinstance(error, DataRefused) and error.sqlstate not in ("23505", "23503"):
                    raise
                continue
            if found is not None:
                return found
        raise Fault(Code.STORE_UNAVAILABLE, "the retry met other transactions", retry_after_s=0.2)

    async def _try(
        self, source: str, step_names: Sequence[str], key: str | None, sha256: str
    ) -> tuple[str, bool] | None:
        """One attempt; None when what stood in the way has gone meanwhile."""
        async with self._database.connection() as connection:
            if key is not None:
                known = await run_of_key(connection, key, sha256)
                if known is not None:
                    return known, True
            run = await connection.fetchrow(query("retry_source"), source)
            if run is None:
                raise run_not_found(source)
            if run["state"] not in ("failed", "cancelled"):
                raise Fault(
                    Code.RUN_NOT_RETRYABLE,
                    f"run {source} is {run['state']}; only a failed or cancelled run can be retried",
                    metadata={"workflow_run_id": source, "state": run["state"]},
                )
            rows = await connection.fetch(query("retry_source_steps"), source)
        earlier = {
            row["step_name"]: EarlierStep(row["step_run_id"], row["idempotency_key"], row["succeeded"])
            for row in rows
        }
        registered = await self._definitions.load(run["definition"], run["definition_version"])
        _check_step_names(registered.spec, step_names)
        trace = self._tracing.retries(run["traceparent"], run["tracestate"])
        arguments = [*_arguments(source, registered, earlier, step_names, key, sha256), *trace]
        async with self._database.connection() as connection:
            started = await connection.fetchval(query("retry_run"), *arguments)
            if started is not None:
                self._on_ready()
                return str(started), False
            live = await connection.fetchval(query("retry_live"), source)
            if live is None:
                return None  # the key was taken, or the live retry has just ended: look again
            if key is None or await connection.fetchval(query("start_key_insert"), key, sha256, live):
                return str(live), True
            return None


def _check_step_names(spec: DefinitionSpec, step_names: Sequence[str]) -> None:
    violations = Violations()
    for index, name in enumerate(step_names):
        if name not in spec.steps:
            violations.add(f"step_names[{index}]", "names no step of this run")
    if violations:
        raise violations.fault(Code.FIELD_INVALID, "the run cannot be retried so")


def _arguments(
    source: str,
    registered: Registered,
    earlier: Mapping[str, EarlierStep],
    step_names: Sequence[str],
    key: str | None,
    sha256: str,
) -> list[Any]:
    """The parameters of `retry_run`, in its order; the trace context follows."""
    spec = registered.spec
    rerun = steps_to_rerun(spec, earlier, step_names)
    run_id = new_id()
    ids = {name: new_id() if name in rerun else earlier[name].step_run_id for name in spec.steps}
    rows = StepColumns()
    for name, step in spec.steps.items():
        if name not in rerun:
            continue
        before = earlier.get(name)
        goes_on = before is not None and not before.succeeded
        rows.add(
            run_id,
            step,
            route_id=registered.route_ids[name],
            ids=ids,
            # What had not succeeded keeps its key, and with it effects and checkpoint; what had is done anew.
            idempotency_key=before.idempotency_key if before and goes_on else f"{run_id}/{name}",
            is_ready=rerun.isdisjoint(step.depends_on),
            goes_on_for=before.step_run_id if before and goes_on else None,
        )
    return [
        run_id,
        source,
        [ids[name] for name in spec.steps if name not in rerun],
        key,
        sha256,
        rows.ids,
        rows.names,
        rows.routes,
        rows.keys,
        rows.schedule_timeouts,
        rows.goes_on_for,
        rows.edge_steps,
        rows.edge_ups,
        rows.ready_ids,
        rows.ready_routes,
        rows.ready_timeouts,
        rows.ready_schedule_timeouts,
    ]
