"""Go on with what the home of a peer has kept, and with what its files lack."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from harness.runner_sites import (
    LINEAGE,
    Site,
    begin_of,
    eventually,
    prepare,
    run_blob,
    scenario,
)

from atoll.collectives.digests import strong_digest
from atoll.peer.durable.disk import RealDisk
from atoll.peer.durable.ledger_format import LedgerRecord
from atoll.peer.durable.round_files import RoundFiles
from atoll.peer.membership import events as ev
from atoll.peer.membership.durable_records import (
    IncarnationRecord,
    ReadyRecord,
    Record,
    Recovered,
    ViewRecord,
    recovered,
)
from atoll.peer.membership.messages import INIT, Begin, Run
from atoll.peer.membership.view import Ballot, Member, View, genesis_chain
from atoll.peer.rounds.attempt_plan import shape_of
from atoll.peer.rounds.durability import save_result
from atoll.peer.rounds.entries import entry_root
from atoll.peer.rounds.recovery import HomeContents, HomeReader, name_of, packed

ELEMENTS = 70_000
GENESIS, CHAIN = genesis_chain(LINEAGE), b"c" * 32


def founding_view(sites: list[Site]) -> View:
    members = tuple(Member(site.me, 1) for site in sites)
    return View(LINEAGE, 1, members, members[0].peer, 0, GENESIS)


def ready_for_first(sites: list[Site], vector: np.ndarray) -> ReadyRecord:
    """Return the READY of the first parameters, which the first of ``sites`` gives."""
    peers, weights = tuple(site.me for site in sites), (1.0, *[0.0] * (len(sites) - 1))
    begin = Begin(LINEAGE, 1, 1, 1, INIT, peers, weights, run_blob(ELEMENTS))
    _, grid = shape_of(begin, None)
    bounds = [grid.bounds(chunk) for chunk in range(grid.count)]
    digests = [strong_digest(vector[lo:hi].tobytes()) for lo, hi in bounds]
    root = entry_root(begin.origins, b"", digests, begin.blob)
    return ReadyRecord(LINEAGE, 1, Run(1, 1, 0, root), GENESIS, begin)


def reader_of(records: list[Record], files: RoundFiles) -> HomeReader:
    entries = [LedgerRecord(i + 1, *packed(record)) for i, record in enumerate(records)]
    opened = SimpleNamespace(records=entries, position=len(entries))
    return HomeReader(opened, files, None, "run", b"secret", holds_state=True)  # type: ignore[arg-type]


def home_read(site: Site) -> ev.HomeRead | None:
    return next((event for event in site.fed if isinstance(event, ev.HomeRead)), None)


def begins_with_damage(sites: list[Site]) -> bytes:
    """Let the first site read a home whose state is whole, and R of round 2 is damaged.

    Return the digest of that state.
    """
    prepare(sites, ELEMENTS)
    state, sites[0].executor.state = sites[0].executor.state, None
    assert state is not None
    found = HomeContents(
        remembered(2), state=state, checkpoint=(1, CHAIN), checkpoint_digest=state.digest
    )
    reader = SimpleNamespace(recovered=remembered(), read=lambda: found)
    sites[0].executor.load(reader)  # type: ignore[arg-type]
    return state.digest


def remembered(*missing: int) -> Recovered:
    """Return what a ledger says of a state after round 1; ``missing``: results that are damaged."""
    at, lacks = (1, CHAIN), frozenset(missing)
    return Recovered(5, 1, None, None, Ballot(), False, None, at, 0, at, (), lacks)


async def reduce_and_apply(sites: list[Site], number: int, attempt: int = 1) -> None:
    """Do a round on all of them."""
    begin = begin_of(sites, attempt, number)
    for site in sites:
        site.carry_out(ev.Reduce(begin))
    await eventually(lambda: all(site.reduced(attempt, number) for site in sites))
    for site in sites:
        site.carry_out(ev.Apply(begin, bytes([number]) * 32))
    await eventually(lambda: all(site.applied(number) for site in sites))


@pytest.mark.parametrize("is_damaged", [False, True], ids=["whole", "damaged"])
def test_the_first_parameters_are_held_over_a_restart(is_damaged: bool, tmp_path: Path) -> None:
    """All may lose power between their READY and the first commit."""

    async def play(sites: list[Site]) -> None:
        vector = np.random.default_rng(1).standard_normal(ELEMENTS).astype(np.float32)
        ready, files = ready_for_first(sites, vector), RoundFiles(RealDisk(), tmp_path / "rounds")
        name = name_of(ready.place)
        save_result(files, name, vector.view(np.uint8))
        if is_damaged:
            (tmp_path / "rounds" / name.file).write_bytes(bytes(10))
        records = [IncarnationRecord(1), ViewRecord(founding_view(sites)), ready]
        reader, site = reader_of(records, files), sites[1]
        assert reader.recovered.has_files
        site.executor.load(reader)
        await eventually(lambda: home_read(site))
        found = home_read(site)
        assert found is not None
        if is_damaged:
            assert (found.is_whole, found.missing) == (False, {1})
            return
        assert (found.round, found.is_whole) == (0, True)
        (known,) = reader.recovered.ready
        assert known.begin is not None
        site.carry_out(ev.Apply(known.begin, known.after, known.run.root))
        await eventually(lambda: site.applied(1))
        np.testing.assert_array_equal(site.state.theta, vector)

    scenario(tmp_path, "ab", play)


def test_an_order_that_counts_on_a_damaged_result_is_void(tmp_path: Path) -> None:
    """A view may be installed while the home is read: until then the ledger is believed."""

    async def play(sites: list[Site]) -> None:
        begins_with_damage(sites)
        sites[0].carry_out(ev.Apply(begin_of(sites, 1, 2), b"2" * 32))
        await eventually(lambda: home_read(sites[0]))
        await reduce_and_apply(sites, 2, attempt=2)
        assert sites[0].state.digest == sites[1].state.digest

    scenario(tmp_path, "ab", play)


def test_nobody_that_remembers_no_more_than_a_view_has_files() -> None:
    view = View(LINEAGE, 1, (Member(b"p" * 32, 1),), b"p" * 32, 0, GENESIS)
    assert not recovered([IncarnationRecord(1), ViewRecord(view)], 2).has_files


def test_a_damaged_result_of_a_round_to_come_stops_no_later_round(tmp_path: Path) -> None:
    """The state is whole: that round is reduced again, and applied."""

    async def play(sites: list[Site]) -> None:
        digest = begins_with_damage(sites)
        await eventually(lambda: home_read(sites[0]))
        assert home_read(sites[0]) == ev.HomeRead(1, CHAIN, digest, False, frozenset({2}))
        for number in (2, 3):
            await reduce_and_apply(sites, number)
        assert sites[0].state.digest == sites[1].state.digest

    scenario(tmp_path, "ab", play)
