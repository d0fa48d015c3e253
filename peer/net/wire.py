"""Turn messages into control frames, and frames into checked frozen dataclasses. Sans-I/O.

A frame is a big-endian u32 length and that many bytes of msgpack: ``[type name, {field: value}]``.
Everything that arrives is hostile until :func:`decode` has returned: lengths are checked before
bytes are kept, msgpack never sees a default cap, and every defect of the other side, of whatever
kind, is one exception, ``RemoteProtocolError``.

Evolution: append fields with defaults. An old peer ignores a field that it does not know; a new
peer fills in the default for a field that an old one did not send.
"""

from __future__ import annotations

import importlib
import re
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import (
    Annotated,
    Any,
    TypeVar,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

import msgpack

from atoll.collectives.errors import LocalProtocolError, RemoteProtocolError

FRAME_HEADER_BYTES = 4
# The largest view or zipped run specification fits (tests); a hostile frame costs no more.
CONTROL_FRAME_BYTES_MAX = 1 << 20
# Four times the members of a view; fields that say how many they take are checked for that.
ARRAY_ITEMS_MAX = 4096
MAP_ITEMS_MAX = 256

# The type name and any field name fit; errors never echo more than this of what arrived.
_ECHO_CHARACTERS_MAX = 80

_WIRE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]{0,63}")
_T = TypeVar("_T")
# Takes a value from msgpack and where it stood; returns the checked value or raises ValueError.
_Check = Callable[[Any, str], Any]


class FrameReader:
    """Cut a byte stream into frames, in linear time and bounded memory.

    It keeps at most one incomplete frame. ``limit_bytes`` may be raised later: a connection that
    has not yet proved itself gets a small one.
    """

    def __init__(self, limit_bytes: int = CONTROL_FRAME_BYTES_MAX) -> None:
        self.limit_bytes = limit_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> list[bytes]:
        """Return the payloads that ``data`` completes.

        Raises RemoteProtocolError if a length is not allowed.
        """
        buffer = self._buffer
        buffer += data
        payloads: list[bytes] = []
        start = 0
        while len(buffer) - start >= FRAME_HEADER_BYTES:
            body = start + FRAME_HEADER_BYTES
            length = int.from_bytes(buffer[start:body], "big")
            if not 0 < length <= self.limit_bytes:
                buffer.clear()
                raise RemoteProtocolError(
                    f"a control frame of {length:,} bytes; 1 to {self.limit_bytes:,} are allowed"
                )
            if len(buffer) - body < length:
                break
            start = body + length
            payloads.append(bytes(buffer[body:start]))
        del buffer[:start]
        return payloads


def frame(payload: bytes) -> bytes:
    """Return ``payload`` as it goes on the wire.

    Raises LocalProtocolError if a receiver would refuse it.
    """
    if not 0 < len(payload) <= CONTROL_FRAME_BYTES_MAX:
        raise LocalProtocolError(
            f"a control frame of {len(payload):,} bytes was about to be sent;"
            f" 1 to {CONTROL_FRAME_BYTES_MAX:,} are allowed"
        )
    return len(payload).to_bytes(FRAME_HEADER_BYTES, "big") + payload


@dataclass_transform(frozen_default=True)
def message(*, wire: str, sparse: tuple[str, ...] = ()) -> Callable[[type[_T]], type[_T]]:
    """Make the decorated class a message: a frozen dataclass that goes on the wire as ``wire``.

    :func:`encode` and :func:`decode` know it by that name, which is said beside the class, so that
    a class can be renamed and the bytes stay what they are. The names of fields travel too, and are
    what they are called here.

    Fields may be int (-2^63 to 2^64-1, what msgpack carries), float (NaN and infinities too),
    bool, str, bytes, ``X | None``, ``tuple[X, ...]`` (at most ARRAY_ITEMS_MAX), ``dict[str, X]``
    (at most MAP_ITEMS_MAX), messages defined above, and ``Annotated[X, Within(low, high)]`` of
    these. A ``__post_init__`` that raises ValueError refuses values.

    ``sparse``: fields that are None in most messages, and then take no bytes.
    """
    if not (isinstance(wire, str) and _WIRE_NAME.fullmatch(wire)):
        raise LocalProtocolError(f"{wire!r} is no name of a message on the wire")

    def register(cls: type[_T]) -> type[_T]:
        made = cls if is_dataclass(cls) else dataclass(frozen=True, slots=True)(cls)
        if wire in _REGISTRY:
            raise LocalProtocolError(f"two message classes are named {wire}")
        _SCHEMAS[made] = _schema_of(made, wire)
        known = {field.name: field.required for field in _SCHEMAS[made]}
        if any(known.get(name, True) for name in sparse):
            raise LocalProtocolError(f"{wire} has not all of {sparse}, or cannot do without")
        if sparse:
            _SPARSE[made] = sparse
        _REGISTRY[wire] = made
        _NAMES[made] = wire
        return made

    return register


def defined_in(module: str, wires: Collection[str]) -> None:
    """Say which module defines messages, by their names, that may arrive before it is loaded.

    The first of them to arrive loads it: until then a program does without that module.
    """
    _ELSEWHERE.update(dict.fromkeys(wires, module))


def registered() -> Mapping[str, type]:
    """Return every message class that has been defined, by its name on the wire."""
    return types.MappingProxyType(_REGISTRY)


def name_of(msg: object) -> str:
    """Return the name of a message on the wire; of anything else the name of its type."""
    return _NAMES.get(type(msg)) or type(msg).__name__


def wire_of(kind: type) -> str | None:
    """Return the name of a message class on the wire; None if it is no message."""
    return _NAMES.get(kind)


def encode(msg: object) -> bytes:
    """Return the payload of one frame.

    Raises LocalProtocolError for what no receiver could decode.
    """
    try:
        payload = msgpack.packb([name_of(msg), _to_map(msg)], default=_to_map)
    except (TypeError, ValueError, OverflowError) as error:
        raise LocalProtocolError(f"cannot encode a {name_of(msg)}: {error}") from error
    assert isinstance(payload, bytes)
    return payload


def decode(payload: bytes, allowed: Collection[type] | None = None) -> object:
    """Return the message in one frame; only classes in ``allowed`` if that is given.

    Raises RemoteProtocolError for whatever is wrong with the bytes, and nothing else.
    """
    try:
        name, values = _unpack(payload)
        cls = _REGISTRY.get(name)
        if cls is None and allowed is None and name in _ELSEWHERE:
            cls = _imported(name)
        if cls is None or (allowed is not None and cls not in allowed):
            raise ValueError(f"a {name!r} message is not allowed here")
        return _build(cls, values, name)
    # ValueError covers UnicodeDecodeError and most of msgpack's; the rest it raises bare.
    except (ValueError, TypeError, RecursionError, OverflowError, msgpack.UnpackException) as error:
        # A __post_init__ may quote a long value: logs are bounded too.
        reason = str(error)[: 4 * _ECHO_CHARACTERS_MAX] or type(error).__name__
        raise RemoteProtocolError(f"undecodable control message: {reason}") from error


def _imported(name: str) -> type:
    """Return the class of a message of an optional package. Raise ValueError if it cannot be had.

    It was there when this process began; if it is not now, a message ends its link, not the daemon.
    """
    try:
        importlib.import_module(_ELSEWHERE[name])
    except (ImportError, OSError) as error:
        raise ValueError(f"a {name!r} message needs {_ELSEWHERE[name]}: {error}") from error
    return _REGISTRY[name]


@dataclass(frozen=True, slots=True)
class Within:
    """Set bounds that :func:`decode` checks, both allowed.

    They are those of an int, of the bytes of a str or bytes, of the items of an array. What this
    program makes itself is not checked: a number that has arrived just inside its bounds may still
    be counted up.
    """

    low: int
    high: int


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    required: bool
    check: _Check


_REGISTRY: dict[str, type] = {}
_ELSEWHERE: dict[str, str] = {}  # modules that define messages which are not registered yet
_SCHEMAS: dict[type, tuple[_Field, ...]] = {}
_SPARSE: dict[type, tuple[str, ...]] = {}
_NAMES: dict[type, str] = {}


def _unpack(payload: bytes) -> tuple[str, dict[Any, Any]]:
    # Every cap is explicit: msgpack's own defaults follow the length of the message.
    document = msgpack.unpackb(
        payload,
        raw=False,
        use_list=False,
        strict_map_key=True,
        max_str_len=CONTROL_FRAME_BYTES_MAX,
        max_bin_len=CONTROL_FRAME_BYTES_MAX,
        max_array_len=ARRAY_ITEMS_MAX,
        max_map_len=MAP_ITEMS_MAX,
        max_ext_len=0,
    )
    if not (isinstance(document, tuple) and len(document) == 2):
        raise ValueError("not an array of a type name and a map")
    name, values = document
    if not (isinstance(name, str) and len(name) <= _ECHO_CHARACTERS_MAX):
        raise ValueError("the type name is not a short string")
    if not isinstance(values, dict):
        raise TypeError(f"the fields of {name!r} are not a map")
    return name, values


def _to_map(value: object) -> dict[str, Any]:
    schema = _SCHEMAS.get(type(value))
    if schema is None:
        raise TypeError(f"{type(value).__name__} is not a message class or a supported field type")
    found = {field.name: getattr(value, field.name) for field in schema}
    for name in _SPARSE.get(type(value), ()):
        if found[name] is None:
            del found[name]
    return found


def _build(cls: type, values: Any, where: str) -> Any:
    if not isinstance(values, dict):
        raise TypeError(f"{where} is {_kind(values)}, not a map")
    arguments: dict[str, Any] = {}
    for field in _SCHEMAS[cls]:
        if field.name in values:
            arguments[field.name] = field.check(values[field.name], f"{where}.{field.name}")
        elif field.required:
            raise ValueError(f"{where}.{field.name} is missing")
    return cls(**arguments)


def _schema_of(cls: type, wire: str) -> tuple[_Field, ...]:
    hints = get_type_hints(cls, include_extras=True)
    return tuple(
        _Field(
            name=field.name,
            required=field.default is MISSING and field.default_factory is MISSING,
            check=_check_for(hints[field.name], f"{wire}.{field.name}"),
        )
        for field in fields(cls)
    )


def _check_for(hint: Any, where: str) -> _Check:
    """Return the check that a field's type hint asks for, made once when the class is defined.

    Raises LocalProtocolError for a type that no message field may have.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in _EXACT:
        return _EXACT[hint]
    if hint in _SCHEMAS:
        return lambda value, place: _build(hint, value, place)
    if origin is Annotated:
        return _within(_check_for(arguments[0], where), arguments[1])
    if origin in (Union, types.UnionType) and len(arguments) == 2 and arguments[1] is type(None):
        return _optional(_check_for(arguments[0], where))
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return _items(_check_for(arguments[0], where))
    if origin is dict and arguments[0] is str:
        return _mapping(_check_for(arguments[1], where))
    raise LocalProtocolError(f"{where} has the type {hint}, which no message field may have")


def _exactly(kind: type) -> _Check:
    def check(value: Any, where: str) -> Any:
        # `type is`, not isinstance: True is an int to isinstance and must not pass for one.
        if type(value) is not kind:
            raise ValueError(f"{where} is {_kind(value)}, not {kind.__name__}")
        return value

    return check


def _float(value: Any, where: str) -> float:
    # Python lets an int stand where a float is declared, so senders do send ints.
    if type(value) not in (float, int):
        raise ValueError(f"{where} is {_kind(value)}, not float")
    return float(value)


_EXACT: dict[Any, _Check] = {kind: _exactly(kind) for kind in (int, bool, str, bytes)}
_EXACT[float] = _float


def _optional(inner: _Check) -> _Check:
    return lambda value, where: None if value is None else inner(value, where)


def _within(inner: _Check, bounds: Within) -> _Check:
    def check(value: Any, where: str) -> Any:
        checked = inner(value, where)
        sized = checked.encode() if isinstance(checked, str) else checked
        size = sized if isinstance(sized, int) else len(sized)
        if not bounds.low <= size <= bounds.high:
            raise ValueError(f"{where} is {size}; {bounds.low} to {bounds.high} are allowed")
        return checked

    return check


def _items(inner: _Check) -> _Check:
    def check(value: Any, where: str) -> tuple[Any, ...]:
        if type(value) is not tuple:
            raise ValueError(f"{where} is {_kind(value)}, not an array")
        return tuple(inner(item, where) for item in value)

    return check


def _mapping(inner: _Check) -> _Check:
    def check(value: Any, where: str) -> dict[str, Any]:
        if type(value) is not dict or not all(type(key) is str for key in value):
            raise ValueError(f"{where} is {_kind(value)}, not a map with string keys")
        return {key: inner(item, where) for key, item in value.items()}

    return check


def _kind(value: object) -> str:
    return "an array" if isinstance(value, tuple) else type(value).__name__
