"""`python -m rara_chaos`: a stack, a load, faults by the seed, then the verdict."""

import asyncio
import random
import shutil
import signal
import sys
import tempfile
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import click

from rara_chaos import docker, golang
from rara_chaos.address import address
from rara_chaos.compose import compose
from rara_chaos.local import local
from rara_chaos.run import run
from rara_chaos.target import Target

_EVERY_S = {"local": 3.0, "compose": 5.0, "address": 3.0}


@dataclass(frozen=True, slots=True)
class Options:
    """Of the command, as far as they are about the target."""

    target: str
    addresses: tuple[str, ...]
    database_url: str
    hooks: tuple[str, ...]
    executors: int
    ledger: str
    project: str
    with_go: bool
    keep: bool

    def started(self, folder: Path) -> AbstractAsyncContextManager[Target]:
        match self.target:
            case "compose":
                return compose(folder, name=self.project, with_go=self.with_go, keep=self.keep)
            case "address":
                return address(
                    folder,
                    self.addresses,
                    executors=self.executors,
                    with_go=self.with_go,
                    database_url=self.database_url,
                    hooks=self.hooks,
                    ledger=self.ledger,
                )
            case _:
                return local(folder, with_go=self.with_go)


async def _main(seed: int, duration_s: float, every_s: float, folder: Path, options: Options) -> bool:
    if (this := asyncio.current_task()) is not None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, this.cancel)
    async with options.started(folder) as target:
        for kind, why in target.left_out.items():
            print(f"left out: {kind}: {why}", flush=True)
        report = await run(seed, duration_s, every_s, target)
    print("\n".join(report.lines()))
    if report.never:
        print("never injected: " + ", ".join(report.never))
    if report.spared:
        print("without work or without a fault: " + ", ".join(report.spared))
    if not report.is_good:
        print(f"logs: {folder}")
        print(f"again: {sys.executable} -m rara_chaos {_again(seed, duration_s, every_s, options)}")
    print(report.json(), flush=True)
    return report.is_good


def _again(seed: int, duration_s: float, every_s: float, options: Options) -> str:
    target = "" if options.target == "local" else f" --target {options.target}"
    return (
        f"--seed {seed} --duration {duration_s:g} --every {every_s:g}"
        f" {'--go' if options.with_go else '--no-go'}{target}"
    )


@click.command()
@click.option(
    "--target",
    type=click.Choice(("local", "compose", "address")),
    help="A stack of its own on this machine, one of the compose file, or what runs at --address."
    "  [default: local; address, where one is given]",
)
@click.option("--seed", type=int, help="Of schedule and load; drawn when not given.")
@click.option(
    "--duration",
    "duration_s",
    type=click.FloatRange(1),
    default=60.0,
    show_default=True,
    help="Seconds of faults.",
)
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(0.1),
    help="Seconds between faults.  [default: 3; with compose 5]",
)
@click.option(
    "--go/--no-go",
    "with_go",
    default=None,
    help="Every second executor is one in Go, and steps of both languages take turns; by default where there is a go.",
)
@click.option(
    "--keep", is_flag=True, help="Keep the folder with logs and ledger, and what is of the target's."
)
@click.option(
    "--project", default="", help="compose: a project that stays; by default one that is gone at the end."
)
@click.option(
    "--address",
    "addresses",
    multiple=True,
    metavar="HOST:PORT",
    help="address: of a scheduler; may be repeated.",
)
@click.option(
    "--database-url",
    default="",
    metavar="URL",
    help="address: of its database, for the history checker; without it the verdict comes from its answers.",
)
@click.option(
    "--executors",
    type=click.IntRange(0, 64),
    default=2,
    show_default=True,
    help="address: executors to bring along; 0: the system has rara_chaos.operations, and --ledger is shared with it.",
)
@click.option("--ledger", default="", metavar="FILE", help="address: where handlers write down what they do.")
@click.option(
    "--hook",
    "hooks",
    multiple=True,
    metavar="COMMAND",
    help="address: a fault of yours, done, held for $HOLD_S seconds and taken back; may be repeated.",
)
def main(
    target: str | None,
    seed: int | None,
    duration_s: float,
    every_s: float | None,
    with_go: bool | None,
    keep: bool,
    project: str,
    addresses: tuple[str, ...],
    database_url: str,
    executors: int,
    ledger: str,
    hooks: tuple[str, ...],
) -> None:
    """Put a stack under faults, and judge what it did by its promises."""
    target = target or ("address" if addresses else "local")
    _refuse(target, addresses, executors, ledger, project)
    seed = random.SystemRandom().randrange(1_000_000) if seed is None else seed
    print(f"seed {seed}, {duration_s:g} s", flush=True)
    if with_go is None:
        without = golang.why_not()
        with_go = not without
        if without:
            print(f"no executors in Go, and no runs of both languages: {without}", flush=True)
    options = Options(target, addresses, database_url, hooks, executors, ledger, project, with_go, keep)
    folder = Path(tempfile.mkdtemp(prefix="rara-chaos-"))
    folder.chmod(0o711)  # as root, PostgreSQL runs as another account
    is_good = False
    try:
        is_good = asyncio.run(_main(seed, duration_s, every_s or _EVERY_S[target], folder, options))
    except asyncio.CancelledError:
        print(f"stopped; logs: {folder}")
        sys.exit(130)
    except BaseException:
        print(f"logs: {folder}", flush=True)
        raise
    if is_good and not keep:
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(0 if is_good else 1)


def _refuse(target: str, addresses: tuple[str, ...], executors: int, ledger: str, project: str) -> None:
    """Options that do not fit together."""
    if (target == "address") != bool(addresses):
        raise click.UsageError("--target address needs --address HOST:PORT, and no other target takes one")
    for each in addresses:
        host, colon, port = each.rpartition(":")
        if not (host and colon and port.isdecimal() and 0 < int(port) < 65_536):
            raise click.UsageError(f"--address must be HOST:PORT, not {each!r}")
    if target == "address" and not executors and not ledger:
        raise click.UsageError("--executors 0 needs --ledger FILE, which the system's executors can write")
    if project and target != "compose":
        raise click.UsageError("--project is for --target compose")
    if target == "compose" and (why := docker.why_not()):
        raise click.UsageError(f"--target compose needs a container engine: {why}")


if __name__ == "__main__":
    main()
