"""What people are told while a state is being loaded: which, since when, and who has it."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from harness.transfers import Site, eventually, goal_of, run_of, scenario

from atoll.peer.membership.view import short


def test_the_round_the_time_and_the_donors_are_named(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        donor, learner = sites
        assert learner.sync.describe() == ""
        donor.donor.is_open = False  # it answers, and has nothing to give
        learner.sync.aim(goal_of(run, [donor]))
        await eventually(lambda: donor.host.link_peers())
        text = learner.sync.describe()
        assert re.fullmatch(r"the state of round 3 \(.+ m?s so far\), no donor answers", text)
        donor.donor.is_open = True
        seen: set[str] = set()

        def reached() -> bool:
            seen.add(learner.sync.describe())
            return bool(learner.reached)

        await eventually(reached)
        donors = f"from {short(donor.me)} at round 3"
        assert any(text.endswith(donors) for text in seen), seen
        assert learner.sync.describe() == ""

    run = run_of(3)
    scenario(tmp_path, [run, None], play)


def test_a_checkpoint_that_holds_the_state_is_named(tmp_path: Path) -> None:
    async def play(sites: list[Site]) -> None:
        donor, archive = sites
        archive.sync.may_finish = copied = asyncio.Event()
        archive.sync.aim(goal_of(run, [donor]))
        held = re.compile(
            r"the state of round 3 \([\d.]+ m?s so far\), all of it is here;"
            r" it has waited for this peer's checkpoint for [\d.]+ m?s"
        )
        await eventually(lambda: held.fullmatch(archive.sync.describe()))
        assert not archive.reached
        copied.set()
        await eventually(lambda: archive.reached)
        assert archive.sync.describe() == ""

    run = run_of(3)
    scenario(tmp_path, [run, None], play)
