"""The bells of watchers: rung by changes, bounded in number, ended by a stop."""

import asyncio

import pytest
from rara_scheduler.domain.errors import Code, Fault
from rara_scheduler.watch_hub import FIRST_LOOK_S, ChangeHub

LONG_S = 30.0


async def test_a_change_wakes_those_who_watch_that_run() -> None:
    hub = ChangeHub()
    with hub.subscribe("a") as first, hub.subscribe("a") as second, hub.subscribe("b") as other:
        waits = [asyncio.create_task(bell.wait(LONG_S)) for bell in (first, second)]
        bystander = asyncio.create_task(other.wait(LONG_S))
        await asyncio.sleep(0)
        hub.publish(["a", "nobody"])
        async with asyncio.timeout(5):
            await asyncio.gather(*waits)
        assert not bystander.done()
        bystander.cancel()


async def test_a_ring_that_comes_before_the_wait_is_heard_once() -> None:
    hub = ChangeHub()
    with hub.subscribe("a") as bell:
        hub.publish(["a"])
        hub.publish(["a"])
        async with asyncio.timeout(5):
            await bell.wait(LONG_S)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await bell.wait(LONG_S)


async def test_without_a_change_the_wait_ends_with_its_time() -> None:
    with ChangeHub().subscribe("a") as bell:
        await bell.wait(0.001)


async def test_a_pause_is_not_cut_by_rings_and_keeps_nothing_of_them() -> None:
    hub = ChangeHub()
    with hub.subscribe("a") as bell:
        pause = asyncio.create_task(bell.pause(0.02))
        await asyncio.sleep(0)
        hub.publish(["a"])
        await asyncio.sleep(0)
        assert not pause.done()
        await pause
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await bell.wait(LONG_S)


async def test_the_end_of_its_run_cuts_a_pause() -> None:
    hub = ChangeHub()
    with hub.subscribe("a") as bell, hub.subscribe("b") as other:
        pause = asyncio.create_task(bell.pause(LONG_S))
        bystander = asyncio.create_task(other.pause(LONG_S))
        await asyncio.sleep(0)
        hub.ended(["a", "nobody"])
        async with asyncio.timeout(5):
            await pause
        assert not bystander.done()
        bystander.cancel()


async def test_a_stop_ends_every_wait_and_pause_and_refuses_new_watchers() -> None:
    hub = ChangeHub()
    with hub.subscribe("a") as first, hub.subscribe("b") as second:
        waits = [asyncio.create_task(first.wait(LONG_S)), asyncio.create_task(second.pause(LONG_S))]
        await asyncio.sleep(0)
        hub.stop()
        for ended in await asyncio.gather(*waits, return_exceptions=True):
            assert isinstance(ended, Fault)
            assert ended.code is Code.SHUTTING_DOWN
    with pytest.raises(Fault, match="stops"), hub.subscribe("a"):
        pass


async def test_watchers_are_bounded_and_leave_their_place() -> None:
    hub = ChangeHub(max_watchers=2)
    with hub.subscribe("a"):
        with hub.subscribe("b"):
            with pytest.raises(Fault) as caught, hub.subscribe("a"):
                pass
            assert caught.value.code is Code.QUEUE_FULL
            assert caught.value.retry_after_s is not None
        with hub.subscribe("a"):
            pass
    hub.publish(["a", "b"])


def test_a_run_that_was_just_started_is_looked_at_a_little_later_unless_it_has_ended() -> None:
    now = 100.0
    hub = ChangeHub(now_s=lambda: now)
    hub.started(["a", "b"])
    hub.ended(["b"])
    now += 0.01
    assert hub.first_look_in_s("a") == pytest.approx(FIRST_LOOK_S - 0.01)
    assert (hub.first_look_in_s("b"), hub.first_look_in_s("of another scheduler")) == (0.0, 0.0)
    now += FIRST_LOOK_S
    assert hub.first_look_in_s("a") <= 0


def test_only_so_many_starts_are_remembered() -> None:
    hub = ChangeHub(now_s=lambda: 0.0)
    hub.started(f"run {n}" for n in range(1001))
    assert (hub.first_look_in_s("run 0"), hub.first_look_in_s("run 1")) == (0.0, FIRST_LOOK_S)
