"""Protocol faults planted on purpose: a simulator that does not find them would find nothing.

Each is a change of a few words in the source of a decision module, made while it is imported, in a
process of its own. A fault counts as caught when a seed fails or its directed test does. A change
that no longer fits its source is an error: then the mutant must be written anew.

    python -m simulation.mutants NAME A..B     # seeds with that fault planted
    python -m simulation.mutants NAME --test   # its directed test
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType

__all__ = ["CHEAP", "CHEAP_SEEDS", "MUTANTS", "Mutant", "first_failure", "gate", "plant"]

SEEDS_MAX = 5_000
CHEAP_SEEDS = 200
STEPS = (25, 100, 200, 500, 1_000, 2_000, SEEDS_MAX)
TESTS = Path(__file__).parents[1]
UNIT = "unit/peer/group/test_"


@dataclass(frozen=True)
class Mutant:
    name: str
    module: str  # of atoll.peer.group
    before: str
    after: str
    test: str = ""  # file::name below tests/, if seeds are not to be relied on


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "commit before quorum",
        "attempts",
        "        synced = [p for p in self.view.replicas if p in alive and p not in unsynced]\n",
        "        return root\n        synced: list[bytes] = []\n",
    ),
    Mutant(
        "commit with one copy",
        "attempts",
        "< min(2, len(able)):",
        "< 1:",
        test="simulation/test_directed.py::test_a_round_is_not_committed_with_one_copy",
    ),
    Mutant(
        "minimum base",
        "election",
        "= max((report.round, report.chain) for",
        "= min((report.round, report.chain) for",
    ),
    Mutant(
        "base of the oldest attempt",
        "election",
        "last = max((run.attempt for run in found), default=0)",
        "last = min((run.attempt for run in found), default=0)",
        test=UNIT + "election.py::test_base_is_the_highest_that_may_have_been_committed",
    ),
    Mutant(
        "base without READY",
        "election",
        "        for run in report.runs:\n",
        "        for run in ():\n",
    ),
    Mutant(
        "either of two results",
        "election",
        "if is_quorum(view, peers | silent)]",
        "if False]",
        test=UNIT + "election.py::test_a_base_is_what_can_have_been_committed",
    ),
    Mutant(
        "called back to found",
        "genesis",
        "if mine is None and self._put_off is not None:",
        "if False:",
        test=UNIT + "genesis.py::test_nobody_is_called_back_to_found_a_run_that_lives",
    ),
    Mutant("ignore accepted value", "election", "if voted and not fork:", "if False:"),
    Mutant("half quorum", "views", "return 2 * present > len", "return 2 * present >= len"),
    Mutant("third quorum", "views", "return 2 * present > len", "return 3 * present >= len"),
    Mutant(
        "double count",
        "follower",
        "elif self.submissions.pop(run.fragment, None) is not None:",
        "elif self.submissions.get(run.fragment) is not None:",
    ),
    Mutant(
        "replicas vote for what others hold",
        "follower",
        "if holds or late or (known",
        "if late or (known",
        test="simulation/test_directed.py::test_a_replica_does_not_vote_for_what_others_hold",
    ),
    Mutant("no freeze on promise", "election", "        self.frozen = True\n", ""),
    Mutant("promise to a lower ballot", "election", "if ballot < self.promised:", "if False:"),
    Mutant(
        "accept below the promise", "election", "if accept.ballot < self.promised:", "if False:"
    ),
    Mutant(
        "ACCEPTED unicast",
        "election",
        "for peer in self.view.peers:\n            self._emit(Send(peer, signed))",
        "for peer in (accept.ballot.peer,):\n            self._emit(Send(peer, signed))",
        test="simulation/test_directed.py::test_a_view_known_only_to_its_dead_proposer_survives",
    ),
    Mutant(
        "coordinator outside S",
        "attempts",
        "wanting = outside + (",
        "wanting = [p for p in outside if p != self.me] + (",
    ),
    Mutant(
        "sticky off",
        "succession",
        "return not gone and heard_s < node.timing.failure_s / 2",
        "return False",
        test="simulation/test_directed.py::test_one_deaf_member_does_not_end_a_view",
    ),
    Mutant(
        "no CheckQuorum",
        "coordinator",
        "if not is_quorum(self.view, alive):\n            self._without",
        "if False:\n            self._without",
        test="simulation/test_directed.py::test_a_coordinator_without_a_quorum_begins_nothing",
    ),
    Mutant("weights forgotten", "coordinator", "tuple(known[peer] for", "tuple(1.0 for"),
    Mutant(
        "attempt numbers stay",
        "coordinator",
        "        self._attempts += 1\n",
        "        self._attempts = 1\n",
    ),
    Mutant(
        "apply whatever is held",
        "follower",
        "whole = len(path) == round_number - self.round and reached == chain",
        "whole = len(path) == round_number - self.round",
    ),
    Mutant(
        "READY taken back",
        "orders",
        "if own.is_replica and own.round + 1 not in own.held:",
        "if own.is_replica:",
        test="simulation/test_directed.py::test_a_doubted_member_keeps_what_it_is_ready_for",
    ),
    Mutant(
        "enters without the state",
        "admission",
        "return position == own.previous and beat.digest_round == beat.round > 0",
        "return True",
        test="simulation/test_directed.py::test_a_joiner_far_behind_does_not_enter",
    ),
    Mutant(
        "two incarnations",
        "viewchange",
        "named = mine is not None and mine.inc == node.me.inc",
        "named = mine is not None",
        test=UNIT + "membership_restarts.py::test_a_view_of_an_earlier_life_is_not_entered",
    ),
    Mutant(
        "begins after proposing",
        "coordinator",
        "lone_ok=False)\n            return",
        "lone_ok=False)",
    ),
    Mutant(
        "any result will do",
        "attempts",
        "or len(roots) > 1:",
        "or False:",
        test=UNIT + "membership_rounds.py::test_one_wrong_result_excludes_its_holder",
    ),
    Mutant(
        "digests are not compared",
        "comparison",
        "digests = roster.digests(own.round)",
        "digests: dict[bytes, bytes] = {}",
    ),
    Mutant(
        "kept chunks of any origin",
        "keeping",
        "origin = before.get(chunk, 0)",
        "origin = 0",
        test=UNIT + "keeping.py::test_a_chunk_that_was_kept_before_keeps_its_origin",
    ),
    Mutant(
        "a fork keeps its lineage", "views", "lineage=lineage, ancestors=ancestors", "ancestors=()"
    ),
    Mutant(
        "who is behind wins",
        "lineages",
        "if (meet.round, meet.lineage) <= (",
        "if (meet.round, meet.lineage) >= (",
        test=UNIT + "policies.py::test_the_slower_fork_gives_way",
    ),
    Mutant(
        "any policy forks",
        "views",
        'return policy == "any" or (policy == "auto" and len(self.members) == 2)',
        "return bool(policy)",
    ),
    Mutant(
        "auto forks as any",
        "views",
        '(policy == "auto" and len(self.members) == 2)',
        'policy == "auto"',
    ),
    Mutant(
        "rolls back unasked",
        "election",
        'if back is None or self.view.rules.on_lost == "halt":',
        "if back is None:",
    ),
    Mutant(
        "goes back in secret",
        "election",
        "            rollback=lost,\n",
        "            rollback=False,\n",
    ),
    Mutant(
        "gives way when it should halt",
        "lineages",
        "            return  # see ``rival``\n",
        "            pass\n",
    ),
    Mutant(
        "goes on beside a rival",
        "lineages",
        'if view.rules.on_fork == "halt":  # members too',
        "if False:  # members too",
    ),
    Mutant(
        "a witness waits for what is lost",
        "admission",
        "if own.is_replica or own.round == 0:",
        "if True:",
        test="simulation/test_directed.py::test_a_witness_that_leads_does_not_wait_for_ever",
    ),
    Mutant(
        "operations keep chunks",
        "coordinator",
        "            if kind not in OPERATIONS:\n                past",
        "            if True:\n                past",
        test=UNIT + "calls.py::test_a_death_in_a_reduction_leaves_nothing_of_the_dead",
    ),
    Mutant(
        "any object will do",
        "roster",
        "            and self.has_given(peer)\n",
        "",
        test=UNIT + "calls.py::test_an_old_object_is_not_taken_for_a_new_one",
    ),
    Mutant(
        "left out in silence",
        "leftout",
        "            self._untold = begin.round\n",
        "            self._untold = 0\n",
        test=UNIT + "calls.py::test_a_straggler_is_told_once_and_is_in_the_next_one",
    ),
)

# Those that few seeds find: the suite plants them every time.
CHEAP = (
    "double count",
    "minimum base",
    "third quorum",
    "half quorum",
    "any policy forks",
    "rolls back unasked",
)


def plant(name: str) -> None:
    """From now on this process imports the mutated module. Before atoll.peer is imported."""
    mutant = next(m for m in MUTANTS if m.name == name)
    target = f"atoll.peer.group.{mutant.module}"
    assert target not in sys.modules, f"{target} was imported before the fault was planted"
    sys.meta_path.insert(0, _Finder(target, mutant))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, target: str, mutant: Mutant) -> None:
        self._target = target
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._target:
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        assert found is not None
        assert found.origin is not None
        loader = _Loader(fullname, found.origin)
        loader.mutant = self._mutant
        return importlib.util.spec_from_file_location(fullname, found.origin, loader=loader)


class _Loader(importlib.machinery.SourceFileLoader):
    mutant: Mutant

    def get_code(self, fullname: str) -> CodeType:
        source = Path(self.path).read_text("utf-8")
        mutant = self.mutant
        assert source.count(mutant.before) == 1, f"mutant {mutant.name!r} does not fit {self.path}"
        return compile(source.replace(mutant.before, mutant.after), self.path, "exec")


# ---------------------------------------------------------------- the gate


def first_failure(name: str, first: int, end: int) -> str:
    """In processes of their own: "SEED INVARIANT" of the first seed that fails with the fault
    planted and does not without it, or nothing."""
    while first < end:
        found = _first_of(name, first, end)
        if not found:
            return ""
        seed = int(found.split()[0])
        if not _first_of("", seed, seed + 1):
            return found
        first = seed + 1
    return ""


def _first_of(name: str, first: int, end: int) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "simulation.mutants", name, f"{first}..{end}"],
        capture_output=True,
        text=True,
        check=False,
        cwd=TESTS,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def caught(mutant: Mutant) -> tuple[Mutant, str]:
    if mutant.test:
        done = subprocess.run(
            [sys.executable, "-m", "simulation.mutants", mutant.name, "--test"],
            capture_output=True,
            text=True,
            check=False,
            cwd=TESTS,
        )
        assert done.returncode in (0, 1), done.stdout[-2000:] + done.stderr[-2000:]
        return mutant, f"test {mutant.test}" if done.returncode == 1 else ""
    first = 0
    for end in STEPS:  # the cheap ones are found soon
        found = first_failure(mutant.name, first, end)
        if found:
            return mutant, f"seed {found}"
        first = end
    return mutant, ""


def gate(jobs: int) -> int:
    """The table; 1 if a planted fault was not caught."""
    missed = 0
    with ThreadPoolExecutor(jobs) as pool:
        for mutant, how in pool.map(caught, MUTANTS):
            missed += not how
            print(f"{mutant.name:28} {how or 'NOT CAUGHT'}", flush=True)
    return bool(missed)


def _main() -> int:
    name, what = sys.argv[1:3]
    if name:
        plant(name)
    if what == "--test":
        import pytest

        test = next(m.test for m in MUTANTS if m.name == name)
        return int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", str(TESTS / test)]))
    from simulation.run import run_seed

    first, end = map(int, what.split(".."))
    for seed in range(first, end):
        outcome = run_seed(seed)
        if outcome.failure:
            print(seed, outcome.failure[:120])
            break
    return 0


if __name__ == "__main__":
    sys.exit(_main())
