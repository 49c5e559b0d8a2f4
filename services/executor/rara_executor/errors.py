"""The faults that handlers raise and that the SDK raises in them."""

from rara_executor.codes import Code


class ExecutorError(Exception):
    """Base of every fault that this package raises on purpose."""


class ConfigurationError(ExecutorError):
    """The executor cannot start as it was asked to; the message names what to change."""


class JobFailure(ExecutorError):
    """Ends the attempt with a code.

    code: two words or more in upper snake case, at most 63 characters.
    retryable: None leaves the decision to the code's default.
    details: anything JSON, shown to people, never a secret.
    retry_after_s: no next attempt sooner.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        retryable: bool | None = None,
        details: object = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retryable = retryable
        self.details = details
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class Retryable(JobFailure):
    """The attempt failed, and another one may succeed."""

    def __init__(
        self, code: str, message: str, details: object = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(code, message, retryable=True, details=details, retry_after_s=retry_after_s)


class Terminal(JobFailure):
    """The attempt failed, and no other one can succeed."""

    def __init__(self, code: str, message: str, details: object = None) -> None:
        super().__init__(code, message, retryable=False, details=details)


class PayloadInvalid(JobFailure):
    """A value is not JSON that can be stored. `path` is the JSON pointer of the culprit."""

    def __init__(self, what: str, path: str, problem: str) -> None:
        super().__init__(Code.PAYLOAD_INVALID, f"{what} at {path or '/'!s}: {problem}")
        self.path = path


class PayloadTooLarge(JobFailure):
    """A value is over the limit that the scheduler named: hand it over as an artifact."""

    def __init__(self, what: str, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            Code.PAYLOAD_TOO_LARGE,
            f"{what} has {size_bytes} bytes, the limit is {limit_bytes}: use an artifact",
        )


class JobCancelledError(BaseException):
    """Raised in a blocking handler that is asked to stop.

    Like asyncio.CancelledError it is no Exception, so that `except Exception` lets it pass.
    """
