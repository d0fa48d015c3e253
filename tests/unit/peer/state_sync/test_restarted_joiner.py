"""A joiner that is killed while the state comes, and its next life."""

from __future__ import annotations

import hashlib
from pathlib import Path

from harness.plainstate import head_of
from harness.transfers import Site, eventually, goal_of, run_of, same, scenario

from atoll.collectives.digests import strong_digest
from atoll.peer.state_sync.chunk_cache import ChunkCache


def cache_of(site: Site) -> Path:
    return site.home / "received"


def test_what_had_come_when_a_joiner_was_killed_need_not_come_again(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        donors, first, second = sites[:2], *sites[2:]
        first.sync.aim(goal_of(runs[0], donors))
        await eventually(lambda: donors[0].pieces + donors[1].pieces > 40)
        await first.close()  # its memory is gone with it
        kept_bytes = cache_of(first).stat().st_size
        assert kept_bytes > 20 * 88_000
        cache_of(first).rename(cache_of(second))
        for run in runs:
            run.commit()
        # From one: of two, one may take over what the other is sending, and it comes twice.
        second.sync.aim(goal_of(runs[0], donors[:1]))
        await eventually(lambda: second.reached)
        assert same(second.state, runs[0].state)
        entry_bytes = runs[0].state.layout(head_of(2)).total_bytes
        assert second.streams.received_bytes < 64 * 88_064 - kept_bytes + entry_bytes + 200_000
        assert any("are here from before the restart" in line for line in second.logs)
        await eventually(lambda: not cache_of(second).exists())

    runs = [run_of(4), run_of(4)]
    scenario(tmp_path, [*runs, None, None], play)


def test_kept_chunks_of_another_history_cost_no_more_than_themselves(tmp_path: Path) -> None:
    """... and nobody is blamed for them."""

    async def play(sites: list[Site]) -> None:
        donor, learner = sites
        cache = ChunkCache(cache_of(learner), learner.logs.append)
        assert donor.state is not None
        cache.begin(hashlib.sha256(donor.state.blob).digest(), 1 << 20)
        data = bytes(donor.state.chunk_bytes(3))
        cache.add(3, 4, b"d" * 32, strong_digest(data), memoryview(data))
        cache.close()
        cache.settle()
        learner.sync.aim(goal_of(run, [donor]))
        await eventually(lambda: learner.reached)
        assert same(learner.state, run.state)
        assert not [line for line in learner.logs if "is not asked for the state any more" in line]

    run = run_of(4)
    scenario(tmp_path, [run, None], play)
