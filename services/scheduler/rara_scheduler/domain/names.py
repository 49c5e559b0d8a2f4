"""How names that people choose may look: one rule per sort of name, with the words that explain it."""

import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Rule:
    """A pattern that a whole name must match, and the sentence that says so."""

    pattern: re.Pattern[str]
    says: str

    def refuses(self, text: str) -> str | None:
        """What is wrong with the text, or None. Never repeats the text: it may be anything."""
        if not text:
            return f"is empty; {self.says}"
        return None if self.pattern.fullmatch(text) else self.says


DEFINITION: Final = Rule(
    re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"),
    "must be 1 to 63 lower-case letters, digits and dashes, with no dash at either end",
)
STEP: Final = Rule(
    re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}"),
    "must be 1 to 63 letters, digits, _, . and -, and begin with a letter, digit or _",
)
KIND: Final = Rule(
    re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"),
    "must be 1 to 128 letters, digits, _, . and -, and begin with a letter, digit or _",
)
KIND_VERSION: Final = Rule(
    re.compile(r"(?=.{1,64}\Z)[0-9A-Za-z]+(?:[.+-][0-9A-Za-z]+)*"),
    "must be parts of letters and digits joined by . - or +, at most 64 characters",
)
EXECUTOR_KIND: Final = Rule(
    re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}"),
    "must be 1 to 63 lower-case letters, digits, _, . and -",
)
# ASCII alone, so that no two names look the same or become the same when a file system normalises them; safe as a
# relative path on every system, whoever writes it there. %: for names that are encoded as in a URL.
ARTIFACT: Final = Rule(
    re.compile(
        r"(?=.{1,255}\Z)[A-Za-z0-9_%](?:[A-Za-z0-9_%.=+@,-]*[A-Za-z0-9_%=+@,-])?"
        r"(?:/[A-Za-z0-9_%](?:[A-Za-z0-9_%.=+@,-]*[A-Za-z0-9_%=+@,-])?)*"
    ),
    "must be 1 to 255 characters: parts joined by /, each of letters, digits and _ % . - = + @ , beginning with a "
    "letter, digit, _ or % and not ending with a dot",
)
SECRET: Final = Rule(
    re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,127}"),
    "must be 1 to 128 letters, digits, _, . and -, and begin with a letter or _",
)
SECRET_PROVIDER: Final = Rule(
    re.compile(r"[a-z][a-z0-9_-]{0,62}"), "must be 1 to 63 lower-case letters, digits, _ and -"
)
SECRET_PATH: Final = Rule(
    re.compile(r"[^\x00-\x1f\x7f]{1,255}"), "must be 1 to 255 characters without control characters"
)
LABEL_KEY: Final = Rule(
    re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_./-]{0,61}[A-Za-z0-9])?"),
    "must be 1 to 63 letters, digits, _, ., / and -, and begin and end with a letter or digit",
)
ERROR_CODE: Final = Rule(
    re.compile(r"(?=.{1,63}\Z)[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*"),
    "must be upper snake case, at most 63 characters",
)
MEDIA_TYPE: Final = Rule(
    re.compile(r"[A-Za-z0-9!#$&^_.+-]{1,127}/[A-Za-z0-9!#$&^_.+-]{1,127}(?:;[ -~]{1,200})?"),
    "must be a media type, such as text/plain",
)
ARTIFACT_TYPES: Final = ("dataset", "model", "index", "metrics", "report", "checkpoint", "blob")
ARTIFACT_TYPE: Final = Rule(
    re.compile("|".join(ARTIFACT_TYPES)), f"must be one of {', '.join(ARTIFACT_TYPES)}"
)
SHA256: Final = Rule(re.compile(r"[0-9a-f]{64}"), "must be 64 lower-case hexadecimal digits")

MAX_LABELS: Final = 64
MAX_LABEL_VALUE: Final = 255
RESERVED_LABELS: Final = "rara."
ALLOW_SECRETS: Final = "rara.allow_secrets"

_CONTROL = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


def refuses_label(key: str, value: str, *, reserved_allowed: frozenset[str] = frozenset()) -> str | None:
    """What is wrong with one label, or None. Keys that begin with `rara.` are ours."""
    said = LABEL_KEY.refuses(key)
    if said is not None:
        return f"the key {said}"
    if key.startswith(RESERVED_LABELS) and key not in reserved_allowed:
        return f"keys that begin with {RESERVED_LABELS} are reserved"
    if len(value) > MAX_LABEL_VALUE or _CONTROL.search(value):
        return f"the value must be at most {MAX_LABEL_VALUE} characters without control characters"
    return None
