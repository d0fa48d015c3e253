"""What hostile peers cannot make of evidence and of contradictions, between daemons."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness.convicts import ALONE, left_behind, suspects
from harness.loops import run_to_rest
from simulation.audit_options import Key, keys
from simulation.audits import World

from atoll.peer.daemon.daemon import Daemon
from atoll.peer.membership.view import Member, View
from atoll.peer.verify import ban_list
from atoll.peer.verify.ban_list import AskEvidence, BanList, EvidencePiece, KnownBans
from atoll.peer.verify.evidence import Evidence, verify_evidence
from atoll.peer.verify.statement import Elimination, StatementPhase, sign_statement

PEERS = tuple(bytes([i]) * 32 for i in range(1, 6))


class Net:
    """Keepers whose messages arrive in the next turn of the loop."""

    def __init__(self, folder: Path, names: tuple[bytes, ...] = PEERS) -> None:
        self.names, self.sent = names, list[tuple[bytes, bytes, object]]()
        self.took_part = set[bytes]()
        self.notes: list[tuple[bytes, str]] = []
        self.mute: set[bytes] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.loop = asyncio.get_running_loop()
        self.keepers = {name: self._keeper(name, folder / name.hex()[:4]) for name in names}
        for keeper in self.keepers.values():
            keeper.installed((*names, *suspects()), ())

    def _keeper(self, me: bytes, folder: Path) -> BanList:
        return BanList(
            me,
            folder,
            SimpleNamespace(
                send=lambda peer, message: self._send(me, peer, message),
                link_peers=lambda: tuple(name for name in self.names if name != me),
                member_peers=lambda: self.names,
                expel=lambda peer, why: None,
                note=lambda kind, text, **_: self.notes.append((me, kind)),
                stop=lambda error: None,
                spawn=self._spawn,
                banned=lambda peers: None,
                took_part=lambda terms: terms in self.took_part,
                feed=lambda bans: None,
            ),
        )

    def _send(self, source: bytes, dest: bytes, message: object) -> bool:
        self.sent.append((source, dest, message))
        if source not in self.mute:
            self.loop.call_soon(self.keepers[dest].on_message, source, message)
        return True

    def _spawn(self, work: Any) -> None:
        task = self.loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def until(self, holds: Callable[[], bool]) -> None:
        for _ in range(3000):
            if holds():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it has not come about")

    def out(self, peer: bytes) -> set[bytes]:
        """For whom it is banned."""
        return {name for name, keeper in self.keepers.items() if keeper.is_out(peer)}


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ban_list, "WORD_S", 0.1)
    monkeypatch.setattr(ban_list, "ARRIVAL_S", 0.1)


def found(count: int) -> list[Evidence]:
    """That stands alone, each against somebody else."""
    evidence = []
    for seed in range(count):
        options = replace(ALONE, seed=1000 + seed, liars={1: "draw abort"})
        world = World(options, keys(options))
        world.play()
        evidence += [e for p in world.honest[:1] for e in p.banned.values()]
    return evidence


def test_who_comes_later_hears_of_all_bans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more than arrive at a time."""
    monkeypatch.setattr(ban_list, "ARRIVAL_S", 30.0)  # a busy machine is no stall
    all_of_it = found(2 * ban_list.ARRIVING_MAX + 1)

    async def act() -> None:
        net = Net(tmp_path, PEERS[:2])
        for evidence in all_of_it:
            net.keepers[PEERS[0]].bans.learn(evidence)
        late = net.keepers[PEERS[1]]
        late.installed((*PEERS, *(evidence.culprit for evidence in all_of_it)), ())
        net.keepers[PEERS[0]].linked(PEERS[1])
        await net.until(lambda: len(late.bans) == len(all_of_it))

    run_to_rest(act)


def test_a_large_file_comes_piece_by_piece_as_it_is_asked_for(tmp_path: Path) -> None:
    evidence = left_behind("dense shift")
    size = len(evidence.encoded)

    async def act() -> None:
        net = Net(tmp_path, PEERS[:2])
        net.keepers[PEERS[0]].bans.learn(evidence)
        net.keepers[PEERS[0]].linked(PEERS[1])
        await net.until(lambda: net.keepers[PEERS[1]].is_out(evidence.culprit))
        kinds = [type(m) for _, _, m in net.sent if isinstance(m, AskEvidence | EvidencePiece)]
        assert kinds == [AskEvidence, EvidencePiece] * (-(-size // 512))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ban_list, "PIECE_BYTES", 512)
        run_to_rest(act)


def test_who_announces_and_sends_nothing_stops_nobody_else(tmp_path: Path) -> None:
    evidence = left_behind("draw abort")

    async def act() -> None:
        net = Net(tmp_path, PEERS[:3])
        honest, hostile, late = (net.keepers[name] for name in net.names)
        honest.bans.learn(evidence)
        net.mute.add(PEERS[1])
        digests = (evidence.digest, *(bytes([i]) * 32 for i in range(20)))
        late.on_message(PEERS[1], KnownBans(digests))
        honest.linked(PEERS[2])
        await net.until(lambda: late.is_out(evidence.culprit))
        assert not hostile.is_out(evidence.culprit)

    run_to_rest(act)


def test_of_strangers_one_peer_shows_so_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ban_list, "VAIN_MAX", 3)
    made_up = found(6)

    async def act() -> None:
        net = Net(tmp_path, PEERS[:3])
        hostile, honest, late = (net.keepers[name] for name in net.names)
        for evidence in made_up:
            hostile.bans.learn(evidence)
        hostile.linked(PEERS[2])
        await net.until(lambda: late._vain.get(PEERS[0]) == 3)
        evidence = left_behind("draw abort")
        honest.bans.learn(evidence)
        honest.linked(PEERS[2])
        await net.until(lambda: late.is_out(evidence.culprit))
        assert len(late.bans) == 1
        assert late._vain == {PEERS[0]: 3}

    run_to_rest(act)


@pytest.mark.parametrize("piece_bytes", [0, 1, ban_list.PIECE_BYTES])
def test_those_who_send_nothing_or_too_slowly_keep_no_places(
    piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as there are places, each of which announces more than anybody could wait for."""
    monkeypatch.setattr(ban_list, "SLOWEST_BYTES_PER_S", 1 << 40)
    evidence, names = left_behind("draw abort"), (*PEERS, b"6" * 32)

    async def trickle(late: BanList) -> None:
        while piece_bytes and not late.is_out(evidence.culprit):
            for digest, each in list(late._arriving.items()):
                piece = EvidencePiece(digest, len(each.data), 1 << 26, bytes(piece_bytes))
                late.on_message(each.source, piece)
            await asyncio.sleep(ban_list.ARRIVAL_S / 5)

    async def act() -> None:
        net = Net(tmp_path, names)
        honest, *hostile, late = names
        net.keepers[honest].bans.learn(evidence)
        assert len(hostile) == ban_list.ARRIVING_MAX
        net.mute |= {*hostile}
        for name in hostile:
            digests = (hashlib.sha256(name + bytes([i])).digest() for i in range(200))
            net.keepers[late].on_message(name, KnownBans(tuple(digests)))
        net._spawn(trickle(net.keepers[late]))
        net.keepers[honest].linked(late)
        await net.until(lambda: net.keepers[late].is_out(evidence.culprit))
        turns = [m for _, dest, m in net.sent if dest in hostile and isinstance(m, AskEvidence)]
        assert sum(not ask.offset for ask in turns) <= ban_list.STALLS_MAX * len(hostile)

    run_to_rest(act)


def test_who_sends_what_is_no_evidence_is_not_asked_again(tmp_path: Path) -> None:
    async def act() -> None:
        net = Net(tmp_path, PEERS[:2])
        net.mute.add(PEERS[0])
        keeper = net.keepers[PEERS[1]]
        for digest in (b"1" * 32, b"2" * 32):
            keeper.on_message(PEERS[0], KnownBans((digest,)))
            keeper.on_message(PEERS[0], EvidencePiece(digest, 0, 7, b"rubbish"))
            await net.until(lambda: (PEERS[1], "forged") in net.notes)
        asked = [m for _, _, m in net.sent if isinstance(m, AskEvidence)]
        assert [m.digest for m in asked] == [b"1" * 32]

    run_to_rest(act)


def test_outside_nobodys_word_counts(tmp_path: Path) -> None:
    """A liar tells a joiner of a view of its own."""
    evidence, liar = left_behind("withholding"), b"l" * 32
    taught = View(b"r" * 32, 9, (Member(liar, 1),), liar, 4, b"c" * 32)
    node = SimpleNamespace(view=None, known_view=taught)
    daemon: Any = SimpleNamespace(
        link_peers=lambda: (),
        send=lambda peer, message: True,
        member_peers=lambda: Daemon.member_peers(daemon),
        expel=lambda peer, why: None,
        banned=lambda peers: None,
        spawn=lambda work: work.close(),
        note=lambda kind, text, **fields: None,
        stop=lambda error: None,
        feed=lambda event: None,
        node=node,
    )

    async def act() -> None:
        keeper = BanList(PEERS[0], tmp_path, daemon)
        keeper._believe(evidence, verify_evidence(evidence), first_hand=False)
        keeper.on_message(liar, KnownBans((evidence.digest,)))
        assert not keeper.is_out(evidence.culprit)
        node.view = taught
        keeper.installed(taught.peers, ())
        assert keeper.is_out(evidence.culprit)

    run_to_rest(act)


# ---------------------------------------------------------------- pairs


def contradiction(evidence: Evidence, accuser: Key, accused: bytes) -> Evidence:
    body, terms = Elimination(accused, "framed"), evidence.terms
    word = sign_statement(terms.digest, StatementPhase.ELIMINATE, b"", body, accuser.me, accuser)
    return Evidence("pair", accused, terms, (word,))


def site(tmp_path: Path) -> tuple[Net, Evidence, Key, list[bytes]]:
    """Five participants, all of whom took part; the liar's key, and the others."""
    options = replace(ALONE, seed=77)
    signers = sorted(keys(options), key=lambda key: key.me)
    world = World(options, keys(options))
    terms = world._terms(tuple(world.peers), 1)
    liar, *others = signers
    net = Net(tmp_path, tuple(key.me for key in signers))
    net.took_part.add(terms.digest)
    evidence = contradiction(Evidence("pair", others[0].me, terms, ()), liar, others[0].me)
    return net, evidence, liar, [key.me for key in others]


def test_most_of_the_others_have_to_say_the_same_of_a_pair(tmp_path: Path) -> None:
    async def act() -> None:
        net, evidence, liar, (accused, *others) = site(tmp_path)
        for name in (others[0], accused):
            net.keepers[name].convict(evidence)
        assert not net.out(accused)
        await net.until(lambda: len(net.out(accused)) == 5)
        assert net.out(liar.me) == {*net.names}
        await asyncio.gather(*net.tasks)
        later = Net(tmp_path, net.names)  # all are started again
        assert later.out(liar.me) == later.out(accused) == {*net.names}

    run_to_rest(act)


def test_who_contradicts_one_before_each_goes_alone(tmp_path: Path) -> None:
    async def act() -> None:
        net, evidence, liar, others = site(tmp_path)
        for place, name in enumerate(others):
            framed = contradiction(evidence, liar, others[place - 1])
            net.keepers[name].convict(framed)
        await net.until(lambda: net.out(liar.me) >= {*others})
        await asyncio.sleep(0.3)
        assert not any(net.out(name) for name in others)
        bans = [net.keepers[name].bans.of(liar.me) for name in others]
        assert {ban.finding.kind for ban in bans if ban is not None} == {"equivocation"}

    run_to_rest(act)


def test_who_took_no_part_believes_the_members_only(tmp_path: Path) -> None:
    """Terms are signed by nobody: liars can make up attempts with whom they like in them."""

    async def act() -> None:
        net, evidence, liar, (accused, *others) = site(tmp_path)
        net.took_part.clear()
        keeper = net.keepers[others[0]]
        keeper.bans.learn(evidence)
        for name in (liar.me, others[1]):
            keeper.on_message(name, KnownBans((evidence.digest,)))
        await asyncio.sleep(0.3)
        assert not keeper.is_out(accused)
        assert not [m for s, _, m in net.sent if s == others[0] and isinstance(m, KnownBans)]

    run_to_rest(act)
