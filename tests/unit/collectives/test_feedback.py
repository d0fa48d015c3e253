"""Error feedback: what is kept, when it moves, and that it makes biased codecs converge."""

from __future__ import annotations

import numpy as np
import pytest
from harness.roundtrip import decoded, draw, relative_error, through
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.collectives.codecs import CODECS, F32, Codec, get_codec
from atoll.collectives.errors import CodecError, ConfigError
from atoll.collectives.feedback import (
    EControlFeedback,
    EF21Feedback,
    Feedback,
    ResidualFeedback,
    RunningMean,
    residual_bound,
)

CONTRACTIVE = [codec for codec in CODECS.values() if codec.contract.alpha > 0]
contractive = pytest.mark.parametrize("codec", CONTRACTIVE, ids=lambda codec: codec.name)
N = 600


def one_of_each(codec: Codec, elements: int = N) -> list[Feedback]:
    return [
        ResidualFeedback(codec, elements),
        ResidualFeedback(codec, elements, decay=0.95),
        EF21Feedback(codec, elements),
        EControlFeedback(codec, elements, eta=0.05),
    ]


def send(feedback: Feedback, values: F32, lo: int = 0, key: int = 0, commit: bool = True) -> F32:
    """One round of one part; what the others decode."""
    data = np.empty(feedback.codec.encoded_bytes(values.size), np.uint8)
    feedback.encode(lo, values, data, key)
    if commit:
        feedback.commit(lo, values, data)
    return decoded(feedback.codec, data, values.size)


def memory(feedback: Feedback) -> bytes:
    return b"".join(array.tobytes() for array in feedback.arrays.values())


# ---------------------------------------------------------------- conservation


@contractive
@pytest.mark.parametrize("decay", [1.0, 0.95, 0.0])
def test_what_is_sent_plus_what_is_kept_is_what_came_in(codec: Codec, decay: float) -> None:
    feedback = ResidualFeedback(codec, N, decay)
    for round_number in range(12):
        values = draw("student_t3", N, seed=round_number)
        message = np.float32(decay) * feedback.arrays["residual"] + values
        sent = send(feedback, values, key=round_number)
        kept = feedback.arrays["residual"]
        assert kept.tobytes() == (message - sent).tobytes()
        # One rounding, of a difference that is no larger than both together.
        assert np.abs(message.astype(float) - sent - kept).max() <= np.abs(kept).max() * 2**-24


@contractive
def test_over_many_rounds_nothing_is_lost(codec: Codec) -> None:
    feedback, came, went = ResidualFeedback(codec, N), np.zeros(N), np.zeros(N)
    for round_number in range(40):
        values = draw("gauss", N, seed=round_number)
        came += values
        went += send(feedback, values, key=round_number)
    assert np.allclose(went + feedback.arrays["residual"], came, atol=1e-4)


@contractive
def test_the_residual_stays_within_its_bound(codec: Codec) -> None:
    feedback, largest, alpha = ResidualFeedback(codec, N), 0.0, 1.0
    for round_number in range(60):
        values = draw("gauss", N, seed=round_number)
        largest = max(largest, float(np.linalg.norm(values)))
        message = feedback.arrays["residual"] + values
        alpha = min(alpha, 1 - relative_error(message, through(codec, message, round_number)))
        send(feedback, values, key=round_number)
        norm = float(np.linalg.norm(feedback.arrays["residual"]))
        assert norm <= residual_bound(codec.contract.alpha, largest)
        # The bound holds for the contraction that was met, too, which is much tighter.
        assert norm <= residual_bound(alpha, largest) * (1 + 1e-6)


# ---------------------------------------------------------------- when it moves


@contractive
def test_an_attempt_that_breaks_changes_nothing(codec: Codec) -> None:
    for feedback in one_of_each(codec):
        send(feedback, draw("gauss", N, seed=1))
        before, values = memory(feedback), draw("gauss", N, seed=2)
        first = send(feedback, values, key=4, commit=False)
        assert memory(feedback) == before
        assert send(feedback, values, key=4, commit=False).tobytes() == first.tobytes()
        assert send(feedback, values, key=4).tobytes() == first.tobytes()
        if codec.contract.kind != "exact" or isinstance(feedback, EF21Feedback | EControlFeedback):
            assert memory(feedback) != before


@settings(max_examples=30)
@given(
    plan=st.lists(
        st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 9)), min_size=1, max_size=12
    )
)
def test_memory_depends_on_committed_parts_only(plan: list[tuple[int, bool, int]]) -> None:
    """Any attempts on any chunks, against a memory that saw only those that were committed."""
    width = N // 4
    for tried, clean in zip(
        one_of_each(get_codec("int4")), one_of_each(get_codec("int4")), strict=True
    ):
        for chunk, commits, seed in plan:
            values = draw("gauss", width, seed)
            send(tried, values, lo=chunk * width, commit=commits)
            if commits:
                send(clean, values, lo=chunk * width)
        assert memory(tried) == memory(clean)


def test_malformed_bytes_are_not_committed() -> None:
    for feedback in one_of_each(get_codec("int4")):
        send(feedback, draw("gauss", N))
        before = memory(feedback)
        data = np.zeros(get_codec("int4").encoded_bytes(N), np.uint8)
        for bad in (data[:-1], np.full_like(data, 0xFF)):
            with pytest.raises(CodecError):
                feedback.commit(0, draw("gauss", N), bad)
        assert memory(feedback) == before


def test_values_that_are_not_finite_are_refused() -> None:
    for feedback in one_of_each(get_codec("int8")):
        with pytest.raises(CodecError, match="NaN or infinity"):
            send(feedback, np.full(N, np.nan, np.float32))
        assert not any(map(np.any, feedback.arrays.values()))


def test_reset_forgets_a_part() -> None:
    for feedback in one_of_each(get_codec("sign")):
        send(feedback, draw("gauss", N))
        feedback.reset(100, 200)
        for array in feedback.arrays.values():
            assert not array[100:200].any()
            assert array[:100].any()
            assert array[200:].any()
        feedback.reset()
        assert not any(map(np.any, feedback.arrays.values()))


@pytest.mark.parametrize("name", ["randk", "ternary"])
def test_codecs_that_do_not_contract_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        EF21Feedback(get_codec(name), 5)


@pytest.mark.parametrize("wrong", [-0.1, 1.1, float("nan")])
def test_parameters_outside_their_range_are_refused(wrong: float) -> None:
    with pytest.raises(ConfigError):
        ResidualFeedback(get_codec("sign"), 5, decay=wrong)
    with pytest.raises(ConfigError):
        EControlFeedback(get_codec("sign"), 5, eta=wrong)


# ---------------------------------------------------------------- relations between them


def test_no_decay_at_all_is_no_feedback() -> None:
    feedback = ResidualFeedback(get_codec("sign"), N, decay=0.0)
    for seed in range(4):
        values = draw("gauss", N, seed)
        assert send(feedback, values).tobytes() == through(get_codec("sign"), values).tobytes()


def test_econtrol_with_eta_0_is_ef21() -> None:
    one, other = EControlFeedback(get_codec("int2"), N, eta=0.0), EF21Feedback(get_codec("int2"), N)
    for seed in range(6):
        values = draw("laplace", N, seed)
        assert send(one, values).tobytes() == send(other, values).tobytes()
        assert one.arrays["estimate"].tobytes() == other.arrays["estimate"].tobytes()


def test_econtrol_keeps_what_the_estimates_lack() -> None:
    feedback, total = EControlFeedback(get_codec("sign"), N, eta=0.1), np.zeros(N)
    for seed in range(20):
        values = draw("gauss", N, seed)
        before = feedback.arrays["estimate"].astype(float)
        total += values - before - send(feedback, values)
    assert np.allclose(feedback.arrays["residual"], total, atol=1e-4)


def test_estimates_of_a_value_that_stays_come_to_it() -> None:
    values = draw("gauss", N)
    for feedback in (
        EF21Feedback(get_codec("sign"), N),
        EControlFeedback(get_codec("sign"), N, 0.01),
    ):
        for _ in range(150):
            send(feedback, values)
        assert relative_error(values, feedback.arrays["estimate"]) < 1e-2


def test_the_running_mean_is_the_mean_of_the_estimates() -> None:
    peers, mean = [EF21Feedback(get_codec("int4"), N) for _ in range(3)], RunningMean(N)
    for seed in range(5):
        sent = [send(peer, draw("gauss", N, 10 * seed + at)) for at, peer in enumerate(peers)]
        mean.commit(0, (sum(sent) / 3).astype(np.float32))
    estimates = sum(peer.arrays["estimate"].astype(float) for peer in peers) / 3
    assert np.allclose(mean.mean, estimates, atol=1e-5)


# ---------------------------------------------------------------- convergence


def descend(kind: str, steps: int = 400, rate: float = 0.05) -> float:
    """Four peers minimize the mean of |x - c_i|^2 / 2 with sign; the distance that remains.

    In the minimum the peers' gradients are not zero; only their mean is.
    """
    codec, elements = get_codec("sign"), 256
    centres = [3 * draw("gauss", elements, seed) for seed in range(4)]
    target = np.mean(centres, axis=0)
    makers = {"plain": ResidualFeedback, "ef21": EF21Feedback}
    peers = [
        EControlFeedback(codec, elements, 0.001)
        if kind == "econtrol"
        else makers[kind](codec, elements)
        for _ in centres
        if kind != "none"
    ]
    x, mean = np.zeros(elements, np.float32), RunningMean(elements)
    for _ in range(steps):
        gradients = [x - centre for centre in centres]
        if kind == "none":
            sent = [through(codec, gradient) for gradient in gradients]
        else:
            sent = [send(peer, g) for peer, g in zip(peers, gradients, strict=True)]
        result = np.mean(sent, axis=0, dtype=np.float32)
        if kind in ("ef21", "econtrol"):
            mean.commit(0, result)
            result = mean.mean
        x = x - np.float32(rate) * result
    return float(np.linalg.norm(x - target) / np.linalg.norm(target))


def test_feedback_converges_where_the_codec_alone_does_not() -> None:
    distances = {kind: descend(kind) for kind in ("none", "plain", "ef21", "econtrol")}
    assert distances["none"] > 0.5
    assert distances["plain"] < 0.1  # in proportion to the rate
    assert distances["ef21"] < 0.01
    assert distances["econtrol"] < 0.01


def test_what_topk_leaves_out_is_sent_later() -> None:
    """One element of 64 in each round, yet the mean of the rounds comes to the values."""
    values, feedback = draw("gauss", 4096), ResidualFeedback(get_codec("topk"), 4096)
    sent = np.zeros(4096)
    for _ in range(300):
        sent += send(feedback, values)
    assert relative_error(values, through(get_codec("topk"), values)) > 0.8
    assert relative_error(values, (sent / 300).astype(np.float32)) < 0.05
