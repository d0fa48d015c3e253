"""The terms of an audited attempt follow from its BEGIN, and what they say fits its messages."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness.runner_sites import LINEAGE

from atoll.collectives import grid_for
from atoll.collectives.audit.sketch import SKETCH_WIDTH
from atoll.collectives.chunks import CHUNK_ELEMENTS_MAX, ChunkGrid
from atoll.collectives.errors import ConfigError
from atoll.collectives.robust import get_rule
from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.run_spec import AUDITED_CHUNKS_MAX, RunSpec, blob, parse_blob, shard_chunks_max
from atoll.peer.membership.layout import Layout
from atoll.peer.membership.messages import Begin
from atoll.peer.net.wire import CONTROL_FRAME_BYTES_MAX, decode, encode
from atoll.peer.rounds.entries import INIT, STEP
from atoll.peer.verify.statement import (
    Check,
    Commitment,
    Resultant,
    Reveal,
    SignedStatement,
    Statement,
    StatementPhase,
    Verdict,
)
from atoll.peer.verify.terms import terms_of

ELEMENTS = 60_000


def opening(count: int, **more: object) -> Begin:
    peers = tuple(bytes([n]) * 32 for n in range(1, count + 1))
    return Begin(LINEAGE, 1, 2, 1, STEP, peers, (1.0,) * count, **more)  # type: ignore[arg-type]


SPEC = RunSpec(sync_every=1, audit=True, aggregate="trimmed(f=1)")


def test_terms_say_what_an_attempt_is() -> None:
    begin = replace(opening(3), weights=(2.5, 0.0, 1.0))
    terms = terms_of(begin, SPEC, grid_for(ELEMENTS))
    assert terms is not None
    assert terms.counted == (True, False, True)
    assert (terms.rule, terms.codec, terms.elements) == ("trimmed(f=1)", "int8", ELEMENTS)
    others = [
        terms_of(replace(begin, attempt=2), SPEC, grid_for(ELEMENTS)),
        terms_of(replace(begin, view=2), SPEC, grid_for(ELEMENTS)),
        terms_of(begin, replace(SPEC, codec="int4"), grid_for(ELEMENTS)),
        terms_of(begin, SPEC, grid_for(ELEMENTS + 1)),
    ]
    assert len({terms.digest, *(other.digest for other in others if other)}) == 5


def test_what_is_not_audited() -> None:
    grid = grid_for(ELEMENTS)
    assert terms_of(opening(3), replace(SPEC, audit=False), grid) is None
    assert terms_of(replace(opening(1), kind=INIT), SPEC, grid) is None


@pytest.mark.parametrize(
    ("begin", "why"),
    [
        (opening(65), "64 at most"),
        (opening(3, layout=Layout("ring", (1, 1, 1), (0, 1, 2))), "is a butterfly, and no ring"),
        (opening(2, layout=Layout("pairwise", (1, 1))), "is a butterfly, and no pairwise"),
    ],
)
def test_what_cannot_be_audited(begin: Begin, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        terms_of(begin, SPEC, grid_for(ELEMENTS))


@pytest.mark.parametrize(
    "other",
    [
        {"method": "sparse_loco", "codec": "topk64_2bit", "aggregate": "senders"},
        {"codec": "dynamic8"},
        {"aggregate": "senders"},
        {"method": "async_diloco", "submits": "deltas"},
        {"method": "gradient_average"},
    ],
)
def test_a_specification_that_cannot_be_audited_is_refused(other: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        RunSpec(**({"sync_every": 1, "audit": True} | other))  # type: ignore[arg-type]


def test_a_fragment_that_does_not_fit_a_statement_is_refused_when_a_run_is_founded() -> None:
    most = AUDITED_CHUNKS_MAX * CHUNK_ELEMENTS_MAX
    large = Manifest.of([Parameter(str(number), (most // 4 + 1,)) for number in range(4)])
    fits = Manifest.of([Parameter("w", (most,))])
    assert parse_blob(blob(SPEC, fits)) == (SPEC, fits)
    with pytest.raises(ConfigError, match="chunks; rounds of 21,500 can be audited"):
        blob(SPEC, large)


def test_with_inner_products_it_is_refused_earlier() -> None:
    """Thirteen peers are the least for this rule, and sign 91 numbers of each chunk."""
    spec = replace(SPEC, aggregate="krum(f=5)")
    most = 13 * shard_chunks_max(spec.rule, 13)
    assert most < AUDITED_CHUNKS_MAX
    blob(spec, Manifest.of([Parameter("w", (most * CHUNK_ELEMENTS_MAX,))]))
    with pytest.raises(ConfigError, match=f"chunks; rounds of {most:,} can be audited"):
        blob(spec, Manifest.of([Parameter("w", (most * CHUNK_ELEMENTS_MAX + 1,))]))


def test_shares_that_do_not_fit_a_statement_become_equal_ones() -> None:
    spec, grid = replace(SPEC, aggregate="gm(f=1)"), ChunkGrid(100 * 256, 256)
    most = shard_chunks_max(spec.rule, 64)
    assert most < 100
    shares = (1, 0, 40, *[1] * 61)
    kept = terms_of(opening(64, layout=Layout("butterfly", shares)), spec, grid)
    assert kept is not None
    assert kept.shares == shares
    shares = (1, 0, 60, *[1] * 61)
    equal = terms_of(opening(64, layout=Layout("butterfly", shares)), spec, grid)
    assert equal is not None
    assert equal.shares == (1, 0, *[1] * 62)
    for rule in ("trimmed(f=1)", "mean"):
        other = terms_of(
            opening(64, layout=Layout("butterfly", shares)), replace(spec, aggregate=rule), grid
        )
        assert other is not None
        assert other.shares == shares
    alone = Layout("butterfly", (1, *[0] * 63))
    with pytest.raises(ConfigError, match=f"each can own {most} in an audited round"):
        terms_of(opening(64, layout=alone), spec, grid)


@pytest.mark.parametrize("count", [5, 8, 16, 64])
def test_what_is_said_of_a_shard_with_inner_products_fits(count: int) -> None:
    most = shard_chunks_max(get_rule("nnm+trimmed(f=1)"), count)
    gram = bytes(4 * count * (count + 1) * most)
    told = encode(Resultant(bytes(32 * most), gram, bytes(4 * count * count)))
    word = SignedStatement(
        b"p" * 32, Statement(bytes(32), StatementPhase.RESULT, bytes(32), told), bytes(64)
    )
    assert len(encode(word)) < CONTROL_FRAME_BYTES_MAX
    assert decode(encode(word)) == word


def test_eight_peers_of_ten_million_parameters_say_little() -> None:
    """docs/audit.md: 0.17 % of the bytes of a round, and 0.27 % with inner products."""
    grid, shares = grid_for(10_000_000), {}
    for rule in ("mean", "nnm+trimmed(f=2)"):
        terms = terms_of(opening(8), replace(SPEC, aggregate=rule), grid)
        assert terms is not None
        work = terms.work
        owned = max(map(len, work.shards.values()))
        products = (bytes(288 * owned), bytes(4 * 64)) if work.rule is not None else (b"", b"")
        bodies = (
            Commitment((bytes(32),) * 8, bytes(32)),
            Resultant(bytes(32 * owned), *products),
            Reveal(bytes(32)),
            Check(bytes(32), bytes(4 * SKETCH_WIDTH * grid.count), bytes(4 * grid.count)),
            Verdict((), ()),
        )
        words = [Statement(bytes(32), 0, bytes(32), encode(body)) for body in bodies]
        said = 7 * sum(len(encode(SignedStatement(b"p" * 32, word, bytes(64)))) for word in words)
        sizes = [work.part_codec.encoded_bytes(grid.size(c)) for c in range(grid.count)]
        shares[rule] = said / (2 * 7 / 8 * sum(sizes))
    assert shares["mean"] < 0.0017
    assert shares["nnm+trimmed(f=2)"] < 0.0027


def test_what_is_said_of_so_many_chunks_fits() -> None:
    numbers = bytes(4 * SKETCH_WIDTH * AUDITED_CHUNKS_MAX)
    check = encode(Check(bytes(32), numbers, bytes(4 * AUDITED_CHUNKS_MAX)))
    word = SignedStatement(
        b"p" * 32, Statement(bytes(32), StatementPhase.CHECK, bytes(32), check), bytes(64)
    )
    assert len(encode(word)) < CONTROL_FRAME_BYTES_MAX
    assert decode(encode(word)) == word
