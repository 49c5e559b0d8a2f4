"""The command line of `bench/load.py`."""

import asyncio
import contextlib
import json
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import psutil
from rara_cli.exits import from_client_error
from rara_cli.options import Seconds
from rara_cli.stack import PartFailed, Stack, StackSettings
from rara_client import RaraError
from rara_scheduler.embedded import EmbeddedPostgresError

from rara_load.machine import Machine
from rara_load.picture import NoPictures, draw
from rara_load.plan import FORMS, MIX, Form, Kind, Plan, PlanInvalid, weights
from rara_load.preflight import NotReady
from rara_load.report import Result
from rara_load.run import Setting, Stops, put_load

DEFAULT_SERVER = "127.0.0.1:7310"
DEFAULT_CALLERS = 8
_EXECUTOR_MODULE = "rara_testing.load"
_USAGE = 2
_UNREADY = 6
_HURRIED = 130


def say(line: str) -> None:
    """Progress goes to standard error: the other one is for the report."""
    print(line, file=sys.stderr, flush=True)


@contextlib.asynccontextmanager
async def own_stack(setting: Setting, slots: int) -> AsyncIterator[Setting]:
    """A local stack for the load, in a folder that is gone afterwards."""
    folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="rara-load-"))
    await asyncio.to_thread(folder.chmod, 0o711)  # as root, PostgreSQL runs as another account
    settings = StackSettings(
        directory=folder, modules=(_EXECUTOR_MODULE,), slots=slots, env={"RARA_LOG_LEVEL": "warning"}
    )
    try:
        async with Stack(settings, report=say) as stack:
            known = {stack.scheduler.pid: "scheduler", stack.executor.pid: "executor"}
            pids = {known.get(child.pid, "postgres"): child.pid for child in psutil.Process().children()}
            yield replace(setting, addresses=(stack.address,), database_url=stack.dsn, machine=Machine(pids))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _main(setting: Setting, plan: Plan, slots: int | None) -> tuple[Result, bool]:
    """slots None: no stack of its own. True: somebody was in a hurry."""
    stops = Stops()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stops.signal)
    async with contextlib.AsyncExitStack() as parts:
        if slots is not None:
            setting = await parts.enter_async_context(own_stack(setting, slots))
        result = await put_load(setting, plan, stops, say)
    return result, stops.hurried.is_set()


def _write(result: Result, report: Path, *, with_picture: bool) -> None:
    report.parent.mkdir(parents=True, exist_ok=True)
    if with_picture:
        picture = report.with_suffix(".svg")
        try:
            draw(picture, result.figures.points, result.stages())
            say(f"picture: {picture}")
        except NoPictures as error:
            result.notes.append(str(error))
    report.write_text(json.dumps(result.as_json(), indent=2) + "\n")
    print("\n".join(result.lines()))
    say(f"report: {report}")


def _pids(given: tuple[str, ...]) -> dict[str, int]:
    found = {}
    for item in given:
        name, _, pid = item.partition("=")
        if not name or not pid.isdecimal():
            raise PlanInvalid(f"--pid: {item!r} is not NAME=PID")
        found[name] = int(pid)
    return found


def _size(**more: Any) -> Any:
    return {"type": click.IntRange(0, 1024 * 1024), "show_default": True, **more}


def _share(**more: Any) -> Any:
    return {"type": click.FloatRange(0, 1), "show_default": True, **more}


_DEFAULT_MIX = ",".join(f"{kind}={weight}" for kind, weight in MIX.items())
_DEFAULT_FORMS = ",".join(f"{form}={weight}" for form, weight in FORMS.items())
_MANY = click.IntRange(1, 10_000)


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--server",
    "servers",
    multiple=True,
    envvar="RARA_SERVER",
    metavar="HOST:PORT",
    help=f"A scheduler; may be given more than once.  [env: RARA_SERVER; default: {DEFAULT_SERVER}]",
)
@click.option("--stack", is_flag=True, help="Start a stack of its own on this machine, for a first try.")
@click.option(
    "--slots", type=click.IntRange(1, 1000), default=16, show_default=True, help="Of the executor of --stack."
)
@click.option(
    "--connections", type=click.IntRange(1, 100), default=4, show_default=True, help="To each scheduler."
)
@click.option(
    "--rate",
    type=click.FloatRange(0, 100_000),
    default=0.0,
    help="Open loop: so many turns are begun each second, whatever became of those before.",
)
@click.option(
    "--arrivals",
    type=click.Choice(("poisson", "constant")),
    default="poisson",
    show_default=True,
    help="How they are spread over time.",
)
@click.option(
    "--callers",
    type=click.IntRange(0, 10_000),
    default=0,
    help="Closed loop: so many callers, each with one turn after the other."
    f"  [default, without --rate: {DEFAULT_CALLERS}]",
)
@click.option(
    "--duration", type=Seconds(), default="30s", show_default=True, help="After the warm-up; 0: until Ctrl-C."
)
@click.option(
    "--warm-up", type=Seconds(), default="5s", show_default=True, help="Comes first, and is left out."
)
@click.option(
    "--mix", default=_DEFAULT_MIX, show_default=True, metavar="KIND=WEIGHT,...", help="What the turns are."
)
@click.option(
    "--graphs",
    default=_DEFAULT_FORMS,
    show_default=True,
    metavar="FORM=WEIGHT,...",
    help="What the runs are.",
)
@click.option("--width", type=click.IntRange(1, 9_998), default=10, show_default=True, help="Of wide graphs.")
@click.option("--depth", type=_MANY, default=5, show_default=True, help="Of deep graphs.")
@click.option(
    "--batch-size",
    type=click.IntRange(1, 1000),
    default=10,
    show_default=True,
    help="Runs in a turn of the kind `batch`.",
)
@click.option("--payload-bytes", default=100, **_size(help="Of each run's input."))
@click.option("--output-bytes", default=100, **_size(help="Of each step's output."))
@click.option(
    "--artifact-bytes",
    type=click.IntRange(0, 1024**3),
    default=0,
    show_default=True,
    help="Of an artifact that each step makes and the next ones read; 0: none.",
)
@click.option(
    "--step-duration", type=Seconds(), default="0s", show_default=True, help="How long steps sleep."
)
@click.option("--flaky", default=0.0, **_share(help="Share of steps whose first attempt fails."))
@click.option("--failing", default=0.0, **_share(help="Share of runs that fail for good, as planned."))
@click.option(
    "--sample", default=0.1, **_share(help="Share of watched runs whose steps are looked at for stages.")
)
@click.option(
    "--max-in-flight",
    type=click.IntRange(1, 100_000),
    default=1000,
    show_default=True,
    help="Turns at one time; more are begun late, and that is measured.",
)
@click.option("--call-timeout", type=Seconds(), default="30s", show_default=True, help="Of one call.")
@click.option(
    "--run-timeout",
    type=Seconds(),
    default="2m",
    show_default=True,
    help="Of a watched run; then it counts as an error.",
)
@click.option(
    "--settle",
    type=Seconds(),
    default="2m",
    show_default=True,
    help="Longest wait for the runs to end after the load.",
)
@click.option(
    "--ready-within",
    type=Seconds(),
    default="30s",
    show_default=True,
    help="Longest wait for the first run, which shows that executors serve the load.",
)
@click.option("--every", type=Seconds(), default="5s", show_default=True, help="Between lines of progress.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of arrivals and choices.")
@click.option(
    "--tolerate",
    multiple=True,
    metavar="CODE",
    help="Errors with this code are expected, under chaos say; may be given more than once.",
)
@click.option(
    "--database",
    "database_url",
    envvar="RARA_DATABASE_URL",
    default="",
    metavar="URL",
    help="For the history checker and the sizes of tables.  [env: RARA_DATABASE_URL]",
)
@click.option(
    "--check",
    "check_command",
    default="",
    metavar="COMMAND",
    help="Runs the history checker, where the database cannot be reached from here.",
)
@click.option(
    "--pid",
    "pids",
    multiple=True,
    metavar="NAME=PID",
    help="A process whose memory and processor time are told; may be given more than once.",
)
@click.option(
    "--compose-project",
    default="",
    metavar="NAME",
    help="The same for all containers of a compose project on this machine.",
)
@click.option(
    "--report",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("load-report.json"),
    show_default=True,
    help="Where the JSON goes; the picture goes beside it, as .svg.",
)
@click.option("--picture/--no-picture", default=True, help="Draw one.")
def main(**given: Any) -> None:
    """Put a load on a Rara at any address, and say how it bore it.

    Kinds of turns: start, watch, batch, get, list, cancel, retry, explain. Forms of graphs: single, deep, wide,
    diamond. The steps are of the kind `load.step`, which an executor offers with
    RARA_EXECUTOR_MODULES=rara_testing.load. Tokens and certificates come from RARA_TOKEN, RARA_TOKEN_FILE,
    RARA_TLS_CA, RARA_TLS_CLIENT_CERT and RARA_TLS_CLIENT_KEY, as those of the `rara` command.

    Ctrl-C ends the load with its report, a second one at once. Exit codes: 0 all as planned, 1 errors or runs that
    did not end as planned, 2 usage, 6 not ready for a load, 7 a promise broken, 130 in a hurry.
    """
    try:
        plan, setting = _plan(given), _setting(given)
    except PlanInvalid as error:
        say(f"USAGE: {error}")
        sys.exit(_USAGE)
    try:
        result, was_hurried = asyncio.run(_main(setting, plan, given["slots"] if given["stack"] else None))
    except (NotReady, PartFailed, EmbeddedPostgresError, ValueError) as error:
        say(f"NOT_READY: {error}")
        sys.exit(_UNREADY)
    except RaraError as fault:
        told = from_client_error(fault, setting.addresses[0])
        say(f"{told}; --stack starts one for a first try")
        sys.exit(told.exit_code)
    _write(result, given["report"], with_picture=given["picture"])
    sys.exit(_HURRIED if was_hurried else result.exit_code)


def _plan(given: dict[str, Any]) -> Plan:
    return Plan(
        rate=given["rate"],
        callers=given["callers"] or (0 if given["rate"] else DEFAULT_CALLERS),
        duration_s=given["duration"],
        warm_up_s=given["warm_up"],
        poisson=given["arrivals"] == "poisson",
        mix={Kind(name): weight for name, weight in weights(given["mix"], Kind, "--mix").items()},
        forms={Form(name): weight for name, weight in weights(given["graphs"], Form, "--graphs").items()},
        width=given["width"],
        depth=given["depth"],
        batch_size=given["batch_size"],
        payload_bytes=given["payload_bytes"],
        output_bytes=given["output_bytes"],
        artifact_bytes=given["artifact_bytes"],
        step_s=given["step_duration"],
        flaky=given["flaky"],
        failing=given["failing"],
        sample=given["sample"],
        max_in_flight=given["max_in_flight"],
        call_timeout_s=given["call_timeout"],
        run_timeout_s=given["run_timeout"],
        settle_s=given["settle"],
        ready_s=given["ready_within"],
        every_s=max(given["every"], 0.1),
        seed=given["seed"],
    )


def _setting(given: dict[str, Any]) -> Setting:
    return Setting(
        addresses=given["servers"] or (DEFAULT_SERVER,),
        connections=given["connections"],
        database_url=given["database_url"],
        check_command=shlex.split(given["check_command"]),
        machine=Machine(_pids(given["pids"]), given["compose_project"]),
        tolerated=frozenset(given["tolerate"]),
    )
