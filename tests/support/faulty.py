"""Operations whose side effects are counted in files, for tests that break what runs them."""

import asyncio
import base64
import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

from rara_executor import BlockingJob, Job, JobFailure, Retryable, Terminal, operation

V = "1.0.0"


def note(job: Job | BlockingJob, name: str) -> int:
    """Append the attempt to the step's own file of this name; how many lines it has now."""
    path = Path(job.input["folder"]) / f"{job.step_name} {name}"
    with path.open("a") as file:
        file.write(
            f"{job.attempt} {job.lease_token} {job.idempotency_key} {time.monotonic()} {os.getpid()}\n"
        )
    return len(path.read_text().splitlines())


def notes(folder: Path, step: str, name: str) -> list[list[str]]:
    """attempt, token, key, monotonic time and process number of each line."""
    path = folder / f"{step} {name}"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


async def is_stored(job: Job, kind: str) -> None:
    """Until the relay has passed on that the event is stored, of this attempt."""
    path = Path(job.input["folder"]) / f"{job.lease_token} {kind}"
    while not path.exists():
        await asyncio.sleep(0.005)


@operation("faulty.charge", version=V)
async def charge(job: Job) -> Any:
    """One effect, and nothing starts before what precedes it is stored."""
    note(job, "starts")
    await is_stored(job, "running")
    await job.progress(0.5, "half", checkpoint={"half": True})
    await is_stored(job, "progress")
    return await job.once("charge", lambda: {"charged_by": job.lease_token, "count": note(job, "charges")})


@operation("faulty.charge_then_fail", version=V)
async def charge_then_fail(job: Job) -> Any:
    """Fails after its effect until the attempt that is asked for."""
    note(job, "starts")
    charged = await job.once("charge", lambda: {"charged_by": job.lease_token, "count": note(job, "charges")})
    if job.attempt < job.input["succeed_at"]:
        raise Retryable("TOOL_FAILED", "not yet")
    return charged


@operation("faulty.auth", version=V)
async def auth(job: Job) -> None:
    note(job, "starts")
    raise Terminal("AUTH_INVALID", "no such key")


@operation("faulty.auth_blocking", version=V)
def auth_blocking(job: BlockingJob) -> None:
    note(job, "starts")
    raise Terminal("AUTH_INVALID", "no such key")


@operation("faulty.unset", version=V)
async def unset(job: Job) -> None:
    """An error that does not say whether it can heal."""
    note(job, "starts")
    raise RuntimeError("who knows")


@operation("faulty.own_code", version=V)
async def own_code(job: Job) -> None:
    """A code of its own, which leaves open whether it can heal."""
    note(job, "starts")
    raise JobFailure("TOOL_ODD", "who knows")


@operation("faulty.fail_twice", version=V)
async def fail_twice(job: Job) -> None:
    """Fails at once, and from the second time on for a minute."""
    note(job, "starts")
    raise Retryable("TOOL_FAILED", "not yet", retry_after_s=60 if job.attempt > 1 else None)


@operation("faulty.fail", version=V)
async def fail(job: Job) -> None:
    note(job, "starts")
    raise Retryable("TOOL_FAILED", "not yet")


@operation("faulty.die", version=V)
def die(job: BlockingJob) -> None:
    """Kills its own process, or that of the whole executor."""
    note(job, "starts")
    os.kill(os.getppid() if job.input.get("executor") else os.getpid(), signal.SIGKILL)
    time.sleep(600)


@operation("faulty.die_async", version=V)
async def die_async(job: Job) -> None:
    note(job, "starts")
    await asyncio.sleep(0.1)  # the neighbours start meanwhile
    os.kill(os.getpid(), signal.SIGKILL)


@operation("faulty.hog", version=V)
def hog(job: BlockingJob) -> int:
    """More memory than a runner is allowed, asked for politely, or by a library that cannot do without."""
    note(job, "starts")
    try:
        return len(bytearray(8 << 30))
    except MemoryError:
        if job.input.get("abort"):
            os.abort()
        raise


@operation("faulty.harmless", version=V)
async def harmless(job: Job) -> int:
    note(job, "starts")
    await asyncio.sleep(0.3)
    return job.attempt


@operation("faulty.harmless_blocking", version=V)
def harmless_blocking(job: BlockingJob) -> int:
    note(job, "starts")
    time.sleep(0.3)
    return job.attempt


@operation("faulty.ticks", version=V)
async def ticks(job: Job) -> None:
    """Writes an effect every 50 ms, and takes no notice of its cancel."""
    note(job, "starts")
    while True:
        note(job, "ticks")
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.05)


@operation("faulty.blocks", version=V)
def blocks(job: BlockingJob) -> None:
    """Sits in C code with the interpreter lock."""
    note(job, "starts")
    ctypes.PyDLL(None).usleep(ctypes.c_uint(int(job.input.get("seconds", 600) * 1e6)))


@operation("faulty.blocks_loop", version=V)
async def blocks_loop(job: Job) -> None:
    note(job, "starts")
    time.sleep(job.input["seconds"])  # noqa: ASYNC251 - that is the point


@operation("faulty.computes", version=V)
def computes(job: BlockingJob) -> int:
    """One call that never releases the interpreter lock."""
    note(job, "starts")
    ends = time.monotonic() + job.input["seconds"]
    while time.monotonic() < ends:
        pow(3, 1 << 20, (1 << 20000) + 1)
    return job.attempt


@operation("faulty.sleeps", version=V)
async def sleeps(job: Job) -> int:
    note(job, "starts")
    await asyncio.sleep(job.input["seconds"])
    return job.attempt


@operation("faulty.counts_on", version=V)
async def counts_on(job: Job) -> int:
    """Writes an effect with its token every 50 ms for so many seconds."""
    note(job, "starts")
    ends = time.monotonic() + job.input["seconds"]
    while time.monotonic() < ends:
        note(job, "ticks")
        await asyncio.sleep(0.05)
    return job.attempt


@operation("faulty.spawns", version=V)
def spawns(job: BlockingJob) -> float:
    """Short subprocesses and multiprocessing workers, while progress flows; the longest start in seconds."""
    note(job, "starts")
    return spawn_many(job.input, ("fork", "spawn"), lambda number: job.progress(None, f"{number} started"))


@operation("faulty.spawns_async", version=V)
async def spawns_async(job: Job) -> float:
    note(job, "starts")
    # Not by fork: a process that CPython forks in a thread ends with 1, whatever it does.
    work = asyncio.create_task(asyncio.to_thread(spawn_many, job.input, ("spawn",), lambda _: None))
    while not work.done():
        await job.progress(None, "at it")
        await asyncio.wait([work], timeout=0.02)
    return work.result()


def spawn_many(given: Any, methods: Sequence[str], report: Callable[[int], None]) -> float:
    longest_s = 0.0
    for number in range(given["subprocesses"]):
        begun = time.monotonic()
        process = subprocess.Popen(["/bin/true"])
        longest_s = max(longest_s, time.monotonic() - begun)
        process.wait()
        report(number)
    for method in methods:
        context: Any = multiprocessing.get_context(method)
        for _ in range(given["workers"] // len(methods)):
            begun = time.monotonic()
            worker = context.Process(target=os.getpid)
            worker.start()
            longest_s = max(longest_s, time.monotonic() - begun)
            worker.join()
            assert worker.exitcode == 0, (method, worker.exitcode)
    return longest_s


@operation("faulty.panics", version=V)
async def panics(job: Job) -> str:
    note(job, "starts")
    if job.attempt == 1:
        await asyncio.sleep(0.3)  # its neighbours run by now
        panic(job.input["how"])
    return "ended well"


@operation("faulty.panics_blocking", version=V)
def panics_blocking(job: BlockingJob) -> str:
    note(job, "starts")
    if job.attempt == 1:
        panic(job.input["how"])
    return "ended well"


def panic(how: str) -> None:
    match how:
        case "exception":
            raise RuntimeError("unexpected")
        case "system_exit":
            raise SystemExit(3)
        case "interrupt":
            raise KeyboardInterrupt
        case "recursion":
            recurse(0)
        case "thread_exit":
            thread = threading.Thread(target=sys.exit, args=(4,))
            thread.start()
            thread.join()
        case "segfault":
            ctypes.string_at(0)
        case "os_exit":
            os._exit(5)


def recurse(depth: int) -> None:
    recurse(depth + 1)


@operation("faulty.says", version=V)
async def says(job: Job) -> Any:
    """Puts a text that cannot be stored, made here, into the place that the step is named after."""
    note(job, "starts")
    text = {
        "nul": "a\0b",
        "surrogate": "a\ud800b",
        "bytes": b"\xff\xfe\x80".decode("utf-8", "surrogateescape"),
    }[job.input["what"]]
    return await say(job, job.step_name.replace("-", "_"), text)


async def say(job: Job, where: str, text: str) -> Any:
    match where:
        case "value":
            return text
        case "key":
            return {text: 1}
        case "deep":
            return {"a": [{"b": [0, [text]]}]}
        case "message":
            raise Terminal("TOOL_FAILED", text)
        case "foreign":
            raise RuntimeError(text)
        case "code":
            raise Terminal(text, "a code that is none")
        case "details":
            raise Terminal("TOOL_FAILED", "see details", {"deep": [text]})
        case "stack":
            try:
                raise ValueError(text)
            except ValueError as error:
                raise Terminal("TOOL_FAILED", "see the stack") from error
        case "progress":
            await job.progress(0.5, text)
        case "metric":
            await job.progress(0.5, "with a metric", {text: 1.0})
        case "checkpoint":
            await job.progress(0.5, "with a checkpoint", checkpoint={"at": text})
        case "effect":
            await job.once("charge", lambda: [text])
        case "effect_name":
            await job.once(text, lambda: 1)
        case "artifact_name":
            await job.artifacts.put_bytes(text, b"bytes")
        case "artifact_type":
            await job.artifacts.put_bytes("typed", b"bytes", media_type=text)
        case "artifact_metadata":
            await job.artifacts.put_bytes("described", b"bytes", metadata={"title": text})
        case "log":
            job.log.warning(text, detail=text)
            print(text.encode("utf-8", "surrogatepass"))
            os.write(2, text.encode("utf-8", "surrogatepass") + b"\xff\n")
    return "said"


@operation("faulty.sized", version=V)
async def sized(job: Job) -> Any:
    """A payload of so many bytes in the place that the step is named after."""
    note(job, "starts")
    text = "x" * (job.input["size"] - 2)
    match job.step_name:
        case "output":
            return text
        case "checkpoint":
            await job.progress(0.5, "with a checkpoint", checkpoint=text)
        case "details":
            raise Terminal("TOOL_FAILED", "see details", text)
        case "message":
            raise Terminal("TOOL_FAILED", text)
        case "progress":
            await job.progress(0.5, text)
        case "effect":
            await job.once("charge", lambda: text)
    return "said"


@operation("faulty.echo", version=V)
async def echo(job: Job) -> Any:
    return job.input


@operation("faulty.leaks", version=V)
async def leaks(job: Job) -> Any:
    """Lets its secret out wherever something is sent, in all its forms; the first attempt fails."""
    secret = job.secrets["key"]
    url = f"https://user:{quote_plus(secret)}@host/path?key={secret}"
    basic = base64.b64encode(f"user:{secret}".encode()).decode()
    plain = base64.b64encode(secret.encode()).decode()
    text = f"cannot reach {url} with {basic} or {plain}"
    print(text)
    print(text, file=sys.stderr, flush=True)
    os.write(1, b"raw " + secret.encode() + b"\n")
    job.log.error(text, secret=secret, **{f"key_{secret}": secret})
    await job.progress(0.5, text, {f"tries of {secret}": 1.0})
    await job.artifacts.put_bytes("report", b"nothing", metadata={"made with": [url, basic, {secret: plain}]})
    if job.attempt == 1:
        try:
            raise ValueError(text)
        except ValueError as error:
            raise Retryable(
                "TOOL_FAILED", f"the part that is no secret: {text}", {secret: url, "b": [basic]}
            ) from error
    return {"url": url, secret: [basic, plain]}


@operation("faulty.keeps", version=V)
async def keeps(job: Job) -> None:
    """Would leave its secret to the next attempt."""
    secret = job.secrets["key"]
    await job.once("login", lambda: {"with": secret, secret: f"https://user:{quote_plus(secret)}@host"})


@operation("faulty.leaks_blocking", version=V)
def leaks_blocking(job: BlockingJob) -> None:
    """The same by an exception that is nobody's, and by what a dying process leaves on standard error."""
    secret = job.secrets["key"]
    if job.attempt == 1:
        raise RuntimeError(f"postgresql://user:{secret}@host/db")
    sys.stderr.write(f"last words: {secret}\n")
    sys.stderr.flush()
    os.abort()
