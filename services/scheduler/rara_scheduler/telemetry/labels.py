"""Label values in bounded number."""

from typing import Final

OTHER: Final = "other"
MOST_KINDS: Final = 100


class Folded:
    """The first values that come keep their names; all later ones are `other`.

    Kinds are chosen by whoever registers definitions: without a bound each would cost memory here and in every store
    that metrics end up in, for ever.
    """

    def __init__(self, most: int = MOST_KINDS) -> None:
        self._most = most
        self._known: set[str] = set()

    def label(self, value: str) -> str:
        if value in self._known:
            return value
        if len(self._known) >= self._most:
            return OTHER
        self._known.add(value)
        return value
