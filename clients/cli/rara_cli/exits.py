"""How a command can end: exit codes, and the one line that says why."""

from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rara_client.errors import RaraError


class Exit(IntEnum):
    """What scripts branch on. A released code keeps its meaning."""

    OK = 0
    UNEXPECTED = 1
    USAGE = 2
    NOT_FOUND = 3
    NOT_ALLOWED = 4  # not signed in, or not allowed
    REFUSED = 5  # the state forbids it, or a schema, secret or other rule
    UNREACHABLE = 6
    PROMISE_BROKEN = 7  # `rara db check` found what may never be
    STILL_GOING = 8  # when --timeout ended
    DIFFERENT = 9  # `rara run compare --exit-code` found that results differ
    RUN_FAILED = 10
    RUN_CANCELLED = 11
    DEADLINE_EXCEEDED = 12
    INTERRUPTED = 130


class CommandError(Exception):
    """Ends the command with one line on stderr.

    code: stable, in capitals. next_command: what to type now; empty where nothing helps.
    """

    def __init__(self, exit_code: Exit, code: str, message: str, next_command: str = "") -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.code = code
        self.message = message
        self.next_command = next_command

    def __str__(self) -> str:
        advice = f" (next: {self.next_command})" if self.next_command else ""
        return f"{self.code}: {self.message}{advice}"


def from_client_error(error: "RaraError", server: str) -> CommandError:
    """What a failed call means for the person who typed the command."""
    # Here and not above: a command that makes no call need not load gRPC.
    from rara_client import errors

    match error:
        case errors.NotFound():
            exit_code = Exit.NOT_FOUND
        case errors.Unauthenticated() | errors.NotAllowed():
            exit_code = Exit.NOT_ALLOWED
        case errors.Unavailable() | errors.CallTimeout():
            exit_code = Exit.UNREACHABLE
        case errors.InvalidArgument() | errors.AlreadyExists() | errors.Refused():
            exit_code = Exit.REFUSED
        case _:
            exit_code = Exit.UNEXPECTED
    message = error.message
    if exit_code is Exit.UNREACHABLE and not error.from_scheduler:
        what = "did not answer in time" if isinstance(error, errors.CallTimeout) else "cannot be reached"
        return CommandError(exit_code, error.reason, f"the scheduler at {server} {what}", _UNREACHABLE_NEXT)
    fields = [f"{item.field}: {item.description}" for item in error.violations]
    new = [text for text in fields if text not in message and text.partition(": ")[2] not in message]
    if new:
        more = f"; and {len(new) - 3} more" if len(new) > 3 else ""
        message = f"{message}: {'; '.join(new[:3])}{more}"
    return CommandError(exit_code, error.reason, message, _NEXT.get(error.reason, ""))


_UNREACHABLE_NEXT = "rara dev up, or name another with --server HOST:PORT"

_NEXT = {
    "DEFINITION_NOT_FOUND": "rara definition list",
    "RUN_NOT_FOUND": "rara run list",
    "STEP_NOT_FOUND": "rara step list RUN",
    "EXECUTOR_NOT_FOUND": "rara executor list",
    "ARTIFACT_NOT_FOUND": "rara artifact list RUN",
    "DEFINITION_INVALID": "mend it, then rara definition validate FILE",
    "IDEMPOTENCY_CONFLICT": "use another --key",
    "RUN_NOT_RETRYABLE": "rara run get RUN",
    "SECRET_IN_PAYLOAD": "name the secret in the definition's `secrets` instead",
    "PAYLOAD_TOO_LARGE": "pass it as a file: --artifact NAME=PATH",
    "QUEUE_FULL": "try again later",
    "QUOTA_EXCEEDED": "rara artifact gc, or raise RARA_BLOB_STORE_QUOTA_BYTES",
    "STORE_UNAVAILABLE": "try again later",
    "SHUTTING_DOWN": "try again",
}
