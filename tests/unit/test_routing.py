"""Who may run a step: kinds, versions as people read them, labels, and what is said of a miss."""

import random

import pytest
from rara_scheduler.domain.routing import (
    Capability,
    Miss,
    Offer,
    Route,
    match,
    nearness,
    takes_version,
    version_key,
)

ORDERED = [
    "0.9", "1", "1.0.0-alpha", "1.0.0-alpha.1", "1.0.0-beta.2", "1.0.0-beta.11", "1.0.0-rc1", "1.0.0-rc2",
    "1.0.0-rc10", "1.0.0", "1.2.0", "1.9.3", "1.10.0", "2.0.0", "10.0.0", "10.0.1",
]  # fmt: skip


def route(kind: str = "index.build", version: str = "", executor_kind: str = "", **labels: str) -> Route:
    return Route(1, executor_kind, kind, version, labels)


def offer(*versions: str, kind: str = "index.build", executor_kind: str = "python", **labels: str) -> Offer:
    return Offer(executor_kind, (Capability("other", ("9",)), Capability(kind, versions)), labels)


def test_versions_sort_as_people_read_them() -> None:
    shuffled = ORDERED[:]
    random.Random(7).shuffle(shuffled)
    assert sorted(shuffled, key=version_key) == ORDERED


@pytest.mark.parametrize(
    ("wanted", "offered", "fits"),
    [
        ("", "1.4.2", True),
        ("1", "1.4.2", True),
        ("1", "1", True),
        ("1.4", "1.4.2", True),
        ("1.4", "1.4", True),
        ("1.4.2", "1.4.2", True),
        ("1.4.2", "1.4.2-rc1", True),
        ("1.4.2-rc1", "1.4.2-rc1", True),
        ("1", "10.0", False),
        ("1.4", "1.40", False),
        ("1.4", "1", False),
        ("1.4.2", "1.4", False),
        ("2", "1.2", False),
    ],
)
def test_a_version_or_its_first_parts_are_taken(wanted: str, offered: str, fits: bool) -> None:
    assert takes_version(wanted, offered) is fits


def test_the_highest_version_that_fits_is_run() -> None:
    have = offer("1.9.0", "1.10.0", "2.0.0", "1.10.0-rc1")
    assert match(route(version="1"), have) == "1.10.0"
    assert match(route(version="1.9"), have) == "1.9.0"
    assert match(route(), have) == "2.0.0"


def test_versions_of_one_kind_may_be_registered_apart() -> None:
    have = Offer("go", (Capability("k", ("1.0",)), Capability("k", ("1.2",))), {})
    assert match(route("k"), have) == "1.2"


@pytest.mark.parametrize(
    ("asked", "lacks"),
    [
        (route("index.drop"), "kind index.drop"),
        (route(version="3"), "version 3 of index.build (has 1.9.0, 1.10.0)"),
        (route(executor_kind="go"), "executor kind go (is python)"),
        (route(gpu="a100"), "label gpu=a100"),
        (route(gpu="a100", zone="eu"), "label gpu=a100"),
        (route(zone="us"), "label zone=us"),
    ],
)
def test_a_miss_says_what_is_lacking(asked: Route, lacks: str) -> None:
    assert match(asked, offer("1.10.0", "1.9.0", zone="eu")) == Miss(lacks)


def test_labels_must_all_hold_and_more_do_no_harm() -> None:
    assert match(route(zone="eu"), offer("1", zone="eu", gpu="a100")) == "1"
    assert match(route(executor_kind="python"), offer("1")) == "1"


def test_a_kind_without_a_version_runs_nothing() -> None:
    assert match(route(), offer()) == Miss("kind index.build")


def test_near_misses_are_ordered_by_what_is_lacking() -> None:
    misses = [
        Miss("kind k"),
        Miss("executor kind go (is python)"),
        Miss("version 2 of k (has 1)"),
        Miss("label a=b"),
    ]
    assert sorted(misses, key=nearness) == list(reversed(misses))
