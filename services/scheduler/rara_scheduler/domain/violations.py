"""Everything that is wrong with one request, gathered so that the caller mends it in one go."""

from typing import Final

from rara_scheduler.domain.errors import Code, Fault, FieldViolation

MAX_VIOLATIONS: Final = 20


class Violations:
    """A bounded list; what comes after the bound is counted only."""

    def __init__(self) -> None:
        self._found: list[FieldViolation] = []
        self._more = 0

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, path: str, description: str, reason: str = "") -> None:
        if len(self._found) < MAX_VIOLATIONS:
            self._found.append(FieldViolation(path, description, reason))
        else:
            self._more += 1

    def add_fault(self, fault: Fault) -> None:
        """Take over the fields of a fault; its code becomes their reason."""
        for violation in fault.fields:
            self.add(violation.field, violation.description, str(fault.code))

    def fault(self, code: Code, subject: str) -> Fault:
        """The fault that lists them, with `code`; SECRET_IN_PAYLOAD if nothing else is wrong."""
        if self._found and all(violation.reason == Code.SECRET_IN_PAYLOAD for violation in self._found):
            code = Code.SECRET_IN_PAYLOAD
        shown = "; ".join(f"{violation.field}: {violation.description}" for violation in self._found[:5])
        rest = len(self._found) + self._more - 5
        more = f"; and {rest} more" if rest > 0 else ""
        metadata = {"path": self._found[0].field} if self._found else {}
        return Fault(code, f"{subject}: {shown}{more}", fields=tuple(self._found), metadata=metadata)
