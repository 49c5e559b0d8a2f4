"""Raw secrets: found by key or by prefix, so that they are refused, or redacted where only people read on.

No rule looks at entropy: in a system that names bytes by their SHA-256 every digest would be one.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import orjson
import re2

from rara_scheduler.domain.canonical import Json, dumps_exact, loads_exact
from rara_scheduler.domain.payload import walk_texts

# Rule and pattern, in RE2 syntax. Patterns hold no quote, so that one scan of a whole document, written compactly,
# finds whatever a string of it holds.
VALUE_RULES: Final[tuple[tuple[str, str], ...]] = (
    ("private_key", r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----"),
    ("aws_access_key", r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"),
    ("google_api_key", r"\bAIza[0-9A-Za-z_-]{35}"),
    ("google_oauth_token", r"\bya29\.[0-9A-Za-z_-]{20,}"),
    ("azure_storage_key", r"\bAccountKey=[0-9A-Za-z+/]{80,}={0,2}"),
    ("github_token", r"\b(?:gh[oprsu]_[0-9A-Za-z]{36,}|github_pat_[0-9A-Za-z_]{22,})"),
    ("gitlab_token", r"\bglpat-[0-9A-Za-z_-]{20,}"),
    ("slack_token", r"\bxox[abeoprs]-[0-9A-Za-z-]{10,}"),
    ("slack_webhook", r"\bhooks\.slack\.com/services/T[0-9A-Za-z]+/B[0-9A-Za-z]+/[0-9A-Za-z]{16,}"),
    ("model_api_key", r"\bsk-(?:[0-9A-Za-z]{32,}|(?:ant|proj|svcacct|admin)-[0-9A-Za-z_-]{20,})"),
    ("huggingface_token", r"\bhf_[0-9A-Za-z]{30,}"),
    ("stripe_key", r"\b[rs]k_live_[0-9A-Za-z]{16,}"),
    ("package_token", r"\b(?:npm_[0-9A-Za-z]{36}|pypi-AgEIcHlwaS5vcmc[0-9A-Za-z_-]{40,})"),
    ("sendgrid_key", r"\bSG\.[0-9A-Za-z_-]{22}\.[0-9A-Za-z_-]{43}"),
    ("rara_token", r"\brara_(?:client|executor|operator)_[0-9A-Za-z_-]{43}"),
    ("jwt", r"\beyJ[0-9A-Za-z_-]{8,}\.eyJ[0-9A-Za-z_-]{8,}\.[0-9A-Za-z_-]{8,}"),
    ("url_with_password", r"\b[A-Za-z][0-9A-Za-z+.-]*://[^\s/:@\"'?#\\]*:[^\s/@\"'?#\\]+@[^\s/@\"'\\]"),
)

_KEY_WORDS: Final = frozenset({"password", "secret", "token", "authorization", "credential", "dsn"})
_KEY_PAIRS: Final = frozenset({("api", "key"), ("private", "key")})
_KEY_JOINED: Final = frozenset({"apikey", "privatekey"})
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")

# A value that only stands for a secret.
_PLACEHOLDER = re.compile(
    r"://[^\s/:@]*:(?:\*+|x+|<[^>]*>|\$\{[^}]*\}|\{\{[^}]*\}\}|\[redacted[^\]]*\])@", re.I
)


def _set_of(patterns: list[str]) -> Any:  # the library has no type information
    options = re2.Options()
    options.log_errors = False
    made = re2.Set.SearchSet(options)
    for pattern in patterns:
        made.Add(pattern)
    made.Compile()
    return made


_VALUES: Final = _set_of([pattern for _, pattern in VALUE_RULES])
# A key in a compactly written document, followed by a string that is not empty: worth a closer look.
_KEYS: Final = re2.compile(
    r'(?i)(?:password|secret|token|api[^"a-z0-9]?key|private[^"a-z0-9]?key|authorization|credential|dsn)":"[^"]'
)
_ESCAPE: Final = re.compile(rb"\\(?:u[0-9A-Fa-f]{4}|.)")
_STRING: Final = re.compile(rb'"(?:[^"\\]|\\.)*"')
_AT_ONCE: Final = 256  # strings that are looked at together
_BETWEEN: Final = '"\0"'  # what no text that can be stored holds
_FEW: Final = 16  # strings to replace, each by a pass over the document
_REDACTIONS: Final = tuple(
    (
        rule,
        re2.compile(
            pattern + r"[\s\S]*?(?:-----END [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----|\z)"
            if rule == "private_key"
            else r"(\b[A-Za-z][0-9A-Za-z+.-]*://[^\s/:@\"'?#\\]*:)[^\s/@\"'?#\\]+@"
            if rule == "url_with_password"
            else pattern
        ),
    )
    for rule, pattern in VALUE_RULES
)


@dataclass(frozen=True, slots=True)
class Finding:
    """Where a raw secret stands: keys and indexes from the top, and the rule that met it. Never the value."""

    parts: tuple[str | int, ...]
    rule: str


def names_a_secret(key: str) -> bool:
    """Whether the last word of a key (snake_case, kebab-case, camelCase) says that its value is a secret."""
    words = [word.lower() for word in _WORD.findall(key)]
    if not words:
        return False
    return words[-1] in _KEY_WORDS or words[-1] in _KEY_JOINED or tuple(words[-2:]) in _KEY_PAIRS


def value_rule(text: str) -> str | None:
    """The rule by which a text holds a raw secret, or None."""
    matched: list[int] | None = _VALUES.Match(text.encode("utf-8", errors="replace"))
    if not matched:
        return None
    rules = [VALUE_RULES[index][0] for index in sorted(matched)]
    if rules == ["url_with_password"] and not _VALUES.Match(
        _PLACEHOLDER.sub("://", text).encode("utf-8", "replace")
    ):
        return None
    return rules[0]


def _searchable(compact: bytes) -> bytes:
    """Compactly written JSON without escapes: the letter of a line's end would be one with the word behind it."""
    return _ESCAPE.sub(b" ", compact) if b"\\" in compact else compact


def find_secret(data: "bytes | Json") -> Finding | None:
    """The first raw secret in a JSON document, given as bytes that are known to be JSON or as a parsed value.

    A key whose last word names a secret, with a string that is not empty; or a string, or key, that matches a value
    rule. A reference (an object) under such a key is what we ask people to write.
    """
    value = loads_exact(data) if isinstance(data, bytes) else data
    # Written by us there is one spelling: no \u0041 and no \/ behind which a prefix could hide.
    compact = _searchable(dumps_exact(value))
    if not _VALUES.Match(compact) and not _KEYS.search(compact):
        return None
    for parts, text, is_key in walk_texts(value):
        rule = value_rule(text)
        if rule is not None:
            return Finding(parts[:-1] if is_key else parts, rule)
        if not is_key and text and parts and isinstance(parts[-1], str) and names_a_secret(parts[-1]):
            return Finding(parts, "secret_key")
    return None


def find_value(data: bytes) -> Finding | None:
    """The first string or key in a JSON document, checked before, that matches a value rule.

    By its key alone nothing is found here: what a handler keeps for itself may well be called `next_page_token`.
    """
    suspects = {text for _, texts in _suspects(data) for text in texts}
    if not suspects:
        return None
    for parts, text, is_key in walk_texts(orjson.loads(data)):
        if text in suspects and (rule := value_rule(text)):
            return Finding(parts[:-1] if is_key else parts, rule)
    return None


def redact_text(text: str) -> str:
    """The text with whatever the value rules meet replaced by `[redacted RULE]`; of a URL only the password."""
    if not _VALUES.Match(text.encode("utf-8", errors="replace")):
        return text
    text = text.encode("utf-8", errors="replace").decode("utf-8")
    for rule, pattern in _REDACTIONS:  # all: one may begin where another one ended
        if rule == "url_with_password":
            text = pattern.sub(r"\1[redacted]@", text)
        else:
            text = pattern.sub(f"[redacted {rule}]", text)
    return text


def _suspects(data: bytes) -> Iterator[tuple[list[bytes], list[str]]]:
    """The strings of a JSON document, as they are written and as they read, where among some a value rule matches.

    A call for each string would take a second for a megabyte, and the loop stands still meanwhile.
    """
    if not _VALUES.Match(_normal(data)):
        return
    literals = list(dict.fromkeys(_STRING.findall(data)))
    for start in range(0, len(literals), _AT_ONCE):
        some = literals[start : start + _AT_ONCE]
        written = b"[" + b",".join(some) + b"]"
        if _VALUES.Match(_normal(written)):
            yield some, orjson.loads(written)


def _normal(data: bytes) -> bytes:
    return data if b"\\" not in data else _searchable(orjson.dumps(orjson.loads(data)))


def _redacted(texts: list[str]) -> list[str]:
    """Each of the texts redacted: at once, since no pattern goes beyond a quote but that of a key without an end."""
    joined = _BETWEEN.join(texts)
    if value_rule(joined) != "private_key":
        redacted = redact_text(joined).split(_BETWEEN)
        if len(redacted) == len(texts):
            return redacted
    return [redact_text(text) for text in texts]


def redact_json(data: bytes) -> bytes:
    """The same JSON (checked before, so of bounded depth) with every string redacted; unchanged when clean."""
    changed: dict[bytes, bytes] = {}
    for literals, texts in _suspects(data):
        for literal, text, redacted in zip(literals, texts, _redacted(texts), strict=True):
            if redacted != text:
                changed[literal] = orjson.dumps(redacted)
    if not changed:
        return data
    if len(changed) <= _FEW:
        # The longest first: one that ends another, behind an escaped quote, must not spoil it.
        for literal in sorted(changed, key=len, reverse=True):
            data = data.replace(literal, changed[literal])
        return data
    return _STRING.sub(lambda found: changed.get(found[0], found[0]), data)
