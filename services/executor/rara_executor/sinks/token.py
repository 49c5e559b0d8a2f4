"""The number that a write carries, and what is raised when a larger one was there."""

from typing import Protocol

from rara_executor.errors import JobFailure


class Tokened(Protocol):
    """A job, or whatever else has its token."""

    @property
    def lease_token(self) -> int: ...


class Superseded(JobFailure):
    """A newer attempt has written: this one has changed nothing, and has no more to do.

    Let it pass: the scheduler drops what a superseded attempt says. Where several steps write to one place it ends the
    attempt as WRITE_SUPERSEDED, and the next attempt, whose token is larger, writes.
    """

    def __init__(self, where: str, lease_token: int) -> None:
        super().__init__("WRITE_SUPERSEDED", f"{where}: a newer attempt than {lease_token} has written")


def token_of(job: Tokened) -> int:
    """Raises ValueError for what no scheduler gives."""
    token = job.lease_token
    if not 0 < token < 1 << 63:
        raise ValueError(f"lease token {token}: must be from 1 to 2^63 - 1")
    return token
