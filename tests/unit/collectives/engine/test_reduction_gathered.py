"""The engine, where results consist of the parts: everyone ends with the same bytes, as told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from harness.roundtrip import decoded, encoded
from harness.stripes import start_stripes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.collectives import Contribution, FrameKind, Reduction, RoundResult, pairwise_plan
from atoll.collectives.codecs import F32, RULES, gathered_codec, get_codec
from atoll.collectives.engine import receive, send
from atoll.collectives.engine.parts import MeanParts
from atoll.collectives.errors import ConfigError, ConnectError
from atoll.collectives.schedule.routes import ring

MakeGroup = Callable[..., Any]
WAIT_S = 30.0
TOPK = get_codec("topk")
rules = pytest.mark.parametrize("rule", RULES)


def group_of(
    make_group: MakeGroup,
    weights: list[float],
    name: str = "topk",
    rule: str = "senders",
    **more: Any,
) -> Any:
    codec = get_codec(name)
    return make_group(
        codec, weights=weights, result_codec=gathered_codec(codec, tuple(weights), rule), **more
    )


def expected(group: Any) -> bytes:
    """What everyone must end with, told in one loop."""
    whole, parts = group.result_codec, []
    for chunk in range(group.grid.count):
        lo, hi = group.grid.bounds(chunk)
        counted = [p for p in group.everyone if group.plan.weights[p] > 0]
        sent = {p: encoded(whole.inner, group.vectors[p][lo:hi]) for p in counted}
        if whole.has_slots:
            parts += [sent[p].tobytes() for p in counted]
            continue
        total, senders = np.zeros(hi - lo, np.float32), np.zeros(hi - lo, np.float32)
        for p in counted:
            whole.add(p, sent[p], total, senders)
        whole.finish(total, senders)
        parts.append(total.tobytes())
    return b"".join(parts)


def check(group: Any) -> None:
    want = expected(group)
    for me in group.everyone:
        assert group.results[me].tobytes() == want
        assert group.rounds[me].digests == group.rounds[0].digests
        assert all(group.rounds[me].digests)
        assert group.done[me] == [group.rounds[0].digests]
        assert group.failed[me] == []


@rules
@pytest.mark.parametrize("streams", ["memory", "sockets"])
@pytest.mark.parametrize("name", ["topk", "float32", "int8", "sign"])
@pytest.mark.parametrize(
    "weights",
    [[2.0], [1.0, 1.0], [1.0, 0.0, 3.0], [0.0, 0.0, 1.0, 0.0], [5.0] * 6, [0.0, *[1.0] * 8]],
    ids=lambda weights: f"{len(weights)}-peers",
)
def test_everyone_ends_with_all_parts(
    make_group: MakeGroup, weights: list[float], name: str, streams: str, rule: str
) -> None:
    group = group_of(make_group, weights, name, rule)
    group.start(streams)
    group.wait_done()
    check(group)


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    weights=st.lists(st.sampled_from([0.0, 1.0, 2.5]), min_size=1, max_size=9).filter(sum),
    total=st.integers(1, 9000),
    blocks=st.integers(1, 4),
)
def test_any_size_and_weights(
    make_group: MakeGroup, weights: list[float], total: int, blocks: int
) -> None:
    group = group_of(make_group, weights, total=total, chunk_elements=256 * blocks)
    group.start()
    group.wait_done()
    check(group)


def test_bytes_on_the_streams_are_what_theory_says(make_group: MakeGroup) -> None:
    group = group_of(make_group, [1.0] * 4, total=256 * 40)
    group.start()
    group.wait_done()
    part_bytes = 40 * TOPK.encoded_bytes(256)
    for reduction in group.reductions:
        assert reduction.join(WAIT_S)
        # 3/4 of a part come; so do 3 times 1/4 of all four parts, as results.
        assert reduction.progress_bytes == 3 * part_bytes // 4 + 3 * part_bytes


def test_several_streams_share_the_pieces_of_large_results(
    make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (receive, send):
        monkeypatch.setattr(module, "PIECE_BYTES", 64)
    group = group_of(make_group, [1.0] * 5, total=256 * 20)
    start_stripes(group, 2)
    group.wait_done()
    check(group)


@rules
@settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(peers=st.integers(2, 9), step=st.integers(1, 60), data=st.data())
def test_after_a_death_in_the_middle_the_survivors_begin_anew(
    make_group: MakeGroup, rule: str, peers: int, step: int, data: st.DataObject
) -> None:
    """Nothing is kept: chunks of the broken attempt have other slots."""
    victim = data.draw(st.integers(0, peers - 1))
    group = group_of(make_group, [1.0] * peers, rule=rule, total=256 * 12)
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
    if step <= 2 * 12 * (peers - 1):  # frames: of each chunk all others' parts, and its results
        assert happened.wait(WAIT_S)
    else:
        group.wait_done()
    group.close()
    vectors = [vector for peer, vector in enumerate(group.vectors) if peer != victim]
    again = group_of(make_group, [1.0] * (peers - 1), rule=rule, total=256 * 12, vectors=vectors)
    again.start("sockets")
    again.wait_done()
    check(again)


def test_the_same_participants_may_begin_anew_in_the_same_memory(make_group: MakeGroup) -> None:
    for name in ("topk", "int8"):
        first = group_of(make_group, [1.0] * 4, name)
        first.start()
        first.wait_done()
        first.close()
        again = group_of(make_group, [1.0] * 4, name, rounds=first.rounds)
        for vector in again.vectors:
            vector *= -2
        again.start()
        again.wait_done()
        check(again)


def test_memory_stays_within_the_formula(make_group: MakeGroup) -> None:
    """Parts go where the result lies; an aggregate takes the senders' weights beside it."""
    peers, chunk = 6, 4 * 256
    for name, floats in (("topk", 0), ("int8", 1)):
        group = group_of(make_group, [1.0] * peers, name, total=256 * 200)
        group.start()
        group.wait_done()
        part = get_codec(name).encoded_bytes(256)
        lead = 200 // peers // 4 + 1
        streams = peers * part + (2 * lead + 1) * peers * part
        sums = floats * 2 * lead * chunk + 4 * chunk
        for reduction in group.reductions:
            assert 0 < reduction.buffer_bytes <= streams + sums


@pytest.mark.parametrize("name", ["topk", "int8"])
def test_a_malformed_part_blames_its_sender(make_group: MakeGroup, name: str) -> None:
    group = group_of(make_group, [0.0, *[1.0] * 4], name, total=256 * 5)
    bad = b"\xff" * get_codec(name).encoded_bytes(256)
    assert group.deliver(1, 0, FrameKind.CONTRIB, 0, bad)
    [(participant, why)] = group.failed[0]
    assert participant == 1
    assert "contribution to chunk 0" in why


@pytest.mark.parametrize("name", ["topk", "int8"])
def test_a_malformed_result_blames_the_owner_and_is_not_final(
    make_group: MakeGroup, name: str
) -> None:
    group = group_of(make_group, [1.0] * 4, name, total=256 * 4)
    bad = b"\xff" * group.rounds[0].layout.size(1)
    assert group.deliver(1, 0, FrameKind.RESULT, 1, bad)
    [(participant, why)] = group.failed[0]
    assert participant == 1
    assert "result of chunk 1" in why
    assert group.rounds[0].digests[1] == b""


def test_nan_in_the_own_part_blames_oneself(make_group: MakeGroup) -> None:
    group = group_of(make_group, [1.0, 1.0, 1.0])
    group.vectors[1][:] = np.nan
    group.start()
    assert group.any_failed.wait(WAIT_S)
    assert group.reductions[1].join(WAIT_S)
    [(participant, why)] = group.failed[1]
    assert participant == 1
    assert "NaN" in why


def test_other_plans_than_a_butterfly_of_these_are_refused(make_group: MakeGroup) -> None:
    group = group_of(make_group, [1.0, 1.0, 2.0])
    good = {"me": 0, "contribution": Contribution(fill), "on_done": list, "on_failed": divmod}
    plan, result = group.plan, group.rounds[0]
    Reduction(plan=plan, result=result, **good)
    for wrong in (
        replace(plan, shape=ring(range(3))),
        replace(plan, fold="sum"),
        replace(plan, weights=(1.0, 2.0, 2.0)),
    ):
        with pytest.raises(ConfigError):
            Reduction(plan=wrong, result=result, **good)
    with pytest.raises(ConfigError, match="other parts"):
        Reduction(plan=plan, result=result, part_codec=get_codec("int8"), **good)
    two = gathered_codec(TOPK, (1.0, 1.0), "all")
    pair = pairwise_plan([b"a" * 32, b"b" * 32], [1.0, 1.0], group.grid)
    with pytest.raises(ConfigError, match="butterfly"):
        Reduction(plan=pair, result=RoundResult(two, group.grid), **good)


def fill(chunk: int, out: F32) -> None:
    out.fill(chunk)


def test_of_an_exact_codec_the_aggregate_is_the_mean_bit_for_bit(make_group: MakeGroup) -> None:
    """Acceptance test 7: all elements are sent as they are, so it is the mean that SGD takes."""
    weights = [1.0, 0.0, 3.0, 2.0]
    group = group_of(make_group, weights, "float32", "all")
    group.start()
    group.wait_done()
    mean = make_group(get_codec("float32"), weights=weights)
    mean.start()
    mean.wait_done()
    assert isinstance(mean.reductions[0]._parts, MeanParts)
    assert not isinstance(group.reductions[0]._parts, MeanParts)
    assert group.results[0].tobytes() == mean.results[0].tobytes()


def test_a_result_decodes_to_the_rule(make_group: MakeGroup) -> None:
    group = group_of(make_group, [1.0] * 3, total=8192, chunk_elements=4096)
    group.start()
    group.wait_done()
    sent = [
        np.concatenate([decoded(TOPK, encoded(TOPK, v[lo : lo + 4096]), 4096) for lo in (0, 4096)])
        for v in group.vectors
    ]
    senders = sum((values != 0).astype(np.float64) for values in sent)
    mean = np.where(senders > 0, sum(sent) / np.maximum(senders, 1), 0)
    for chunk in range(2):
        lo, hi = group.grid.bounds(chunk)
        out = decoded(group.result_codec, group.rounds[0].view(chunk), hi - lo)
        np.testing.assert_allclose(out, mean[lo:hi], rtol=1e-6)
