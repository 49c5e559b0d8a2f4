"""What a handler's return or exception means for its attempt."""

import traceback

from rara_executor import payload, text
from rara_executor.codes import Code, is_handler_code
from rara_executor.errors import JobFailure, PayloadInvalid, PayloadTooLarge
from rara_executor.runner_protocol import Failed, StartJob, Succeeded

_HANDLER_CODES = "capital words joined by _, at least two, and none of Rara's own"
# Codes that the SDK itself gives to a failure, and that the contract lets no handler choose.
_OURS = (PayloadInvalid, PayloadTooLarge)


def success(start: StartJob, value: object) -> Succeeded | Failed:
    """The output as JSON, or why it cannot be one."""
    try:
        output = payload.encode(value, what="output", limit_bytes=start.max_payload_bytes)
    except JobFailure as error:
        return failure(start, error, with_stack=False)
    return Succeeded(start.lease_token, output)


def failure(start: StartJob, error: BaseException, *, with_stack: bool = True) -> Failed:
    """The error as the contract has it. An error without a code leaves `retryable` to its default."""
    stack = "".join(traceback.format_exception(error)) if with_stack else ""
    details: bytes | None = None
    retryable: bool | None = None
    retry_after_s: float | None = None
    match error:
        case JobFailure():
            code, message = str(error.code), str(error.message)
            retryable, retry_after_s = error.retryable, error.retry_after_s
            details, problem = _details(start, error)
            if not is_handler_code(error.code):
                shown = text.cut(text.valid(code), 200)
                message = f"[code {shown!r} is not one a handler can use: {_HANDLER_CODES}] {message}"
                code = Code.HANDLER_FAILED
            message += problem
        case MemoryError():
            code, message = Code.OUT_OF_MEMORY, _describe(error)
        case SystemExit():
            code, message = Code.HANDLER_FAILED, f"the handler called sys.exit({error.code!r})"
        case _:
            code, message = Code.HANDLER_FAILED, _describe(error)
    return Failed(
        lease_token=start.lease_token,
        code=str(code),
        message=text.cut(text.valid(message), 4 * text.MAX_MESSAGE_BYTES),
        retryable=retryable,
        retry_after_s=None if retry_after_s is None else max(0.0, float(retry_after_s)),
        stack_trace=text.cut_middle(text.valid(stack), 4 * text.MAX_STACK_BYTES),
        details=details,
    )


def invalid_input(start: StartJob, path: str, problem: str) -> Failed:
    """The input does not fit the operation's schema. path: JSON pointer into the input."""
    message = f"input at {path or '/'} {text.valid(problem)}"
    return _sdk_failure(start, Code.INPUT_INVALID, message)


def unsupported(start: StartJob) -> Failed:
    return _sdk_failure(
        start, Code.INTERNAL, f"no handler for {start.kind} {start.kind_version} in the runner"
    )


def _sdk_failure(start: StartJob, code: Code, message: str) -> Failed:
    return Failed(
        lease_token=start.lease_token,
        code=str(code),
        message=text.cut(message, text.MAX_MESSAGE_BYTES),
        retryable=None,
        retry_after_s=None,
        stack_trace="",
        details=None,
    )


def _details(start: StartJob, error: JobFailure) -> tuple[bytes | None, str]:
    """Details are for people: what cannot be sent is left out, and said so, so that the error survives."""
    if error.details is None:
        return None, ""
    try:
        return payload.encode(error.details, what="details", limit_bytes=start.max_payload_bytes), ""
    except PayloadTooLarge as problem:
        cut = {"cut": True, "reason": problem.message}
        return payload.encode(cut, what="details"), ""
    except JobFailure as problem:
        return None, f" [details left out: {problem.message}]"


def _describe(error: BaseException) -> str:
    try:
        words = str(error)
    except Exception:  # an exception whose text fails must not hide the failure
        words = "(its text could not be made)"
    name = type(error).__name__
    return f"{name}: {words}" if words else name
