"""Power cuts at any call: what was synced is there, whatever survived of the rest."""

from __future__ import annotations

import random
from typing import Any

import pytest
from harness.disk_lives import DURABLE, ledger_lives, planted, round_lives
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.collectives.errors import DiskError

SEEDS = 400  # within which each planted fault is found
RANDOM = st.integers(0, 1 << 32).map(random.Random)
MANY = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))


@MANY
@given(RANDOM)
def test_a_ledger_loses_nothing_that_was_synced(rng: random.Random) -> None:
    ledger_lives(DURABLE, rng)


@MANY
@given(RANDOM)
def test_a_result_that_is_ready_is_there_with_all_its_bytes(rng: random.Random) -> None:
    round_lives(DURABLE, rng)


# Each a change of a few words that these checks must find: name, lives, module, before, after.
FAULTS = (
    (
        "nothing is synced",
        ledger_lives,
        "ledger",
        "    def sync(self) -> None:\n        self.file.sync()\n",
        "    def sync(self) -> None:\n        pass\n",
    ),
    (
        "a failed sync is taken for one",
        ledger_lives,
        "ledger",
        "                file.sync()\n",
        "                with contextlib.suppress(DiskError):\n                    file.sync()\n",
    ),
    (
        "synced before the sync",
        ledger_lives,
        "ledger",
        "                sequence = file.end_block()\n            with",
        "                sequence = file.end_block()\n"
        "                file.mark(sequence)\n"
        "            with",
    ),
    (
        "what was synced is written again",
        ledger_lives,
        "ledger",
        "        self._at = whole_blocks(self._at)\n        return self._sequence",
        "        return self._sequence",
    ),
    (
        "a last record with one good copy is cut",
        ledger_lives,
        "ledger_format",
        "for half in self._halves]\n        for entry in found:",
        "for half in self._halves]\n        for entry in found if found[0] == found[1] else ():",
    ),
    (
        "position restarts at compaction",
        ledger_lives,
        "ledger",
        "            os.urandom(NONCE_BYTES),\n            position,",
        "            os.urandom(NONCE_BYTES),\n            0,",
    ),
    (
        "compaction drops what came meanwhile",
        ledger_lives,
        "ledger",
        "                for record in self._after(position + len(late)):\n",
        "                for record in ():\n",
    ),
    (
        "compaction drops a late record",
        ledger_lives,
        "ledger",
        "        records = [*kept, *late]\n",
        "        records = [*kept, *late[1:]]\n",
    ),
    (
        "rename without a sync of the folder",
        ledger_lives,
        "ledger",
        "            self._disk.sync_folder(self._folder)\n",
        "",
    ),
    (
        "rename before the new file is synced",
        ledger_lives,
        "ledger",
        "            new.sync()\n            with self._lock:\n",
        "            with self._lock:\n",
    ),
    (
        "R is not synced",
        round_lives,
        "round_files",
        "            self._file.sync()\n",
        "",
    ),
    (
        "the name of R is not synced",
        round_lives,
        "round_files",
        "            self._disk.sync_folder(self._path.parent)",
        "            pass",
    ),
    (
        "R of an older attempt is sealed",
        round_lives,
        "round_files",
        'f"{self.round}-{self.view}-{self.attempt}"',
        'f"{self.round}-{self.view}-1"',
    ),
    (
        "a new attempt takes the place of what is READY",
        round_lives,
        "round_files",
        "        self._disk.remove(path)\n        file = ",
        "        for old in self.names():\n"
        "            if old.round == name.round:\n"
        "                self._disk.remove(self._folder / old.file)\n"
        "        file = ",
    ),
    (
        "rounds of the older checkpoint are deleted",
        round_lives,
        "round_files",
        "sorted(checkpoints)[-2]",
        "sorted(checkpoints)[-1]",
    ),
    (
        "an error of the thread that writes is forgotten",
        round_lives,
        "round_files",
        "            if self._error is not None:\n",
        "            if False:\n",
    ),
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault[0])
def test_a_planted_fault_is_found(fault: tuple[str, Any, str, str, str]) -> None:
    _, lives, *change = fault
    durable = planted(*change)
    for seed in range(SEEDS):
        try:
            lives(durable, random.Random(seed))
        except (AssertionError, OSError, DiskError):
            return
    pytest.fail(f"not found within {SEEDS} seeds")


@pytest.mark.slow
@pytest.mark.parametrize("lives", [ledger_lives, round_lives], ids=lambda lives: lives.__name__)
def test_thousands_of_lives(lives: Any) -> None:
    for seed in range(5_000):
        lives(DURABLE, random.Random(seed))
