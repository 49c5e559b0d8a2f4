"""An executor whose sessions are cut, unanswered and resumed by chance says everything once, and nothing twice else."""

import random
from collections import defaultdict
from pathlib import Path

import grpc
import pytest
from rara.v1 import dispatch_pb2, job_pb2
from rara_testing.scripted_scheduler import ScriptedScheduler, Terms, job
from support.running_executor import running

JOBS = 10
CUTS = 8
WINDOW = 3


class Chance:
    """A scripted scheduler's answers by the dice: stored and acknowledged, only one of them, or neither, and cuts."""

    def __init__(self, scheduler: ScriptedScheduler, seed: int) -> None:
        self.dice = random.Random(seed)
        self.cuts = 0
        self.lost: set[int] = set()
        self.known: list[dict[int, set[int]]] = []  # what each Welcome called stored
        self._scheduler = scheduler
        self._welcome = scheduler._welcome
        scheduler.acknowledge = self.acknowledge
        scheduler._welcome = self.welcome  # type: ignore[method-assign]  # to see what was stored just then

    def welcome(self, hello: dispatch_pb2.Hello) -> dispatch_pb2.Welcome:
        self.known.append({token: set(stored) for token, stored in self._scheduler.stored.items()})
        return self._welcome(hello)

    def acknowledge(self, event: job_pb2.ProgressEvent) -> bool:
        if self.cuts >= CUTS or self.dice.random() > 0.25:
            return True
        self.cuts += 1
        if self.dice.random() < 0.5:  # stored, and the acknowledgement is lost with the session
            self._scheduler.stored.setdefault(event.lease.lease_token, {})[event.sequence] = event
        elif self.dice.random() < 0.3:  # meanwhile the lease passes on
            self._scheduler.lost.add(event.lease.lease_token)
        self._scheduler.sessions[-1].end(grpc.StatusCode.UNAVAILABLE)
        return False


@pytest.mark.parametrize(
    "seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(3, 30))]
)
async def test_whatever_happens_to_its_sessions_each_event_is_stored_once(tmp_path: Path, seed: int) -> None:
    terms = Terms(heartbeat_s=0.1, event_window=WINDOW)
    async with ScriptedScheduler(terms) as scheduler:
        chance = Chance(scheduler, seed)
        async with running(scheduler.address, tmp_path, grace_s=1, slots=JOBS):
            first = await scheduler.session()
            tokens = range(1, JOBS + 1)
            (tmp_path / "go").touch()
            for token in tokens:
                first.send_jobs(job(token, "demo.wait_for_file", input={"file": str(tmp_path / "go")}))
            arrived = set(tokens)

            def settled() -> bool:
                """What an executor has taken in is stored to its end or lost; the rest never reached it."""
                named = {
                    event.lease.lease_token for session in scheduler.sessions for event in session.events
                }
                last = scheduler.sessions[-1]
                beats = last.of("heartbeat")
                idle = bool(beats) and not beats[-1].lease_tokens and not last.ended.is_set()
                ended = {
                    token
                    for token in named
                    if "succeeded" in scheduler.kinds(token) or token in scheduler.lost
                }
                return idle and named == ended and bool(named & arrived)

            await scheduler.until(settled, "ends of all jobs", bound_s=30)
            assert chance.cuts > 0
            check(scheduler, chance)


def check(scheduler: ScriptedScheduler, chance: Chance) -> None:
    said: dict[tuple[int, int], bytes] = {}
    sessions = [session for session in scheduler.sessions if session.frames]
    for session, known in zip(sessions, chance.known, strict=False):
        times: dict[tuple[int, int], int] = defaultdict(int)
        for event in session.events:
            token, number = event.lease.lease_token, event.sequence
            data = event.SerializeToString(deterministic=True)
            assert said.setdefault((token, number), data) == data, "other content under a used number"
            assert number not in known.get(token, ()), "sent again after Welcome had called it stored"
            times[token, number] += 1
        assert set(times.values()) <= {1}, "twice in one session"
    for token in {token for token, _ in said}:
        if token not in scheduler.lost:
            numbers = [event.sequence for event in scheduler.events(token)]
            assert numbers == list(range(1, len(numbers) + 1))
            assert scheduler.kinds(token)[:2] == ["accepted", "running"]
            assert scheduler.kinds(token)[-1] == "succeeded"
