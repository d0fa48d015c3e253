"""What is counted as sent again: nothing in a calm round, little after a death at half of one."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from harness.plainstate import head_of
from harness.runner_sites import PATIENCE_S, Site, begin_of, eventually, prepare, scenario

from atoll.collectives.engine.parts import Contribution
from atoll.peer.membership import events as ev
from atoll.peer.membership.kept_chunks import Kept, pack_kept
from atoll.peer.membership.messages import STEP, Begin, EntryOrigin
from atoll.peer.rounds.attempt_run import AttemptRun, SentPayload

CHAIN = b"c" * 32
NOT_FINAL = bytes(32)
PEERS = 8
ELEMENTS = 64 * 4096  # 64 of the smallest chunks, eight of each owner
STILL_S = 0.5  # so long without a byte: what can be sent has been sent


def again_bytes(sites: list[Site]) -> int:
    return sum(site.executor.attempts.again_bytes for site in sites)


def sent_bytes(sites: list[Site], number: int) -> int:
    """Payload of the attempt at hand."""
    runs = [site.executor.attempts.get(number) for site in sites]
    return sum(run.sent.total_bytes for run in runs if run is not None)


async def come_to_rest(sites: list[Site], number: int) -> None:
    """Whoever is not held up by a peer that hangs has sent all that it can."""
    before = -1
    async with asyncio.timeout(PATIENCE_S):
        while before != (now := sent_bytes(sites, number)):
            before = now
            await asyncio.sleep(STILL_S)


class Hang(NamedTuple):
    begun: threading.Event
    released: threading.Event


def hang_at_half(victim: Site, monkeypatch: pytest.MonkeyPatch) -> Hang:
    """Half of the victim's own parts leave it, and nothing after them until it is released."""
    hang, lock = Hang(threading.Event(), threading.Event()), threading.Lock()
    left = victim.state.grid.count // 2
    contribution = AttemptRun._contribution

    def limited(run: AttemptRun) -> Contribution | None:
        whole = contribution(run)
        if run._peer is not victim.executor:
            return whole
        assert whole is not None

        def fill(chunk: int, out: np.ndarray) -> None:
            nonlocal left
            with lock:
                left -= 1
                waits = left < 0
            if waits:
                hang.begun.set()
                hang.released.wait(PATIENCE_S)
            whole.source(chunk, out)

        return Contribution(fill)

    monkeypatch.setattr(AttemptRun, "_contribution", limited)
    return hang


async def broken_attempt(
    sites: list[Site], victim: Site, hang: Hang
) -> tuple[dict[int, Kept], Begin]:
    """(what a coordinator would keep of it, its opening)"""
    begin = begin_of(sites, 1, 3)
    survivors = [site for site in sites if site is not victim]
    for site in sites:
        site.carry_out(ev.Reduce(begin))
    await eventually(hang.begun.is_set)
    await come_to_rest(sites, 3)
    await victim.close()
    for site in survivors:
        site.carry_out(ev.ListFinal(3, 1))
    await eventually(lambda: all(site.finals(1) is not None for site in survivors))
    holders: dict[int, tuple[bytes, list[int]]] = {}
    for place, site in enumerate(sites):
        listed = (site.finals(1) or b"") if site is not victim else b""
        for chunk in range(len(listed) // 32):
            digest = listed[32 * chunk : 32 * chunk + 32]
            if digest != NOT_FINAL:
                holders.setdefault(chunk, (digest, []))[1].append(place)
    kept = {chunk: Kept(chunk, 1, d, tuple(places)) for chunk, (d, places) in holders.items()}
    return kept, begin


def test_one_of_eight_dies_at_half_of_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play(sites: list[Site]) -> None:
        prepare(sites, ELEMENTS)
        calm = begin_of(sites, 1)
        for site in sites:
            site.carry_out(ev.Reduce(calm))
        await eventually(lambda: all(site.reduced(1, 2) for site in sites))
        whole_bytes = sent_bytes(sites, 2)
        encoded_bytes = sites[0].state.layout(head_of(2)).total_bytes
        assert whole_bytes == 2 * (PEERS - 1) * encoded_bytes
        for site in sites:
            site.carry_out(ev.Apply(calm, CHAIN))
        await eventually(lambda: all(site.applied(2) for site in sites))
        assert again_bytes(sites) == 0
        assert not [line for site in sites for line in site.logs if "sent again" in line]

        victim = sites[3]
        hang = hang_at_half(victim, monkeypatch)
        kept, broken = await broken_attempt(sites, victim, hang)
        survivors = [site for site in sites if site is not victim]
        chunks = sites[0].state.grid.count
        assert chunks / 4 < len(kept) < 3 / 4 * chunks, "it was not at half of the round"
        again = Begin(
            broken.lineage,
            broken.view,
            3,
            2,
            STEP,
            tuple(site.me for site in survivors),
            (1.0,) * len(survivors),
            past=(EntryOrigin(broken.participants, broken.weights),),
            kept=pack_kept(kept.values()),
        )
        for site in survivors:
            site.carry_out(ev.Reduce(again))
        await eventually(lambda: all(site.reduced(2, 3) for site in survivors))
        for site in survivors:
            site.carry_out(ev.Apply(again, CHAIN))
        await eventually(lambda: all(site.applied(3) for site in survivors))
        hang.released.set()
        assert 0 < again_bytes(survivors) < 0.2 * whole_bytes, again_bytes(survivors) / whole_bytes
        lines = [line for site in survivors for line in site.logs if "sent again" in line]
        assert len(lines) == len(survivors)
        assert all(line.startswith("round 3 took 2 attempts here: ") for line in lines)

    scenario(tmp_path, "abcdefgh"[:PEERS], play)


def test_only_what_is_reduced_again_was_sent_in_vain() -> None:
    first = SentPayload()
    for chunk in (0, 0, 1, 2):
        first.add(chunk, 10)
    second = SentPayload()
    assert second.carry(first, {0}) == 20
    assert second.total_bytes == 20  # kept so far, and lost if the second breaks and nobody has it
    second.add(1, 10)
    assert SentPayload().carry(second, ()) == 30
