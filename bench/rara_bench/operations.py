"""The operations of the benchmark: `rara-executor --module rara_bench.operations`."""

from typing import Any, Final

from rara_executor import Job, operation

VERSION: Final = "1.0.0"
NOOP: Final = "probe.echo"  # what the Go probe calls it too
REPORT: Final = "bench.report"


@operation(NOOP, version=VERSION)
async def echo(job: Job) -> Any:
    """Nothing but its input: accepted, running, succeeded."""
    return job.input


@operation(REPORT, version=VERSION)
async def report(job: Job) -> Any:
    """With one report on the way: four events."""
    await job.progress(0.5, "half way")
    return job.input
