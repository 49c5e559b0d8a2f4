"""Resolved secrets replaced in everything that leaves the executor, in the forms they usually take."""

import base64
import re
from collections.abc import Iterable
from urllib.parse import quote, quote_plus

import orjson

from rara_executor import payload, text

MARK = "***"
MIN_SECRET_CHARS = 8  # shorter ones would blank out ordinary words


class Redactor:
    """Knows every secret that was resolved since the process began."""

    def __init__(self) -> None:
        self._secrets: set[str] = set()
        self._text: re.Pattern[str] | None = None
        self._bytes: re.Pattern[bytes] | None = None

    def add(self, secret: str) -> None:
        if len(secret) < MIN_SECRET_CHARS or secret in self._secrets:
            return
        self._secrets.add(secret)
        forms = {form for known in self._secrets for form in _forms(known)}
        # At one place the regular expression takes the first alternative that fits: the longest must lead.
        ordered = sorted(forms, key=lambda form: (-len(form), form))
        pattern = "|".join(re.escape(form) for form in ordered)
        self._text = re.compile(pattern)
        self._bytes = re.compile("|".join(re.escape(form) for form in ordered).encode())

    def text(self, given: str) -> str:
        return given if self._text is None else self._text.sub(MARK, given)

    def json(self, data: bytes) -> bytes:
        """JSON with the secrets replaced inside its strings; what holds none is returned as it is."""
        if self._bytes is None or not self._bytes.search(data):
            return data
        return payload.encode(self._value(payload.decode(data)), what="value", limit_bytes=len(data) * 4 + 64)

    def where(self, data: bytes) -> str | None:
        """Where in JSON a secret stands, as a JSON pointer; None: nowhere."""
        if self._bytes is None or not self._bytes.search(data):
            return None
        return self._path(payload.decode(data), "")

    def _path(self, value: object, at: str) -> str | None:
        inner: Iterable[tuple[object, object]] = ()
        match value:
            case dict():
                inner = value.items()
            case list():
                inner = enumerate(value)
            case _:
                return at or "/" if self._value(value) != value else None
        for key, item in inner:
            if isinstance(key, str) and self.text(key) != key:
                return at or "/"  # of a key itself nothing is said
            if found := self._path(item, f"{at}/{text.cut(str(key), 64)}"):
                return found
        return None

    def _value(self, value: object) -> object:
        match value:
            case str():
                return self.text(value)
            case dict():
                return {self.text(key): self._value(item) for key, item in value.items()}
            case list():
                return [self._value(item) for item in value]
            case bool() | None:
                return value
            case _:  # a number that contains a secret, like an account number
                return MARK if self._text is not None and self._text.search(str(value)) else value


def _forms(secret: str) -> set[str]:
    data = secret.encode("utf-8", "surrogateescape")
    forms = {secret, quote(data, safe=""), quote(data), quote_plus(data)}
    forms |= {re.sub(r"%[0-9A-F]{2}", lambda match: match[0].lower(), form) for form in set(forms)}
    forms.add(orjson.dumps(secret.encode("utf-8", "replace").decode())[1:-1].decode())
    forms |= {repr(secret)[1:-1]}
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        forms |= {encode(data).decode(), encode(data).decode().rstrip("=")}
        for shift in range(3):
            # In the middle of a longer text (user:password) the secret begins at any of three offsets, and
            # the characters at its ends depend on its neighbours: keep those that do not.
            encoded = encode(b"\0" * shift + data).decode().rstrip("=")
            start = (shift * 8 + 5) // 6
            end = (shift + len(data)) * 8 // 6
            forms.add(encoded[start:end])
    return {form for form in forms if len(form) >= MIN_SECRET_CHARS}
