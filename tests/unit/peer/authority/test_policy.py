"""Guards of real link hosts: what they refuse, what they tell each other, what homes remember."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness.guards import sites
from harness.passes import AUTHORITY, PUBLIC, RUN, key_of, passed, peer_of, token, tokened

from atoll.collectives.errors import (
    AdmissionError,
    ConfigError,
    PassExpiredError,
    PassForgedError,
    PassMissingError,
    PassRevokedError,
    PassRoleError,
    PassRunError,
    PassUsedUpError,
    RemoteProtocolError,
)
from atoll.peer.authority import policy as policy_module
from atoll.peer.authority.grants import Credential, Grant, Revocations
from atoll.peer.authority.ledger import Admitted, Known, Revoked
from atoll.peer.membership.messages import Join
from atoll.peer.membership.view import REPLICA, WITNESS, Member
from atoll.peer.net.admission_policy import AdmissionPolicy

LONG_AGO_S = 1_000


def revoking(*names: str, number: int = 1) -> bytes:
    ids = [peer_of(name) for name in names]
    return Revocations(number - 1).with_more(ids, AUTHORITY).encode()


# ---------------------------------------------------------------- who gets a link


def test_who_has_a_pass_gets_a_link_and_everybody_knows(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with sites(tmp_path) as made:
            a, b, c = await made.members("abc")  # a - b - c
            await made.until(lambda: a.knows() == b.knows() == c.knows() == {a.id, b.id, c.id})
            assert a.host.link_peers() == (b.id,)

    asyncio.run(scenario())


def unsigned(name: str) -> Credential:
    """With the signature of somebody else than the authority."""
    grant = Grant(RUN, peer_of(name)).signed(key_of("no authority"))
    return Credential.bind(grant, PUBLIC, key_of(name))


class Shows(AdmissionPolicy):
    """Shows what it likes, and lets everybody in."""

    def __init__(self, credential: bytes, role: str) -> None:
        super().__init__()
        self.credential, self.role = credential, role


REFUSED = [
    (b"", REPLICA, PassMissingError),
    (unsigned("m").encode(), REPLICA, PassForgedError),
    (passed("b").encode(), REPLICA, PassForgedError),
    (passed("m", run="other").encode(), REPLICA, PassRunError),
    (passed("m", not_after_s=LONG_AGO_S).encode(), REPLICA, PassExpiredError),
    (passed("m", role=WITNESS).encode(), REPLICA, PassRoleError),
    (tokened("m", token("t"), "t").encode(), REPLICA, PassUsedUpError),
]


@pytest.mark.parametrize(("shown", "role", "error"), REFUSED)
def test_others_are_refused_and_told_why(
    tmp_path: Path, shown: bytes, role: str, error: type[AdmissionError]
) -> None:
    async def scenario() -> None:
        async with sites(tmp_path) as made:
            (a,) = await made.members("a")
            a.ledger.record(tokened("b", token("t"), "t"))
            before = a.knows()
            mallory = made.make("m", without=True)
            mallory.host._policy = Shows(shown, role)
            with pytest.raises(error, match="refused: ") as caught:
                await mallory.host.dial(a.address)
            assert caught.value.fix
            assert caught.value.exit_code == AdmissionError.exit_code
            assert a.host.link_peers() == ()
            assert a.knows() == before

    asyncio.run(scenario())


@pytest.mark.parametrize("shown", [b"", unsigned("m").encode()])
def test_who_is_called_has_to_show_a_pass_too(tmp_path: Path, shown: bytes) -> None:
    async def scenario() -> None:
        async with sites(tmp_path) as made:
            b, mallory = made.make("b"), made.make("m", without=True)
            b.outside = True
            mallory.host._policy = Shows(shown, REPLICA)
            with pytest.raises((PassMissingError, PassForgedError)):
                await b.host.dial(await mallory.listen())
            assert b.host.link_peers() == ()

    asyncio.run(scenario())


def test_a_newcomer_calls_members_whose_passes_have_expired_since(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with sites(tmp_path) as made:
            old = made.make("a", passed("a", not_after_s=LONG_AGO_S))
            new = made.make("b")
            new.outside = True
            await new.host.dial(await old.listen())
            new.outside = False
            other = made.make("c")
            with pytest.raises(PassExpiredError):
                await other.host.dial(old.address)
            other.outside = True  # who is called judges all the same
            with pytest.raises(PassExpiredError, match="refused: "):
                await old.host.dial(await other.listen())

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("shown", "role", "error"),
    [
        (passed("b"), REPLICA, PassForgedError),
        (passed("a", role=WITNESS), REPLICA, PassRoleError),
        (passed("a", not_after_s=LONG_AGO_S), REPLICA, PassExpiredError),
        (passed("a", run="other"), REPLICA, PassRunError),
    ],
)
def test_a_founder_judges_itself(
    tmp_path: Path, shown: Credential, role: str, error: type[AdmissionError]
) -> None:
    async def scenario() -> None:
        async with sites(tmp_path) as made:
            with pytest.raises(error, match="not admitted: ") as caught:
                made.make("a", shown, role, founds=True)
            assert caught.value.fix

    asyncio.run(scenario())


def test_a_role_that_the_pass_is_not_for_ends_the_link(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with sites(tmp_path) as made:
            (a,) = await made.members("a")
            liar = made.make("m", passed("m", role=WITNESS), WITNESS)
            await liar.host.dial(a.address)
            for role, allowed in ((WITNESS, True), (REPLICA, False)):
                join = Join(Member(liar.id, 1, role, ""))
                if allowed:
                    assert a.admission.check_message(liar.id, join)
                else:
                    with pytest.raises(RemoteProtocolError, match="not for the role replica"):
                        a.admission.check_message(liar.id, join)

    asyncio.run(scenario())


# ---------------------------------------------------------------- uses


def test_a_use_at_one_member_counts_at_all(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with sites(tmp_path) as made:
            a, _, c = await made.members("abc")
            first, second = (made.make(name, tokened(name, token("t"), "t")) for name in ("p", "q"))
            await first.host.dial(a.address)
            await made.until(lambda: first.id in c.knows())
            with pytest.raises(PassUsedUpError, match="was for 1, and 1 came"):
                await second.host.dial(c.address)
            await first.host.dial(c.address)

    asyncio.run(scenario())


def test_of_two_who_came_at_once_the_same_stays_everywhere(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with sites(tmp_path) as made:
            a, b = made.make("a"), made.make("b")
            pair = [made.make(name, tokened(name, token("t"), "t")) for name in ("p", "q")]
            for newcomer, member in zip(pair, (a, b), strict=True):
                await newcomer.host.dial(await member.listen())
            await b.host.dial(a.address)
            await made.until(lambda: any(newcomer.stopped for newcomer in pair))
            await made.until(lambda: a.knows() == b.knows())
            (out,) = [newcomer for newcomer in pair if newcomer.stopped]
            (stays,) = [newcomer for newcomer in pair if not newcomer.stopped]
            assert isinstance(out.stopped[0], PassUsedUpError)
            assert a.knows() == {a.id, b.id, stays.id}
            await made.until(lambda: out.id not in {*a.host.link_peers(), *b.host.link_peers()})
            assert stays.id in {*a.host.link_peers(), *b.host.link_peers()}

    asyncio.run(scenario())


# ---------------------------------------------------------------- revocation


def test_a_revocation_reaches_everybody_and_ends_the_links(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with sites(tmp_path) as made:
            a, b, c, d = await made.members("abcd")  # d has a link to c only
            stream = await d.host.open_data(c.id, c.address)
            await made.until(lambda: c.streams)
            assert "list 1 with 1 revoked" in a.admission.revoke(revoking("d"))
            await made.until(lambda: c.downs and d.downs)
            why = "the authority has revoked this peer (list 1)"
            assert c.downs == [(d.id, why)]
            await made.until(lambda: d.stopped)  # once it has written down why
            assert [str(error.what) for error in d.stopped] == [why]
            assert isinstance(d.stopped[0], PassRevokedError)
            assert c.streams[0].closed
            stream.close()
            assert not b.stopped
            assert a.host.link_peers() == (b.id,)
            for site in (a, b, c):
                assert site.admission.is_out(d.id)
                with pytest.raises(PassRevokedError, match="refused: "):
                    await d.host.dial(site.address)
                with pytest.raises(PassRevokedError):
                    await site.host.dial(d.address)

    asyncio.run(scenario())


def test_who_gets_a_link_later_learns_it_then(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with sites(tmp_path) as made:
            a, b = made.make("a"), made.make("b")
            a.admission.revoke(revoking("d"))
            b.admission.revoke(revoking("d", "e", number=2))
            await b.host.dial(await a.listen())
            await made.until(lambda: a.ledger.revocations.number == 2)
            assert a.admission.is_out(peer_of("e"))
            assert "nothing new: list 2" in a.admission.revoke(revoking("d"))
            assert b.ledger.revocations.number == 2

    asyncio.run(scenario())


def test_who_knows_the_same_is_told_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with sites(tmp_path) as made:
            a, b, c = await made.members("abc")
            everybody = {a.id, b.id, c.id}
            await made.until(lambda: a.knows() == b.knows() == c.knows() == everybody)
            a.heard.clear()
            await c.host.dial(a.address)
            await made.until(lambda: a.heard)
            assert c.host.send(a.id, Admitted((passed("d").encode(),)))  # after all else
            await made.until(lambda: peer_of("d") in a.knows())
            assert [type(message) for _, message in a.heard] == [Known, Admitted]

    asyncio.run(scenario())


def test_what_was_on_its_way_from_a_revoked_peer_is_dropped(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with sites(tmp_path) as made:
            a, b = await made.members("ab")
            join = Join(Member(b.id, 1, REPLICA, ""))
            assert a.admission.check_message(b.id, join)
            a.admission.revoke(revoking("b"))
            assert not a.admission.check_message(b.id, join)

    asyncio.run(scenario())


def test_what_is_forged_is_dropped_and_named_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with sites(tmp_path) as made:
            a, b = await made.members("ab")
            forged = Revocations().with_more([a.id], key_of("no authority")).encode()
            for _ in range(3):
                assert b.host.send(a.id, Revoked(forged))
                assert b.host.send(a.id, Admitted((unsigned("m").encode(),)))
            assert b.host.send(a.id, Admitted((passed("c").encode(),)))  # after all of these
            await made.until(lambda: peer_of("c") in a.knows())
            assert len(a.said("forged")) == 1
            assert "has not signed this revocation list" in a.said("forged")[0]
            assert a.ledger.revocations.number == 0
            assert a.host.link_peers() == (b.id,)
            with pytest.raises(PassForgedError) as caught:
                a.admission.revoke(forged)
            assert "DIR/revocations" in caught.value.fix

    asyncio.run(scenario())


def test_a_run_without_an_authority_revokes_nobody(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with sites(tmp_path) as made:
            a, b = made.make("a", without=True), made.make("b", without=True)
            await b.host.dial(await a.listen())
            assert a.admission.status() == {"mode": "secret"}
            with pytest.raises(ConfigError, match="has no authority"):
                a.admission.revoke(revoking("b"))

    asyncio.run(scenario())


# ---------------------------------------------------------------- the home


def test_a_restart_remembers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a peer whose pass has expired since."""

    def clock(now_s: float) -> None:
        monkeypatch.setattr(policy_module, "time", SimpleNamespace(time=lambda: now_s))

    async def scenario() -> None:
        async with sites(tmp_path) as made:
            clock(LONG_AGO_S)
            a = made.make("a")
            b = made.make("b", passed("b", not_after_s=LONG_AGO_S))
            await b.host.dial(await a.listen())
            a.admission.revoke(revoking("d"))
            await made.until(lambda: b.admission.is_out(peer_of("d")))
            for site in (a, b):
                await site.saved()
                await site.host.close()
            clock(LONG_AGO_S + 1)
            again, later = made.make("a"), made.make("b", passed("b", not_after_s=LONG_AGO_S))
            assert again.knows() == later.knows() == {a.id, b.id}
            assert again.ledger.revocations.number == 1
            await later.host.dial(await again.listen())
            revoked = made.make("d")
            with pytest.raises(PassRevokedError):
                await revoked.host.dial(again.address)

    asyncio.run(scenario())


def test_a_revoked_peer_that_is_started_again_says_so_itself(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with sites(tmp_path) as made:
            a, b = await made.members("ab")
            a.admission.revoke(revoking("b"))
            await made.until(lambda: b.stopped)
            await b.saved()
            with pytest.raises(PassRevokedError, match="not admitted: the authority has revoked"):
                made.make("b")

    asyncio.run(scenario())


def test_a_damaged_file_is_a_config_error(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with sites(tmp_path) as made:
            a = made.make("a")
            a.admission.revoke(revoking("d"))
            await a.saved()
            path = a.home.path / "admission"
            assert path.stat().st_mode & 0o777 == 0o600
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
            with pytest.raises(ConfigError, match="cannot be read"):
                made.make("a")

    asyncio.run(scenario())
