"""Daemons tell each other of bans: evidence goes around, is checked, and is kept."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness.convicts import left_behind, suspects
from harness.loops import run_to_rest

from atoll.collectives.errors import AtollError, BannedError
from atoll.peer.membership.bans import BansBelieved
from atoll.peer.membership.view import Banned
from atoll.peer.net.admission_policy import PeersMet
from atoll.peer.net.wire import encode
from atoll.peer.verify import ban_list, ban_record
from atoll.peer.verify import evidence as evidence_module
from atoll.peer.verify.ban_list import AskEvidence, BanList, EvidencePiece, KnownBans
from atoll.peer.verify.evidence import verify_evidence


class Site:
    """One daemon's keeper; what it sends arrives at once, at those that are linked."""

    def __init__(self, name: bytes, folder: Path, net: dict[bytes, Site]) -> None:
        self.name, self.net = name, net
        self.notes: list[str] = []
        self.dropped: list[bytes] = []
        self.stopped: list[AtollError] = []
        self.failed: list[bytes] = []
        self.sent: list[object] = []
        self.believed: list[BansBelieved] = []
        self.tasks: list[asyncio.Task[Any]] = []
        net[name] = self
        met = suspects()  # members of an earlier view
        self.keeper = BanList(
            name,
            folder / name.hex()[:4],
            SimpleNamespace(
                send=self._send,
                link_peers=lambda: [peer for peer in net if peer != name],
                member_peers=lambda: list(net),
                expel=lambda peer, why: self.dropped.append(peer),
                note=lambda kind, text, **fields: self.notes.append(f"{kind}: {text}"),
                stop=self.stopped.append,
                spawn=self._spawn,
                banned=self.failed.extend,
                took_part=lambda terms: False,
                feed=self.believed.append,
            ),
        )
        self.keeper.installed(met, ())

    def _send(self, peer: bytes, message: object) -> bool:
        self.sent.append(message)
        site = self.net[peer]
        asyncio.get_running_loop().call_soon(site.keeper.on_message, self.name, message)
        return True

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(work))


async def settle(net: dict[bytes, Site]) -> None:
    for _ in range(10):
        for _ in range(50):
            await asyncio.sleep(0)
        await asyncio.gather(*(task for site in net.values() for task in site.tasks))


def sites(folder: Path, names: str = "abc") -> dict[bytes, Site]:
    net: dict[bytes, Site] = {}
    for name in names:
        Site(name.encode() * 32, folder, net)
    for site in net.values():
        (folder / site.name.hex()[:4]).parent.mkdir(exist_ok=True)
    return net


def test_what_one_has_found_all_know_and_keep(tmp_path: Path) -> None:
    evidence = left_behind("dense shift")

    async def main() -> None:
        net = sites(tmp_path)
        a, *others = net.values()
        a.keeper.convict(evidence)
        await settle(net)
        for site in net.values():
            assert site.keeper.is_out(evidence.culprit)
            assert site.failed == [evidence.culprit]
            with pytest.raises(BannedError, match="signed a wrong result"):
                site.keeper.check(evidence.culprit)
            (file,) = (tmp_path / site.name.hex()[:4]).iterdir()
            assert file.read_bytes() == evidence.encoded
        for site in others:
            assert not any(note.startswith("forged") for note in site.notes)
        again = Site(a.name, tmp_path, {})  # another life of it
        assert again.keeper.is_out(evidence.culprit)

    run_to_rest(main)


def test_the_banned_hears_why_and_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ban_list, "LAST_WORDS_S", 0.0)
    evidence = left_behind("draw abort")

    async def main() -> None:
        net = sites(tmp_path, "ab")
        banned = Site(evidence.culprit, tmp_path, net)
        a = net[b"a" * 32]
        a.keeper.convict(evidence)
        await settle(net)
        (error,) = banned.stopped
        assert isinstance(error, BannedError)
        assert "another number" in error.what

    run_to_rest(main)


def test_a_newcomer_asks_for_what_it_lacks_once(tmp_path: Path) -> None:
    evidence = left_behind("dense shift")

    async def main() -> None:
        net = sites(tmp_path)
        for site in list(net.values())[:2]:
            site.keeper.convict(evidence)
        await settle(net)
        late = Site(b"z" * 32, tmp_path, net)
        for site in list(net.values())[:3]:
            site.keeper.linked(late.name)
        await settle(net)
        assert late.keeper.is_out(evidence.culprit)
        asked = [message for message in late.sent if isinstance(message, AskEvidence)]
        assert len(asked) == 1

    run_to_rest(main)


def test_a_newcomer_counts_who_holds_another_file_against_the_same_peer(tmp_path: Path) -> None:
    one = left_behind("withholding")
    other = replace(one, said=one.said[::-1])

    async def main() -> None:
        net = sites(tmp_path)
        for site, evidence in zip(net.values(), (one, other, one), strict=True):
            site.keeper.bans.learn(evidence, first_hand=True)
        late = Site(b"z" * 32, tmp_path, net)
        for site in list(net.values())[:3]:
            site.keeper.linked(late.name)
        await settle(net)
        assert late.keeper.is_out(one.culprit)
        assert late.keeper.bans.digests == (one.digest,)

    run_to_rest(main)


def test_all_keep_the_file_that_the_view_names(tmp_path: Path) -> None:
    one = left_behind("withholding")
    other = replace(one, said=one.said[::-1])

    async def main() -> None:
        net = sites(tmp_path)
        for site, evidence in zip(net.values(), (one, other, one), strict=True):
            site.keeper._believe(evidence, verify_evidence(evidence), first_hand=True)
        await settle(net)
        late = Site(b"z" * 32, tmp_path, net)
        for site in net.values():
            for peer in net.keys() - {site.name}:
                site.keeper.linked(peer)
            site.keeper.installed(net, (Banned(one.culprit, other.digest),))
        await settle(net)
        for site in net.values():
            assert site.keeper.bans.digests == (other.digest,)
            (file,) = (tmp_path / site.name.hex()[:4]).iterdir()
            assert file.read_bytes() == other.encoded
            (row,) = site.keeper.bans.rows()
            assert row["agreed"]
            (ban,) = site.believed[-1].bans
            assert (ban.peer, ban.evidence) == (one.culprit, other.digest)
            assert ban.believers == net.keys() - {site.name}
        assert late.failed == [one.culprit]

    run_to_rest(main)


def test_who_is_named_is_out_before_the_file_is_here(tmp_path: Path) -> None:
    async def main() -> None:
        net = sites(tmp_path, "ab")
        a = net[b"a" * 32]
        a.keeper.installed(net, (Banned(b"x" * 32, b"d" * 32),))
        await settle(net)
        with pytest.raises(BannedError, match="have agreed"):
            a.keeper.check(b"x" * 32)
        assert "not here yet" in str(a.keeper.bans.rows())
        assert not a.believed  # nothing that it could show to others

    run_to_rest(main)


def test_a_word_about_a_pair_is_no_belief(tmp_path: Path) -> None:
    evidence = left_behind("dense shift")

    async def main() -> None:
        net = sites(tmp_path)
        a, b, c = net.values()
        a.keeper.convict(evidence)
        a.keeper.on_message(b.name, KnownBans((), (evidence.digest,)))
        await asyncio.sleep(0)
        (ban,) = a.believed[-1].bans
        assert ban.believers == frozenset()
        await settle(net)
        (ban,) = a.believed[-1].bans
        assert ban.believers == {b.name, c.name}
        a.keeper.unlinked(b.name)
        a.keeper.installed(net, ())
        await settle(net)
        assert a.believed[-1].bans[0].believers == {c.name}

    run_to_rest(main)


def test_evidence_about_strangers_waits_for_most_members_or_a_view(tmp_path: Path) -> None:
    """Whoever makes keys up can prove what they have done: thousands of such bans filled the room
    for real ones."""
    evidence = left_behind("equivocation")

    async def main() -> None:
        net = sites(tmp_path, "abcd")
        a, *others = net.values()
        a.keeper.convict(evidence)
        for site in others:
            site.keeper._met = PeersMet()
            site.keeper.installed(net, ())
        await settle(net)
        assert not any(site.keeper.is_out(evidence.culprit) for site in others)
        others[0].keeper.convict(evidence)
        await settle(net)
        assert not others[1].keeper.is_out(evidence.culprit)
        others[1].keeper.installed(net, (Banned(evidence.culprit, evidence.digest),))
        await settle(net)
        assert others[1].failed == [evidence.culprit]
        await settle(net)
        assert others[2].failed == [evidence.culprit]  # three of four say it now

    run_to_rest(main)


def test_who_was_a_stranger_and_becomes_a_member_is_judged_by_the_evidence(tmp_path: Path) -> None:
    evidence = left_behind("equivocation")

    async def main() -> None:
        net = sites(tmp_path, "abc")
        a, b, c = net.values()
        for site in (b, c):
            site.keeper._met = PeersMet()
            site.keeper.installed(net, ())
        a.keeper.convict(evidence)
        await settle(net)
        assert not b.keeper.is_out(evidence.culprit)
        b.keeper.installed((*net, evidence.culprit), ())
        await settle(net)
        assert b.failed == [evidence.culprit]

    run_to_rest(main)


def test_all_files_that_a_view_names_are_kept_and_told(tmp_path: Path) -> None:
    both = [left_behind(lie) for lie in ("equivocation", "other steps")]

    async def main() -> None:
        net = sites(tmp_path, "ab")
        a, _ = net.values()
        a.keeper._met = PeersMet()
        for evidence in both:
            a.keeper._believe(evidence, verify_evidence(evidence), first_hand=False)
        assert len(a.keeper.bans) == 0
        a.keeper.installed(net, [Banned(each.culprit, each.digest) for each in both])
        await settle(net)
        kept = {file.name for file in (tmp_path / a.name.hex()[:4]).iterdir()}
        assert kept == {f"{each.digest.hex()}.evidence" for each in both}
        told = {d for each in a.sent if isinstance(each, KnownBans) for d in each.digests}
        assert told == {each.digest for each in both}

    run_to_rest(main)


def test_heaps_of_digests_hide_nothing(tmp_path: Path) -> None:
    """Four peers name thousands of files that nobody has."""
    evidence = left_behind("dense shift")

    async def main() -> None:
        net = sites(tmp_path, "abz")
        a, _, late = net.values()
        liars = [bytes([number]) * 32 for number in range(4)]
        for liar in liars:
            Site(liar, tmp_path, net)
        a.keeper.bans.learn(evidence)
        late.keeper.on_message(a.name, KnownBans((evidence.digest,)))
        for liar in liars:
            for turn in range(3):
                heap = tuple(
                    hashlib.sha256(liar + bytes([turn, n % 256, n // 256])).digest()
                    for n in range(4000)
                )
                late.keeper.on_message(liar, KnownBans(heap))
        await settle(net)
        assert late.keeper.is_out(evidence.culprit)

    run_to_rest(main)


def test_whoever_dies_in_the_middle_is_not_waited_for(tmp_path: Path) -> None:
    evidence = left_behind("dense shift")

    async def main() -> None:
        net = sites(tmp_path, "abz")
        a, b, late = net.values()
        late.keeper.on_message(a.name, KnownBans((evidence.digest,)))
        late.keeper.on_message(b.name, KnownBans((evidence.digest,)))
        b.keeper.bans.learn(evidence)
        await settle(net)  # a has nothing to answer with
        assert not late.keeper.is_out(evidence.culprit)
        late.keeper.unlinked(a.name)
        await settle(net)
        assert late.keeper.is_out(evidence.culprit)

    run_to_rest(main)


def test_lies_about_evidence_are_named_and_forgotten(tmp_path: Path) -> None:
    evidence = left_behind("dense shift")
    nothing = replace(evidence, parts=evidence.parts[:1])

    async def main() -> None:
        net = sites(tmp_path, "az")
        a, late = net.values()
        for digest, data in (
            (evidence.digest, nothing.encoded),  # something else
            (nothing.digest, nothing.encoded),  # no evidence
        ):
            late.keeper.on_message(a.name, KnownBans((digest,)))
            piece = ban_list.PIECE_BYTES
            for offset in range(0, len(data), piece):
                part = data[offset : offset + piece]
                late.keeper.on_message(a.name, EvidencePiece(digest, offset, len(data), part))
            await settle(net)
            late.keeper.unlinked(a.name)  # else it is not asked again
        assert len([note for note in late.notes if note.startswith("forged")]) == 2
        assert len(late.keeper.bans) == 0

    run_to_rest(main)


def test_pieces_that_nobody_asked_for_are_dropped(tmp_path: Path) -> None:
    async def main() -> None:
        net = sites(tmp_path, "az")
        late = net[b"z" * 32]
        for offset in range(0, 1 << 20, ban_list.PIECE_BYTES):
            piece = EvidencePiece(b"d" * 32, offset, 1 << 20, bytes(ban_list.PIECE_BYTES))
            late.keeper.on_message(b"a" * 32, piece)
        assert not late.keeper._arriving
        for number in range(20):
            late.keeper.on_message(b"a" * 32, KnownBans((bytes([number]) * 32,)))
        assert len(late.keeper._arriving) == 1  # of each

    run_to_rest(main)


def test_asking_again_and_again_is_answered_so_many_times(tmp_path: Path) -> None:
    evidence = left_behind("draw abort")

    async def main() -> None:
        net = sites(tmp_path, "az")
        a = net[b"a" * 32]
        a.keeper.convict(evidence)
        for _ in range(ban_list.ASKED_MAX + 20):
            a.keeper.on_message(b"z" * 32, AskEvidence(evidence.digest))
        pieces = [message for message in a.sent if isinstance(message, EvidencePiece)]
        assert len(pieces) == ban_list.ASKED_MAX
        await settle(net)

    run_to_rest(main)


def test_what_is_in_the_home_alone_is_given_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ban_record, "BELIEVED_BYTES_MAX", 0)
    monkeypatch.setattr(ban_list, "PIECE_BYTES", 1000)
    evidence = left_behind("dense shift")

    async def main() -> None:
        net = sites(tmp_path, "a")
        a = net[b"a" * 32]
        a.keeper.convict(evidence)
        await settle(net)
        for late in (b"y" * 32, b"z" * 32):
            assert a.keeper.bans.evidence(evidence.digest) is None
            Site(late, tmp_path, net)
            a.keeper.linked(late)
            await settle(net)
            assert net.pop(late).keeper.is_out(evidence.culprit)
            a = Site(a.name, tmp_path, net)  # another life of it
        Site(b"x" * 32, tmp_path, net)
        (tmp_path / a.name.hex()[:4] / f"{evidence.digest.hex()}.evidence").unlink()
        a.keeper.on_message(b"x" * 32, AskEvidence(evidence.digest))
        assert a.sent == [], "it has nothing to give"

    run_to_rest(main)


def test_evidence_is_encoded_once_and_what_peers_say_tells_nobody_what_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [replace(left_behind(lie)) for lie in ("dense shift", "other steps")]
    encoded: list[object] = []

    def counted(evidence: object) -> bytes:
        encoded.append(evidence)
        return encode(evidence)

    monkeypatch.setattr(evidence_module, "encode", counted)

    async def main() -> None:
        net = sites(tmp_path, "ab")
        a = net[b"a" * 32]
        for evidence in found:
            a.keeper.convict(evidence)
        await settle(net)
        told = len(a.believed)
        assert len(a.believed[-1].bans) == 2
        for number in range(5):
            a.keeper.on_message(b"b" * 32, KnownBans((bytes([number]) * 32,)))
            await asyncio.sleep(0)
        assert len(a.believed) == told
        await settle(net)
        for evidence in found:
            assert sum(each is evidence for each in encoded) == 1

    run_to_rest(main)


def test_a_damaged_file_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / (b"a" * 32).hex()[:4]
    folder.mkdir()
    (folder / "x.evidence").write_bytes(b"atoll evidence 1\nrubbish")

    async def main() -> None:
        site = Site(b"a" * 32, tmp_path, {})
        assert any("is left alone" in note for note in site.notes)
        assert len(site.keeper.bans) == 0

    run_to_rest(main)
