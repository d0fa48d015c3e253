"""Hellos: what two peers must have in common, and what the refused one is told."""

from __future__ import annotations

import pytest

from atoll.collectives.errors import (
    AdmissionError,
    ConnectError,
    IdentityInUseError,
    RemoteProtocolError,
    VersionError,
)
from atoll.peer.net.hello import (
    CONTROL,
    HELLO_BYTES_MAX,
    Hello,
    Refused,
    check,
    refusal_error,
    refusal_of,
)
from atoll.peer.net.wire import decode, encode


def hello(low: int = 1, high: int = 1, run: str = "demo") -> Hello:
    return Hello(low, high, run, CONTROL, 1, "a:1")


@pytest.mark.parametrize("theirs", [hello(), hello(1, 5), hello(0, 1)])
def test_ranges_that_overlap_can_talk(theirs: Hello) -> None:
    check(hello(), theirs)
    check(theirs, hello())


@pytest.mark.parametrize(
    ("mine", "theirs", "kind", "words"),
    [
        (hello(1, 1), hello(2, 3), VersionError, "speaks version 1, .* versions 2 to 3"),
        (hello(2, 3), hello(1, 1), VersionError, "speaks versions 2 to 3, .* version 1"),
        (hello(), hello(run="other"), AdmissionError, "not admitted to run demo: .* 'other'"),
    ],
)
def test_a_refusal_names_both_sides_and_reaches_the_dialler(
    mine: Hello, theirs: Hello, kind: type[ConnectError], words: str
) -> None:
    with pytest.raises(kind, match=words) as caught:
        check(mine, theirs)
    told = decode(encode(refusal_of(caught.value)))
    assert isinstance(told, Refused)
    error = refusal_error(told, "a:1")
    assert type(error) is kind
    assert caught.value.what in error.what
    assert error.fix


def test_who_is_refused_as_an_older_life_knows_that_its_home_was_copied() -> None:
    error = refusal_error(Refused(IdentityInUseError.code, "incarnation 2, yours is 1"), "a:1")
    assert type(error) is IdentityInUseError
    assert error.exit_code == 2
    assert "incarnation 2, yours is 1" in error.what
    assert "never copy a home" in error.fix


def test_an_unknown_refusal_is_a_connect_error() -> None:
    assert type(refusal_error(Refused("E999", "because"), "a:1")) is ConnectError


@pytest.mark.parametrize(
    "values",
    [
        (2, 1, "demo", CONTROL, 1, ""),
        (-1, 1, "demo", CONTROL, 1, ""),
        (1, 1, "x" * 65, CONTROL, 1, ""),
        (1, 1, "demo", "telnet", 1, ""),
        (1, 1, "demo", CONTROL, -1, ""),
        (1, 1, "demo", CONTROL, 1, "h" * 301),
    ],
)
def test_a_hello_is_checked_when_it_arrives(values: tuple[object, ...]) -> None:
    names = ("protocol_min", "protocol_max", "run", "kind", "inc", "address")
    good = hello()
    for name, value in zip(names, values, strict=True):
        object.__setattr__(good, name, value)
    with pytest.raises(RemoteProtocolError):
        decode(encode(good))


def test_the_longest_hello_fits() -> None:
    longest = Hello(1, 1 << 60, "x" * 64, CONTROL, (1 << 64) - 1, "ä" * 300)
    assert len(encode(longest)) <= HELLO_BYTES_MAX
    assert len(encode(Refused("x" * 64, "ä" * 1000))) <= HELLO_BYTES_MAX
