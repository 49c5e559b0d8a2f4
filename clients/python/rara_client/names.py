"""What an artifact may be called: the scheduler's rule, for those who want to know before they upload."""

import re
from typing import Final

_PART: Final = r"[A-Za-z0-9_%](?:[A-Za-z0-9_%.=+@,-]*[A-Za-z0-9_%=+@,-])?"
_ARTIFACT: Final = re.compile(rf"(?=.{{1,255}}\Z){_PART}(?:/{_PART})*")


def is_artifact_name(text: str) -> bool:
    """1 to 255 characters: parts joined by /, none of which a file system could mistake. docs/reference/artifacts.md"""
    return _ARTIFACT.fullmatch(text) is not None
