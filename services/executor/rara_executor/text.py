"""Text that can always be sent: valid UTF-8, without U+0000, cut to a limit with a mark."""

MAX_MESSAGE_BYTES = 16 << 10
MAX_STACK_BYTES = 64 << 10
MAX_PROGRESS_BYTES = 4 << 10

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def valid(text: str) -> str:
    """The text with U+0000 and lone surrogates replaced by U+FFFD."""
    if text.isascii():
        return text.replace("\0", _REPLACEMENT) if "\0" in text else text
    # A lone surrogate is what Python makes of a byte that it could not decode.
    text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text.replace("\0", _REPLACEMENT)


def cut(text: str, limit_bytes: int) -> str:
    """The text's beginning, at most limit_bytes of UTF-8, with a mark if anything was left out."""
    data = text.encode()
    if len(data) <= limit_bytes:
        return text
    mark = f" [cut: {len(data)} bytes]"
    return data[: limit_bytes - len(mark)].decode("utf-8", "ignore") + mark


def cut_middle(text: str, limit_bytes: int) -> str:
    """Beginning and end of the text: of a stack trace, the end says most."""
    data = text.encode()
    if len(data) <= limit_bytes:
        return text
    mark = f"\n[cut: {len(data)} bytes]\n"
    room = limit_bytes - len(mark)
    head, tail = data[: room // 4], data[len(data) - (room - room // 4) :]
    return head.decode("utf-8", "ignore") + mark + tail.decode("utf-8", "ignore")
