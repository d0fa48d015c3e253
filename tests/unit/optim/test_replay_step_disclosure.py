"""A segment with its proof: what was committed to is read, nothing else is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from harness.replay_ways import segment
from harness.replaying import adamw, text_model

from atoll.collectives.errors import ConfigError, RemoteProtocolError
from atoll.optim.manifest import Manifest
from atoll.optim.model_io import ModelVector
from atoll.optim.replay import step_disclosure as module
from atoll.optim.replay.checkpoint import leaf_of
from atoll.optim.replay.step_disclosure import (
    EXTENT_BYTES,
    Batch,
    Extent,
    RoundEnding,
    StepDisclosure,
    Steps,
    WorkCommitment,
    batches_bytes_max,
    batches_leaf,
    check_step,
    opening_bytes_max,
    pack,
    unpack,
)

SIZES = {"width": 8, "depth": 1, "heads": 2}


def steps_of(count: int, rng: bytes = b"") -> Steps:
    return [
        tuple(
            Batch(np.arange(n + part, dtype=np.int64) - 1, (rng, b"")) for part in range(1 + n % 3)
        )
        for n in range(count)
    ]


class Committed:
    """Of a work of eight steps in segments of three; its checkpoints are made up of two."""

    def __init__(self) -> None:
        opened = segment(adamw, 1, **SIZES)
        assert opened.end is not None
        self.manifest: Manifest = ModelVector(text_model(**SIZES)).manifest
        self.checkpoints = [opened.start, opened.end] * 2
        self.steps = [steps_of(3), steps_of(3, b"random"), steps_of(2)]
        leaves = [leaf_of(self.checkpoints[0].digests())]
        for steps, checkpoint in zip(self.steps, self.checkpoints[1:], strict=True):
            leaves += [batches_leaf(pack(steps)), leaf_of(checkpoint.digests())]
        self.commitment = WorkCommitment(Extent(7, 70, 8, 3), leaves)

    def opening(self, number: int, *, whole: bool = True) -> StepDisclosure:
        end = self.checkpoints[number + 1]
        return StepDisclosure(
            self.commitment.extent,
            number,
            self.checkpoints[number].encode(),
            self.commitment.proof(2 * number),
            pack(self.steps[number]),
            self.commitment.proof(2 * number + 1),
            end.encode() if whole else end.digests(),
            self.commitment.proof(2 * number + 2),
            self.ending() if number == 0 else None,
        )

    def ending(self) -> RoundEnding:
        proof = self.commitment.proof(self.commitment.extent.leaves - 1)
        return RoundEnding(self.commitment.extent, self.checkpoints[-1].digests(), proof)


@pytest.fixture(scope="module")
def work() -> Committed:
    return Committed()


# ------------------------------------------------------------ batches


@pytest.mark.parametrize("rng", [b"", b"state" * 1000])
def test_batches_are_read_as_they_were_written(rng: bytes) -> None:
    steps = steps_of(7, rng)
    read = unpack(pack(steps), 7)
    assert [[(b.indices.tolist(), b.rng) for b in step] for step in read] == [
        [(b.indices.tolist(), b.rng) for b in step] for step in steps
    ]
    assert pack(read) == pack(steps)
    assert len(pack(steps)) < batches_bytes_max(7)


def test_batches_that_are_cut_or_longer_are_refused() -> None:
    data = pack(steps_of(4, b"r"))
    for end in range(len(data)):
        with pytest.raises(RemoteProtocolError, match="cannot be read"):
            unpack(data[:end], 4)
    for bad, count in ((data + b"\0", 4), (data, 3), (data, 5)):
        with pytest.raises(RemoteProtocolError, match="cannot be read"):
            unpack(bad, count)


@pytest.mark.parametrize(
    "head",
    [
        module.COUNT.pack(0),
        module.COUNT.pack(2**32 - 1),
        module.COUNT.pack(1) + module.BATCH.pack(8193, 0, 0),
        module.COUNT.pack(1) + module.BATCH.pack(2**32 - 1, 0, 0),
        module.COUNT.pack(1) + module.BATCH.pack(0, 8193, 0),
        module.COUNT.pack(2) + 2 * (module.BATCH.pack(8000, 0, 0) + bytes(64_000)),
    ],
)
def test_more_than_a_step_may_have_is_refused(head: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="cannot be read"):
        unpack(module.COUNT.pack(1) + head + bytes(100_000), 1)


def test_a_trainer_hears_what_is_too_much() -> None:
    check_step((Batch(np.zeros(8192, np.int64)),))
    for step in (
        (Batch(np.zeros(8193, np.int64)),),
        (Batch(np.zeros(1, np.int64)),) * 4097,
        (Batch(np.zeros(1, np.int64), (bytes(8193), b"")),),
    ):
        with pytest.raises(ConfigError):
            check_step(step)


# ------------------------------------------------------------ commitment


@pytest.mark.parametrize(
    "other",
    [Extent(8, 70, 8, 3), Extent(7, 71, 8, 3), Extent(7, 70, 7, 3), Extent(7, 70, 8, 2)],
)
def test_a_commitment_is_to_one_extent(work: Committed, other: Extent) -> None:
    root = work.commitment._tree.root
    assert other.commitment(root) != work.commitment.digest
    assert len(work.commitment.digest) == 32


def test_segments_of_an_extent() -> None:
    extent = Extent(7, 70, 8, 3)
    assert (extent.segments, extent.leaves) == (3, 7)
    assert [extent.steps_of(n) for n in range(3)] == [3, 3, 2]
    assert [extent.step_of(n) for n in range(3)] == [70, 73, 76]
    assert Extent.unpack(extent.pack()) == extent


@pytest.mark.parametrize(
    "extent",
    [(2**60, 0, 8, 3), (0, 2**60, 8, 3), (0, 0, 0, 3), (0, 0, 8, 0), (0, 0, 2000, 1)],
)
def test_an_extent_that_cannot_be_is_refused(extent: tuple[int, int, int, int]) -> None:
    with pytest.raises(RemoteProtocolError, match="no trainer takes"):
        Extent.unpack(Extent(*extent).pack())


# ------------------------------------------------------------ opening


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_what_was_committed_to_is_read(work: Committed, number: int, whole: bool) -> None:
    data = work.opening(number, whole=whole).encode()
    assert len(data) < opening_bytes_max(work.manifest, 3)
    opened = StepDisclosure.decode(data, work.manifest).open(work.commitment.digest)
    assert opened.start.digests() == work.checkpoints[number].digests()
    assert opened.end_digests == work.checkpoints[number + 1].digests()
    assert (opened.end is not None) == whole
    assert pack(opened.steps) == pack(work.steps[number])
    assert (opened.is_first, opened.is_last) == (number == 0, number == 2)


@pytest.mark.parametrize(
    ("field", "what"),
    [
        ("start", "start"),
        ("start_proof", "start"),
        ("batches", "samples"),
        ("batches_proof", "samples"),
        ("end", "end"),
        ("end_proof", "end"),
    ],
)
def test_what_was_not_committed_to_is_refused(work: Committed, field: str, what: str) -> None:
    mine, other = work.opening(0), work.opening(1)
    lie = replace(mine, **{field: getattr(other, field)})
    with pytest.raises(RemoteProtocolError, match=f"the {what} of segment 0"):
        StepDisclosure.decode(lie.encode(), work.manifest).open(work.commitment.digest)


def test_another_segment_or_extent_is_refused(work: Committed) -> None:
    mine = work.opening(0)
    for lie in (replace(mine, segment=1), replace(mine, extent=Extent(7, 70, 3, 3))):
        with pytest.raises(RemoteProtocolError, match="has committed to"):
            lie.open(work.commitment.digest)
    with pytest.raises(RemoteProtocolError, match="has committed to"):
        mine.open(bytes(32))


def test_an_opening_that_is_cut_longer_or_changed_is_refused(work: Committed) -> None:
    data = work.opening(1, whole=False).encode()
    ends = [*range(0, len(data), 97), *range(len(data) - 100, len(data))]
    for bad in (*(data[:end] for end in ends), data + b"\0", b"x" + data[1:]):
        with pytest.raises(RemoteProtocolError):
            StepDisclosure.decode(bad, work.manifest).open(work.commitment.digest)
    random = np.random.default_rng(0)
    for at in random.integers(len(data), size=300):
        changed = bytearray(data)
        changed[at] ^= int(random.integers(1, 256))
        try:
            StepDisclosure.decode(bytes(changed), work.manifest).open(work.commitment.digest)
        except RemoteProtocolError:
            continue
        assert chr(changed[at]).isspace()  # a blank in a checkpoint's header


def test_what_is_longer_than_the_runs_checkpoints_is_refused(work: Committed, monkeypatch) -> None:
    data = work.opening(1).encode()
    monkeypatch.setattr("atoll.optim.replay.step_disclosure.checkpoint_bytes_max", lambda _: 1000)
    with pytest.raises(RemoteProtocolError, match="a part of"):
        StepDisclosure.decode(data, work.manifest)


def test_how_the_round_before_ended_is_proven(work: Committed) -> None:
    """Of the round itself, as if it had been the one before."""
    data = work.opening(0).encode()
    opened = StepDisclosure.decode(data, work.manifest).open(work.commitment.digest)
    assert opened.before == work.ending()
    assert opened.before.leads_to(work.commitment.digest)
    assert not opened.before.leads_to(bytes(32))
    assert not opened.carries_over(work.commitment.digest)  # its end has taken a step more
    same = replace(opened, start=work.checkpoints[-1])
    assert same.carries_over(work.commitment.digest)
    assert not same.carries_over(bytes(32))
    assert not replace(same, before=None).carries_over(work.commitment.digest)
    assert not replace(same, segment=1).carries_over(work.commitment.digest)
    for end in (0, EXTENT_BYTES + 127, EXTENT_BYTES + 128 + 12 * 32 + 1):
        with pytest.raises(RemoteProtocolError, match="the end of a round"):
            RoundEnding.unpack(work.ending().pack().ljust(1000, b"\0")[:end])
