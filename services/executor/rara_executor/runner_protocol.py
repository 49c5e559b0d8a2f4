"""What supervisor and runner say to each other over their socket pair, and how it is framed.

A frame is two 32-bit lengths (of all that follows, of the header), a JSON header, and the bytes fields one
after the other. Payloads travel as they are: the supervisor does not parse what it only hands on.

Messages are not frozen, although nobody changes them: to make a frozen one costs three times as much, and each job
needs some six.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter, itemgetter
from typing import Any, TypeAlias, get_type_hints

import orjson

MAX_FRAME_BYTES = 256 << 20
_LENGTHS = struct.Struct("!II")


class ProtocolError(Exception):
    """The other side sent what is no frame."""


@dataclass(slots=True)
class Setup:
    """To a new runner, first: what to import."""

    modules: list[str]
    sys_path: list[str]
    memory_limit_bytes: int  # 0: none


@dataclass(frozen=True, slots=True)
class OperationInfo:
    kind: str
    version: str
    is_async: bool
    max_concurrency: int
    input_schema_sha256: str


@dataclass(slots=True)
class Ready:
    """From a runner: its modules are imported."""

    operations: list[OperationInfo]
    problem: str  # why it cannot work; empty: it can


@dataclass(slots=True)
class Assume:
    """To a runner that is ready: run `async def` handlers side by side, or plain ones one by one."""

    is_async: bool


@dataclass(frozen=True, slots=True)
class InputInfo:
    """An input artifact as a handler sees it before it is opened."""

    name: str
    sha256: str
    size_bytes: int
    media_type: str
    type: str
    metadata: str  # JSON; empty: none


@dataclass(slots=True)
class StartJob:
    lease_token: int
    step_run_id: str
    workflow_run_id: str
    step_name: str
    definition: str
    attempt: int
    idempotency_key: str
    failures: int
    max_attempts: int
    kind: str
    kind_version: str
    time_left_s: float | None
    inputs: list[InputInfo]
    secrets: dict[str, str]
    effects: dict[str, str]  # name to JSON
    scratch: str  # a folder of the job's own, which may not exist yet
    max_payload_bytes: int
    input: bytes
    checkpoint: bytes | None
    checkpoint_artifacts: list[InputInfo] = field(default_factory=list)
    traceparent: str = ""  # of the span that the handler's own are children of; empty: no trace
    tracestate: str = ""


@dataclass(slots=True)
class CancelJob:
    """To a runner: ask the handler to stop."""

    lease_token: int
    reason: str


@dataclass(slots=True)
class Reply:
    """To a runner: what became of its request; `path` of an opened artifact."""

    lease_token: int
    request: int
    path: str
    code: str  # empty: it worked
    message: str


@dataclass(slots=True)
class Leave:
    """To an idle runner: exit."""


@dataclass(slots=True)
class Progress:
    lease_token: int
    fraction: float | None
    message: str
    metrics: dict[str, float]
    checkpoint: bytes | None
    artifacts: list[tuple[str, str]] = field(
        default_factory=list
    )  # of the checkpoint: name, and what keep said


@dataclass(slots=True)
class RecordEffect:
    """Answered when the effect is stored."""

    lease_token: int
    request: int
    name: str
    result: bytes


@dataclass(slots=True)
class OpenArtifact:
    """Answered with the path of the verified bytes."""

    lease_token: int
    request: int
    name: str
    of_checkpoint: bool = False  # else: an input


@dataclass(slots=True)
class PutArtifact:
    """Answered when the bytes at `path`, in the job's scratch folder, are stored."""

    lease_token: int
    request: int
    name: str
    path: str
    sha256: str
    size_bytes: int
    media_type: str
    type: str
    metadata: str  # JSON; empty: none
    derived_from: list[tuple[str, int]]  # digests and sizes
    for_checkpoint: bool = False  # else: an output


@dataclass(slots=True)
class LogLine:
    lease_token: int
    level: str
    event: str
    values: dict[str, str]


@dataclass(slots=True)
class LeavesChildren:
    """Before the outcome of a blocking handler: processes that it started are still there."""

    lease_token: int


@dataclass(slots=True)
class Succeeded:
    lease_token: int
    output: bytes


@dataclass(slots=True)
class Failed:
    lease_token: int
    code: str
    message: str
    retryable: bool | None
    retry_after_s: float | None
    stack_trace: str
    details: bytes | None


@dataclass(slots=True)
class Stopped:
    """The handler ended because it was asked to; a runner of blocking handlers exits after this."""

    lease_token: int


ToRunner: TypeAlias = Setup | Assume | StartJob | CancelJob | Reply | Leave
Request: TypeAlias = RecordEffect | OpenArtifact | PutArtifact
FromRunner: TypeAlias = Ready | Progress | Request | LogLine | LeavesChildren | Succeeded | Failed | Stopped
Message: TypeAlias = ToRunner | FromRunner


@dataclass(frozen=True, slots=True)
class _Shape:
    """How one class is written. arrange: from the plain values and then the binary ones to the class's own order."""

    tag: int
    cls: type
    plain: Callable[[Message], tuple[Any, ...]]
    binary: Callable[[Message], tuple[Any, ...]]
    counts: tuple[int, int]
    arrange: Callable[[list[Any]], tuple[Any, ...]]
    nested: dict[int, type]  # by the place among the plain values


def _shape(tag: int, cls: type) -> _Shape:
    hints = get_type_hints(cls)
    names = [item.name for item in fields(cls)]
    binary = [name for name in names if hints[name] in (bytes, bytes | None)]
    plain = [name for name in names if name not in binary]
    nested = {plain.index(name): inner for name, inner in _NESTED.get(cls, {}).items()}
    arrange = _several(itemgetter, [(plain + binary).index(name) for name in names])
    counts = len(plain), len(binary)
    return _Shape(
        tag, cls, _several(attrgetter, plain), _several(attrgetter, binary), counts, arrange, nested
    )


def _several(getter: Any, of: Sequence[str | int]) -> Callable[[Any], tuple[Any, ...]]:
    """A getter that always gives a tuple: those of `operator` give no tuple of one, and none of none."""
    if len(of) > 1:
        several: Callable[[Any], tuple[Any, ...]] = getter(*of)
        return several
    if not of:
        return lambda _: ()
    single = getter(*of)
    return lambda given: (single(given),)


def _shapes() -> list[_Shape]:
    classes: tuple[type, ...] = (
        Setup, Ready, Assume, StartJob, CancelJob, Reply, Leave, Progress, RecordEffect, OpenArtifact,
        PutArtifact, LogLine, LeavesChildren, Succeeded, Failed, Stopped,
    )  # fmt: skip
    return [_shape(tag, cls) for tag, cls in enumerate(classes)]


_NESTED: dict[type, dict[str, type]] = {
    Ready: {"operations": OperationInfo},
    StartJob: {"inputs": InputInfo, "checkpoint_artifacts": InputInfo},
}
_SHAPES = _shapes()
_BY_CLASS = {shape.cls: shape for shape in _SHAPES}


def encode(message: Message) -> bytes:
    shape = _BY_CLASS[type(message)]
    blobs = shape.binary(message)
    lengths = [-1 if blob is None else len(blob) for blob in blobs]
    header = orjson.dumps((shape.tag, shape.plain(message), lengths))
    body = b"".join([blob for blob in blobs if blob])
    return b"".join((_LENGTHS.pack(4 + len(header) + len(body), len(header)), header, body))


class Decoder:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are complete with this data. Raises ProtocolError."""
        buffer = self._buffer
        buffer += data
        messages: list[Message] = []
        start = 0
        while len(buffer) - start >= _LENGTHS.size:
            length, header_length = _LENGTHS.unpack_from(buffer, start)
            if length > MAX_FRAME_BYTES or header_length + 4 > length:
                raise ProtocolError(f"a frame of {length} bytes with a header of {header_length}")
            end = start + 4 + length
            if end > len(buffer):
                break
            body = start + _LENGTHS.size + header_length
            messages.append(_decode(bytes(buffer[start + _LENGTHS.size : body]), bytes(buffer[body:end])))
            start = end
        if start:
            del buffer[:start]
        return messages


def _decode(header: bytes, body: bytes) -> Message:
    try:
        tag, values, lengths = orjson.loads(header)
        shape = _SHAPES[tag]
        if (len(values), len(lengths)) != shape.counts:
            raise ProtocolError(f"{len(values)} and {len(lengths)} values, not {shape.counts}")
        for place, cls in shape.nested.items():
            values[place] = [cls(**item) for item in values[place]]
        position = 0
        for length in lengths:
            values.append(None if length < 0 else body[position : position + length])
            position += max(length, 0)
        message: Message = shape.cls(*shape.arrange(values))
    except (ValueError, TypeError, IndexError) as error:
        raise ProtocolError(f"a frame that says nothing: {error}") from error
    return message
