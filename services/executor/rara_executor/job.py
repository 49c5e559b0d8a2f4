"""What a handler is given: its job, and the ways back."""

import asyncio
import inspect
import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rara_executor import payload, text
from rara_executor.codes import Code
from rara_executor.errors import JobFailure, PayloadInvalid
from rara_executor.job_artifacts import Artifacts, BlockingArtifacts, Keepable
from rara_executor.ports import AsyncPort, BlockingPort, check
from rara_executor.runner_protocol import FromRunner, LogLine, Progress, RecordEffect, StartJob

MAX_METRICS = 256
_NAME = re.compile(r"[^\x00-\x1f\x7f\ud800-\udfff]{1,255}")  # the scheduler refuses others

R = TypeVar("R")


class JobLog:
    """Log lines with the step's ids; a secret in them is replaced before they are written."""

    def __init__(self, lease_token: int, post: Callable[[FromRunner], None]) -> None:
        self._lease_token = lease_token
        self._post = post

    def debug(self, event: str, **values: object) -> None:
        self._line("debug", event, values)

    def info(self, event: str, **values: object) -> None:
        self._line("info", event, values)

    def warning(self, event: str, **values: object) -> None:
        self._line("warning", event, values)

    def error(self, event: str, **values: object) -> None:
        self._line("error", event, values)

    def _line(self, level: str, event: str, values: Mapping[str, object]) -> None:
        kept = {text.valid(str(key)): _short(value) for key, value in values.items()}
        self._post(LogLine(self._lease_token, level, _short(event), kept))


class JobView:
    """What a job is: the same for async and blocking handlers."""

    def __init__(self, start: StartJob, post: Callable[[FromRunner], None]) -> None:
        self.input: Any = payload.decode(start.input)
        self.checkpoint: Any = None if start.checkpoint is None else payload.decode(start.checkpoint)
        self.step_run_id = start.step_run_id
        self.workflow_run_id = start.workflow_run_id
        self.step_name = start.step_name
        self.definition = start.definition
        self.attempt = start.attempt
        self.lease_token = start.lease_token
        self.idempotency_key = start.idempotency_key
        self.failures = start.failures
        self.max_attempts = start.max_attempts
        self.kind = start.kind
        self.kind_version = start.kind_version
        self.secrets: Mapping[str, str] = start.secrets
        self.log = JobLog(start.lease_token, post)
        self._start = start
        self._ends_at = None if start.time_left_s is None else time.monotonic() + start.time_left_s
        self._cancel_reason = ""
        self._effects = dict(start.effects)

    @property
    def cancelled(self) -> bool:
        """Whether the handler was asked to stop."""
        return bool(self._cancel_reason)

    @property
    def cancel_reason(self) -> str:
        """Why it was asked to stop, a code of the contract; empty while it was not."""
        return self._cancel_reason

    @property
    def time_left_s(self) -> float | None:
        """Seconds to the deadline or the attempt's timeout, whichever is first; None: there is neither."""
        return None if self._ends_at is None else max(0.0, self._ends_at - time.monotonic())

    @property
    def trace_headers(self) -> dict[str, str]:
        """The job's trace as W3C headers, for calls to other services; empty: nobody traces the run."""
        headers = {"traceparent": self._start.traceparent, "tracestate": self._start.tracestate}
        return {name: value for name, value in headers.items() if value}

    @property
    def scratch(self) -> Path:
        """A folder for this attempt alone, removed when the attempt has ended."""
        path = Path(self._start.scratch)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def ask_to_stop(self, reason: str) -> None:
        """For the runner: the handler sees `cancelled`."""
        self._cancel_reason = reason

    def _progress(
        self,
        fraction: float | None,
        message: str,
        metrics: Mapping[str, float] | None,
        checkpoint: object,
        artifacts: list[tuple[str, str]],
    ) -> Progress:
        limit = self._start.max_payload_bytes
        return Progress(
            lease_token=self.lease_token,
            fraction=_fraction(fraction),
            message=text.cut(text.valid(str(message)), 4 * text.MAX_PROGRESS_BYTES),
            metrics=_finite(metrics or {}),
            checkpoint=None
            if checkpoint is None
            else payload.encode(checkpoint, what="checkpoint", limit_bytes=limit),
            artifacts=artifacts,
        )

    def _recorded(self, name: str) -> tuple[bool, Any]:
        if not _NAME.fullmatch(name):
            raise PayloadInvalid("effect name", "", "must have 1 to 255 printable characters")
        known = self._effects.get(name)
        return known is not None, payload.decode(known.encode()) if known else None

    def _effect(self, name: str, result: object, request: int) -> RecordEffect:
        if len(self._effects) >= payload.MAX_EFFECTS:
            raise JobFailure(
                Code.PAYLOAD_TOO_LARGE,
                f"a step records at most {payload.MAX_EFFECTS} effects",
                retryable=False,
            )
        encoded = payload.encode(result, what=f"effect {name}", limit_bytes=payload.MAX_EFFECT_BYTES)
        return RecordEffect(self.lease_token, request, name, encoded)

    def _remember(self, effect: RecordEffect) -> Any:
        # What later attempts will get, this one gets too: a list for a tuple.
        self._effects[effect.name] = effect.result.decode()
        return payload.decode(effect.result)


class Job(JobView):
    """One attempt, for an `async def` handler."""

    def __init__(self, start: StartJob, port: AsyncPort) -> None:
        super().__init__(start, port.post)
        self._port = port
        self._once: dict[str, asyncio.Lock] = {}
        self.artifacts = Artifacts(start, port)

    async def progress(
        self,
        fraction: float | None = None,
        message: str = "",
        metrics: Mapping[str, float] | None = None,
        checkpoint: object = None,
        artifacts: Mapping[str, Keepable] | None = None,
    ) -> None:
        """Report how far it is, from 0 to 1; the newest checkpoint is what a later attempt starts from.

        artifacts: bytes that the checkpoint needs, by name; stored first. A later attempt finds them with
        `artifacts.open_checkpoint(name)`. They replace those of the checkpoint before.
        """
        kept = await self.artifacts.keep_for_checkpoint(_of_checkpoint(checkpoint, artifacts))
        await self._port.send(self._progress(fraction, message, metrics, checkpoint, kept))

    async def once(self, name: str, fn: Callable[[], Awaitable[R] | R]) -> R:
        """The result of fn, from whichever attempt recorded it first; fn may be async.

        A crash between fn and the record repeats fn, so hand `idempotency_key` to what it calls.
        """
        async with self._once.setdefault(name, asyncio.Lock()):
            known, value = self._recorded(name)
            if known:
                recorded: R = value
                return recorded
            outcome = fn()
            result = await outcome if inspect.isawaitable(outcome) else outcome
            effect = self._effect(name, result, self._port.next_request())
            check(await self._port.request(effect))
            stored: R = self._remember(effect)
            return stored


class BlockingJob(JobView):
    """One attempt, for a plain `def` handler."""

    def __init__(self, start: StartJob, port: BlockingPort) -> None:
        super().__init__(start, port.post)
        self._port = port
        self.artifacts = BlockingArtifacts(start, port)

    def progress(
        self,
        fraction: float | None = None,
        message: str = "",
        metrics: Mapping[str, float] | None = None,
        checkpoint: object = None,
        artifacts: Mapping[str, Keepable] | None = None,
    ) -> None:
        """Report how far it is, from 0 to 1; the newest checkpoint is what a later attempt starts from.

        artifacts: as for an async handler.
        """
        kept = self.artifacts.keep_for_checkpoint(_of_checkpoint(checkpoint, artifacts))
        self._port.send(self._progress(fraction, message, metrics, checkpoint, kept))

    def once(self, name: str, fn: Callable[[], R]) -> R:
        """The result of fn, from whichever attempt recorded it first."""
        known, value = self._recorded(name)
        if known:
            recorded: R = value
            return recorded
        effect = self._effect(name, fn(), self._port.next_request())
        check(self._port.request(effect))
        stored: R = self._remember(effect)
        return stored


def _of_checkpoint(checkpoint: object, artifacts: Mapping[str, Keepable] | None) -> Mapping[str, Keepable]:
    if artifacts and checkpoint is None:
        raise ValueError("artifacts belong to a checkpoint: give one, if only an empty object")
    return artifacts or {}


def _fraction(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return min(1.0, max(0.0, float(value)))


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """A loss that became NaN is no reason to lose the step: such a metric is left out."""
    if len(metrics) > MAX_METRICS:
        raise JobFailure(
            Code.PAYLOAD_TOO_LARGE, f"{len(metrics)} metrics at once, the limit is {MAX_METRICS}"
        )
    pairs = ((text.cut(text.valid(str(name)), 200), float(value)) for name, value in metrics.items())
    return {name: value for name, value in pairs if math.isfinite(value)}


def _short(value: object) -> str:
    return text.cut(text.valid(str(value)), text.MAX_PROGRESS_BYTES)
