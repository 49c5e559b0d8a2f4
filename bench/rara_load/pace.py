"""How turns follow one another: at a rate whatever happens (open loop), or each after the last (closed loop)."""

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from rara_load.arrivals import arrivals
from rara_load.plan import Kind, Plan
from rara_load.turns import Caller, Turn


@dataclass(slots=True)
class Pace:
    """Has turns taken until the time is over or `stopping` is set; what was begun is finished.

    began_s, measured_s, ended_s: when turns began to be taken, to be measured, and to be taken no more.
    """

    plan: Plan
    caller: Caller
    stopping: asyncio.Event
    began_s: float = 0.0
    ended_s: float = 0.0

    @property
    def measured_s(self) -> float:
        return self.began_s + self.plan.warm_up_s

    async def run(self) -> None:
        self.began_s = time.monotonic()
        async with asyncio.TaskGroup() as turns:
            issue = self._at_a_rate(turns) if self.plan.rate else self._one_after_another(turns)
            issuing = asyncio.create_task(issue, name="issue turns")
            try:
                await self._until_over()
            finally:
                issuing.cancel()
                await asyncio.wait([issuing])
                self.ended_s = time.monotonic()
            if not issuing.cancelled():
                issuing.result()

    async def _until_over(self) -> None:
        whole_s = self.plan.warm_up_s + self.plan.duration_s if self.plan.duration_s else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(whole_s):
                await self.stopping.wait()

    async def _at_a_rate(self, turns: asyncio.TaskGroup) -> None:
        """A turn that finds too many in flight waits, and the wait counts: it was due all the same."""
        slots = asyncio.Semaphore(self.plan.max_in_flight)
        draw, kind = random.Random(f"{self.plan.seed} arrivals"), self._kinds()
        due = (self.began_s + at_s for at_s in arrivals(self.plan.rate, poisson=self.plan.poisson, draw=draw))
        for due_s in due:
            try:
                # Give way even when late, or a generator that cannot keep up would begin turns and go on with none.
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                await slots.acquire()
            except asyncio.CancelledError:
                left = itertools.takewhile(
                    lambda at_s: at_s < time.monotonic(), itertools.chain([due_s], due)
                )
                self.caller.figures.not_begun = sum(1 for _ in left)
                raise
            turn = Turn(kind(), due_s, due_s >= self.measured_s)
            if turn.is_measured:
                self.caller.figures.send_lag.record(time.monotonic() - due_s)
            turns.create_task(self.caller.take(turn)).add_done_callback(lambda _: slots.release())

    async def _one_after_another(self, turns: asyncio.TaskGroup) -> None:
        for number in range(self.plan.callers):
            turns.create_task(self._loop(number), name=f"caller {number}")
        await asyncio.Event().wait()  # until it is cancelled; the callers look at the time themselves

    async def _loop(self, number: int) -> None:
        kind = self._kinds(number)
        over_s = self.measured_s + self.plan.duration_s if self.plan.duration_s else float("inf")
        while (now_s := time.monotonic()) < over_s and not self.stopping.is_set():
            await self.caller.take(Turn(kind(), now_s, now_s >= self.measured_s))

    def _kinds(self, number: int = 0) -> Callable[[], Kind]:
        """Draws what to do next; the same seed gives the same sequence."""
        draw = random.Random(f"{self.plan.seed} kinds {number}")
        kinds, weights = list(self.plan.mix), list(self.plan.mix.values())
        return lambda: draw.choices(kinds, weights)[0]
