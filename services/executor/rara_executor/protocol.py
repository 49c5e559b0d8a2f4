"""The versions of the protocol that are spoken: the newest, and the one before it."""

from typing import Final

from google.rpc import error_details_pb2, status_pb2

from rara_executor.codes import Code

NEWEST: Final = 1
OLDEST: Final = max(1, NEWEST - 1)


def is_spoken(version: int) -> bool:
    return OLDEST <= version <= NEWEST


class Spoken:
    """The version that the next Hello says: the newest, until a scheduler knows only the one before."""

    def __init__(self) -> None:
        self.version = NEWEST

    def refused(self, versions: tuple[int, int]) -> bool:
        """A scheduler speaks these alone, oldest and newest. True: another try, at once, may meet it."""
        version = min(NEWEST, versions[1])
        if version == self.version or version < max(OLDEST, versions[0]):
            return False
        self.version = version
        return True

    def session_ended(self) -> None:
        """The next session may be with a newer scheduler."""
        self.version = NEWEST


def versions_of(status: status_pb2.Status | None) -> tuple[int, int] | None:
    """What a scheduler that refused our version speaks, oldest and newest; None: it was no such refusal."""
    for detail in status.details if status is not None else ():
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.reason == Code.PROTOCOL_VERSION_UNSUPPORTED:
            oldest, newest = info.metadata.get("oldest", ""), info.metadata.get("newest", "")
            if oldest.isdecimal() and newest.isdecimal():
                return int(oldest), int(newest)
    return None
