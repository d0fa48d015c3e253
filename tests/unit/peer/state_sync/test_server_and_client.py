"""Donors and a learner over real TLS links, with a real state and a real log."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import socket
from pathlib import Path
from typing import Any

import pytest
from harness.plainstate import head_of
from harness.tinyrun import TinyRun
from harness.transfers import Site, eventually, goal_of, run_of, same, scenario

from atoll.collectives import encoded_layout, get_codec
from atoll.collectives.digests import strong_digest
from atoll.collectives.errors import ConnectError, StateError
from atoll.collectives.merkle import MerkleTree
from atoll.peer.membership.events import Goal
from atoll.peer.membership.view import Member
from atoll.peer.state_sync import machine, sources
from atoll.peer.state_sync import messages as msg
from atoll.peer.state_sync.server import (
    BUSY_BYTES,
    BUSY_SHARE,
    PATIENT_REDUCTIONS,
    PieceQueue,
    ServingPace,
)
from atoll.peer.state_sync.verification import entry_holds, entry_leaf, open_parts, part_head
from atoll.peer.streams.frames import DataHeader
from atoll.peer.streams.manager import FrameOutlet
from atoll.peer.streams.transfers import TransferKind


def test_a_state_comes_from_three_donors_of_which_one_dies_and_one_lies(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        good, dying, liar, third, learner = sites
        assert liar.state is not None
        liar.state.theta[:] += 1  # its leaves say otherwise
        learner.sync.aim(goal_of(truth, [good, dying, liar, third]))
        await eventually(lambda: dying.pieces > 8)
        await dying.die()
        await eventually(lambda: learner.reached)
        assert learner.reached == [(4, truth.chain)]
        assert same(learner.state, truth.state)
        assert (
            len([line for line in learner.logs if "is not asked for the state any more" in line])
            == 1
        )
        assert not learner.sync.is_working
        assert learner.rounds.chain_after(4) == truth.chain
        assert learner.rounds.digest_after(4) == truth.state.digest

    runs = [run_of(4) for _ in range(4)]
    truth = runs[0]
    scenario(tmp_path, [*runs, None], play)


# Of two, one may take over what the other is sending: a slow machine then receives it twice.
@pytest.mark.parametrize(("givers", "most"), [(1, 1.1), (2, 2.2)])
def test_a_laggard_is_brought_forward_by_entries(tmp_path: Path, givers: int, most: float) -> None:
    async def play(sites: list[Site]) -> None:
        *donors, laggard = sites
        before = laggard.state
        laggard.sync.aim(goal_of(truth, donors))
        await eventually(lambda: laggard.reached)
        assert laggard.state is before
        assert same(laggard.state, truth.state)
        entries = 2 * truth.state.layout(head_of(2)).total_bytes
        assert laggard.streams.received_bytes < most * entries

    givers_runs = [run_of(5) for _ in range(givers)]
    truth = givers_runs[0]
    scenario(tmp_path, [*givers_runs, run_of(3)], play)


@pytest.mark.parametrize("own", [4, None], ids=["laggard", "joiner"])
def test_collectives_in_the_log_cost_their_heads_only(tmp_path: Path, own: int | None) -> None:
    async def play(sites: list[Site]) -> None:
        donors, learner = sites[:1], sites[1]  # of two, one may take over what the other sends
        before_bytes = learner.streams.received_bytes
        learner.sync.aim(goal_of(truth, donors))
        await eventually(lambda: learner.reached)
        assert learner.reached == [(15, truth.chain)]
        assert same(learner.state, truth.state)
        if own is not None:  # one step of nine entries
            step = truth.state.layout(head_of(2)).total_bytes
            assert learner.streams.received_bytes - before_bytes < 1.1 * step
        truth.operate()
        learner.sync.aim(goal_of(truth, donors))
        await eventually(lambda: learner.reached[-1] == (16, truth.chain))
        assert same(learner.state, truth.state)

    truth = run_of(3)
    for _ in range(6):
        truth.operate()
    truth.commit()
    for _ in range(5):
        truth.operate()
    laggard = None
    if own is not None:
        laggard = run_of(3)
        for _ in range(own - 3):
            laggard.operate()
    scenario(tmp_path, [truth, laggard], play)


def test_who_follows_for_long_remembers_no_more_of_the_history(tmp_path: Path) -> None:
    """An archive catches up round by round, for as long as it runs."""

    async def play(sites: list[Site]) -> None:
        donor, archive = sites
        for _ in range(10):
            for _ in range(20):
                truth.operate()
            archive.sync.aim(goal_of(truth, [donor]))
            await eventually(lambda: archive.reached and archive.reached[-1][1] == truth.chain)
            heads = archive.sync._machine.assembly._history.heads
            assert heads is None or heads.last - heads.first < 20

    truth = run_of(3)
    scenario(tmp_path, [truth, None], play)


def test_a_piece_that_was_lost_with_its_stream_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other streams to the learner may live on: nothing else would tell it."""
    sent = itertools.count(1)
    send_parts = FrameOutlet.send_parts

    def fails_once(outlet: FrameOutlet, kind: int, chunk: int, *parts: memoryview) -> None:
        if next(sent) == 3:
            raise ConnectError("the stream has ended", fix="none")
        send_parts(outlet, kind, chunk, *parts)

    async def play(sites: list[Site]) -> None:
        donor, learner = sites
        learner.sync.aim(goal_of(run, [donor]))
        await eventually(lambda: learner.reached)
        assert same(learner.state, run.state)

    monkeypatch.setattr(FrameOutlet, "send_parts", fails_once)
    run = run_of(3)
    scenario(tmp_path, [run, None], play)
    assert next(sent) > 3


def test_a_doubtful_state_costs_only_what_is_wrong(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        donors, doubter = sites[:2], sites[2]
        assert doubter.state is not None
        doubter.state.momentum[400_000] += 1
        doubter.rounds.restart(3, b"w" * 32, truth.chain)
        doubter.sync.aim(goal_of(truth, donors, suspect=True))
        await eventually(lambda: doubter.reached)
        assert same(doubter.state, truth.state)
        assert doubter.streams.received_bytes < 3 * 8 * 11_008 + 100_000
        assert doubter.rounds.digest_after(3) == truth.state.digest, "it attests no wrong one"

    runs = [run_of(3), run_of(3), run_of(3)]
    truth = runs[0]
    scenario(tmp_path, list(runs), play)


@pytest.mark.parametrize("momentum_codec", ["float32", "dynamic8"])
def test_rounds_go_on_while_a_learner_loads(tmp_path: Path, momentum_codec: str) -> None:
    async def play(sites: list[Site]) -> None:
        donors, learner = sites[:3], sites[3]
        learner.sync.aim(goal_of(runs[0], donors))
        for i in range(6):
            await eventually(lambda i=i: learner.reached or sum(d.pieces for d in donors) > 8 * i)
            for run in runs:
                await asyncio.to_thread(run.commit)
            learner.sync.aim(goal_of(runs[0], donors))
        await eventually(lambda: learner.reached and learner.reached[-1][0] == 9)
        assert same(learner.state, runs[0].state)

    runs = [run_of(3, fragments=2, momentum_codec=momentum_codec) for _ in range(3)]
    scenario(tmp_path, [*runs, None], play)


def test_a_round_that_is_applied_meanwhile_ends_the_load_with_a_reason(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        donor, laggard = sites
        laggard.sync.aim(goal_of(ahead, [donor]))
        await eventually(lambda: donor.pieces)
        behind.commit()
        await eventually(lambda: laggard.failed or laggard.reached)
        if laggard.failed:
            laggard.sync.aim(goal_of(ahead, [donor]))
            await eventually(lambda: laggard.reached)
        assert same(laggard.state, ahead.state)

    ahead, behind = run_of(6), run_of(2)
    scenario(tmp_path, [ahead, behind], play)


def test_a_closed_donor_gives_nothing(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        donor, learner = sites
        donor.donor.is_open = False
        learner.sync.aim(goal_of(run, [donor]))
        await eventually(lambda: donor.host.link_peers())
        assert donor.donor._state_from(1) == msg.StateIs(-1)
        learner.sync.cancel()
        assert not learner.reached

    run = run_of(2)
    scenario(tmp_path, [run, None], play)


def test_a_donor_that_refuses_pieces_gives_them_when_it_may_again(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        donor, learner = sites
        refused: list[str] = []

        def refuses() -> str:
            refused.append("its bytes for today are spent")
            return refused[-1]

        donor.donor.refuses = refuses
        learner.sync.aim(goal_of(truth, [donor]))
        await eventually(lambda: refused)
        assert not learner.reached
        assert not donor.host.counts.sent["state"]
        donor.donor.refuses = lambda: ""
        await eventually(lambda: learner.reached)
        assert same(learner.state, truth.state)

    truth = run_of(2)
    scenario(tmp_path, [truth, None], play)


def test_what_is_lost_with_a_link_is_asked_again_although_the_link_is_back(tmp_path: Path) -> None:
    """A peer that renews drops all links and has them again within a moment: nobody sees them gone,
    and the answer to what was asked is never sent."""

    async def play(sites: list[Site]) -> None:
        donor, learner = sites
        asked: list[object] = []
        answer = donor.donor.on_message
        donor.donor.on_message = lambda peer, message: asked.append(message)  # type: ignore[method-assign]
        learner.sync.aim(goal_of(run, [donor]))
        await eventually(lambda: asked)
        donor.donor.on_message = answer  # type: ignore[method-assign]
        learner.sync.lost(donor.me)
        await eventually(lambda: learner.reached)

    run = run_of(2)
    scenario(tmp_path, [run, None], play)


@pytest.mark.parametrize("question", [msg.AskHeads, msg.AskBlob])
def test_whichever_question_was_lost_with_a_link_is_asked_again_at_once(
    tmp_path: Path, question: type
) -> None:
    async def play(sites: list[Site]) -> None:
        donor, learner = sites
        lost: list[object] = []
        answer = donor.donor.on_message

        def lose(peer: bytes, message: object) -> None:
            if isinstance(message, question) and not lost:
                lost.append(message)
            else:
                answer(peer, message)

        donor.donor.on_message = lose  # type: ignore[method-assign]
        learner.sync.aim(goal_of(run, [donor]))
        await eventually(lambda: lost or learner.reached)
        assert lost
        began_s = asyncio.get_running_loop().time()
        learner.sync.lost(donor.me)
        await eventually(lambda: learner.reached)
        assert asyncio.get_running_loop().time() - began_s < machine.ANSWER_S
        if question is msg.AskHeads:  # the way that it had begun
            assert learner.streams.received_bytes < 2.5 * run.state.layout(head_of(2)).total_bytes

    run = run_of(5)
    runs = [run, run_of(3) if question is msg.AskHeads else None]
    scenario(tmp_path, runs, play)


def test_frames_that_nobody_asked_for_are_dropped(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        donor, learner = sites
        await donor.host.dial(learner.address)
        outlet = FrameOutlet(
            await donor.streams.to(learner.me),
            DataHeader(0, 0, 0, 0, bytes(8), 0, 3, 77, 0),
        )
        await asyncio.to_thread(outlet.send, int(TransferKind.STATE), 0, memoryview(bytes(9000)))
        await eventually(lambda: learner.streams.received_bytes > 9000)
        learner.sync.aim(goal_of(run, [donor]))
        await eventually(lambda: learner.reached)
        assert same(learner.state, run.state)

    run = run_of(2)
    scenario(tmp_path, [run, None], play)


def test_why_a_donor_cannot_be_reached_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "DIAL_S", 0.0)

    async def play(sites: list[Site]) -> None:
        [learner] = sites
        dial, tries = learner.host.dial, []

        async def counted(address: str, **options: Any) -> Any:
            tries.append(address)
            return await dial(address, **options)

        monkeypatch.setattr(learner.host, "dial", counted)
        with socket.socket() as deaf:
            deaf.bind(("127.0.0.1", 0))  # and never listens
            absent = Member(b"a" * 32, 1, address=f"127.0.0.1:{deaf.getsockname()[1]}")
            learner.sync.aim(Goal(2, run.chain, absent.peer, (absent,)))
            await eventually(lambda: len(tries) > 4)
            learner.sync.cancel()
        assert len([line for line in learner.logs if "cannot get the state from" in line]) == 1

    run = run_of(2)
    scenario(tmp_path, [None], play)


def test_heads_come_in_answers_that_fit(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        donor = sites[0].donor
        whole = donor._heads(2, 5)
        assert [head.round for head in whole.heads] == [2, 3, 4, 5]
        assert whole.before == run.log.chain_after(1)
        assert donor._heads(7, 9).heads == ()
        answer = donor._state_from(1)
        assert (answer.round, answer.first, answer.log_first) == (5, 1, 2)
        assert answer.digests[-32:] == run.state.digest
        data_digest = hashlib.sha256(answer.blob_digest + answer.root).digest()
        assert data_digest == run.state.digest

    run = run_of(5)
    scenario(tmp_path, [run], play)


# ---------------------------------------------------------------- without a network


def test_an_init_entry_holds_only_with_its_blob() -> None:
    run = TinyRun(b"p" * 32)
    head, encoded = run.log.head(1), run.log.encoded(1)
    assert head is not None
    assert encoded is not None
    layout = encoded_layout(run.state.grid, get_codec("float32"))
    count = run.state.grid.count
    slices = [layout.slice(chunk) for chunk in range(count)]
    data_digests = [strong_digest(encoded[lo:hi]) for lo, hi in slices]
    tree = MerkleTree(
        [entry_leaf(head, i, data_digest) for i, data_digest in enumerate(data_digests)]
    )
    lo, hi = slices[1]
    payload = part_head(tree.proof(1), hi - lo, same=False) + encoded[lo:hi].tobytes()
    [part] = open_parts(memoryview(payload))
    assert entry_holds(head, 1, count, part)
    assert not entry_holds(head, 0, count, part)
    run.close()


def test_a_pace_gives_pieces_a_small_share_and_everything_when_idle() -> None:
    sent, now, moves = [0], [0.0], [True]

    def clock() -> float:
        now[0] += 20.0
        sent[0] += moves[0]  # the reduction sends: little, but it does
        return now[0]

    pace = ServingPace(lambda: sent[0], clock)
    pace.wait(10**9)  # no reduction: at once
    sent[0] += 10**9
    pace.busy(True)
    sent[0] += 1
    pace.wait(BUSY_BYTES)  # so much in every reduction
    with pytest.raises(StateError, match="needs its link"):
        pace.wait(1000)
    sent[0] += int((BUSY_BYTES + 1000) / BUSY_SHARE)
    pace.wait(1000)
    with pytest.raises(StateError, match="needs its link"):
        pace.wait(1000)
    moves[0] = False  # it waits for others: perhaps for the very peer that wants the pieces
    pace.wait(1000)
    moves[0] = True
    pace.busy(False)
    pace.wait(1000)
    pace.close()
    with pytest.raises(StateError, match="closing"):
        pace.wait(1)


def test_who_does_not_keep_up_gets_more_of_the_link() -> None:
    """Else it would never be back where rounds take most of the time."""
    sent = [0]
    pace = ServingPace(lambda: sent[0], itertools.count(step=0.001).__next__)

    def reduction(wanted: bool) -> float:
        """Return the share of its bytes that pieces get."""
        began, pieces = sent[0], 0
        pace.busy(True)
        for _ in range(2000):
            sent[0] += BUSY_BYTES // 10
            if wanted and pace._takes(BUSY_BYTES // 20):
                pieces += BUSY_BYTES // 20
        if wanted:
            pace.wait(0)
        pace.busy(False)
        return pieces / (sent[0] - began)

    shares = [reduction(wanted=True) for _ in range(PATIENT_REDUCTIONS + 5)]
    patient, more = shares[: PATIENT_REDUCTIONS + 1], shares[PATIENT_REDUCTIONS + 1 :]
    assert patient == pytest.approx([BUSY_SHARE] * len(patient), abs=0.01)
    assert more == pytest.approx([0.1, 0.2, 0.4, 0.5], abs=0.01)  # half of it is all that is asked
    reduction(wanted=False)
    assert reduction(wanted=True) == pytest.approx(BUSY_SHARE, abs=0.01)


def test_a_queue_has_a_limit_and_forgets_what_is_dropped() -> None:
    queue = PieceQueue()
    assert all(queue.add(msg.FetchPiece(n, 0)) for n in range(1, msg.ASKED_MAX + 1))
    assert not queue.add(msg.FetchPiece(99, 0))
    queue.drop([1, 2, 55])
    first = queue.next()
    assert first is not None
    assert first.ticket == 3
    assert len(queue.rest()) == msg.ASKED_MAX - 3
    assert queue.next() is None
