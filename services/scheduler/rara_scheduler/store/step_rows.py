"""The columns in which the steps of new runs go to the database."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import uuid_utils

from rara_scheduler.domain.definition import StepSpec


def new_id() -> str:
    """A UUIDv7: ids made one after the other sort in that order."""
    return str(uuid_utils.uuid7())


@dataclass(slots=True)
class StepColumns:
    """Lists of equal length in each group: steps, edges, ready steps. Times in seconds."""

    runs: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    routes: list[int] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    schedule_timeouts: list[float | None] = field(default_factory=list)
    goes_on_for: list[str | None] = field(default_factory=list)
    edge_runs: list[str] = field(default_factory=list)
    edge_steps: list[str] = field(default_factory=list)
    edge_ups: list[str] = field(default_factory=list)
    ready_runs: list[str] = field(default_factory=list)
    ready_ids: list[str] = field(default_factory=list)
    ready_routes: list[int] = field(default_factory=list)
    ready_timeouts: list[float | None] = field(default_factory=list)
    ready_schedule_timeouts: list[float | None] = field(default_factory=list)

    def add(
        self,
        workflow_run_id: str,
        step: StepSpec,
        *,
        route_id: int,
        ids: Mapping[str, str],
        idempotency_key: str,
        is_ready: bool,
        goes_on_for: str | None = None,
    ) -> None:
        """One step; ids: of it and of every step that it depends on, by name."""
        step_run_id = ids[step.step_name]
        self.runs.append(workflow_run_id)
        self.ids.append(step_run_id)
        self.names.append(step.step_name)
        self.routes.append(route_id)
        self.keys.append(idempotency_key)
        self.schedule_timeouts.append(step.schedule_timeout_s)
        self.goes_on_for.append(goes_on_for)
        for up in step.depends_on:
            self.edge_runs.append(workflow_run_id)
            self.edge_steps.append(step_run_id)
            self.edge_ups.append(ids[up])
        if is_ready:
            self.ready_runs.append(workflow_run_id)
            self.ready_ids.append(step_run_id)
            self.ready_routes.append(route_id)
            self.ready_timeouts.append(step.timeout_s)
            self.ready_schedule_timeouts.append(step.schedule_timeout_s)
