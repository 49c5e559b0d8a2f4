"""Commands and groups that load late, and take the global options anywhere on the line."""

import functools
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from importlib import import_module
from typing import Any

import click
from click.core import ParameterSource

from rara_cli.session import FORMATS, Session

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

_GIVEN = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)


class Seconds(click.ParamType[float]):
    """A length of time: 90, 1.5s, 5m, 2h."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(|s|m|h|d)", str(value).strip())
        if match is None:
            self.fail(f"{value!r} is not a length of time such as 30s, 1.5s, 5m or 2h", param, ctx)
        return float(match[1]) * _UNITS[match[2]]


class Instant(click.ParamType[datetime]):
    """A point in time: 2026-03-04T05:06:07Z."""

    name = "instant"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        try:
            made = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
        except ValueError:
            made = None
        if made is None or made.tzinfo is None:
            self.fail(f"{value!r} is not an instant such as 2026-03-04T05:06:07Z", param, ctx)
        return made


def blob_store_option(*, required: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For what works on the blob store itself."""
    return click.option(
        "--blob-store",
        envvar="RARA_BLOB_STORE",
        required=required,
        metavar="URL",
        help="file:///folder or s3://bucket/prefix, as the schedulers have it.  [env: RARA_BLOB_STORE]",
    )


def _store(ctx: click.Context, param: click.Parameter, value: object) -> None:
    """Keep what was given; an option further right on the line wins."""
    session = ctx.ensure_object(Session)
    if param.name is not None and ctx.get_parameter_source(param.name) in _GIVEN:
        setattr(session, param.name.removeprefix("global_"), value)


def _global_options(*, at_root: bool, formats: Sequence[str] = FORMATS) -> list[click.Option]:
    """The same options everywhere; shown in the help, and read from the environment, only once."""

    def option(*names: str, env: str = "", **more: Any) -> click.Option:
        return click.Option(
            names,
            envvar=env if at_root and env else None,
            hidden=not at_root,
            default=None,
            expose_value=False,
            callback=_store,
            **more,
        )

    return [
        option(
            "global_server",
            "--server",
            env="RARA_SERVER",
            metavar="HOST:PORT",
            help="The scheduler.  [env: RARA_SERVER; default: 127.0.0.1:7310]",
        ),
        option(
            "global_output",
            "-o",
            "--output",
            env="RARA_OUTPUT",
            type=click.Choice(formats),
            help="How to show the answer.  [default: table]",
        ),
        option(
            "global_time",
            "--time",
            env="RARA_TIME",
            type=click.Choice(("relative", "iso", "unix")),
            help="How to show instants.  [default: relative on a terminal, else iso]",
        ),
        option(
            "global_color",
            "--color",
            env="RARA_COLOR",
            type=click.Choice(("auto", "always", "never")),
            help="Colour and live views.  [default: auto; NO_COLOR and CLICOLOR_FORCE count]",
        ),
        option(
            "global_timeout_s",
            "--timeout",
            env="RARA_TIMEOUT",
            type=Seconds(),
            help="Longest wait: 30, 1.5s, 5m, 2h.  [default: 15s for an answer, for ever in watch and wait]",
        ),
        option("global_no_input", "--no-input", is_flag=True, help="Never ask."),
        option("global_yes", "-y", "--yes", is_flag=True, help="Do not ask before what cannot be undone."),
        option("global_verbose", "-v", "--verbose", is_flag=True, help="More detail; tracebacks of errors."),
    ]


class Command(click.Command):
    """A command that takes the global options."""

    more_formats: tuple[str, ...] = ()  # of this command's answer alone

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.params.extend(_global_options(at_root=False, formats=(*FORMATS, *self.more_formats)))
        self.epilog = self.epilog or "Global options: rara --help"


class Group(click.Group):
    """A group of such commands."""

    command_class = Command

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.params.extend(_global_options(at_root=False))


class LazyGroup(click.Group):
    """The root: loads a subcommand's module when it is used, and shows the help without loading any.

    The pattern is the one of click's documentation, "Lazily Loading Subcommands".
    """

    def __init__(self, *args: Any, lazy: dict[str, tuple[str, str]], **more: Any) -> None:
        """lazy: name -> ("module:attribute", its line in the help)."""
        super().__init__(*args, **more)
        self._lazy = lazy
        self.params.extend(_global_options(at_root=True))

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*super().list_commands(ctx), *self._lazy]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._lazy:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = self._lazy[cmd_name][0].partition(":")
        command = getattr(import_module(module), attribute)
        if not isinstance(command, click.Command):
            raise TypeError(f"{module}:{attribute} is no command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self._lazy.items()])


def filter_options(*, ended: bool, states: Sequence[str]) -> Callable[..., Any]:
    """Which runs or steps are meant; given to the command as `wanted`. ended: they are runs that have ended."""

    def option(name: str, *more: Any, **settings: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        return click.option(f"--{name}", *more, **settings)

    in_state = "In one of those given." + ("  [default: failed]" if ended else "")
    many = {"multiple": True, "default": ()}
    options = [
        option("definition", default="", metavar="NAME", help="All runs of this definition."),
        option("version", type=click.IntRange(1), help="Of this version of it."),
        option("label", "labels", metavar="KEY=VALUE", help="With this label; all that are given.", **many),
        option("all", "every", is_flag=True, help="Without any other filter."),
        option("preview", "preview_only", is_flag=True, help="Say how many there are, and do nothing."),
        option(
            "as-of", type=Instant(), help="Nothing later than this, as a preview said it.  [default: now]"
        ),
    ]
    if ended or not states:
        options += [
            option("code", "codes", metavar="CODE", help="That failed so; one of those given.", **many),
            option("kind", default="", help="In a step of this kind."),
        ]
    if states:
        options += [
            option("state", "states", type=click.Choice(states), help=in_state, **many),
            option("created-since", type=Seconds(), help="Created within this time: 30m, 24h, 7d."),
            option("created-before", type=Seconds(), help="Created longer ago than this."),
        ]
    if ended:
        options += [
            option("since", type=Seconds(), help="Ended within this time: 30m, 24h, 7d."),
            option("before", type=Seconds(), help="Ended longer ago than this."),
        ]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def with_filter(*args: Any, **given: Any) -> Any:
            from rara_cli.bulk import Filter

            nothing: dict[str, Any] = {"codes": (), "kind": "", "states": ()}
            wanted = {name: given.pop(name, nothing.get(name)) for name in Filter.__slots__}
            return function(*args, wanted=Filter(**wanted), **given)

        made: Callable[..., Any] = with_filter
        for each in reversed(options):
            made = each(made)
        return made

    return decorate


def pause_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """For what pauses."""
    reason = click.option("--reason", default="", metavar="TEXT", help="Why, for those who wonder later.")
    unknown = click.option("--even-if-unknown", is_flag=True, help="Take a name that nothing uses yet.")
    return reason(unknown(function))


def pass_session(function: Callable[..., Any]) -> Callable[..., Any]:
    """Hand the global options to a command as its first argument."""
    return click.make_pass_decorator(Session, ensure=True)(function)
