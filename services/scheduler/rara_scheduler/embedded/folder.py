"""The folder that one embedded server lives in: its layout, its owner's lock and its socket's place.

owner.lock      flock held by the owner for as long as it uses the folder
data/           PostgreSQL's data directory; data.new/ while it is being made
run/            mode 0700, holds the socket
postgres.log    what the server says
binaries/       a copy of the server, only where root has to make one
"""

import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

from rara_scheduler.embedded.account import Account
from rara_scheduler.embedded.errors import EmbeddedPostgresError, FolderInUse

PORT = 5432  # only part of the socket's name: there is no TCP
# The kernel takes 107 bytes (macOS: 103) for a socket's whole path; leave room for `.s.PGSQL.5432.lock`.
LONGEST_SOCKET_PATH = 98
LONGEST_LOG_BYTES = 16 * 1024 * 1024


class StateFolder:
    """Paths below one folder, and the lock that makes this process its only owner."""

    def __init__(self, directory: Path) -> None:
        self.path = Path(os.path.abspath(directory))  # noqa: PTH100 - resolve() would follow the user's links
        self.data = self.path / "data"
        self.new_data = self.path / "data.new"
        self.log = self.path / "postgres.log"
        self.binaries = self.path / "binaries"
        # Same folder, same name: whoever knew the address before a restart still has it.
        name = hashlib.sha256(os.fsencode(self.path.resolve())).hexdigest()[:12]
        temporary = Path(tempfile.gettempdir())
        if len(os.fsencode(temporary)) > LONGEST_SOCKET_PATH - 48:
            temporary = Path("/tmp")  # noqa: S108 - made private below
        self.private = temporary / f"rara-{os.geteuid()}-{name}"
        self.run = self.path / "run"
        if len(os.fsencode(self.run / f".s.PGSQL.{PORT}")) > LONGEST_SOCKET_PATH:
            self.run = self.private / "run"
        self._lock: int | None = None

    def take(self) -> None:
        """Become the owner. Raises FolderInUse."""
        if not self.path.exists():
            self.path.mkdir(parents=True)
            # Root's server runs as another account, which passes through to what is its own and can list nothing.
            self.path.chmod(0o711 if os.geteuid() == 0 else 0o700)
        try:
            lock = os.open(
                self.path / "owner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
        except PermissionError as error:
            raise EmbeddedPostgresError(
                f"{self.path} belongs to another account: {error.strerror}"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(lock, 200, 0).decode(errors="replace").strip()
            os.close(lock)
            raise FolderInUse(self.path, owner) from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()}\n".encode(), 0)
        self._lock = lock

    def release(self) -> None:
        """Give the folder up, and remove what was put elsewhere for it. Harmless when not owned."""
        if self._lock is None:
            return
        shutil.rmtree(self.private, ignore_errors=True)
        os.ftruncate(self._lock, 0)
        os.close(self._lock)
        self._lock = None

    def prepare_run(self, account: Account | None) -> None:
        """Make the socket's folder anew. Only after the last server has ended: it removes that one's socket."""
        if self.run.is_relative_to(self.private):
            self.make_private(account)
        shutil.rmtree(self.run, ignore_errors=True)
        self.make_directory(self.run, account)

    def make_private(self, account: Account | None) -> None:
        """A folder of our own in the shared temporary directory, where anybody may have put a trap."""
        owners = {os.geteuid(), *([account.uid] if account else [])}
        try:
            found = self.private.lstat()
        except FileNotFoundError:
            self.make_directory(self.private, account)
            return
        if not stat.S_ISDIR(found.st_mode) or found.st_uid not in owners or found.st_mode & 0o077:
            raise EmbeddedPostgresError(f"{self.private} is not the private folder it should be: remove it")
        if account:
            account.own(self.private)

    def make_directory(self, path: Path, account: Account | None) -> None:
        path.mkdir(mode=0o700)
        if account:
            account.own(path)

    def open_log(self) -> int:
        """A descriptor to append to the log; the log is begun anew when it has grown large."""
        if self.log.exists() and self.log.stat().st_size > LONGEST_LOG_BYTES:
            self.log.replace(self.log.with_suffix(".log.1"))
        return os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
