"""Hellos: what two peers must have in common, and what the refused one is told."""

from __future__ import annotations

import msgpack
import pytest

import atoll
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
    PROTOCOL_MAX,
    Hello,
    Refused,
    check,
    fix_of,
    refusal_error,
    refusal_of,
)
from atoll.peer.net.wire import decode, encode


def hello(low: int = 1, high: int = 1, run: str = "demo") -> Hello:
    return Hello(low, high, run, CONTROL, 1, "a:1")


def test_ciphers_are_something_that_the_first_version_does_not_know() -> None:
    old = {"protocol_min": 1, "protocol_max": 1, "run": "demo", "kind": CONTROL, "inc": 1}
    payload = msgpack.packb(["Hello", {**old, "address": "a:1"}])
    assert decode(payload) == Hello(1, 1, "demo", CONTROL, 1, "a:1", ())
    new = Hello(1, 1, "demo", CONTROL, 1, "a:1", ("aes-256-gcm", "of a later version"))
    assert decode(encode(new)) == new
    assert len(encode(new)) < HELLO_BYTES_MAX


@pytest.mark.parametrize("ciphers", [("x",) * 9, ("x" * 65,), ("",)])
def test_ciphers_are_few_and_have_short_names(ciphers: tuple[str, ...]) -> None:
    with pytest.raises(RemoteProtocolError, match=r"Hello\.ciphers is "):
        decode(encode(Hello(1, 1, "demo", CONTROL, 1, "a:1", ciphers)))


@pytest.mark.parametrize("theirs", [hello(), hello(1, 5), hello(0, 1)])
def test_ranges_that_overlap_can_talk(theirs: Hello) -> None:
    check(hello(), theirs)
    check(theirs, hello())


@pytest.mark.parametrize(
    ("mine", "theirs", "kind", "words"),
    [
        (hello(1, 1), hello(2, 3), VersionError, r"protocols 2 to 3\), you run .*protocol 1\)"),
        (hello(2, 3), hello(1, 1), VersionError, r"protocol 1\), you run .*protocols 2 to 3\)"),
        (
            hello(),
            hello(run="other"),
            AdmissionError,
            "that peer runs 'other', you asked for 'demo'",
        ),
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
    assert error.fix
    if kind is AdmissionError:
        assert caught.value.what in error.what
    else:  # from what is known on this side, whatever the words of the other
        assert f"you run atoll {atoll.__version__} (protocol {PROTOCOL_MAX})" in error.what


def test_who_is_of_an_older_protocol_is_told_from_its_silence() -> None:
    """Protocol 1 said neither its program nor, in a refusal, its protocol."""
    refused = decode(
        msgpack.packb(["Refused", {"code": "E22", "what": "this side speaks version 1"}])
    )
    assert isinstance(refused, Refused)
    error = refusal_error(refused, "a:1")
    assert type(error) is VersionError
    assert "a:1 runs an atoll that does not say its version (protocol 1), you run" in error.what
    assert error.fix.startswith(f"install atoll {atoll.__version__} on that machine too")
    newer = refusal_error(Refused("E22", "", 3, 4, "0.9"), "a:1")
    assert "a:1 runs atoll 0.9 (protocols 3 to 4), you run" in newer.what
    assert newer.fix.startswith("install atoll 0.9 on this machine too")


@pytest.mark.parametrize("program", ["x" * 65, "0.1\n", "0.1 beta", "\x1b[2J"])
def test_a_version_of_a_program_is_short_and_plain(program: str) -> None:
    good, refused = hello(), Refused("E22", "")
    for message in (good, refused):
        object.__setattr__(message, "program", program)
        with pytest.raises(RemoteProtocolError, match="not a version"):
            decode(encode(message))


def test_who_is_refused_as_an_older_life_knows_that_its_home_was_copied() -> None:
    error = refusal_error(Refused(IdentityInUseError.code, "life 2, yours is 1"), "a:1")
    assert type(error) is IdentityInUseError
    assert error.exit_code == 2
    assert "life 2, yours is 1" in error.what
    assert "never copy a home" in error.fix


@pytest.mark.parametrize("kind", AdmissionError.__subclasses__())
def test_what_is_wrong_with_a_pass_reaches_the_dialler(kind: type[AdmissionError]) -> None:
    told = decode(encode(refusal_of(kind("what it is"))))
    assert isinstance(told, Refused)
    error = refusal_error(told, "a:1")
    assert type(error) is kind
    assert error.what == "a:1 refused: what it is"
    assert error.fix == fix_of(error) != ""
    assert error.exit_code == AdmissionError.exit_code


def test_a_hello_without_a_pass_is_as_it_was() -> None:
    assert (hello().credential, hello().role) == (b"", "")
    with pytest.raises(RemoteProtocolError, match=r"Hello\.credential is 1025"):
        decode(encode(Hello(1, 1, "demo", CONTROL, 1, "a:1", (), bytes(1025))))


@pytest.mark.parametrize("code", [AdmissionError.code, "E999"])
def test_a_refusal_writes_one_line_to_a_terminal_and_moves_nothing_there(code: str) -> None:
    told = decode(encode(Refused(code, "no\x1b[2J\nATOLL-E99 forged\u202e", 3, 3)))
    assert isinstance(told, Refused)
    assert refusal_error(told, "a:1").what == "a:1 refused: no?[2J?ATOLL-E99 forged?"


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
    ciphers = ("x" * 64,) * 8
    longest = Hello(
        *(1, 1 << 60, "x" * 64, CONTROL, (1 << 64) - 1, "ä" * 300, ciphers),
        credential=bytes(1024),
        role="x" * 64,
        program="1" * 64,
    )
    assert len(encode(longest)) <= HELLO_BYTES_MAX
    refused = Refused("x" * 64, "ä" * 1000, 1, 1 << 60, "1" * 64)
    assert len(encode(refused)) <= HELLO_BYTES_MAX
