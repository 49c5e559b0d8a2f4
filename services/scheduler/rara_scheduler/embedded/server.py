"""PostgreSQL as a child of this process, for trying Rara out and for tests.

The server ends when its owner ends, however that happens; it is reached by a socket that only the owner's
account can open; its data survives the kill of both. Durable settings (fsync, checksums) are on by default.
"""

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

import asyncpg

from rara_scheduler.embedded import account as accounts
from rara_scheduler.embedded import stale
from rara_scheduler.embedded.account import Account, choose_account, command, copy_binaries, reaches
from rara_scheduler.embedded.binaries import Binaries, find_binaries
from rara_scheduler.embedded.errors import AccountUnusable, EmbeddedPostgresError, StartFailed
from rara_scheduler.embedded.folder import PORT, StateFolder

DATABASE = "rara"
ROLE = "rara"
POLL_S = 0.03
CONNECT_TIMEOUT_S = 5.0
RETRY_S = 0.3
KILL_TIMEOUT_S = 10.0  # how long an immediate shutdown may take before SIGKILL
LOG_TAIL_BYTES = 4000
WAL_SEGMENT_MB = 1  # PostgreSQL's own 16 makes two thirds of what a new folder takes, in space and in time

# What the last server's remains can make a new one say, until they have gone.
_TRANSIENT = ("shared memory block", "already exists")
# Set here and nowhere else: what makes the server private.
_FIXED = frozenset({"listen_addresses", "unix_socket_directories", "port", "data_directory", "hba_file"})
_DEFAULTS = {
    "cluster_name": "rara",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "jit": "off",  # costs more than it gives on short statements
    "log_checkpoints": "off",
    "min_wal_size": "32MB",  # in bytes what PostgreSQL's own defaults are in segments, or a little less
    "max_wal_size": "1GB",
    "fsync": "on",
}


class EmbeddedPostgres:
    """One server over one folder, started and stopped by its owner.

    directory: all that the server keeps; made if missing. One owner at a time.
    binaries: a server's `bin` folder; default: see `find_binaries`. Existing data picks its own version.
    settings: PostgreSQL settings by name, over the defaults.
    user: the account to run as where this process is root; default: see `choose_account`.

    The server is tied to the thread that calls `start`: call it in one that lives as long as the server should.
    Faults are raised as EmbeddedPostgresError or a class below it.
    """

    def __init__(
        self,
        directory: Path,
        *,
        binaries: Path | None = None,
        settings: Mapping[str, str] | None = None,
        user: str | None = None,
        start_timeout_s: float = 60.0,
        stop_timeout_s: float = 30.0,
    ) -> None:
        self._folder = StateFolder(directory)
        self._explicit_binaries = binaries
        self._settings = {**_DEFAULTS, **(settings or {})}
        if refused := sorted(_FIXED & self._settings.keys()):
            raise ValueError(f"settings that keep the server private cannot be changed: {', '.join(refused)}")
        self._user = user
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._binaries: Binaries | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._lifeline: int | None = None  # our end of a pipe, see shim.py
        self._turn = asyncio.Lock()  # start and stop exclude each other

    @property
    def directory(self) -> Path:
        return self._folder.path

    @property
    def log_path(self) -> Path:
        return self._folder.log

    @property
    def dsn(self) -> str:
        """Address of the database `rara`, the same at every start; nobody answers before `start`."""
        return self.dsn_of(DATABASE)

    def dsn_of(self, database: str) -> str:
        """Address of another database of this server."""
        socket = quote(str(self._folder.run), safe="/")
        return f"postgresql://{ROLE}@/{quote(database, safe='')}?host={socket}&port={PORT}"

    @property
    def version(self) -> str:
        """Of the server that runs or ran, like `18.6`. Raises RuntimeError before the first start."""
        if self._binaries is None:
            raise RuntimeError("not started yet")
        return self._binaries.version

    @property
    def pid(self) -> int | None:
        """The server's process; None while there is none."""
        return self._process.pid if self._process and self._process.returncode is None else None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Return when the database `rara` answers. Harmless while the server runs."""
        async with self._turn:
            if self.pid is not None:
                return
            await self._end()  # of a server that ended by itself
            self._folder.take()
            try:
                async with asyncio.timeout(self._start_timeout_s):
                    await self._start()
            except TimeoutError as error:
                await self._end()
                raise StartFailed(
                    f"PostgreSQL did not answer within {self._start_timeout_s:g} s\n{self._log_tail(0)}"
                ) from error
            except BaseException:
                await self._end()
                raise

    async def stop(self) -> None:
        """End all sessions, stop the server and give the folder up. Harmless at any time."""
        async with self._turn:
            await self._end()

    async def wait(self) -> int:
        """Wait until the server has ended, for whatever reason, and return its exit code."""
        if self._process is None:
            raise RuntimeError("not started")
        return await self._process.wait()

    async def _end(self) -> None:
        process = self._process
        if process is not None:
            # fast: sessions are ended, a checkpoint is made; immediate: recovery at the next start; then by force
            for number, patience_s in (
                (signal.SIGINT, self._stop_timeout_s),
                (signal.SIGQUIT, KILL_TIMEOUT_S),
                (signal.SIGKILL, KILL_TIMEOUT_S),
            ):
                if process.returncode is None:
                    with suppress(ProcessLookupError):
                        process.send_signal(number)
                    with suppress(TimeoutError):
                        async with asyncio.timeout(patience_s):
                            await process.wait()
            if process.returncode is None:
                raise EmbeddedPostgresError(f"PostgreSQL, process {process.pid}, does not end")
            self._process = None
        self._cut_lifeline()
        self._folder.release()

    async def _start(self) -> None:
        folder = self._folder
        account = choose_account(self._user, folder.data)
        binaries = await asyncio.to_thread(find_binaries, self._explicit_binaries, major=self._data_major())
        self._binaries = binaries
        if account is not None:
            binaries = await self._within_reach(binaries, account)
        if not folder.data.exists():
            await self._initdb(binaries, account)
        elif account is not None and folder.data.stat().st_uid != account.uid:
            await asyncio.to_thread(account.own_all, folder.data)
        while True:
            disregard = await self._await_last_server()
            folder.prepare_run(account)
            began = folder.log.stat().st_size if folder.log.exists() else 0
            self._process = await self._spawn(binaries, account, disregard)
            if await self._answers(self._process):
                return
            code, said = await self._process.wait(), self._log_tail(began)
            if not any(sign in said for sign in _TRANSIENT):
                raise StartFailed(f"PostgreSQL ended with code {code}\n{said}")
            await asyncio.sleep(RETRY_S)

    def _data_major(self) -> int | None:
        try:
            text = (self._folder.data / "PG_VERSION").read_text().strip()
        except FileNotFoundError:
            return None
        except PermissionError as error:
            raise EmbeddedPostgresError(f"{self._folder.data} belongs to another account") from error
        return int(text.partition(".")[0])

    async def _within_reach(self, binaries: Binaries, account: Account) -> Binaries:
        """The binaries, or a copy of them, where the account can run them. No other folder's rights change."""
        if await reaches(account, binaries.postgres):
            return binaries
        if await reaches(account, self.directory):
            copied = await asyncio.to_thread(copy_binaries, binaries, self._folder.binaries)
            if await reaches(account, copied.postgres):
                return copied
        self._folder.make_private(account)
        copied = await asyncio.to_thread(copy_binaries, binaries, self._folder.private / "binaries")
        if await reaches(account, copied.postgres):
            return copied
        raise AccountUnusable(
            f"the account {account.name} can run PostgreSQL neither in {binaries.bin} nor in {copied.bin}"
        )

    async def _initdb(self, binaries: Binaries, account: Account | None) -> None:
        """Make the data directory under another name first: killed half way, it is begun again."""
        folder = self._folder
        if folder.new_data.exists():
            await asyncio.to_thread(shutil.rmtree, folder.new_data)
        folder.make_directory(folder.new_data, account)
        began = folder.log.stat().st_size if folder.log.exists() else 0
        with self._shown_to(account, folder.new_data) as (shown, descriptors):
            arguments = [str(binaries.initdb), "-D", shown[0], "-U", ROLE, "--encoding=UTF8", "--no-locale"]
            arguments += ["--auth-local=trust", "--auth-host=reject", "--data-checksums", "--no-instructions"]
            arguments += [f"--wal-segsize={WAL_SEGMENT_MB}"]
            if self._settings["fsync"] == "off":
                arguments.append("--no-sync")
            process = await self._child(command(arguments, account, signal.SIGKILL), descriptors, {})
            try:
                code = await process.wait()
            finally:
                if process.returncode is None:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    await process.wait()
        if code != 0:
            raise StartFailed(f"initdb ended with code {code}\n{self._log_tail(began)}")
        folder.new_data.rename(folder.data)

    async def _await_last_server(self) -> int | None:
        """Wait until no server runs on the data. Returns the number that a new one must disregard, if any."""
        data = self._folder.data
        asked = False
        while (pid := stale.recorded_pid(data)) is not None:
            if pid and not await asyncio.to_thread(stale.is_server_of, pid, data):
                return pid
            if pid and not asked:
                # Its owner was killed, so that it is stopping already, or was never told to.
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGINT)
                asked = True
            if not pid:
                # Killed between making the file and writing it. The server refuses such a file for ever.
                await asyncio.sleep(RETRY_S)
                if stale.recorded_pid(data) == 0:
                    (data / "postmaster.pid").unlink(missing_ok=True)
            await asyncio.sleep(POLL_S)
        return None

    async def _spawn(
        self, binaries: Binaries, account: Account | None, disregard: int | None
    ) -> asyncio.subprocess.Process:
        with self._shown_to(account, self._folder.data, self._folder.run) as (shown, descriptors):
            arguments = [str(binaries.postgres), "-D", shown[0], "-k", shown[1], "-p", str(PORT), "-h", ""]
            for name, value in self._settings.items():
                arguments += ["-c", f"{name}={value}"]
            environment = {"PG_GRANDPARENT_PID": str(disregard)} if disregard else {}
            # SIGINT is PostgreSQL's fast shutdown
            if accounts.KERNEL_SIGNALS:
                return await self._child(command(arguments, account, signal.SIGINT), descriptors, environment)
            self._cut_lifeline()
            watched, self._lifeline = os.pipe()
            try:
                program = command(arguments, account, signal.SIGINT, watched)
                return await self._child(program, (*descriptors, watched), environment)
            finally:
                os.close(watched)

    def _cut_lifeline(self) -> None:
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None

    async def _child(
        self, arguments: list[str], descriptors: tuple[int, ...], environment: Mapping[str, str]
    ) -> asyncio.subprocess.Process:
        log = self._folder.open_log()
        try:
            return await asyncio.create_subprocess_exec(
                *arguments,
                cwd="/",
                env={
                    "PATH": os.defpath,
                    "LC_ALL": "C",
                    "TZ": "UTC",
                    **environment,
                },  # none of the owner's PG*
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=descriptors,
                start_new_session=True,  # Ctrl-C is for the owner, who stops things in order
            )
        finally:
            os.close(log)

    @contextmanager
    def _shown_to(
        self, account: Account | None, *directories: Path
    ) -> Iterator[tuple[list[str], tuple[int, ...]]]:
        """Names under which the server finds its directories, and the descriptors that it has to inherit for them.

        Root's folder may lie where the account cannot go (below /root, say). An inherited descriptor leads to the
        directory itself, past its parents, whose rights stay as they are.
        """
        if account is None or not Path("/proc/self/fd").exists():
            yield [str(directory) for directory in directories], ()
            return
        with ExitStack() as stack:
            opened: list[int] = []
            for directory in directories:
                number = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                stack.callback(os.close, number)
                opened.append(number)
            yield [f"/proc/self/fd/{number}" for number in opened], tuple(opened)

    async def _answers(self, process: asyncio.subprocess.Process) -> bool:
        """True when the database answers a query; False when the server ended instead."""
        while process.returncode is None:
            with suppress(
                OSError, TimeoutError, asyncpg.CannotConnectNowError, asyncpg.PostgresConnectionError
            ):
                with suppress(asyncpg.InvalidCatalogNameError):
                    await self._query(DATABASE, "select 1")
                    return True
                with suppress(asyncpg.DuplicateDatabaseError):
                    await self._query("postgres", f"create database {DATABASE}")
                continue
            await asyncio.sleep(POLL_S)
        return False

    async def _query(self, database: str, statement: str) -> None:
        connection = await asyncpg.connect(
            host=str(self._folder.run),
            port=PORT,
            user=ROLE,
            database=database,
            timeout=CONNECT_TIMEOUT_S,
            ssl=False,
        )
        try:
            await connection.execute(statement)
        finally:
            connection.terminate()

    def _log_tail(self, began: int) -> str:
        """The end of the log, at most LOG_TAIL_BYTES, and nothing before byte `began`."""
        try:
            with self._folder.log.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(min(began, end), end - LOG_TAIL_BYTES))
                return file.read().decode(errors="replace").strip()
        except OSError:
            return ""
