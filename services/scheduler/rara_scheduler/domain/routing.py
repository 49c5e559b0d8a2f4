"""Which executor may run a step: what a step asks for, what an executor offers, and where the two differ."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

_PART = re.compile(r"[.+-]")
_SortKey: TypeAlias = tuple[tuple[int, int, str], ...]


@dataclass(frozen=True)
class Route:
    """What a set of steps asks of an executor; empty executor_kind or kind_version: any."""

    route_id: int
    executor_kind: str
    kind: str
    kind_version: str
    required_labels: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Capability:
    """A kind and the versions of it that an executor has; max_concurrency 0: as much as its credit allows."""

    kind: str
    versions: tuple[str, ...]
    max_concurrency: int = 0


@dataclass(frozen=True)
class Offer:
    """What one executor registered."""

    executor_kind: str
    capabilities: tuple[Capability, ...]
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Miss:
    """Why an offer does not serve a route, for people: `label gpu=a100`."""

    lacks: str


def _order(parts: Iterable[str]) -> _SortKey:
    return tuple((1, int(part), "") if part.isascii() and part.isdigit() else (0, 0, part) for part in parts)


def version_key(version: str) -> tuple[_SortKey, int, _SortKey]:
    """Sorts versions as people read them: 1.10 after 1.9, 1.0.0 after 1.0.0-rc2, 1.0.0-rc2 after 1.0.0-rc1."""
    plain = version.split("+", 1)[0]
    release, _, pre = plain.partition("-")
    pre_parts = [part for chunk in pre.split(".") for part in re.findall(r"\d+|\D+", chunk)] if pre else []
    return _order(release.split(".")), 0 if pre else 1, _order(pre_parts)


def takes_version(wanted: str, offered: str) -> bool:
    """Whether `wanted` is `offered` or its first parts: "1" takes 1.4.2 and not 10.0; empty takes all."""
    if not wanted or wanted == offered:
        return True
    parts = _PART.split(wanted)
    return _PART.split(offered)[: len(parts)] == parts


def match(route: Route, offer: Offer) -> "str | Miss":
    """The version of the kind to run: the highest that fits. Or what the offer lacks."""
    if route.executor_kind and route.executor_kind != offer.executor_kind:
        return Miss(f"executor kind {route.executor_kind} (is {offer.executor_kind})")
    versions = [
        version for have in offer.capabilities if have.kind == route.kind for version in have.versions
    ]
    if not versions:
        return Miss(f"kind {route.kind}")
    fitting = [version for version in versions if takes_version(route.kind_version, version)]
    if not fitting:
        has = ", ".join(sorted(versions, key=version_key)[-5:])
        return Miss(f"version {route.kind_version} of {route.kind} (has {has})")
    for key, value in sorted(route.required_labels.items()):
        if offer.labels.get(key) != value:
            return Miss(f"label {key}={value}")
    return max(fitting, key=version_key)


def nearness(miss: Miss) -> int:
    """How far an offer is from serving: less is nearer. Orders what `explain` shows first."""
    return ("label", "version", "executor", "kind").index(miss.lacks.split(" ", 1)[0])
