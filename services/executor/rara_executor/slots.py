"""How many jobs this executor takes: slots, bounds of kinds, and the credit that follows. Pure."""

from dataclasses import dataclass

from rara_executor.codes import Code
from rara_executor.runner_protocol import OperationInfo


@dataclass(frozen=True, slots=True)
class NotTaken:
    """Why a job is rejected before anything of it has run."""

    code: Code
    message: str


class Slots:
    def __init__(self, slots: int, *, executor_kind: str = "python") -> None:
        self.draining = False
        self._slots = slots
        self._executor_kind = executor_kind
        self._occupied = 0
        self._by_kind: dict[str, int] = {}
        self._received = 0  # in this session
        self._operations: dict[tuple[str, str], OperationInfo] = {}

    def offer(self, operations: list[OperationInfo]) -> None:
        self._operations = {(operation.kind, operation.version): operation for operation in operations}

    def new_session(self) -> None:
        """Credit counts from the session's begin."""
        self._received = 0

    def take(self, kind: str, version: str, *, executor_kind: str = "") -> OperationInfo | NotTaken:
        """A received job gets a slot and the operation that runs it, or is rejected.

        executor_kind: the kind of executor that it was sent for; empty: any.
        """
        self._received += 1
        if self.draining:
            return NotTaken(Code.EXECUTOR_SHUTDOWN, "the executor drains")
        operation = self._operations.get((kind, version))
        if operation is None:
            known = ", ".join(sorted(f"{kind} {version}" for kind, version in self._operations))
            message = f"{kind} {version} is not offered here; there are: {known}"
            return NotTaken(Code.UNSUPPORTED_KIND, message[:1000])
        if executor_kind not in ("", self._executor_kind):
            message = f"this executor is of kind {self._executor_kind}, not {executor_kind}"
            return NotTaken(Code.UNSUPPORTED_KIND, message[:1000])
        same = self._by_kind.get(kind, 0)
        if self._occupied >= self._slots or (operation.max_concurrency and same >= operation.max_concurrency):
            return NotTaken(Code.NO_CAPACITY, "no slot is free")
        self._occupied += 1
        self._by_kind[kind] = same + 1
        return operation

    def leave(self, kind: str) -> None:
        """The slot is really free: the process is reaped, or has room again."""
        self._occupied -= 1
        self._by_kind[kind] -= 1

    def free(self) -> int:
        """Jobs that may come now."""
        return 0 if self.draining else self._slots - self._occupied

    def credit(self) -> int:
        """Jobs allowed since the session began."""
        return self._received + self.free()
