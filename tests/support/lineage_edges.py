"""Edges of lineage as a scheduler would send them, from a few words."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from rara.v1 import common_pb2, workflow_pb2

RUN = "0198c2a0-0000-7000-8000-000000000001"
OTHER = "0198c2a1-0000-7000-8000-000000000002"


def digest(word: str) -> common_pb2.Digest:
    return common_pb2.Digest(sha256=hashlib.sha256(word.encode()).hexdigest(), size_bytes=len(word) * 100)


def step_id(name: str) -> str:
    return f"0198c2b0-0000-7000-8000-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def edges_of(
    step: str,
    depth: int,
    *,
    uses: Sequence[str] = (),
    makes: Sequence[str] | Mapping[str, Iterable[str]] = (),
    sees: Sequence[str] = (),
    run: str = RUN,
) -> list[workflow_pb2.LineageEdge]:
    """All of one step's edges. An artifact is named as its bytes are. makes: may say what each was made from."""
    made = makes if isinstance(makes, Mapping) else dict.fromkeys(makes, ())
    terms = [
        *((word, word, True, ()) for word in uses),
        *((word, "", True, ()) for word in sees),
        *((word, word, False, origins) for word, origins in made.items()),
    ]
    return [
        workflow_pb2.LineageEdge(
            artifact=digest(word),
            artifact_name=name,
            artifact_type="dataset",
            workflow_run_id=run,
            step_run_id=step_id(step),
            attempt=1,
            produced=not is_use,
            declared=bool(name),
            depth=depth,
            step_name=step,
            definition="nightly",
            definition_version=3,
            kind=f"do.{step}",
            derived_from=[digest(origin) for origin in origins],
        )
        for word, name, is_use, origins in terms
    ]
