"""The clock that leases are counted on: it never goes back, and goes on while the machine sleeps."""

import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
FENCE_FRACTION = 5 / 6


def lease_now() -> float:
    """Seconds since some fixed instant, the same for all processes of this machine."""
    return time.clock_gettime(_CLOCK)


class LeaseClock:
    """How long one lease can be certain, counted from when what renewed it was sent."""

    __slots__ = ("lease_s", "since")

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.since = float("-inf")

    def renewed(self, sent_at: float) -> None:
        self.since = max(self.since, sent_at)

    @property
    def fence_at(self) -> float:
        """When the handler has to be stopped."""
        return self.since + self.lease_s * FENCE_FRACTION

    @property
    def over_at(self) -> float:
        """When the runner must have ended."""
        return self.since + self.lease_s
