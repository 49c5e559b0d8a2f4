"""What this scheduler knows to be paused, as of its newest look."""

import time
from collections.abc import Callable, Sequence

from rara_scheduler.domain.pause import Pause, Target


class Pauses:
    """stale_s: after that long without a look nothing is known, and nothing may be leased.

    That bounds how long a scheduler can lease what was paused elsewhere, one that was frozen and wakes up too.
    """

    def __init__(self, *, stale_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stale_s = stale_s
        self._clock = clock
        self._looked_at = float("-inf")
        self._all: frozenset[Pause] = frozenset()
        self._mark = ""
        self.kinds: frozenset[str] = frozenset()
        self.definitions: frozenset[str] = frozenset()
        # Steps of these wait for no executor: those that are being resumed are still having their wait restarted.
        self.sparing_kinds: frozenset[str] = frozenset()
        self.sparing_definitions: frozenset[str] = frozenset()

    @property
    def are_known(self) -> bool:
        return self._age_s <= self._stale_s

    def is_quiet(self, age_s: float) -> bool:
        """Nothing was paused or about to be resumed at the newest look, which is no older than that."""
        return not self._all and self._age_s <= age_s

    @property
    def _age_s(self) -> float:
        return self._clock() - self._looked_at

    def confirmed(self, mark: str, at: float) -> bool:
        """Whether a look that began at `at`, and saw no more than this mark, found what is known."""
        if self._looked_at == float("-inf") or mark != self._mark:
            return False
        self._looked_at = max(self._looked_at, at)
        return True

    def looked(self, found: Sequence[Pause], at: float) -> bool:
        """Take over what a look found that began at `at`, unless a later one is known; whether anything has changed."""
        if at < self._looked_at:
            return False
        self._looked_at = at
        now_all = frozenset(found)
        if now_all == self._all:
            return False
        self._all = now_all
        ordered = sorted(found, key=lambda pause: pause.pause_id)
        self._mark = " ".join(f"{p.pause_id}{'-' if p.resumed_at else ''}" for p in ordered)
        targets = [pause.target for pause in found if pause.resumed_at is None]
        self.kinds, self.definitions = _named(targets)
        self.sparing_kinds, self.sparing_definitions = _named([pause.target for pause in found])
        return True


def _named(targets: Sequence[Target]) -> tuple[frozenset[str], frozenset[str]]:
    return (
        frozenset(target.kind for target in targets if target.kind is not None),
        frozenset(target.definition for target in targets if target.definition is not None),
    )
