"""Where the watch of a run or of a step stands, and what of a resumed stream is new."""

from collections.abc import Awaitable, Callable
from typing import Final

from google.protobuf.message import Message
from rara.v1 import workflow_pb2

from rara_client.watching import Stream

RUN_ENDED: Final = frozenset(
    {
        workflow_pb2.WORKFLOW_RUN_STATE_SUCCEEDED,
        workflow_pb2.WORKFLOW_RUN_STATE_FAILED,
        workflow_pb2.WORKFLOW_RUN_STATE_CANCELLED,
    }
)
STEP_ENDED: Final = frozenset(
    {
        workflow_pb2.STEP_RUN_STATE_SUCCEEDED,
        workflow_pb2.STEP_RUN_STATE_TERMINAL_FAILED,
        workflow_pb2.STEP_RUN_STATE_CANCELLED,
    }
)
_ATTEMPT_OPEN: Final = frozenset({workflow_pb2.STEP_RUN_STATE_LEASED, workflow_pb2.STEP_RUN_STATE_RUNNING})


class RunCursor:
    """A watch of one run, by revision.

    One transaction changes several rows under one revision, so a stream can break between two messages of the
    same one. Resuming therefore asks for the newest revision once more and drops what is known by its content;
    the memory that takes is the run and its steps, once each.
    """

    message_type = workflow_pb2.WatchRunResponse

    def __init__(
        self,
        open_after: Callable[[int], Stream],
        fetch: Callable[[], Awaitable[workflow_pb2.WorkflowRun]],
        after_revision: int,
    ) -> None:
        self._open_after = open_after
        self._fetch = fetch
        self._next_after = after_revision
        self._newest = after_revision
        self._in_snapshot = after_revision == 0
        self._snapshot_was_shown = False
        self._known: dict[str, Message] = {}
        self._has_ended = False

    def open(self) -> Stream:
        return self._open_after(0 if self._in_snapshot else self._next_after)

    def restart(self) -> None:
        self._in_snapshot = True
        self._newest = 0

    def accept(self, message: workflow_pb2.WatchRunResponse) -> bool:
        if message.revision > self._newest:
            self._newest = message.revision
            self._next_after = max(message.revision - 1, 0)
        match message.WhichOneof("update"):
            case "run":
                self._has_ended = message.run.state in RUN_ENDED
                return self._is_new("", message.run)
            case "step_run":
                return self._is_new(message.step_run.step_run_id, message.step_run)
            case "snapshot_end":
                self._in_snapshot = False
                is_first, self._snapshot_was_shown = not self._snapshot_was_shown, True
                return is_first
            case _:  # alive, or an update that a newer scheduler sends
                return False

    async def is_over(self) -> bool:
        if self._has_ended:
            return True
        run = await self._fetch()
        return run.state in RUN_ENDED and run.revision <= self._newest

    def _is_new(self, key: str, value: Message) -> bool:
        if self._known.get(key) == value:
            return False
        self._known[key] = value
        return True


class StepCursor:
    """A watch of one attempt of a step, by sequence.

    Numbers may be missing, and may come late: resuming asks for what follows the last number below which
    nothing is missing, and drops what is known.
    """

    message_type = workflow_pb2.WatchStepRunResponse

    def __init__(
        self,
        open_after: Callable[[int, int], Stream],
        fetch: Callable[[], Awaitable[workflow_pb2.StepRun]],
        *,
        attempt: int,
        after_sequence: int,
    ) -> None:
        self._open_after = open_after
        self._fetch = fetch
        self._attempt = attempt
        self._whole_to = after_sequence
        self._beyond: set[int] = set()
        self._known: workflow_pb2.StepRun | None = None

    def open(self) -> Stream:
        return self._open_after(self._attempt, self._whole_to)

    def restart(self) -> None:
        """Events are not compacted one by one: there is nothing to begin again."""

    def accept(self, message: workflow_pb2.WatchStepRunResponse) -> bool:
        match message.WhichOneof("update"):
            case "event":
                # From the first sight on it is this attempt, also where the newest was asked for.
                self._attempt = self._attempt or message.event.lease.attempt
                return self._is_new(message.event.sequence)
            case "step_run":
                if self._known == message.step_run:
                    return False
                self._known = message.step_run
                self._attempt = self._attempt or message.step_run.attempt
                return True
            case _:
                return False

    async def is_over(self) -> bool:
        step = await self._fetch()
        if step.state in STEP_ENDED:
            return True
        watched = self._attempt or step.attempt
        if watched == 0 or step.attempt < watched:
            return False  # it has not begun
        return step.attempt > watched or step.state not in _ATTEMPT_OPEN

    def _is_new(self, sequence: int) -> bool:
        if sequence <= self._whole_to or sequence in self._beyond:
            return False
        self._beyond.add(sequence)
        while self._whole_to + 1 in self._beyond:
            self._whole_to += 1
            self._beyond.remove(self._whole_to)
        return True
