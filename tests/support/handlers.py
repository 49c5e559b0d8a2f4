"""Operations for the executor's tests: each does one thing that handlers do, or should not do."""

import asyncio
import contextlib
import ctypes
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rara_executor import BlockingJob, Job, Retryable, Terminal, operation

V = "1.0.0"


@operation("demo.echo", version=V)
async def echo(job: Job) -> Any:
    return job.input


@operation("demo.echo_blocking", version=V)
def echo_blocking(job: BlockingJob) -> Any:
    return job.input


@operation("demo.facts", version=V)
async def facts(job: Job) -> Any:
    return {
        "attempt": job.attempt,
        "lease_token": job.lease_token,
        "idempotency_key": job.idempotency_key,
        "step_name": job.step_name,
        "definition": job.definition,
        "checkpoint": job.checkpoint,
        "failures": job.failures,
        "max_attempts": job.max_attempts,
        "artifacts": job.artifacts.names(),
        "cancelled": job.cancelled,
        "time_left_s": job.time_left_s,
        "pid": os.getpid(),
    }


@operation("demo.pid", version=V)
def pid(job: BlockingJob) -> int:
    return os.getpid()


@operation("demo.progress", version=V)
async def progress(job: Job) -> int:
    count: int = job.input["count"]
    for number in range(1, count + 1):
        checkpoint = {"done": number} if job.input.get("checkpoint") else None
        await job.progress(number / count, f"{number} of {count}", {"number": number}, checkpoint)
    return count


@operation("demo.wait", version=V)
async def wait(job: Job) -> str:
    """Touches the file that it is given, then waits to be cancelled."""
    mark(job.input)
    await asyncio.sleep(600)
    return "slept"


@operation("demo.wait_blocking", version=V)
def wait_blocking(job: BlockingJob) -> str:
    mark(job.input)
    job.progress(0.5, "waiting", checkpoint={"half": True})
    time.sleep(600)
    return "slept"


@operation("demo.wait_for_file", version=V)
async def wait_for_file(job: Job) -> str:
    """Ends when the file exists."""
    await job.progress(0.1, "waiting", checkpoint={"waiting": True})
    while not Path(job.input["file"]).exists():
        await asyncio.sleep(0.02)
    return "there"


@operation("demo.swallow", version=V)
async def swallow(job: Job) -> None:
    """Takes no notice of its cancel."""
    mark(job.input)
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(600)


@operation("demo.block_loop", version=V)
async def block_loop(job: Job) -> str:
    """Blocks the loop that it shares."""
    mark(job.input)
    time.sleep(job.input["seconds"])  # noqa: ASYNC251 - that is the point
    return "blocked"


@operation("demo.hold_lock", version=V)
def hold_lock(job: BlockingJob) -> str:
    """Keeps the interpreter lock, so that no other thread of its process runs."""
    mark(job.input)
    ctypes.PyDLL(None).usleep(ctypes.c_uint(int(job.input["seconds"] * 1e6)))
    return "held"


@operation("demo.children", version=V)
def children(job: BlockingJob) -> None:
    """Starts a child and a grandchild, says their numbers, and waits."""
    sleep = "import time; time.sleep(600)"
    script = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {sleep!r}]); "
    script += f"print(p.pid, flush=True); {sleep}"
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    pids = [os.getpid(), child.pid, int(child.stdout.readline())]
    Path(job.input["file"]).write_text(json.dumps(pids))
    time.sleep(600)


@operation("demo.many_children", version=V)
def many_children(job: BlockingJob) -> int:
    """Short processes, started while the supervisor streams."""
    for _ in range(job.input["count"]):
        subprocess.run(["/bin/true"], check=True)
    return int(job.input["count"])


@operation("demo.workers", version=V)
def workers(job: BlockingJob) -> Any:
    return squares(job.input)


@operation("demo.workers_async", version=V)
async def workers_async(job: Job) -> Any:
    return await asyncio.to_thread(squares, job.input)


def squares(method: str) -> list[int]:
    context: Any = multiprocessing.get_context(method)
    idler = context.Process(target=time.sleep, args=(600,))
    idler.start()
    with context.Pool(2) as pool:
        result: list[int] = pool.map(square, [1, 2, 3])
    idler.terminate()
    idler.join(5)
    assert idler.exitcode == -signal.SIGTERM
    return result


@operation("demo.terminated_at_once", version=V)
async def terminated_at_once(job: Job) -> list[int | None]:
    """Ends each of so many forked processes as soon as it has begun; their exit codes."""
    return await asyncio.to_thread(_terminate_at_once, job.input)


@operation("demo.terminated_at_once_blocking", version=V)
def terminated_at_once_blocking(job: BlockingJob) -> list[int | None]:
    return _terminate_at_once(job.input)


def _terminate_at_once(count: int) -> list[int | None]:
    codes = []
    for _ in range(count):
        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        process.start()
        process.terminate()
        process.join(5)
        codes.append(process.exitcode)
        process.kill()
    return codes


def square(number: int) -> int:
    return number * number


@operation("demo.hog", version=V)
def hog(job: BlockingJob) -> int:
    return len(bytearray(job.input))


@operation("demo.ticks", version=V)
async def ticks(job: Job) -> None:
    """Appends its token and the time to a file, until it is stopped."""
    path = Path(job.input["file"])
    while True:
        with path.open("a") as file:  # noqa: ASYNC230 - a few bytes
            file.write(f"{job.lease_token} {time.monotonic()}\n")
        await asyncio.sleep(0.02)


@operation("demo.stop_nicely", version=V)
async def stop_nicely(job: Job) -> Any:
    """Finishes when it is asked to stop: a success all the same."""
    mark(job.input)
    try:
        await asyncio.sleep(600)
    except asyncio.CancelledError:
        return {"cancelled": job.cancelled, "reason": job.cancel_reason}


@operation("demo.last_words", version=V)
async def last_words(job: Job) -> None:
    """Reports once more when it is asked to stop."""
    mark(job.input)
    try:
        await asyncio.sleep(600)
    except asyncio.CancelledError:
        await job.progress(0.9, "last words")
        await asyncio.sleep(0.1)  # time enough for it to be sent
        Path(job.input["file"] + ".said").touch()
        raise


@operation("demo.self_cancel", version=V)
async def self_cancel(job: Job) -> None:
    raise asyncio.CancelledError


@operation("demo.die", version=V)
def die(job: BlockingJob) -> None:
    match job.input["how"]:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "abort":
            os.abort()
        case "exit":
            os._exit(7)
        case "sys_exit":
            sys.exit(3)
        case "memory":
            raise MemoryError


@operation("demo.die_async", version=V)
async def die_async(job: Job) -> None:
    mark(job.input)
    await asyncio.sleep(job.input.get("after_s", 0))
    os.kill(os.getpid(), signal.SIGKILL)


@operation("demo.fail", version=V)
async def fail(job: Job) -> None:
    fail_as(job.input)


@operation("demo.fail_blocking", version=V)
def fail_blocking(job: BlockingJob) -> None:
    fail_as(job.input)


def fail_as(given: Any) -> None:
    match given["how"]:
        case "retryable":
            raise Retryable(given.get("code", "TOOL_FAILED"), given.get("message", "no luck"), {"n": 1}, 7.5)
        case "terminal":
            raise Terminal(given.get("code", "INPUT_HOPELESS"), given.get("message", "never"))
        case "details":
            raise Terminal("INPUT_HOPELESS", "see details", {"big": "x" * given["size"]})
        case "bad_details":
            raise Terminal("INPUT_HOPELESS", "see details", {"when": object()})
        case "bytes":
            raise RuntimeError(b"\xff\xfe\x80 and \x00".decode("utf-8", "surrogateescape"))
        case "long":
            raise RuntimeError("é" * 100_000)
        case "deep":
            recurse(0)
        case _:
            raise RuntimeError(given.get("message", "boom"))


def recurse(depth: int) -> None:
    recurse(depth + 1)


@operation("demo.output", version=V)
async def output(job: Job) -> Any:
    """An output that is made here, since it could not come as an input."""
    return {
        "nul": {"a": ["x", {"b/c": "\0"}]},
        "nul_key": {"a\0": 1},
        "surrogate": ["\ud800"],
        "nan": {"loss": [1.0, float("nan")]},
        "infinity": float("inf"),
        "set": {"ids": {1, 2}},
        "bytes": b"x",
        "int_key": {1: 2},
        "big_int": {"n": 2**200, "m": 2**53 + 1, "negative": -(2**63)},
        "tuple": {"pair": (1, 2)},
        "deep": nested(5000),
        "exact": "x" * ((1 << 20) - 2),
        "over": "x" * ((1 << 20) - 1),
        "nothing": None,
    }[job.input]


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@operation("demo.big_checkpoint", version=V)
async def big_checkpoint(job: Job) -> None:
    await job.progress(checkpoint="x" * (1 << 20))


@operation("demo.long_progress", version=V)
async def long_progress(job: Job) -> None:
    await job.progress(message="m" * (1 << 20), fraction=7, metrics={"loss": float("nan"), "ok": 1})


@operation(
    "demo.checked",
    version=V,
    input_schema={
        "type": "object",
        "properties": {"items": {"type": "array", "items": {"type": "integer"}}},
        "required": ["items"],
    },
)
async def checked(job: Job) -> int:
    return sum(job.input["items"])


@operation("demo.one_at_a_time", version=V, max_concurrency=1)
async def one_at_a_time(job: Job) -> None:
    await wait_for_file(job)


@operation("demo.once", version=V)
async def once(job: Job) -> Any:
    calls: list[str] = []

    async def effect() -> Any:
        calls.append("async")
        return {"charged": 5, "pair": (1, 2)}

    first = await job.once("charge", effect)
    second = await job.once("charge", effect)
    third = await job.once("mail", lambda: "sent")
    return {"first": first, "second": second, "third": third, "calls": len(calls)}


@operation("demo.slow_effects", version=V)
async def slow_effects(job: Job) -> int:
    """Records an effect every so many seconds, and reports nothing else."""
    for number in range(job.input["count"]):
        await job.once(f"effect {number}", lambda: 1)
        await asyncio.sleep(job.input["seconds"])
    return int(job.input["count"])


@operation("demo.once_blocking", version=V)
def once_blocking(job: BlockingJob) -> Any:
    return [job.once("charge", lambda: 1), job.once("charge", lambda: 2)]


@operation("demo.big_effect", version=V)
async def big_effect(job: Job) -> None:
    await job.once("big", lambda: "x" * (16 << 10))


@operation("demo.artifacts", version=V)
async def artifacts(job: Job) -> Any:
    source = await job.artifacts.open("corpus")
    data = source.read_bytes()
    path = job.scratch / "reversed"
    path.write_bytes(data[::-1])
    big = await job.artifacts.put_file(
        "reversed", path, type="dataset", metadata={"bytes": len(data)}, derived_from=("corpus",)
    )
    path.unlink()
    small = await job.artifacts.put_bytes("summary", b"small", media_type="text/plain")
    again = await job.artifacts.open("corpus")
    return {
        "size": source.size_bytes,
        "type": source.type,
        "metadata": source.metadata,
        "big": big.digest,
        "small": small.digest,
        "same": again.path == source.path,
    }


@operation("demo.artifacts_blocking", version=V)
def artifacts_blocking(job: BlockingJob) -> Any:
    data = job.artifacts.open("corpus").read_bytes()
    return job.artifacts.put_bytes("copy", data).digest


@operation("demo.secrets", version=V)
async def secrets(job: Job) -> Any:
    secret = job.secrets["key"]
    print(f"printed {secret}")
    job.log.info("said", secret=secret)
    await job.progress(0.5, f"with {secret}", checkpoint={"at": "page 2"})
    if job.input == "checkpoint":
        await job.progress(0.6, checkpoint={"pages": [{"at": f"https://u:{secret}@host"}]})
        await job.progress(0.7, checkpoint={"at": "page 3"})
    if job.input == "effect":
        await job.once("log in", lambda: {"cookie": secret})
    if job.input == "fail":
        raise Retryable("TOOL_FAILED", f"cannot reach https://host/?key={secret}", {"used": [secret]})
    return {"in": f"a {secret} b", secret: 1}


@operation("demo.noise", version=V)
def noise(job: BlockingJob) -> str:
    """Writes to all that could disturb the link."""
    print("out", "x" * 100_000)
    print("err", file=sys.stderr)
    os.write(1, b"\x00\xff raw\n")
    for number in range(5000):
        print(number)
    return "quiet"


@operation("demo.progress_from_thread", version=V)
def progress_from_thread(job: BlockingJob) -> str:
    thread = threading.Thread(target=lambda: job.progress(0.5, "from a thread"))
    thread.start()
    thread.join()
    return "done"


def mark(given: Any) -> None:
    """Tell the test that the handler is here."""
    if isinstance(given, dict) and "file" in given:
        Path(given["file"]).write_text(str(os.getpid()))


@operation("demo.setsid", version=V)
def setsid(job: BlockingJob) -> str:
    """Leaves processes behind in sessions of their own: a child, a daemon, and one without our environment."""
    leave_behind(job.input)
    if job.input.get("wait"):
        time.sleep(600)
    if job.input.get("crash"):
        os.kill(os.getpid(), signal.SIGKILL)
    return "left"


@operation("demo.setsid_async", version=V)
async def setsid_async(job: Job) -> str:
    leave_behind(job.input)
    await asyncio.sleep(600)
    return "left"


def leave_behind(given: Any) -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    daemon = f"import subprocess; print(subprocess.Popen({sleep!r}, start_new_session=True, stdout=-3).pid)"
    child = subprocess.Popen(sleep, start_new_session=True)
    orphan = subprocess.run([sys.executable, "-c", daemon], stdout=subprocess.PIPE, text=True, check=True)
    pids = [os.getpid(), child.pid, int(orphan.stdout)]
    if not given.get("crash"):
        pids.append(subprocess.Popen(sleep, start_new_session=True, env={}).pid)
    Path(given["file"]).write_text(json.dumps(pids))
