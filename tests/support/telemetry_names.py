"""Names of log events and spans, as the source of the services spells them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCHEDULER = ROOT / "services" / "scheduler"
EXECUTOR = ROOT / "services" / "executor"
GO = ROOT / "executors" / "go"

_LEVELS = {"debug": "debug", "info": "info", "warning": "warning", "error": "error", "exception": "error"}
_EVENT = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)+")
_GO_EVENT = re.compile(r"\.(Debug|Info|Warn|Error)\(\"([a-z_]+\.[a-z_]+)\"")
_GO_LEVELS = {"Debug": "debug", "Info": "info", "Warn": "warning", "Error": "error"}
_SPAN_MAKERS = {"start_span", "start_as_current_span", "_span"}


def _calls(folder: Path) -> Iterator[ast.Call]:
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and node.args:
                yield node


def log_events(folder: Path) -> dict[str, set[str]]:
    """The levels of each event; `any` where the level is chosen at run time."""
    found: dict[str, set[str]] = {}
    for call in _calls(folder):
        match call.func:
            case ast.Attribute(value=ast.Name(id="log"), attr=attr) if attr in _LEVELS:
                level = _LEVELS[attr]
            case ast.Name(id="say" | "write"):
                level = "any"
            case _:
                continue
        for node in ast.walk(call.args[0]):
            if isinstance(node, ast.Constant) and _EVENT.fullmatch(str(node.value)):
                found.setdefault(str(node.value), set()).add(level)
    return found


def go_log_events() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for path in sorted(GO.rglob("*.go")):
        if not path.name.endswith("_test.go"):
            for level, event in _GO_EVENT.findall(path.read_text(encoding="utf-8")):
                found.setdefault(event, set()).add(_GO_LEVELS[level])
    return found


def span_names(folder: Path) -> set[str]:
    """What stands in a span's name for a kind or a method is written in angle brackets."""
    found = set()
    for call in _calls(folder):
        if isinstance(call.func, ast.Attribute) and call.func.attr in _SPAN_MAKERS:
            found |= _spelled(call.args[0])
    return found - {"<name>"}


def _spelled(name: ast.expr) -> set[str]:
    match name:
        case ast.Constant(value=str(text)):
            return {text}
        case ast.Name(id=variable):
            return {f"<{variable}>"}
        case ast.JoinedStr(values=parts):
            return {"".join(_part(part) for part in parts)}
        case _:
            return {ast.unparse(name)}


def _part(part: ast.expr) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    assert isinstance(part, ast.FormattedValue)
    return f"<{ast.unparse(part.value).rpartition('.')[2]}>"
