"""Who may run what, by a rule of its own: it knows nothing of the product's."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Want:
    """What a step asks for."""

    kind: str
    version: str = ""
    executor_kind: str = ""
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Has:
    """What an executor says of itself. draining: it has said that it takes nothing more."""

    name: str
    executor_kind: str
    kinds: Mapping[str, tuple[str, ...]] = field(hash=False)
    labels: tuple[tuple[str, str], ...] = ()
    draining: bool = False


# Which offered versions each wanted one takes: written out by hand, not computed.
TAKES = {
    "": {"1.4.2", "1.10.0", "10.0.0", "2.0.0-rc1"},
    "1": {"1.4.2", "1.10.0"},
    "1.4": {"1.4.2"},
    "1.10.0": {"1.10.0"},
    "2.0.0": {"2.0.0-rc1"},
    "2.0.0-rc1": {"2.0.0-rc1"},
    "3": set(),
}
# From the oldest to the newest, as people read them.
BY_AGE = ("1.4.2", "1.10.0", "2.0.0-rc1", "10.0.0")


def runs_as(want: Want, has: Has) -> str | None:
    """The version that this executor has to run it as, or None where it must never see it."""
    if has.draining:
        return None
    if want.executor_kind and want.executor_kind != has.executor_kind:
        return None
    for label in want.labels:
        if label not in has.labels:
            return None
    fitting = [
        version
        for version in BY_AGE
        if version in has.kinds.get(want.kind, ()) and version in TAKES[want.version]
    ]
    return fitting[-1] if fitting else None
