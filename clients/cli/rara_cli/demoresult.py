"""What the demo's run left behind, as the API tells it, and what of it should hold."""

import json
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp
from rara.v1 import common_pb2, workflow_pb2
from rara_client import Client
from rara_client.payloads import json_value

from rara_cli import words
from rara_cli.artifacts import content
from rara_cli.jsonview import Json, to_json

FIGURES = ("queries", "recall_at_1", "recall_at_10", "mrr")


@dataclass(frozen=True, slots=True)
class Made:
    """One artifact with its nearest lineage. used_by: steps, each with the name that it knows it by."""

    artifact: common_pb2.Artifact
    made_by: str
    used_by: list[str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """steps: in the definition's order, each with all its attempts. figures: read from the artifact `metrics`."""

    run: workflow_pb2.WorkflowRun
    steps: list[workflow_pb2.GetStepRunResponse]
    edges: list[workflow_pb2.LineageEdge]
    figures: dict[str, Any]

    def step(self, name: str) -> workflow_pb2.GetStepRunResponse | None:
        return next((step for step in self.steps if step.step_run.step_name == name), None)

    def output(self, name: str) -> dict[str, Any]:
        """A step's output; empty as long as there is none."""
        step = self.step(name)
        value = json_value(step.step_run.output) if step is not None else None
        return value if isinstance(value, dict) else {}

    def made(self) -> list[Made]:
        names = {step.step_run.step_run_id: step.step_run.step_name for step in self.steps}
        return [
            Made(artifact, step.step_run.step_name, list(self._users(artifact, names)))
            for step in self.steps
            for artifact in step.step_run.manifest.artifacts
        ]

    def _users(self, artifact: common_pb2.Artifact, names: dict[str, str]) -> Iterable[str]:
        """Of this run: the same bytes may have been used by other runs too."""
        seen = set()
        for edge in self.edges:
            user = names.get(edge.step_run_id)
            if (
                edge.artifact.sha256 != artifact.digest.sha256
                or edge.produced
                or user is None
                or user in seen
            ):
                continue
            seen.add(user)
            alias = edge.artifact_name
            yield user if alias in ("", artifact.name) else f"{user} as {alias}"

    def to_json(self) -> Json:
        return {
            "run": to_json(self.run),
            "figures": self.figures,
            "steps": [to_json(step) for step in self.steps],
            "artifacts": [
                {"step_name": made.made_by, "used_by": made.used_by, **to_json(made.artifact)}
                for made in self.made()
            ],
            "lineage": [to_json(edge) for edge in self.edges],
        }


async def fetch_outcome(client: Client, workflow_run_id: str) -> Outcome:
    """Ask for everything: the run, its steps and attempts, the figures, who used what."""
    run = (await client.get_run(workflow_run_id)).run
    definition = await client.get_definition(run.definition, run.definition_version)
    places = {step.step_name: place for place, step in enumerate(definition.steps)}
    async with aclosing(client.list_step_runs(workflow_run_id, page_size=1000)) as found:
        ids = {step.step_name: step.step_run_id async for step in found}
    steps = [await client.get_step_run(ids[name]) for name in sorted(ids, key=lambda name: places[name])]
    artifacts = [artifact for step in steps for artifact in step.step_run.manifest.artifacts]
    return Outcome(run, steps, await _edges(client, artifacts), await _figures(client, artifacts))


async def _edges(client: Client, artifacts: list[common_pb2.Artifact]) -> list[workflow_pb2.LineageEdge]:
    """One hop up and down from each artifact."""
    edges = []
    directions = (workflow_pb2.LINEAGE_DIRECTION_UPSTREAM, workflow_pb2.LINEAGE_DIRECTION_DOWNSTREAM)
    for digest in {artifact.digest.sha256: artifact.digest for artifact in artifacts}.values():
        for direction in directions:
            request = workflow_pb2.QueryLineageRequest(artifact=digest, direction=direction, depth=1)
            async with aclosing(client.query_lineage(request)) as found:
                edges.extend([edge async for edge in found])
    return edges


async def _figures(client: Client, artifacts: list[common_pb2.Artifact]) -> dict[str, Any]:
    for artifact in artifacts:
        if artifact.type == "metrics":
            value = json.loads(b"".join([data async for data in content(client, artifact)]))
            return {name: value[name] for name in FIGURES}
    return {}


def faults(outcome: Outcome) -> list[str]:
    """What is not as a demo should end; empty: all is well."""
    found = []
    state = words.run_state(outcome.run.state)
    if state != "succeeded":
        found.append(f"the run {state}: {outcome.run.error.code} {outcome.run.error.message}".rstrip(": "))
    found += [f"no figure {name}" for name in FIGURES if name not in outcome.figures]
    output = outcome.output("evaluate")
    found += [
        f"step evaluate says {name} {output.get(name)}, its artifact {value}"
        for name, value in outcome.figures.items()
        if output.get(name) != value
    ]
    if state == "succeeded":
        found += [
            f"no lineage for {made.artifact.name}" for made in outcome.made() if not _is_traced(outcome, made)
        ]
    return found


def _is_traced(outcome: Outcome, made: Made) -> bool:
    return any(edge.produced and edge.artifact == made.artifact.digest for edge in outcome.edges)


def seconds_between(start: Timestamp, end: Timestamp) -> float:
    return (words.instant(end) - words.instant(start)).total_seconds()
