"""Lineage planted as rows, and the same graph as a small model that says what a walk must find."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import asyncpg
from support.store_world import new_id


def digest_of(word: str) -> str:
    return hashlib.sha256(word.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Planted:
    """One edge. origins: words that an output was made from; empty: all inputs."""

    run: str
    step: str
    word: str
    name: str
    produced: bool
    declared: bool = True
    origins: frozenset[str] = frozenset()

    @property
    def key(self) -> tuple[str, str, bool, str]:
        return digest_of(self.word), self.step, self.produced, self.name


Depths = dict[tuple[str, str, bool, str], int]  # by Planted.key


@dataclass
class PlantedLineage:
    """Artifacts are named by words, whose bytes they are."""

    raw: "asyncpg.Connection[asyncpg.Record]"
    edges: list[Planted] = field(default_factory=list)

    async def run(self, *, definition: str = "flow") -> str:
        run_id = new_id()
        await self.raw.execute(
            "insert into rara.workflow_run (workflow_run_id, definition, definition_version, steps_total, on_failure)"
            " values ($1, $2, 1, 1, 'fail_fast')",
            run_id,
            definition,
        )
        return run_id

    async def step(
        self,
        run_id: str,
        name: str,
        *,
        uses: Sequence[str] = (),
        makes: Sequence[str] | Mapping[str, Iterable[str]] = (),
        sees: Sequence[str] = (),
    ) -> str:
        """A step that succeeded. uses and makes: words; `makes` may say what each was made from. sees: undeclared."""
        step_id = new_id()
        await self.raw.execute(
            "with route as (insert into rara.route (executor_kind, kind, kind_version, required_labels)"
            " values ('', $4, '', '{}') on conflict (executor_kind, kind, kind_version, required_labels)"
            " do update set kind = excluded.kind returning route_id)"
            " insert into rara.step_run (step_run_id, workflow_run_id, step_name, route_id, idempotency_key)"
            " select $1, $2, $3, route_id, $3 from route",
            step_id,
            run_id,
            name,
            f"do.{name}",
        )
        made = makes if isinstance(makes, Mapping) else dict.fromkeys(makes, ())
        new = [
            *(Planted(run_id, step_id, word, f"in-{word}", produced=False) for word in uses),
            *(Planted(run_id, step_id, word, "", produced=False, declared=False) for word in sees),
            *(
                Planted(run_id, step_id, word, f"out-{word}", produced=True, origins=frozenset(origins))
                for word, origins in made.items()
            ),
        ]
        await self.raw.executemany(
            "insert into rara.lineage (sha256, size_bytes, step_run_id, workflow_run_id, attempt, produced, declared,"
            " name, derived_from) values ($1, $2, $3, $4, 1, $5, $6, $7, $8)",
            [
                (
                    digest_of(edge.word),
                    len(edge.word),
                    step_id,
                    run_id,
                    edge.produced,
                    edge.declared,
                    edge.name,
                    sorted(digest_of(word) for word in edge.origins),
                )
                for edge in new
            ],
        )
        self.edges.extend(new)
        return step_id

    def expected(
        self, *, upstream: bool, depth: int, word: str | None = None, steps: Iterable[str] = ()
    ) -> Depths:
        """Which edges a walk from a word or from steps finds, and how far away: by relaxing until nothing changes."""
        far: dict[str, int] = {} if word is None else {word: 0}
        found: Depths = {}

        def reach(edge: Planted, at: int) -> None:
            found[edge.key] = min(at, found.get(edge.key, at))

        for edge in self.edges:
            if edge.step in set(steps) and edge.produced != upstream:
                reach(edge, 1)
                far[edge.word] = 1
        before = None
        while before != found:
            before = dict(found)
            for near in self.edges:
                at = far.get(near.word, depth) + 1
                if near.produced != upstream or at > depth:
                    continue
                reach(near, at)
                for other in self.edges:
                    if other.step != near.step or other.produced == upstream:
                        continue
                    made, used = (near, other) if upstream else (other, near)
                    if not made.origins or used.word in made.origins:
                        reach(other, at)
                        far[other.word] = min(at, far.get(other.word, at))
        return found
