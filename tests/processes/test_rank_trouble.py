"""What is wrong on one rank is heard on both, at the same call: none waits for the other."""

from __future__ import annotations

import pytest
from harness.rank_processes import two_ranks
from harness.rank_trouble import Heard

from atoll.collectives.errors import CodecError, ConfigError, SessionError


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> list[Heard]:
    found: list[Heard] = two_ranks(tmp_path_factory.mktemp("ranks"), "rank_trouble", "in_trouble")
    assert [one["nothing"] for one in found] == [[], []]
    return found


def test_both_ranks_end_where_one_has_a_nan(heard: list[Heard]) -> None:
    (first, what_0, _), (second, what_1, _) = (one["a NaN in rows of rank 1"] for one in heard)
    assert first == second == CodecError.code
    assert "NaN or Inf in rows of another rank" in what_0
    assert "NaN or Inf in head.weight" in what_1


def test_both_ranks_end_where_the_first_finds_no_memory(heard: list[Heard]) -> None:
    (first, what, fix), (second, *_) = (one["no memory"] for one in heard)
    assert (first, second) == (ConfigError.code, SessionError.code)
    assert (what, fix) == ("no memory for ranks", "free some")


def test_both_ranks_end_where_the_second_cannot_map_it(heard: list[Heard]) -> None:
    for code, what, fix in (one["another container"] for one in heard):
        assert code == ConfigError.code
        assert "cannot open the memory of rank 0" in what
        assert "on one machine" in fix
