"""The test tools themselves: a scripted and an automatic executor against a scheduler of a few lines."""

import asyncio
from collections.abc import AsyncIterator
from typing import TypeAlias

import grpc
import grpc.aio
import pytest
from rara.v1 import dispatch_pb2, dispatch_pb2_grpc, job_pb2
from rara_testing.auto_executor import AutoExecutor, AutoJob, JobFailure
from rara_testing.job_events import accepted, duration, json_payload, progress
from rara_testing.scripted_executor import ScriptedExecutor

_Context: TypeAlias = grpc.aio.ServicerContext[
    AsyncIterator[dispatch_pb2.ConnectRequest], AsyncIterator[dispatch_pb2.ConnectResponse]
]


class _Dispatch(dispatch_pb2_grpc.DispatchServiceServicer):
    """Welcomes, gives the listed jobs as credit allows, acknowledges everything."""

    def __init__(self, jobs: list[job_pb2.JobRequest]) -> None:
        self.jobs = jobs
        self.frames: list[dispatch_pb2.ConnectRequest] = []
        self.cancel_when_running: set[int] = set()
        self.refuse: dict[int, str] = {}  # lease token -> code for its terminal event

    async def Connect(  # noqa: N802 - the stub's name
        self,
        request_iterator: AsyncIterator[dispatch_pb2.ConnectRequest],
        context: _Context,
    ) -> AsyncIterator[dispatch_pb2.ConnectResponse]:
        sent = 0
        async for frame in request_iterator:
            self.frames.append(frame)
            match frame.WhichOneof("frame"):
                case "hello":
                    terms = dispatch_pb2.SessionTerms(heartbeat_interval=duration(0.05))
                    yield dispatch_pb2.ConnectResponse(
                        welcome=dispatch_pb2.Welcome(protocol_version=1, session_id="s", terms=terms)
                    )
                case "credit":
                    batch = self.jobs[sent : frame.credit.limit]
                    sent += len(batch)
                    if batch:
                        yield dispatch_pb2.ConnectResponse(jobs=dispatch_pb2.JobBatch(jobs=batch))
                case "events":
                    answer = dispatch_pb2.EventAcks()
                    for event in frame.events.events:
                        token = event.lease.lease_token
                        if token in self.refuse and event.WhichOneof("event") == "succeeded":
                            answer.refusals.add(
                                lease_token=token, sequence=event.sequence, code=self.refuse[token]
                            )
                        else:
                            answer.acks.add(lease_token=token, sequence=event.sequence)
                        if event.HasField("running") and token in self.cancel_when_running:
                            cancel = dispatch_pb2.CancelJob(lease_token=token, reason="CANCELLED")
                            yield dispatch_pb2.ConnectResponse(cancels=dispatch_pb2.CancelJobs(jobs=[cancel]))
                    yield dispatch_pb2.ConnectResponse(acks=answer)
                case "heartbeat":
                    number = frame.heartbeat.number
                    ack = dispatch_pb2.HeartbeatAck(number=number, renewed=number)
                    yield dispatch_pb2.ConnectResponse(heartbeat_ack=ack)
                case "goodbye":
                    return
                case _:
                    pass


def _job(token: int, kind: str, value: object = None) -> job_pb2.JobRequest:
    lease = job_pb2.Lease(step_run_id=f"step-{token}", lease_token=token, attempt=1)
    return job_pb2.JobRequest(lease=lease, kind=kind, input=json_payload(value))


class _Scheduler:
    def __init__(self, dispatch: _Dispatch) -> None:
        self.dispatch = dispatch
        self.address = ""
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> "_Scheduler":
        self._server = grpc.aio.server()
        dispatch_pb2_grpc.add_DispatchServiceServicer_to_server(self.dispatch, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        await self._server.stop(0)


async def test_a_scripted_executor_sends_what_it_is_told_and_takes_each_frame_once() -> None:
    jobs = [_job(1, "demo.echo"), _job(2, "demo.echo")]
    async with _Scheduler(_Dispatch(jobs)) as scheduler, ScriptedExecutor() as executor:
        await executor.connect(scheduler.address)
        await executor.hello(["demo.echo"], labels={"zone": "a"})
        assert (await executor.expect("welcome")).session_id == "s"
        await executor.credit(1)
        first = await executor.expect_job()
        await executor.credit(2)
        second = await executor.expect_job()
        assert [first.lease.lease_token, second.lease.lease_token] == [1, 2]

        await executor.events(accepted(first.lease), progress(first.lease, 7, fraction=0.5))
        assert (await executor.expect_ack(first.lease, 7)).sequence == 7
        assert await executor.heartbeat([1, 2]) == 1
        assert (await executor.expect("heartbeat_ack")).renewed == 1
        assert await executor.heartbeat([1]) == 2
        await executor.expect("heartbeat_ack", lambda ack: ack.number == 2)

        await executor.goodbye()
        assert await executor.status() is grpc.StatusCode.OK
        beats = [f.heartbeat for f in scheduler.dispatch.frames if f.HasField("heartbeat")]
        assert [(list(b.lease_tokens), b.answered) for b in beats] == [([1, 2], 0), ([1], 1)]
        hello = scheduler.dispatch.frames[0].hello
        assert hello.executor_id == executor.executor_id
        assert hello.labels == {"zone": "a"}
        assert hello.capabilities[0].versions == ["1.0.0"]


async def test_an_expectation_that_is_not_met_says_what_came_instead() -> None:
    async with _Scheduler(_Dispatch([])) as scheduler, ScriptedExecutor() as executor:
        await executor.connect(scheduler.address)
        await executor.hello()
        with pytest.raises(AssertionError, match=r"no jobs within 0\.1 s: received welcome"):
            await executor.expect("jobs", timeout_s=0.1)
        executor.cancel()
        with pytest.raises(AssertionError, match="the call ended without jobs"):
            await executor.expect("jobs")
        assert await executor.status() is grpc.StatusCode.CANCELLED


async def test_an_automatic_executor_runs_several_jobs_at_once_and_reports_each_end() -> None:
    together = asyncio.Barrier(2)

    async def meet(job: AutoJob) -> object:
        await together.wait()
        await job.progress(0.5, "met")
        return {"got": job.input}

    async def fail(job: AutoJob) -> object:
        raise JobFailure("DEMO_FAILED", retryable=False)

    async def hang(job: AutoJob) -> object:
        return await asyncio.Event().wait()

    jobs = [_job(1, "meet", 10), _job(2, "meet", 20), _job(3, "fail"), _job(4, "hang"), _job(5, "late")]
    dispatch = _Dispatch(jobs)
    dispatch.cancel_when_running = {4}
    dispatch.refuse = {5: "LEASE_LOST"}
    handlers = {"meet": meet, "fail": fail, "hang": hang, "late": lambda job: None}
    async with _Scheduler(dispatch) as scheduler:
        async with AutoExecutor(scheduler.address, handlers, slots=2) as executor:
            await executor.wait_for(5)
            while not any(f.HasField("heartbeat") and f.heartbeat.answered for f in dispatch.frames):
                await executor.session.expect("heartbeat_ack")
        assert executor.outcomes[1] == executor.outcomes[2] == "succeeded"
        assert executor.outcomes[3] == "failed"
        assert executor.outcomes[4] == "cancelled"
        assert executor.outcomes[5] in ("lost", "refused:LEASE_LOST")

    events = [e for f in dispatch.frames for e in f.events.events]
    told = {t: [str(e.WhichOneof("event")) for e in events if e.lease.lease_token == t] for t in range(1, 6)}
    assert told[1] == ["accepted", "running", "progress", "succeeded"]
    assert told[3] == ["accepted", "running", "failed"]
    assert told[4] == ["accepted", "running", "cancelled"]
    assert [e.sequence for e in events if e.lease.lease_token == 1] == [1, 2, 3, 4]
    assert max(f.credit.limit for f in dispatch.frames) == 7  # two slots, raised once for each end
    outputs = {e.lease.lease_token: e.succeeded.output.data for e in events if e.HasField("succeeded")}
    assert outputs[2] == b'{"got":20}'
