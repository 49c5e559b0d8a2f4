"""Who runs the server: PostgreSQL refuses root, so root hands it to an account without rights."""

import asyncio
import errno
import hashlib
import os
import pwd
import shutil
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from rara_scheduler.embedded import shim
from rara_scheduler.embedded.binaries import Binaries
from rara_scheduler.embedded.errors import AccountUnusable

SETTING = "RARA_POSTGRES_USER"
FALLBACKS = ("nobody", "postgres")
CHECK_TIMEOUT_S = 10.0
KERNEL_SIGNALS = sys.platform == "linux"  # a child can ask to be told of its parent's end


@dataclass(frozen=True, slots=True)
class Account:
    """An existing account of this machine."""

    name: str
    uid: int
    gid: int

    def own(self, path: Path) -> None:
        os.chown(path, self.uid, self.gid, follow_symlinks=False)

    def own_all(self, directory: Path) -> None:
        """Hand over a folder of ours with all that is in it; links are changed, not followed."""
        self.own(directory)
        for parent, folders, files in os.walk(directory):
            for name in (*folders, *files):
                self.own(Path(parent) / name)


def choose_account(user: str | None, data: Path) -> Account | None:
    """The account to change to; None where this process is not root and simply stays what it is.

    In order: `user`, the setting RARA_POSTGRES_USER, the owner of an existing data directory, then the first of
    FALLBACKS that exists. Raises AccountUnusable.
    """
    name = user or os.environ.get(SETTING)
    if os.geteuid() != 0:
        if name and _look_up(name).uid != os.geteuid():
            raise AccountUnusable(f"only root can run PostgreSQL as {name}")
        return None
    if name:
        account = _look_up(name)
        if account.uid == 0:
            raise AccountUnusable("PostgreSQL refuses to run as root: name another account")
        return account
    if data.exists():
        owner = data.stat()
        if owner.st_uid != 0:
            return Account(str(owner.st_uid), owner.st_uid, owner.st_gid)
    for fallback in FALLBACKS:
        try:
            return _look_up(fallback)
        except AccountUnusable:
            continue
    raise AccountUnusable(
        f"PostgreSQL refuses to run as root, and neither {' nor '.join(FALLBACKS)} exists here:"
        f" name an account in {SETTING}"
    )


def command(
    program: list[str], account: Account | None, death_signal: int, lifeline: int | None = None
) -> list[str]:
    """The command line that becomes `program` as that account and is sent the signal when this process ends.

    lifeline: the reading end of a pipe that tells so, where the kernel does not.
    """
    uid, gid = (account.uid, account.gid) if account else (-1, -1)
    if lifeline is None and not KERNEL_SIGNALS:
        death_signal = 0
    numbers = (uid, gid, os.getpid(), death_signal, -1 if lifeline is None else lifeline)
    return [sys.executable, "-I", "-S", shim.__file__, *map(str, numbers), *program]


async def reaches(account: Account, program: Path) -> bool:
    """Whether the account can run a program: asked of the kernel, which alone knows all its rules."""
    process = await asyncio.create_subprocess_exec(
        *command(["/bin/sh", "-c", 'test -x "$0"', str(program)], account, 0),
        cwd="/",
        env={},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            _, complaint = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == 126:
        raise AccountUnusable(f"cannot become {account.name}: {complaint.decode(errors='replace').strip()}")
    return process.returncode == 0


def copy_binaries(binaries: Binaries, folder: Path) -> Binaries:
    """Copy a server below `folder`, or find the copy made earlier. Takes a fraction of a second and 35 MB."""
    stat = binaries.postgres.stat()
    source = f"{binaries.postgres}:{stat.st_size}:{stat.st_mtime_ns}"
    name = f"postgresql-{binaries.version}-{hashlib.sha256(source.encode()).hexdigest()[:8]}"
    target = folder / name
    if not target.is_dir():
        folder.mkdir(mode=0o755, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=folder))
        try:
            partial.chmod(0o755)
            for part in binaries.parts:
                if (binaries.root / part).is_dir():
                    shutil.copytree(binaries.root / part, partial / part, symlinks=True)
            partial.rename(target)  # all or nothing, also when killed half way
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
    return replace(binaries, bin=target / binaries.bin.relative_to(binaries.root), root=target)


def _look_up(name: str) -> Account:
    try:
        found = pwd.getpwnam(name)
    except KeyError:
        raise AccountUnusable(f"there is no account {name} on this machine") from None
    return Account(name, found.pw_uid, found.pw_gid)
