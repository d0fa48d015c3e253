"""The engine with robust rules: everyone ends with the bytes that a rule makes of whole vectors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from harness.roundtrip import decoded, encoded
from harness.stripes import WAIT_S, start_stripes, until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.collectives import FrameKind, grid_for, pairwise_plan
from atoll.collectives.codecs import F32, get_codec
from atoll.collectives.engine import receive, send
from atoll.collectives.engine.parts import PartError
from atoll.collectives.engine.reference import reduce_together
from atoll.collectives.errors import ConfigError, ConnectError, RemoteProtocolError
from atoll.collectives.robust import RobustRule, get_rule
from atoll.collectives.robust.gram import add_gram, packed_sum
from atoll.collectives.schedule.plan import shared_plan
from atoll.collectives.schedule.routes import ring
from atoll.collectives.schedule.schedule import Frame

MakeGroup = Callable[..., Any]
RULES = [
    "trimmed(f=1)",
    "median(f=1)",
    "bucketing(s=2)+median(f=1)",
    "krum(f=1)",
    "gm(f=1)",
    "nnm+trimmed(f=1)",
    "bulyan(f=1)",
    "bucketing(s=1)+multi_krum(f=1)",
]


def expected(group: Any) -> bytes:
    """What everyone must end with, told in one loop over whole vectors."""
    rule, grid, codec = group.plan.rule, group.grid, group.codec
    counted = [p for p in group.everyone if group.plan.weights[p] > 0]
    chunks = [slice(*grid.bounds(chunk)) for chunk in range(grid.count)]
    sent: F32 = np.empty((len(counted), grid.total), np.float32)
    for row, p in zip(sent, counted, strict=True):
        for where in chunks:
            row[where] = decoded(codec, encoded(codec, group.vectors[p][where]), row[where].size)
    count = len(counted)
    gram = np.zeros((count, count))
    for owner in sorted(set(group.plan.owners)):
        part = np.zeros((count, count))
        for chunk, where in enumerate(chunks):
            if group.plan.owners[chunk] == owner:
                one = np.zeros((count, count))
                add_gram(sent[:, where], one)
                part += one
        gram += part
    matrix = rule.matrix(gram if rule.needs_gram else None, count, group.plan.key)
    found = [rule.aggregate(sent[:, where], matrix) for where in chunks]
    return b"".join(encoded(group.result_codec, values).tobytes() for values in found)


def check(group: Any) -> None:
    want = expected(group)
    for me in group.everyone:
        assert group.failed[me] == []
        assert group.results[me].tobytes() == want
        assert group.done[me] == [group.rounds[0].digests]


def nothing(src: int, dest: int, kind: int, chunk: int) -> None:
    """No hook of a test before or after a frame."""


class Direct:
    """A stream that delivers each frame at once, or loses it."""

    def __init__(
        self, group: Any, src: int, dest: int, sends: Any, before: Any, after: Any
    ) -> None:
        self.group, self.src, self.dest = group, src, dest
        self.sends, self.before, self.after = sends, before, after

    def send(self, kind: int, chunk: int, payload: memoryview, offset: int = 0) -> None:
        if self.sends(self.src, kind):
            self.before(self.src, self.dest, kind, chunk)
            self.group.deliver(self.src, self.dest, kind, chunk, bytes(payload))
            self.after(self.src, self.dest, kind, chunk)


def start_direct(
    group: Any,
    sends: Callable[[int, int], bool] = lambda src, kind: True,
    before: Callable[[int, int, int, int], None] = nothing,
    after: Callable[[int, int, int, int], None] = nothing,
) -> None:
    for src, reduction in enumerate(group.reductions):
        more = sends, before, after
        reduction.start({d: Direct(group, src, d, *more) for d in reduction.destinations})


def run(group: Any, streams: str = "memory") -> None:
    group.start(streams)
    group.wait_done()
    check(group)


@pytest.mark.parametrize("streams", ["memory", "sockets"])
@pytest.mark.parametrize("name", ["float32", "int8", "topk"])
@pytest.mark.parametrize("rule", RULES)
def test_everyone_ends_with_the_same_bytes(
    make_group: MakeGroup, rule: str, name: str, streams: str
) -> None:
    run(make_group(get_codec(name), weights=[1.0] * 7, rule=rule), streams)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    weights=st.lists(st.sampled_from([0.0, 1.0, 2.5]), min_size=5, max_size=9).filter(
        lambda weights: sum(w > 0 for w in weights) >= 5
    ),
    total=st.integers(1, 9000),
    blocks=st.integers(1, 4),
    rule=st.sampled_from(["trimmed(f=1)", "multi_krum(f=1)", "nnm+trimmed(f=2)"]),
)
def test_any_size_and_weights(
    make_group: MakeGroup, weights: list[float], total: int, blocks: int, rule: str
) -> None:
    """A weight says who counts, and not how much."""
    codec = get_codec("float32")
    run(make_group(codec, weights=weights, total=total, chunk_elements=256 * blocks, rule=rule))


def test_some_may_own_nothing(make_group: MakeGroup) -> None:
    def planned(ids: Any, weights: Any, grid: Any, kept: Any) -> Any:
        return shared_plan(ids, weights, grid, kept, (3, 0, 1, 0, 2))

    for rule in ("nnm+trimmed(f=1)", "trimmed(f=1)"):
        codec = get_codec("float32")
        run(make_group(codec, weights=[1.0] * 5, rule=rule, planned=planned, total=256 * 12))


@pytest.mark.parametrize("weights", [[1.0] * 3, [1.0] * 7, [1.0, 2.0, 3.0], [1.0, 0.0, 3.0, 0.5]])
@pytest.mark.parametrize("rule", ["trimmed(f=0)", "nnm+trimmed(f=0)", "multi_krum(f=0)"])
def test_with_nobody_to_bear_it_is_bit_for_bit_the_plain_mean(
    make_group: MakeGroup, rule: str, weights: list[float]
) -> None:
    for name in ("float32", "int8"):
        groups = [make_group(get_codec(name), weights=weights, rule=text) for text in (rule, "")]
        for group in groups:
            group.start()
            group.wait_done()
        assert groups[0].results[0].tobytes() == groups[1].results[0].tobytes()


def test_several_streams_bring_what_owners_tell_each_other_in_pieces(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (receive, send):
        monkeypatch.setattr(module, "PIECE_BYTES", 64)
    group = make_group(get_codec("int8"), weights=[1.0] * 5, total=256 * 20, rule="krum(f=1)")
    start_stripes(group, 2)
    group.wait_done()
    check(group)


@pytest.mark.parametrize("rule", ["krum(f=1)", "nnm+trimmed(f=1)"])
def test_absurd_lengths_are_named_by_every_owner(make_group: MakeGroup, rule: str) -> None:
    vectors = [np.random.default_rng(p).normal(size=5000).astype(np.float32) for p in range(5)]
    vectors[3] *= np.float32(1e9)
    group = make_group(get_codec("float32"), weights=[1.0] * 5, vectors=vectors, rule=rule)
    group.start()
    until(lambda: all(group.failed))
    group.close()
    for found in group.failed:
        assert [participant for participant, _ in found] == [3]
        assert "times as long as the others'" in found[0][1]


def test_in_an_audited_round_no_owner_s_word_names_another_peer(make_group: MakeGroup) -> None:
    """An owner that lies about a length is found later: what is absurd is left to the rule."""
    vectors = [np.random.default_rng(p).normal(size=5000).astype(np.float32) for p in range(5)]
    vectors[3] *= np.float32(1e9)
    group = make_group(get_codec("float32"), weights=[1.0] * 5, vectors=vectors, rule="krum(f=1)")
    for reduction in group.reductions:
        reduction._parts.audited = True
    run(group)
    for me, reduction in enumerate(group.reductions):
        products = reduction.inner_products
        assert products.told[me] == packed_sum(products.chunks, 5)
        assert products.told == group.reductions[0].inner_products.told
        assert len(products.chunks) == 120 * group.plan.owners.count(me)


def test_an_owner_that_sees_it_last_tells_the_others_all_the_same(make_group: MakeGroup) -> None:
    """Or they would wait for its inner products, and name it instead. Its last part comes from
    somebody that owns nothing, after all others have told."""

    def planned(ids: Any, weights: Any, grid: Any, kept: Any) -> Any:
        return shared_plan(ids, weights, grid, kept, (1, 0, 1, 1, 1))

    vectors = [np.random.default_rng(p).normal(size=5000).astype(np.float32) for p in range(5)]
    vectors[3] *= np.float32(1e9)
    more = {"vectors": vectors, "rule": "krum(f=1)", "planned": planned}
    group = make_group(get_codec("float32"), weights=[1.0] * 5, chunk_elements=256, **more)
    told: set[int] = set()
    last = group.plan.owners.index(2) - 1

    def hold(src: int, dest: int, kind: int, chunk: int) -> None:
        if (kind, src, dest, chunk) == (FrameKind.CONTRIB, 1, 0, last):
            until(lambda: told == {2, 3, 4})
            held.append(chunk)

    def note(src: int, dest: int, kind: int, chunk: int) -> None:
        if (kind, dest) == (FrameKind.GRAM, 0):
            told.add(src)

    held: list[int] = []
    start_direct(group, before=hold, after=note)
    owners = [group.failed[me] for me in (0, 2, 3, 4)]
    until(lambda: all(owners))
    group.close()
    assert held == [last]
    for found in owners:
        assert [participant for participant, _ in found] == [3]


def test_of_one_chunk_alone_no_length_is_absurd(make_group: MakeGroup) -> None:
    """An expert that only one of them has trained."""
    vectors = [np.random.default_rng(p).normal(size=5000).astype(np.float32) for p in range(5)]
    for vector in vectors[:4]:
        vector[:256] *= np.float32(1e-12)
    for rule in ("trimmed(f=1)", "nnm+trimmed(f=1)"):
        run(make_group(get_codec("float32"), weights=[1.0] * 5, vectors=vectors, rule=rule))


def test_who_does_not_tell_is_the_one_that_is_missing(make_group: MakeGroup) -> None:
    group = make_group(get_codec("float32"), weights=[1.0] * 5, rule="krum(f=1)", total=256 * 20)

    start_direct(group, sends=lambda src, kind: (src, kind) != (4, FrameKind.GRAM))
    others = [reduction for me, reduction in enumerate(group.reductions) if me != 4]
    until(lambda: all(reduction.missing() == {4} for reduction in others))
    group.close()


@pytest.mark.parametrize("rule", ["gm(f=1)", "mda(f=1)", "caf(f=1)", "nnm+trimmed(f=1)"])
@pytest.mark.parametrize("number", [1.7e308, 1e80, 1e-300])
def test_who_tells_what_cannot_be_is_named_and_nobody_else(
    make_group: MakeGroup, rule: str, number: float
) -> None:
    group = make_group(get_codec("float32"), weights=[1.0] * 5, rule=rule, total=256 * 20)
    upper = np.zeros(15)
    upper[1] = number  # of the first two; their squares are zero
    frame = Frame(1, FrameKind.GRAM, group.plan.owners.index(1))
    buffer = group.reductions[0].reserve(frame, 120, WAIT_S)
    buffer[:] = upper.tobytes()
    group.reductions[0].received(frame)
    assert [participant for participant, _ in group.failed[0]] == [1]


@pytest.mark.parametrize("where", ["matrix", "aggregate"])
def test_a_rule_that_raises_ends_no_thread_and_blames_no_other(
    make_group: MakeGroup, where: str
) -> None:
    def broken(*arguments: object) -> None:
        raise ZeroDivisionError("a defect")

    group = make_group(get_codec("float32"), weights=[1.0] * 5, rule="krum(f=1)", total=256 * 20)
    with patch.object(RobustRule, where, broken):
        group.start()
        until(lambda: all(group.failed))
        group.close()
    for me, found in enumerate(group.failed):
        assert [participant for participant, _ in found] == [me]
        assert "a defect" in found[0][1]


def test_a_part_that_is_not_finite_is_named(make_group: MakeGroup) -> None:
    vectors = [np.random.default_rng(p).normal(size=5000).astype(np.float32) for p in range(5)]
    group = make_group(get_codec("float32"), weights=[1.0] * 5, vectors=vectors, rule="krum(f=1)")
    frame = Frame(1, FrameKind.CONTRIB, 0)
    size = 4 * group.grid.size(0)
    buffer = group.reductions[0].reserve(frame, size, WAIT_S)
    buffer[:] = b"\xff" * size
    group.reductions[0].received(frame)
    group.start()
    assert group.any_failed.wait(WAIT_S)
    group.close()
    assert {participant for found in group.failed for participant, _ in found} == {1}


@pytest.mark.parametrize("data", [b"\xff" * 120, b"\x00" * 7 + b"\xf0" + b"\x00" * 112])
def test_inner_products_that_cannot_be_are_named(make_group: MakeGroup, data: bytes) -> None:
    """NaN; and a negative square."""
    group = make_group(get_codec("float32"), weights=[1.0] * 5, rule="krum(f=1)", total=256 * 20)
    first = group.plan.owners.index(1)
    frame = Frame(1, FrameKind.GRAM, first)
    buffer = group.reductions[0].reserve(frame, 120, WAIT_S)
    buffer[:] = data
    group.reductions[0].received(frame)
    assert [participant for participant, _ in group.failed[0]] == [1]
    assert "inner products" in group.failed[0][0][1]


def test_what_nobody_needs_is_refused(make_group: MakeGroup) -> None:
    group = make_group(get_codec("float32"), weights=[1.0] * 5, rule="krum(f=1)", total=256 * 20)
    other = group.plan.owners.index(2)
    for chunk, length in ((other, 120), (group.plan.owners.index(1), 119)):
        with pytest.raises(RemoteProtocolError):
            group.reductions[0].reserve(Frame(1, FrameKind.GRAM, chunk), length, WAIT_S)
    plain = make_group(get_codec("float32"), weights=[1.0] * 5, total=256 * 20)
    with pytest.raises(RemoteProtocolError, match="nobody needs"):
        plain.reductions[0].reserve(Frame(1, FrameKind.GRAM, other), 120, WAIT_S)


def test_a_rule_needs_enough_peers_and_a_butterfly(make_group: MakeGroup) -> None:
    codec = get_codec("float32")
    with pytest.raises(ConfigError, match="needs at least 5 peers"):
        make_group(codec, weights=[1.0, 1.0, 1.0, 1.0, 0.0], rule="trimmed(f=2)")
    with pytest.raises(ConfigError, match="butterfly"):
        make_group(codec, weights=[1.0] * 3, rule="trimmed(f=1)", shape=ring(range(3)))
    with pytest.raises(ConfigError, match="butterfly"):
        make_group(codec, weights=[1.0] * 2, rule="trimmed(f=0)", planned=pairwise_plan)


@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(step=st.integers(1, 160), victim=st.integers(0, 5))
@pytest.mark.parametrize("rule", ["trimmed(f=1)", "multi_krum(f=1)"])
def test_after_a_death_in_the_middle_the_survivors_begin_anew(
    make_group: MakeGroup, rule: str, step: int, victim: int
) -> None:
    codec = get_codec("int8")
    group = make_group(codec, weights=[1.0] * 6, rule=rule, total=256 * 12)
    lock, happened, frames = threading.Lock(), threading.Event(), 0

    def gate(src: int, dest: int) -> None:
        nonlocal frames
        with lock:
            frames += 1
            if frames >= step:
                happened.set()
        if happened.is_set() and victim in (src, dest):
            raise ConnectError(f"peer {victim} is gone")

    group.gate = gate
    group.start("sockets")
    # A rule that needs distances has more frames: of some steps only one of the two reaches them.
    until(lambda: happened.is_set() or all(done.is_set() for done in group.done_events))
    group.close()
    vectors = [vector for peer, vector in enumerate(group.vectors) if peer != victim]
    again = make_group(codec, weights=[1.0] * 5, rule=rule, total=256 * 12, vectors=vectors)
    run(again, "sockets")


@pytest.mark.parametrize("rule", RULES)
def test_in_one_process_it_is_the_same(make_group: MakeGroup, rule: str) -> None:
    codec = get_codec("float32")
    group = make_group(codec, weights=[1.0] * 7, rule=rule)
    run(group)

    def source(vector: F32) -> Callable[[int, F32], None]:
        def fill(chunk: int, out: F32) -> None:
            out[:] = vector[slice(*group.grid.bounds(chunk))]

        return fill

    sources = [source(vector) for vector in group.vectors]
    together = reduce_together(
        codec, group.grid, [1.0] * 7, sources, rule=group.plan.rule, key=group.plan.key
    )
    assert together.array.tobytes() == group.results[0].tobytes()


def test_in_one_process_absurd_lengths_are_refused() -> None:
    def source(value: float) -> Callable[[int, F32], None]:
        return lambda chunk, out: out.fill(value)

    sources = [source(value) for value in (1, 1e9, 1)]
    codec, rule = get_codec("float32"), get_rule("gm(f=1)")
    with pytest.raises(PartError, match="times as long") as raised:
        reduce_together(codec, grid_for(1000), [1.0] * 3, sources, rule=rule)
    assert raised.value.participant == 1
