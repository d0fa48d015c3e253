"""The numbers that are computed early and once are those that anybody gets from the same bytes."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from atoll.collectives.audit.sketch import distance, error_bounds, sign_bits, sketch
from atoll.collectives.codecs import U8
from atoll.peer.verify.checks import Numbers, part_numbers
from atoll.peer.verify.statement import told_numbers
from atoll.peer.verify.terms import AuditTerms, ReductionTerms

PEERS = tuple(bytes([n]) * 32 for n in range(3))
SEED = b"s" * 32
ME = 1


def work_of(codec: str) -> ReductionTerms:
    """Six chunks, of which the last is shorter and no whole number of blocks."""
    everybody = (True, True, True)
    return AuditTerms(
        b"L" * 32, 1, 7, 1, 0, PEERS, everybody, (1, 1, 1), "mean", codec, 6 * 512 - 100, 512
    ).work


def encoded(work: ReductionTerms, seed: int) -> list[U8]:
    numbers, chunks = np.random.default_rng(seed), []
    for chunk in range(work.grid.count):
        size = work.grid.size(chunk)
        out = np.empty(work.codec.encoded_bytes(size), np.uint8)
        work.codec.encode(numbers.standard_normal(size, np.float32), out)
        chunks.append(out)
    return chunks


class Attempt:
    def __init__(self, codec: str) -> None:
        self.work = work_of(codec)
        self.parts = [encoded(self.work, peer) for peer in range(3)]
        self.results = encoded(self.work, 3)
        self.held = {(s, c): self.parts[s][c] for c in self.work.shards[ME] for s in (0, 2)}
        self.numbers = Numbers(self.work, self.parts[ME], self.held)

    def true(self, sender: int, chunk: int) -> bytes:
        part, result = self.parts[sender][chunk], self.results[chunk]
        return part_numbers(self.work, SEED, chunk, part, result)


@pytest.mark.parametrize("codec", ["float32", "int8", "int4", "fp4_e3m0", "bfloat16"])
@pytest.mark.parametrize("came", [(), (4, 0, 4), range(6)])
def test_it_makes_no_difference_when_they_are_computed(codec: str, came: range) -> None:
    attempt = Attempt(codec)
    work, numbers = attempt.work, attempt.numbers
    for chunk in came:
        numbers.came(chunk, attempt.results[chunk])
    check = numbers.check(SEED, attempt.results)
    for chunk in range(work.grid.count):
        assert told_numbers(work, check, chunk) == attempt.true(ME, chunk)
    told, seen = numbers.look(SEED, attempt.results)
    assert told == {(s, c): attempt.true(s, c) for s, c in attempt.held}
    for chunk, (found, bounds, length) in enumerate(seen):
        size, data = work.grid.size(chunk), attempt.results[chunk]
        values = np.empty(size, np.float32)
        work.codec.decode(data, values)
        assert np.array_equal(found, sketch(values, sign_bits(SEED, chunk, size)))
        assert np.array_equal(bounds, error_bounds(work.codec, data, size))
        assert length == float(distance(values, np.zeros(size, np.float32)))


def test_chunks_may_come_in_many_threads() -> None:
    attempt = Attempt("int8")
    threads = [
        threading.Thread(target=attempt.numbers.came, args=(chunk, attempt.results[chunk]))
        for chunk in range(6)
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check = attempt.numbers.check(SEED, attempt.results)
    for chunk in range(6):
        assert told_numbers(attempt.work, check, chunk) == attempt.true(ME, chunk)


def test_a_part_that_does_not_decode_has_no_numbers() -> None:
    attempt = Attempt("int8")
    (sender, chunk), *others = attempt.held
    attempt.held[sender, chunk].view(np.float32)[0] = np.nan  # the scale of its first block
    told, _ = attempt.numbers.look(SEED, attempt.results)
    assert told[sender, chunk] == attempt.true(sender, chunk) == b""
    assert all(told[place] for place in others)


def test_who_does_not_count_has_no_numbers_to_tell() -> None:
    attempt = Attempt("int8")
    check = Numbers(attempt.work, (), attempt.held).check(SEED, attempt.results)
    assert (check.seed, check.sketches, check.norms) == (SEED, b"", b"")
