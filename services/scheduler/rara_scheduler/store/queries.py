"""The hand-written statements of db/queries, by name."""

import re
from functools import cache
from importlib.resources import files
from pathlib import Path

_NAME = re.compile(r"^-- name: (\w+)\s*$", re.MULTILINE)


def database_folder() -> Path:
    """The folder that holds `migrations` and `queries`: inside the package when installed, else the checkout's."""
    packaged = Path(str(files("rara_scheduler"))) / "db"
    if packaged.is_dir():
        return packaged
    return Path(__file__).resolve().parents[4] / "db"


@cache
def load_queries() -> dict[str, str]:
    """All statements by name. Raises ValueError on a name given twice."""
    found: dict[str, str] = {}
    for path in sorted((database_folder() / "queries").glob("*.sql")):
        parts = _NAME.split(path.read_text(encoding="utf-8"))
        for name, text in zip(parts[1::2], parts[2::2], strict=True):
            if name in found:
                raise ValueError(f"query {name} is defined twice, the second time in {path.name}")
            found[name] = text.strip().rstrip(";")
    return found


def query(name: str) -> str:
    """The statement of that name. Raises KeyError when there is none."""
    return load_queries()[name]
