"""Runs with an authority: who gets in, who does not, and who is thrown out while they train."""

from __future__ import annotations

import contextlib
import io
import time
from pathlib import Path

import pytest
from harness.netns import Net
from harness.processes import NET_PORT, Fleet, Peer, fleet, until
from harness.wrong_clock import WrongClock

from atoll.collectives.errors import (
    AtollError,
    PassExpiredError,
    PassForgedError,
    PassMissingError,
    PassRevokedError,
    PassRoleError,
    PassUsedUpError,
)
from atoll.peer.authority.grants import Grant
from atoll.peer.authority.key import Authority
from atoll.peer.cli import main
from atoll.peer.client.ipc_client import ask
from atoll.peer.net.invite import Invite, fingerprint_of


def says(*arguments: str) -> str:
    """What an `atoll` command prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main.main(arguments) == 0
    return out.getvalue()


class Guarded:
    """A fleet whose run has an authority, and that authority."""

    def __init__(self, run: Fleet) -> None:
        self.run = run
        self.folder = run.folder / "authority"
        self.public = says("authority", "new", str(self.folder)).strip()
        own = ("--authority", self.public, "--pass", self.invite("127.0.0.1:9"))
        founder = run.start("a", "up", "--run", "demo", *own)
        self.first = founder
        until(lambda: founder.try_status().get("members"), "the run is founded", founder)

    def invite(self, at: str = "", *more: str) -> str:
        at = at or str(self.run.peers["a"].status()["address"])
        line = ("authority", "invite", str(self.folder), "--run", "demo", "--at", at, *more)
        return says(*line).split()[2]

    def join(self, names: str) -> None:
        """With one token for all of them."""
        invite = self.invite("", "--uses", str(len(names)))
        for name in names:
            self.run.join(name, invite)
        for name in ("a", *names):
            self.run.sees(name, 1 + len(names))

    def revoke(self, *ids: str, tell: str = "a") -> None:
        says("authority", "revoke", str(self.folder), *ids)
        home = str(self.run.peers[tell].home)
        assert "is told to all" in says("revoke", str(self.folder / "revocations"), "--home", home)


@pytest.fixture
def guarded(tmp_path: Path):  # type: ignore[no-untyped-def]  # a generator fixture
    with fleet(tmp_path) as run:
        yield Guarded(run)


def refused(peer: Peer, error: type[AtollError]) -> None:
    assert peer.ends() == error.exit_code
    assert f"ATOLL-{error.code} " in peer.text
    assert "fix: " in peer.text.partition(f"ATOLL-{error.code} ")[2]


def list_of(peer: Peer) -> int:
    return int(peer.status()["admission"]["list"])


def test_members_come_with_tokens_and_train(guarded: Guarded) -> None:
    run = guarded.run
    guarded.join("bc")
    for name in "abc":
        run.train(name)
    for name in "abc":
        run.peers[name].reaches(3)
    assert run.agree("abc") >= 1
    status = run.peers["b"].status()["admission"]
    assert (status["mode"], status["authority"]) == ("authority", guarded.public)
    assert status["admitted"] == 3
    assert sorted(token["used"] for token in status["tokens"]) == [1, 2]
    text = says("status", "--home", str(run.peers["b"].home))
    assert "2 of 2 used, expires 20" in text
    with pytest.raises(AtollError, match="the authority of run demo invites, and nobody else"):
        ask(run.peers["a"].home, "invite")


def test_who_has_no_good_pass_is_refused_with_the_reason(guarded: Guarded) -> None:
    run = guarded.run
    used = guarded.invite()
    run.join("b", used)
    run.sees("a", 2)
    refused(run.join("c", used), PassUsedUpError)
    parsed = Invite.parse(used)
    fingerprint = fingerprint_of(bytes.fromhex(guarded.first.status()["id"]))
    secret_only = str(Invite(parsed.host, parsed.port, "demo", fingerprint, parsed.secret))
    refused(run.join("d", secret_only), PassMissingError)
    other = Authority.new(run.folder / "other")
    grant, seed = other.token("demo", "replica", 1, 0)
    forged = Invite(
        parsed.host, parsed.port, "demo", b"", parsed.secret, other.public_key, grant.encode(), seed
    )
    refused(run.join("e", str(forged)), PassForgedError)
    authority = Authority.open(guarded.folder)
    grant, seed = authority.token("demo", "replica", 1, int(time.time()) - 1)
    expired = authority.invite(grant, (parsed.host, parsed.port), seed)
    refused(run.join("f", str(expired)), PassExpiredError)
    assert len(run.peers["a"].status()["members"]) == 2


def test_a_pass_is_for_the_peer_that_it_names(guarded: Guarded) -> None:
    run = guarded.run
    found = says("id", "--home", str(run.folder / "b")).strip()
    at = run.peers["a"].status()["address"]
    line = ("authority", "allow", str(guarded.folder), found, "--run", "demo", "--at", at)
    invite = says(*line).split()[2]
    refused(run.join("c", invite), PassForgedError)
    run.join("b", invite)
    run.sees("a", 2)


def test_roles_are_those_of_the_invite(guarded: Guarded) -> None:
    run = guarded.run
    witness = guarded.invite("", "--role", "witness")
    refused(run.join("b", witness), PassRoleError)
    run.start("b", "join", witness, "--witness")
    archive = guarded.invite("", "--role", "archive")
    refused(run.join("c", archive), PassRoleError)
    follower = run.start("c", "follow", archive)
    run.sees("a", 2)
    run.train("a")
    follower.reaches(3)
    guarded.revoke(follower.status()["id"])
    refused(follower, PassRevokedError)
    run.peers["a"].reaches(run.peers["a"].status()["round"] + 2)


def test_founders_need_a_pass_each(tmp_path: Path) -> None:
    with fleet(tmp_path, Net("ab")) as run:
        assert run.net is not None
        folder = str(run.folder / "authority")
        public = says("authority", "new", folder).strip()
        where = {name: f"{run.net.address(name)}:{NET_PORT}" for name in "ab"}
        together = ("--expect", "2", "--peers", ",".join(where.values()))
        for name, at in where.items():
            invite = says("authority", "invite", folder, "--run", "demo", "--at", at).split()[2]
            own = ("--authority", public, "--pass", invite)
            run.start(name, "up", "--run", "demo", *own, *together)
        for name in "ab":
            run.sees(name, 2)
            peer = run.peers[name]  # which may be in the view before it has told who came
            until(lambda p=peer: p.status()["admission"]["admitted"] == 2, "both are known", peer)


def test_a_revoked_member_is_out_everywhere_and_the_run_goes_on(guarded: Guarded) -> None:
    run = guarded.run
    guarded.join("bcd")
    for name in "abcd":
        run.train(name)
    for name in "abcd":
        run.peers[name].reaches(2)
    out = run.peers["d"]
    guarded.revoke(out.status()["id"], tell="c")  # not the coordinator
    refused(out, PassRevokedError)
    for name in "abc":
        run.sees(name, 3)
        assert list_of(run.peers[name]) == 1
    number = max(run.peers[name].status()["round"] for name in "abc")
    for name in "abc":
        run.peers[name].reaches(number + 3)
    assert run.agree("abc") >= 1
    refused(run.start("d", "up", "--run", "demo"), PassRevokedError)  # it knows that itself
    (out.home / "admission").unlink()  # and if it does not want to
    refused(run.start("d", "up", "--run", "demo"), PassRevokedError)
    assert "refused: the authority has revoked this peer" in run.peers["d"].text


@pytest.mark.slow
def test_a_revoked_member_that_does_not_go_is_out_all_the_same(guarded: Guarded) -> None:
    run = guarded.run
    run.odd["d"] = "stays"
    guarded.join("bcd")
    for name in "abcd":
        run.train(name)
    for name in "abcd":
        run.peers[name].reaches(2)
    guarded.revoke(run.peers["d"].status()["id"])
    for name in "abc":
        run.sees(name, 3)
    number = max(run.peers[name].status()["round"] for name in "abc")
    for name in "abc":
        run.peers[name].reaches(number + 5)
    stays = run.peers["d"]
    until(lambda: "refused: the authority" in stays.status()["last_error"], "it is refused", stays)
    assert [line["stays"] for line in stays.lines][:1] == [
        "the authority has revoked this peer (list 1)"
    ]
    assert stays.status()["round"] <= number
    assert {len(run.peers[name].status()["members"]) for name in "abc"} == {3}


def test_a_revoked_coordinator_is_replaced(guarded: Guarded) -> None:
    run = guarded.run
    guarded.join("bc")
    for name in "abc":
        run.train(name)
    run.peers["b"].reaches(2)
    lead = run.coordinator
    others = "abc".replace(lead, "")
    guarded.revoke(run.peers[lead].status()["id"], tell=others[0])
    refused(run.peers[lead], PassRevokedError)
    for name in others:
        run.sees(name, 2)
        run.peers[name].reaches(run.peers[name].status()["round"] + 2)


def test_a_revoked_token_takes_along_who_came_with_it(guarded: Guarded) -> None:
    run = guarded.run
    guarded.join("b")
    invite = guarded.invite("", "--uses", "3")
    for name in "cd":
        run.join(name, invite)
    for name in "abcd":
        run.sees(name, 4)
    public = Authority.open(guarded.folder).public_key
    guarded.revoke(Grant.parse(Invite.parse(invite).grant, public).subject.hex())
    for name in "cd":
        refused(run.peers[name], PassRevokedError)
    refused(run.join("e", invite), PassRevokedError)


@pytest.mark.slow
def test_a_restart_remembers_who_is_in_and_who_is_out(tmp_path: Path) -> None:
    """A month later, when the token that they came with has long expired."""
    try:
        clock = WrongClock(tmp_path / "clock")
    except RuntimeError as error:
        pytest.skip(str(error))
    with contextlib.closing(clock), fleet(tmp_path) as run:
        run.environment = clock.environment
        guarded = Guarded(run)
        invite = guarded.invite("", "--uses", "4", "--expires", "1d")
        for name in "bcd":
            run.join(name, invite)
        for name in "abcd":
            run.sees(name, 4)
        guarded.revoke(run.peers["d"].status()["id"])
        refused(run.peers["d"], PassRevokedError)
        for name in "abc":
            run.sees(name, 3)
        clock.jump(30 * 86400)
        for name in "bc":
            old = run.peers[name]
            old.kill()
            old.ends()
            new = run.start(name, "up", "--run", "demo")
            returned(run, name)
            assert list_of(new) == 1
        refused(run.join("e", invite), PassExpiredError)


def returned(run: Fleet, name: str) -> None:
    """A member that was started again has links to all others, in a view of all.

    Whether it goes on in its old view or joins again depends on how long its start took.
    """

    def all_linked() -> bool:
        found = [run.peers[each].try_status() for each in "abc"]
        members = [member for status in found for member in status.get("members", ())]
        return len(members) == 9 and all(member["state"] == "connected" for member in members)

    until(all_linked, f"{name} is back", *run.peers.values())


def test_runs_without_an_authority_are_as_they_were(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.form("ab")
        for name in "ab":
            assert run.peers[name].status()["admission"] == {"mode": "secret", "banned": []}
            assert not (run.peers[name].home / "admission").exists()
        with pytest.raises(AtollError, match="this run has no authority"):
            ask(run.peers["a"].home, "revoke", signed=b"x")
        assert says("invite", "--home", str(run.peers["a"].home)).split()[2] == run.invite
