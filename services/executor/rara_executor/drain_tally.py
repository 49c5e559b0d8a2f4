"""What became of the jobs of a drain. Pure.

Nothing counts as told before the scheduler has said that it knows: an event by its acknowledgement, a rejection by the
end of the session that our Goodbye asked for.
"""

from dataclasses import dataclass, field

from rara.v1 import job_pb2

from rara_executor.codes import Code

# Codes that end an attempt and spend nothing.
_FREE = frozenset({"DISPATCH_LOST", Code.EXECUTOR_SHUTDOWN, Code.UNSUPPORTED_KIND, Code.NO_CAPACITY})
# Cancels of the attempt alone, which are judged as failures.
_SPENDING_CANCELS = frozenset({Code.ATTEMPT_TIMEOUT, Code.PROGRESS_TIMEOUT})


@dataclass(slots=True)
class DrainTally:
    """finished: ended by themselves, failures included. spent: of finished and lost, what cost its step a failure."""

    finished: int = 0
    handed_back: int = 0
    lost: int = 0
    spent: int = 0
    _rejected: set[int] = field(default_factory=set)

    def stored(self, event: job_pb2.ProgressEvent) -> None:
        """The last event of a job is acknowledged."""
        match event.WhichOneof("event"):
            case "cancelled" if event.cancelled.reason == Code.EXECUTOR_SHUTDOWN:
                self.handed_back += 1
            case "cancelled":
                self.finished += 1
                self.spent += event.cancelled.reason in _SPENDING_CANCELS
            case "failed":
                self.finished += 1
                self.spent += event.failed.code not in _FREE
            case _:
                self.finished += 1

    def rejected(self, lease_token: int) -> None:
        """A lease is given back on the session."""
        self._rejected.add(lease_token)

    @property
    def awaits_goodbye(self) -> bool:
        """Whether the end of the session decides what became of a job."""
        return bool(self._rejected)

    def passed_on(self) -> None:
        """A lease is somebody else's, or nobody's, while its job was here."""
        self.lost += 1
        self.spent += 1

    def close(self, *, left: int, was_heard: bool, gives_back: bool) -> None:
        """The end. left: jobs that are still held. was_heard: our last word. gives_back: it was about them, too."""
        rejected = len(self._rejected)
        self._rejected.clear()
        known = was_heard * (rejected + gives_back * left)
        self.handed_back += known
        self.lost += rejected + left - known
        self.spent += rejected + left - known

    def fields(self, duration_s: float) -> dict[str, object]:
        """Of the log line that a drain ends with."""
        return {
            "finished": self.finished,
            "handed_back": self.handed_back,
            "lost": self.lost,
            "spent": self.spent,
            "duration_s": round(duration_s, 3),
        }
