"""The artifacts that a definition hands to a step: from the run's own inputs, and from the steps before it."""

from collections.abc import Mapping, Sequence

import asyncpg

from rara_scheduler.domain.attempt import ArtifactFacts
from rara_scheduler.domain.definition import StepSpec
from rara_scheduler.store.database import Connection
from rara_scheduler.store.queries import query


class ArtifactNotThere(Exception):
    """A binding names an artifact that its step did not produce."""

    def __init__(self, step_run_id: str, name: str, from_step: str, from_name: str) -> None:
        origin = f"step {from_step}" if from_step else "the run's input"
        super().__init__(f"input artifact {name}: {origin} has no artifact {from_name}")
        self.step_run_id = step_run_id


def _facts(row: asyncpg.Record, name: str) -> ArtifactFacts:
    return ArtifactFacts(
        name=name,
        sha256=row["sha256"],
        size_bytes=row["size_bytes"],
        media_type=row["media_type"],
        type=row["type"],
        inline=row["inline"],
        metadata=row["metadata"],
    )


async def load_input_artifacts(
    connection: Connection,
    steps: Sequence[tuple[str, str, StepSpec]],
    missing: dict[str, ArtifactNotThere] | None = None,
) -> Mapping[str, tuple[ArtifactFacts, ...]]:
    """Bound artifacts by step_run_id, under the names the steps know them by.

    steps: (step_run_id, workflow_run_id, spec). Steps with a binding that leads nowhere are put into `missing`, or
    left without that artifact where the caller gives no `missing`.
    """
    bound = [(step_id, run_id, spec) for step_id, run_id, spec in steps if spec.input_artifacts]
    if not bound:
        return {}
    found: dict[tuple[str, str, str], asyncpg.Record] = {}
    if any(binding.from_step for _, _, spec in bound for binding in spec.input_artifacts):
        for row in await connection.fetch(query("upstream_artifacts"), [step_id for step_id, _, _ in bound]):
            found[row["step_run_id"], row["step_name"], row["name"]] = row
    if any(not binding.from_step for _, _, spec in bound for binding in spec.input_artifacts):
        of_run: dict[str, list[asyncpg.Record]] = {}
        for row in await connection.fetch(query("run_artifacts"), list({run_id for _, run_id, _ in bound})):
            of_run.setdefault(row["workflow_run_id"], []).append(row)
        for step_id, run_id, _ in bound:
            for row in of_run.get(run_id, ()):
                found[step_id, "", row["name"]] = row
    artifacts: dict[str, tuple[ArtifactFacts, ...]] = {}
    for step_id, _, spec in bound:
        given = []
        for binding in spec.input_artifacts:
            record = found.get((step_id, binding.from_step, binding.from_name))
            if record is not None:
                given.append(_facts(record, binding.name))
            elif missing is not None:
                missing[step_id] = ArtifactNotThere(
                    step_id, binding.name, binding.from_step, binding.from_name
                )
        artifacts[step_id] = tuple(given)
    return artifacts
