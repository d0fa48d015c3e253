"""Invites: exact round trips, every damage noticed, the secret never shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.errors import ConfigError
from atoll.peer.net.invite import (
    DEFAULT_PORT,
    Invite,
    check_run_name,
    fingerprint_of,
    parse_address,
    parse_listen,
)

SECRET = bytes(range(100, 132))
INVITE = Invite("203.0.113.7", 29600, "demo", fingerprint_of(b"p" * 32), SECRET)
TOKEN = str(INVITE).partition("#")[2]


@given(
    host=st.sampled_from(["203.0.113.7", "a-b.example.org", "2001:db8::1", "::1", "localhost"]),
    port=st.integers(1, 65535),
    run=st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True),
    fingerprint=st.binary(min_size=8, max_size=8),
    secret=st.binary(min_size=32, max_size=32),
)
def test_an_invite_comes_back_as_it_was(
    host: str, port: int, run: str, fingerprint: bytes, secret: bytes
) -> None:
    invite = Invite(host, port, run, fingerprint, secret)
    assert Invite.parse(f"  {invite}\n") == invite


@given(
    secret=st.binary(min_size=32, max_size=32),
    authority=st.binary(min_size=32, max_size=32),
    grant=st.binary(min_size=1, max_size=300),
    seed=st.binary(min_size=32, max_size=32),
)
def test_an_authority_s_invite_comes_back_as_it_was(
    secret: bytes, authority: bytes, grant: bytes, seed: bytes
) -> None:
    invite = Invite("203.0.113.7", 29600, "demo", b"", secret, authority, grant, seed)
    assert Invite.parse(str(invite)) == invite
    with pytest.raises(ConfigError, match="damaged or cut short"):
        Invite.parse(str(invite)[:-8])


def test_the_text_is_stable() -> None:
    assert str(INVITE) == f"atoll://203.0.113.7:29600/demo#{TOKEN}"
    assert str(Invite("::1", 1, "r", bytes(8), bytes(32))).startswith("atoll://[::1]:1/r#aeaaaa")
    assert TOKEN.islower()
    assert Invite.parse(str(INVITE).replace(TOKEN, TOKEN.upper())) == INVITE


@given(st.integers(0, len(TOKEN) - 1), st.sampled_from("abcdefghijklmnopqrstuvwxyz234567"))
def test_any_wrong_character_is_noticed(at: int, character: str) -> None:
    damaged = TOKEN[:at] + character + TOKEN[at + 1 :]
    if damaged == TOKEN:
        return
    with pytest.raises(ConfigError) as caught:
        Invite.parse(f"atoll://h:1/demo#{damaged}")
    assert damaged[20:40] not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        f"203.0.113.7:29600/demo#{TOKEN}",
        f"http://203.0.113.7:29600/demo#{TOKEN}",
        "atoll://203.0.113.7:29600/demo",
        f"atoll://203.0.113.7:29600#{TOKEN}",
        f"atoll://203.0.113.7/demo#{TOKEN}",
        f"atoll://:29600/demo#{TOKEN}",
        f"atoll://2001:db8::1:29600/demo#{TOKEN}",
        f"atoll://h:0/demo#{TOKEN}",
        f"atoll://h:65536/demo#{TOKEN}",
        f"atoll://h:²/demo#{TOKEN}",
        f"atoll://h:1/de mo#{TOKEN}",
        f"atoll://h:1/#{TOKEN}",
        f"atoll://h:1/demo#{TOKEN[:-1]}",
        f"atoll://h:1/demo#{TOKEN}a",
        f"atoll://h:1/demo#{TOKEN}aaaaaaaa",
        f"atoll://h:1/demo#é{TOKEN[1:]}",
        "atoll://h:1/demo#",
        "atoll://h:1/demo#ae======",
    ],
)
def test_what_is_not_an_invite_is_a_config_error_without_the_token(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Invite.parse(text)
    assert TOKEN[10:30] not in str(caught.value)
    assert caught.value.__cause__ is None


def test_another_version_is_named() -> None:
    with pytest.raises(ConfigError, match="version 3; this program reads 1 and 2"):
        Invite.parse("atoll://h:1/demo#am" + TOKEN[2:])


def test_repr_hides_the_secret() -> None:
    assert repr(SECRET) not in repr(INVITE)
    assert TOKEN not in repr(INVITE)


@pytest.mark.parametrize("run", ["", "a b", "x" * 65, "a/b", "a\n", "ä"])
def test_run_names(run: str) -> None:
    with pytest.raises(ConfigError, match="not a run name"):
        check_run_name(run)


def test_addresses_to_listen_on_may_have_port_zero_and_no_host() -> None:
    assert parse_listen("[::]:0") == ("::", 0)
    assert parse_listen("127.0.0.1:29601") == ("127.0.0.1", 29601)
    assert parse_listen(":29601") == ("", 29601)
    assert parse_listen(None) == ("", DEFAULT_PORT)
    for wrong in ("[::]:0", ":29600"):
        with pytest.raises(ConfigError):
            parse_address(wrong)
    for wrong in ("", ":", ":70000", "::", "29600"):
        with pytest.raises(ConfigError):
            parse_listen(wrong)
