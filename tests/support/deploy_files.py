"""What the Dockerfiles and the compose file say, read without an engine."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(slots=True)
class Image:
    """What holds in the last layer of a target; of an instruction that stands several times, the last."""

    base: str
    said: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)

    def command(self) -> list[str]:
        """ENTRYPOINT and CMD together. ValueError for one in shell form."""
        return [*self._words("ENTRYPOINT"), *self._words("CMD")]

    def _words(self, instruction: str) -> list[str]:
        text = self.said.get(instruction, "[]")
        words = json.loads(text) if text.startswith("[") else None
        if words is None:
            raise ValueError(f"{instruction} {text}: in shell form, so that a shell gets the signals")
        return list(words)


def image(dockerfile: Path, target: str) -> Image:
    """The target, with all that it inherits from the stages below it."""
    return _stages(dockerfile)[target]


def targets(dockerfile: Path) -> set[str]:
    """The stages that no other starts from and that run something."""
    stages = _stages(dockerfile)
    bases = {stage.base for stage in stages.values()}
    return {name for name, stage in stages.items() if name not in bases and "USER" in stage.said}


def _stages(dockerfile: Path) -> dict[str, Image]:
    text = re.sub(r"^\s*#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE)
    arguments: dict[str, str] = {}
    stages: dict[str, Image] = {}
    current = Image("")
    for line in re.sub(r"\\\n", " ", text).splitlines():
        instruction, _, rest = line.strip().partition(" ")
        rest = re.sub(r"\$\{(\w+)\}", lambda match: arguments.get(match[1], match[0]), rest.strip())
        match instruction:
            case "ARG":
                name, _, value = rest.partition("=")
                arguments[name] = value
            case "FROM":
                base, _, name = rest.partition(" AS ")
                below = stages.get(base, Image(base))
                current = Image(base, dict(below.said), dict(below.env))
                stages[name or base] = current
            case "ENV":
                current.env.update(pair.partition("=")[::2] for pair in rest.split())
            case "":
                pass
            case _:
                current.said[instruction] = rest
    return stages


def compose(name: str = "docker-compose.yml") -> dict[str, Any]:
    """The compose file; of ${NAME:-default} and ${NAME-default} the default stands."""
    text = (DEPLOY / name).read_text()
    loaded: dict[str, Any] = yaml.safe_load(re.sub(r"\$\{\w+:?-([^}]*)\}", r"\1", text))
    return loaded


def our_services() -> dict[str, dict[str, Any]]:
    """Those whose image is built here, by name."""
    return {name: service for name, service in compose()["services"].items() if "build" in service}


def long_running_services() -> dict[str, dict[str, Any]]:
    return {
        name: service
        for name, service in our_services().items()
        if service.get("restart") == "unless-stopped"
    }


def image_of(service: dict[str, Any]) -> Image:
    build = service["build"]
    return image(ROOT / build["dockerfile"], build["target"])


def seconds(text: str) -> float:
    """Of a duration as compose writes it: 1m30s."""
    parts = re.findall(r"(\d+)(ms|s|m|h)", text)
    assert "".join(number + unit for number, unit in parts) == text
    return sum(int(number) * _UNITS[unit] for number, unit in parts)
