"""States that are shared among a few trainers whose rounds are written down."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from atoll.collectives.errors import CollectiveMismatchError, ConfigError, TooFewPeersError
from atoll.peer.client import own_loops
from atoll.peer.client.own_loops import HAS, LACKS, Found, OwnLoops, ReducedValue

ROUND_S = 4.0


class Sum:
    peers = ("a", "b")

    def __init__(self, value: np.ndarray) -> None:
        self.value = value


class Trainer(OwnLoops):
    """A trainer, with one other whose flag is written down, and whose vector is zeros."""

    def __init__(self, name: str, flags: Found, *, refuses: bool = False) -> None:
        self.peer_name, self.flags, self.refuses = name, flags, refuses
        self.reduced, self.now_s = 0, 0.0

    def all_gather(self, data: bytes) -> Found:
        self.now_s += ROUND_S
        return sorted([(self.peer_name, data), *self.flags])

    def all_reduce(
        self, tensor: np.ndarray, op: str = "mean", *, codec: str = "float32"
    ) -> ReducedValue:
        assert op == "sum"
        self.reduced += 1
        if self.refuses:
            with self._in_step():
                raise CollectiveMismatchError("most trainers called all_reduce() of 3 elements")
        return Sum(tensor + np.zeros_like(tensor))


def test_who_has_a_state_of_another_size_is_told_and_the_donor_goes_on() -> None:
    lacking = Trainer("b", [("a", HAS + b" 3000")])
    with pytest.raises(ConfigError, match=r"of 4 elements here, and 3,000 at a, whose") as caught:
        lacking.share([np.zeros(4, np.float32)])
    assert "same model" in caught.value.fix
    assert not lacking.reduced
    other = Trainer("b", [("a", b"what another loop gathers")])
    with pytest.raises(ConfigError, match="an unknown number at a"):
        other.share([np.zeros(4, np.float32)])
    donor = Trainer("a", [("b", LACKS + b" 3000")])
    assert not donor.share([np.zeros(4, np.float32)])
    assert donor.has_state


def test_a_state_that_cannot_be_taken_is_not_asked_for_without_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer("b", [("a", HAS + b" 4")], refuses=True)
    monkeypatch.setattr(own_loops, "time", SimpleNamespace(monotonic=lambda: trainer.now_s))
    with pytest.raises(TooFewPeersError, match=r"share\(\) has waited 32 s: .* of 3 elements"):
        trainer.share([np.zeros(4, np.float32)], wait_s=30.0)
    assert trainer.reduced == 8
    said = capsys.readouterr().err.splitlines()
    assert [line.split(":")[1] for line in said] == [
        " share() goes on after 12 s",
        " share() goes on after 24 s",
    ]


def test_the_donor_gets_the_same_bits_as_the_others() -> None:
    """A sum of -0.0 and 0.0 is 0.0."""
    given, taken = np.array([-0.0, 1.5], np.float32), np.ones(2, np.float32)
    donor = Trainer("a", [("b", LACKS + b" 2")])
    assert not donor.share([given])
    assert given.tobytes() == np.array([0.0, 1.5], np.float32).tobytes()
    newcomer = Trainer("b", [("a", HAS + b" 2")])
    assert newcomer.share([taken])
    assert not np.signbit(taken).any()
