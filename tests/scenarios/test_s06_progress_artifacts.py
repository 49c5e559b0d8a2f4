"""S06: events and artifacts that come late, twice, out of order, with holes, and over streams cut anywhere."""

import asyncio
import contextlib
import hashlib
import itertools
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import pytest_asyncio
from rara.v1 import common_pb2, dispatch_pb2, job_pb2
from rara_testing.fault_proxy import Direction, End, FaultProxy
from rara_testing.job_events import accepted, effect, json_payload, progress, running, succeeded
from rara_testing.scripted_executor import ScriptedExecutor
from support import running_executor
from support.executor_process import notes
from support.running_scheduler import KIND, RunningScheduler, running_scheduler

STORY = "case.story"


@pytest_asyncio.fixture
async def world(database_url: str, tmp_path: Path) -> AsyncIterator[RunningScheduler]:
    async with running_scheduler(database_url, tmp_path) as opened:
        yield opened


def artifact(name: str, data: bytes) -> common_pb2.Artifact:
    digest = common_pb2.Digest(sha256=hashlib.sha256(data).hexdigest(), size_bytes=len(data))
    return common_pb2.Artifact(name=name, digest=digest, type="report", inline=data)


def story(lease: job_pb2.Lease) -> list[job_pb2.ProgressEvent]:
    """One of everything; the last is the end."""
    made = [artifact("report", b"what came out"), artifact("metrics", b"[1]")]
    read = common_pb2.Digest(sha256=hashlib.sha256(b"read").hexdigest(), size_bytes=4)
    return [
        accepted(lease, 1),
        running(lease, 2),
        progress(lease, 3, fraction=0.2, message="first", checkpoint=json_payload({"at": 1})),
        effect(lease, 4, "charge", {"paid": 5}),
        progress(lease, 5, fraction=0.4, message="second", checkpoint=json_payload({"at": 2})),
        progress(lease, 6, fraction=0.6, message="third"),
        succeeded(lease, 7, output={"n": 1}, artifacts=made, consumed=[read]),
    ]


LAST = 7


@dataclass
class Story:
    """What the tables hold of one step, without what differs from one run to the next."""

    events: list[tuple[int, str, bytes]]
    result: tuple[Any, ...]
    artifacts: list[tuple[Any, ...]]
    lineage: list[tuple[Any, ...]]
    effects: list[tuple[Any, ...]]
    checkpoint: bytes | None
    attempt: int = field(compare=False)
    earlier: list[tuple[Any, ...]] = field(compare=False)


async def stored(world: RunningScheduler, step_run_id: str) -> Story:
    async def rows(query: str) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in await world.raw.fetch(query, step_run_id)]

    attempt = (await world.step(step_run_id))["attempt"]
    by_step = "where step_run_id = $1::uuid"
    events = await rows(
        f"select sequence, type, body from rara.step_event {by_step} and attempt = {attempt} order by sequence"
    )
    (result,) = await rows(
        f"select state, reason, failures, last_sequence, gaps, output from rara.result {by_step}"
    )
    checkpoints = await rows(f"select data from rara.checkpoint {by_step}")
    return Story(
        events=[(sequence, kind, body) for sequence, kind, body in events],
        result=result,
        artifacts=await rows(
            f"select name, sha256, size_bytes, type, inline from rara.artifact {by_step} order by position"
        ),
        lineage=await rows(
            f"select sha256, produced, declared, name from rara.lineage {by_step} order by sha256, produced"
        ),
        effects=await rows(f"select name, result from rara.effect {by_step}"),
        checkpoint=checkpoints[0][0] if checkpoints else None,
        attempt=attempt,
        earlier=await rows(
            f"select reason, spent, executor_id::text from rara.step_attempt {by_step} order by attempt"
        ),
    )


# ------------------------------------------------------------ a session cut after each of its frames


class CutHere(Exception):
    """All frames that may be sent were sent."""


def spend(budget: Iterator[int]) -> None:
    if next(budget, None) is None:
        raise CutHere


class Resuming:
    """Plays a story over as many sessions as it takes; `frames_left` of them are sent before the first is cut.

    The next session resends what its welcome does not acknowledge, or everything: an executor that lost its acks.
    """

    def __init__(self, world: RunningScheduler, *, everything: bool, stored_first: bool) -> None:
        self._world = world
        self._everything = everything
        self._stored_first = stored_first
        self.executor_id: str | None = None
        self._lease: job_pb2.Lease | None = None
        self._sent = 0

    async def play(self, frames_left: int) -> str:
        """Cut after that many frames, then play to the end; the step."""
        await self._session(frames_left)
        await self._session(None)
        assert self._lease is not None
        return self._lease.step_run_id

    async def _session(self, frames_left: int | None) -> None:
        async with ScriptedExecutor(executor_id=self.executor_id) as session:
            self.executor_id = session.executor_id
            await session.connect(self._world.address)
            budget = itertools.count() if frames_left is None else range(frames_left)
            with contextlib.suppress(CutHere):
                await self._frames(session, iter(budget))
            session.cancel()
            await session.ended.wait()

    async def _frames(self, session: ScriptedExecutor, budget: Iterator[int]) -> None:
        spend(budget)
        listed = []
        if self._lease is not None:
            listed = [dispatch_pb2.HeldJob(lease=self._lease, last_sequence=self._sent)]
        await session.hello([KIND], held_jobs=listed)
        acked = 0
        if listed or self._stored_first:
            welcome = await session.expect("welcome")
            assert not welcome.lost_lease_tokens
            acked = max((ack.sequence for ack in welcome.acks.acks), default=0)
        spend(budget)
        await session.credit(1)
        if self._lease is None:
            spend(budget)
            await session.heartbeat()
            self._lease = (await session.expect_job()).lease
        for event in story(self._lease):
            if event.sequence <= acked and not self._everything:
                continue
            spend(budget)
            await session.events(event)
            self._sent = max(self._sent, event.sequence)
            if self._stored_first:
                await session.expect_ack(self._lease, event.sequence)
            if event.sequence == 3:
                spend(budget)
                await session.heartbeat([self._lease.lease_token])
        await session.expect_ack(self._lease, LAST)


FRAMES = 3 + LAST + 1  # hello, credit, heartbeat; the events; a heartbeat between


@pytest.mark.case("S06")
@pytest.mark.parametrize("stored_first", [False, True], ids=["cut at once", "cut when stored"])
@pytest.mark.parametrize("everything", [False, True], ids=["resumes", "sends all again"])
async def test_a_session_cut_after_any_frame_stores_the_same_as_one_that_was_not(
    world: RunningScheduler, stored_first: bool, everything: bool
) -> None:
    await world.define("one", {"a": {}})
    reference: Story | None = None
    for cut_after in range(FRAMES, 0, -1):  # the first is cut when all is over
        run_id = await world.start("one")
        player = Resuming(world, everything=everything, stored_first=stored_first)
        async with asyncio.timeout(20):
            step_run_id = await player.play(cut_after)
        await world.until_run(run_id, "succeeded")
        found = await stored(world, step_run_id)
        reference = reference or found
        assert found == reference, f"cut after frame {cut_after}"
        # A job that never arrived was leased again, free of cost. Once it was here there is no other attempt; the
        # session of the player before may have been given it first, before the scheduler saw that it had ended.
        assert {ended[:2] for ended in found.earlier} <= {("DISPATCH_LOST", False)}
        assert found.attempt == 1 + len(found.earlier)
        if cut_after > 3:
            assert player.executor_id not in {ended[2] for ended in found.earlier}
    assert reference is not None
    assert [sequence for sequence, _, _ in reference.events] == list(range(1, LAST + 1))
    assert reference.result == ("succeeded", "", 0, LAST, 0, b'{"n":1}')
    assert [row[0] for row in reference.artifacts] == ["report", "metrics"]
    assert len(reference.lineage) == 3
    assert reference.effects == [("charge", b'{"paid":5}')]
    assert reference.checkpoint == b'{"at":2}'


# ------------------------------------------------------------ twice, left out, out of order


async def play_in_order(
    world: RunningScheduler, order: Sequence[int], *, one_batch: bool, times: int = 1
) -> tuple[str, dict[int, str]]:
    """Send the story's events in this order of numbers; the step, and the answer to each number."""
    async with world.executor() as executor:
        lease = (await executor.expect_job()).lease
        events = {event.sequence: event for event in story(lease)}
        batches = [[events[n] for n in order]] if one_batch else [[events[n]] for n in order]
        for batch in batches:
            for _ in range(times):
                await executor.events(*batch)
        late = order[list(order).index(LAST) + 1 :]
        for sequence in late:
            await executor.expect_refusal(lease, sequence)
        await executor.expect_ack(lease, LAST)
        return lease.step_run_id, {n: await executor.outcome_of(lease, n) for n in order}


@pytest.mark.case("S06")
@pytest.mark.parametrize("one_batch", [False, True], ids=["a frame each", "in one batch"])
async def test_everything_sent_twice_is_stored_once(world: RunningScheduler, one_batch: bool) -> None:
    await world.define("one", {"a": {}})
    found = []
    for times in (1, 2, 3):
        run_id = await world.start("one")
        order = range(1, LAST + 1)
        step_run_id, answers = await play_in_order(world, order, one_batch=one_batch, times=times)
        assert set(answers.values()) == {""}
        assert await world.run_state(run_id) == "succeeded"
        found.append(await stored(world, step_run_id))
    assert found[0] == found[1] == found[2]
    assert {story.attempt for story in found} == {1}


@pytest.mark.case("S06", "ORDER-1")
@pytest.mark.parametrize("one_batch", [False, True], ids=["a frame each", "in one batch"])
async def test_events_in_any_order_are_stored_by_number_and_nothing_waits_for_a_hole(
    world: RunningScheduler, one_batch: bool
) -> None:
    """What came before the end is kept, the end is applied where it stands, and what comes after changes nothing."""
    await world.define("one", {"a": {}})
    dice = random.Random(6)
    orders = [
        [LAST],  # the end alone
        [1, LAST],
        [LAST, *range(1, LAST)],  # the end first
        [*range(LAST - 1, 0, -1), LAST],  # backwards
        *([n for n in range(1, LAST + 1) if n != left_out] for left_out in range(1, LAST)),
        *(dice.sample(range(1, LAST + 1), LAST) for _ in range(8)),
        *([*dice.sample(range(1, LAST), 3), LAST] for _ in range(4)),
    ]
    for order in orders:
        run_id = await world.start("one")
        step_run_id, answers = await play_in_order(world, order, one_batch=one_batch)
        assert await world.run_state(run_id) == "succeeded", order
        before_end = set(order[: order.index(LAST) + 1])
        late = set(order) - before_end
        assert {n for n, answer in answers.items() if answer == "refused:LEASE_LOST"} == late, order
        assert {n for n, answer in answers.items() if answer == ""} == before_end, order
        found = await stored(world, step_run_id)
        assert [sequence for sequence, _, _ in found.events] == sorted(before_end), order
        assert found.result == ("succeeded", "", 0, LAST, LAST - len(before_end), b'{"n":1}'), order
        assert [row[0] for row in found.artifacts] == ["report", "metrics"]
        assert len(found.lineage) == 3
        checkpoints = [n for n in (5, 3) if n in before_end]
        assert found.checkpoint == ({5: b'{"at":2}', 3: b'{"at":1}'}[checkpoints[0]] if checkpoints else None)
        assert bool(found.effects) == (4 in before_end)
        assert (found.attempt, found.earlier) == (1, [])


@pytest.mark.case("S06", "OWN-2")
async def test_artifacts_of_a_superseded_attempt_make_no_lineage(world: RunningScheduler) -> None:
    """The same manifest, sent late under the old token and twice under the new one: the step has one."""
    await world.define("one", {"a": {}})
    run_id = await world.start("one")
    async with world.executor(credit=2) as executor:
        old = (await executor.expect_job()).lease
        await executor.events(*story(old)[:3])
        await executor.expect_ack(old, 3)
        new = (await executor.expect_job()).lease  # nothing renewed the first one
        assert new.attempt == 2
        await executor.events(story(old)[-1])
        assert (await executor.expect_refusal(old, LAST)).code == "LEASE_LOST"
        for table in ("artifact", "lineage", "result"):
            assert await world.raw.fetchval(f"select count(*) from rara.{table}") == 0
        await executor.events(*story(new), *story(new))
        await executor.expect_ack(new, LAST)
        await executor.events(story(old)[-1])
        await world.until_run(run_id, "succeeded")
    found = await stored(world, new.step_run_id)
    assert [row[0] for row in found.artifacts] == ["report", "metrics"]
    attempts = await world.raw.fetch("select distinct attempt from rara.lineage")
    assert [row["attempt"] for row in attempts] == [2]
    assert found.result[:4] == ("succeeded", "", 1, LAST)


# ------------------------------------------------------------ a real executor, cut at every message of its stream


class MessageProxy(FaultProxy):
    """Counts the DATA frames of HTTP/2 that pass, and ends a link behind a given one of them."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port)
        self.seen = dict.fromkeys(Direction, 0)
        self._behind: tuple[Direction, int, End] | None = None
        self._readers: dict[tuple[int, Direction], FrameReader] = {}

    def cut_behind(self, direction: Direction, count: int, how: End) -> None:
        """End the link on which the `count`th message from now on passes, right behind it."""
        self.triggered.clear()
        self._behind = (direction, self.seen[direction] + count, how)

    def disarm(self) -> None:
        self._behind = None

    def _kept_by_trigger(self, link: Any, direction: Direction, chunk: bytes) -> int | None:
        reader = self._readers.setdefault(
            (id(link), direction), FrameReader(direction is Direction.TO_SERVER)
        )
        for end in reader.data_frames(chunk):
            self.seen[direction] += 1
            if self._behind is not None and self._behind[:2] == (direction, self.seen[direction]):
                self.cut_after(link.passed[direction] + end, direction, self._behind[2])
                self._behind = None
        return super()._kept_by_trigger(link, direction, chunk)


class FrameReader:
    """Finds the frames in one direction of an HTTP/2 connection (RFC 9113, section 4.1)."""

    def __init__(self, is_client: bool) -> None:
        self._skip = len(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") if is_client else 0
        self._header = b""
        self._is_data = False

    def data_frames(self, chunk: bytes) -> list[int]:
        """Where in the chunk a DATA frame with content ends."""
        ends = []
        at = 0
        while at < len(chunk):
            step = min(self._skip, len(chunk) - at)
            self._skip -= step
            at += step
            if not self._skip and self._is_data:
                ends.append(at)
                self._is_data = False
            if not self._skip and at < len(chunk):
                taken = chunk[at : at + 9 - len(self._header)]
                self._header += taken
                at += len(taken)
                if len(self._header) == 9:
                    self._skip = int.from_bytes(self._header[:3])
                    self._is_data = self._header[3] == 0 and self._skip > 0
                    self._header = b""
        return ends


def check_story(found: Story, reference: Story, where: str) -> None:
    """Progress that could not be sent may have been merged into a newer one; all else is as without a cut."""
    numbers = [sequence for sequence, _, _ in found.events]
    assert numbers == list(range(1, len(numbers) + 1)), where
    kinds = [kind for _, kind, _ in found.events]
    assert kinds[:2] == ["accepted", "running"], where
    assert [kind for kind in kinds if kind != "progress"] == ["accepted", "running", "effect", "succeeded"], (
        where
    )
    assert kinds[-1] == "succeeded", where
    messages = [
        job_pb2.ProgressEvent.FromString(body).progress.message
        for _, kind, body in found.events
        if kind == "progress"
    ]
    assert messages == [m for m in ("first", "second", "third") if m in messages], where
    assert messages[-1] == "third", where
    state, reason, failures, last, gaps, output = found.result
    assert (state, reason, failures, last, gaps) == ("succeeded", "", 0, len(numbers), 0), where
    assert output == reference.result[-1], where
    assert found.artifacts == reference.artifacts, where
    assert found.lineage == reference.lineage, where
    assert found.effects == reference.effects == [("charge", b'{"paid":5}')], where
    assert found.checkpoint == b'{"at":3}', where
    assert {ended[:2] for ended in found.earlier} <= {("DISPATCH_LOST", False)}, where


async def tell(world: RunningScheduler, proxy: MessageProxy, folder: Path, lane: str) -> Story:
    """One run on the executor of this lane, from start to end."""
    folder.mkdir()
    run_id = await world.start(lane, value={"folder": str(folder)})
    await world.until_run(run_id, "succeeded", "failed", "cancelled")
    proxy.disarm()
    step_run_id = await world.raw.fetchval(
        "select step_run_id::text from rara.step_run where workflow_run_id = $1::uuid", run_id
    )
    assert len(notes(folder, "starts")) == 1
    return await stored(world, step_run_id)


async def cut_everywhere(
    world: RunningScheduler, database_url: str, folder: Path, lane: str, how: End, turns: slice
) -> int:
    """Tell the story again and again, cut behind the first message, then the second, and so on; how many cuts."""
    folder.mkdir()
    host, _, port = world.address.rpartition(":")
    world = replace(world, raw=await asyncpg.connect(database_url))  # for this lane alone
    await world.define(lane, {"a": {"kind": STORY, "required_labels": {"lane": lane}}})
    async with (
        MessageProxy(host, int(port)) as proxy,
        running_executor.running(
            proxy.address, folder, modules="support.case_handlers", labels=f"lane={lane}", slots=1
        ),
    ):
        reference = await tell(world, proxy, folder / "reference", lane)
        check_story(reference, reference, "no cut")
        cuts = 0
        for direction in Direction:
            for count in range(1, 13)[turns]:
                proxy.cut_behind(direction, count, how)
                where = f"{how} behind message {count} {direction}"
                check_story(await tell(world, proxy, folder / f"{direction}{count}", lane), reference, where)
                cuts += proxy.triggered.is_set()
        await world.raw.close(timeout=10)
        return cuts


@pytest.mark.case("S06")
async def test_a_real_executor_cut_behind_any_message_of_its_stream_loses_and_repeats_nothing(
    world: RunningScheduler, database_url: str, tmp_path: Path
) -> None:
    lanes = [("a", End.RESET, slice(0, None, 2)), ("b", End.CLOSE, slice(1, None, 2))]
    async with asyncio.TaskGroup() as tasks:
        started = [
            tasks.create_task(cut_everywhere(world, database_url, tmp_path / lane, lane, how, turns))
            for lane, how, turns in lanes
        ]
    assert (
        sum(task.result() for task in started) >= 8
    )  # a story has some ten messages, by what leaves in one frame


@pytest.mark.soak
@pytest.mark.case("S06")
@pytest.mark.parametrize("how", End)
async def test_every_way_to_cut_behind_every_message(
    world: RunningScheduler, database_url: str, tmp_path: Path, how: End
) -> None:
    for turn in range(3):
        await cut_everywhere(world, database_url, tmp_path / str(turn), f"lane{turn}", how, slice(None))


async def test_frames_are_found_however_the_bytes_are_cut() -> None:
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    frames = [(4, b""), (0, b"abc"), (1, b"h"), (0, b""), (0, b"x" * 300)]
    stream = preface + b"".join(
        len(body).to_bytes(3) + bytes([kind, 0, 0, 0, 0, 1]) + body for kind, body in frames
    )
    for size in (1, 2, 7, 10, len(stream)):
        reader = FrameReader(True)
        ends = [
            at + end
            for at in range(0, len(stream), size)
            for end in reader.data_frames(stream[at : at + size])
        ]
        assert ends == [len(preface) + 9 + 12, len(stream)]
