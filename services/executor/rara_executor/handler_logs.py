"""What handlers say and how jobs end, as log lines with the step's ids and without secrets."""

import logging

import structlog
from rara.v1 import job_pb2

from rara_executor.held_job import HeldJob
from rara_executor.redaction import Redactor
from rara_executor.runner import Runner
from rara_executor.runner_protocol import LogLine

log = structlog.get_logger(__name__)


class HandlerLogs:
    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor

    def said(self, job: HeldJob, line: LogLine) -> None:
        """A line by job.log; its keys are marked, so that they cannot pass for ours."""
        text = self._redactor.text
        values = {f"handler_{text(key)}": text(value) for key, value in line.values.items()}
        write = {"debug": log.debug, "warning": log.warning, "error": log.error}.get(line.level, log.info)
        write("handler.said", said=text(line.event), **values, **job.names)

    def line(self, runner: Runner, job: HeldJob | None, stream: str, line: bytes) -> None:
        """A line that a runner printed. job: whose it is, if that is known."""
        text = self._redactor.text(line.decode("utf-8", "replace"))
        names = {} if job is None else job.names
        log.info("runner.line", stream=stream, line=text, runner_id=runner.runner_id, pid=runner.pid, **names)


def ended(job: HeldJob, event: job_pb2.ProgressEvent) -> None:
    """Successes at debug level: of short steps there are thousands a second."""
    if event.HasField("succeeded"):
        if log.is_enabled_for(logging.DEBUG):  # the names cost more than the call
            log.debug("job.succeeded", **job.names)
    elif event.HasField("failed"):
        log.warning("job.failed", **job.names, code=event.failed.code, message=event.failed.message)
    else:
        log.info("job.cancelled", **job.names, reason=event.cancelled.reason)
