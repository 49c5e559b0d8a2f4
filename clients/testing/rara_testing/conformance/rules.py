"""Rules that hold in every scenario, looked at over all frames that the executor sent in it."""

import base64
from collections.abc import Iterable, Iterator
from urllib.parse import quote

from rara.v1 import dispatch_pb2, job_pb2

from rara_testing.conformance.target import SECRET

TERMINAL = frozenset({"succeeded", "failed", "cancelled"})


def broken(
    sessions: Iterable[tuple[list[dispatch_pb2.ConnectRequest], int]], tokens: range, *, slots: int | None
) -> Iterator[str]:
    """What was broken, in words.

    sessions: the frames of each and how many jobs it was sent, oldest first. tokens: those of the scenario; what an
    earlier one has left is not looked at. slots: as the executor was told; None
    where nobody told it.
    """
    events: dict[int, dict[int, job_pb2.ProgressEvent]] = {}
    ids = set()
    for frames, jobs_sent in sessions:
        yield from _session_rules(frames)
        limit = max((frame.credit.limit for frame in frames), default=0)
        if slots is not None and limit > slots + jobs_sent:
            yield f"credit was {limit}, with {slots} slots and {jobs_sent} jobs"
        for frame in frames:
            if frame.WhichOneof("frame") == "hello":
                ids.add(frame.hello.executor_id)
            for event in frame.events.events:
                if event.lease.lease_token in tokens:
                    yield from _take(events, event)
            if found := _secret_in(frame.SerializeToString()):
                yield f"a {frame.WhichOneof('frame')} frame holds the planted secret, {found}"
    if len(ids) > 1:
        yield f"the executor_id changed while the process lived: {sorted(ids)}"
    for token, numbered in sorted(events.items()):
        yield from _lease_rules(token, numbered)


def _take(events: dict[int, dict[int, job_pb2.ProgressEvent]], event: job_pb2.ProgressEvent) -> Iterator[str]:
    token = event.lease.lease_token
    if not event.lease.step_run_id or event.lease.attempt < 1:
        yield f"an event of lease {token} does not carry the whole lease"
    known = events.setdefault(token, {}).setdefault(event.sequence, event)
    # A refusal may be answered with another event under its number: only then is `failed` what comes second.
    if known != event and event.WhichOneof("event") != "failed":
        yield f"lease {token}: two different events have number {event.sequence}"


def _lease_rules(token: int, numbered: dict[int, job_pb2.ProgressEvent]) -> Iterator[str]:
    numbers = sorted(numbered)
    if numbers != list(range(1, len(numbers) + 1)):
        yield f"lease {token}: numbers are {numbers}, not 1, 2, 3 ..."
        return
    kinds = [numbered[number].WhichOneof("event") or "unknown" for number in numbers]
    if kinds[0] not in {"accepted", *TERMINAL}:
        yield f"lease {token}: begins with {kinds[0]}"
    ends = [kind for kind in kinds if kind in TERMINAL]
    if len(ends) > 1:
        yield f"lease {token}: ends {len(ends)} times ({', '.join(ends)})"
    if ends and kinds[-1] not in TERMINAL:
        yield f"lease {token}: {kinds[-1]} comes after {ends[0]}"
    for kind in ("progress", "effect"):
        if kind in kinds and ("running" not in kinds or kinds.index(kind) < kinds.index("running")):
            yield f"lease {token}: {kind} comes before running"


def _session_rules(frames: list[dispatch_pb2.ConnectRequest]) -> Iterator[str]:
    if not frames:
        return
    first = frames[0].WhichOneof("frame")
    if first != "hello":
        yield f"the first frame is {first}, not hello"
    beat = 0
    for frame in frames:
        if frame.WhichOneof("frame") == "heartbeat":
            if frame.heartbeat.number <= beat:
                yield f"heartbeat {frame.heartbeat.number} comes after {beat}"
            beat = frame.heartbeat.number


def _secret_in(data: bytes) -> str:
    """In which form the planted secret is in there; empty: it is not."""
    raw = SECRET.encode()
    forms = {
        "as it is": raw,
        "URL-encoded": quote(SECRET, safe="").encode(),
        "in base64": base64.b64encode(raw).rstrip(b"="),
    }
    return next((name for name, form in forms.items() if form in data), "")
