"""The versions of the protocol that are served: the newest, and the one before it."""

from typing import Final

from rara_scheduler.domain.errors import Code, Fault

NEWEST: Final = 1
OLDEST: Final = max(1, NEWEST - 1)


def served() -> tuple[int, ...]:
    """The newest first."""
    return tuple(range(NEWEST, OLDEST - 1, -1))


def require(version: int) -> None:
    """Raises Fault for a version that is not served; its metadata name those that are."""
    if version not in served():
        raise Fault(
            Code.PROTOCOL_VERSION_UNSUPPORTED,
            f"protocol version {version} is not spoken here; {OLDEST} to {NEWEST} are",
            metadata={"oldest": str(OLDEST), "newest": str(NEWEST)},
        )
