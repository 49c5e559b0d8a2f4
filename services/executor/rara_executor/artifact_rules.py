"""What an output may be called: the scheduler's rules, kept here as well so that no work is done in vain.

Not taken from rara_client: a runner process starts without that, and without gRPC. A test holds the rules together.
"""

import re
from typing import Final

from rara_executor.errors import JobFailure

MAX_ARTIFACTS: Final = 1000  # in one manifest
# All of a manifest but the inline bytes: with the output and these it has to fit into one frame.
MAX_MANIFEST_BYTES: Final = 1 << 20

_PART = r"[A-Za-z0-9_%](?:[A-Za-z0-9_%.=+@,-]*[A-Za-z0-9_%=+@,-])?"
_NAME = re.compile(rf"(?=.{{1,255}}\Z){_PART}(?:/{_PART})*")
TYPES: Final = ("dataset", "model", "index", "metrics", "report", "checkpoint", "blob")
_MEDIA_TYPE = re.compile(r"[A-Za-z0-9!#$&^_.+-]{1,127}/[A-Za-z0-9!#$&^_.+-]{1,127}(?:;[ -~]{1,200})?")


class ArtifactInvalid(JobFailure, ValueError):
    """An output cannot be called so. Final: the next attempt would call it the same."""

    def __init__(self, message: str) -> None:
        JobFailure.__init__(self, "ARTIFACT_INVALID", message, retryable=False)


def check(name: str, type_: str, media_type: str) -> None:
    """Raises ArtifactInvalid."""
    if not _NAME.fullmatch(name):
        raise ArtifactInvalid(
            f"artifact name {shown(name)}: must be 1 to 255 characters: parts joined by /, each of letters, digits "
            "and _ % . - = + @ , beginning with a letter, digit, _ or % and not ending with a dot"
        )
    if type_ not in TYPES:
        raise ArtifactInvalid(f"artifact {name}: type {shown(type_)}: must be one of {', '.join(TYPES)}")
    if not _MEDIA_TYPE.fullmatch(media_type):
        raise ArtifactInvalid(
            f"artifact {name}: media_type {shown(media_type)}: must be a media type, such as text/plain"
        )


def shown(text: str) -> str:
    """For a message: short, and with nothing in it that changes how the rest is read."""
    return ascii(text if len(text) <= 80 else f"{text[:80]}...")
