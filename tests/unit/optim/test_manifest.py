from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.errors import ConfigError, RemoteProtocolError
from atoll.optim.manifest import DTYPES, PARAMETERS_MAX, Manifest, Parameter
from atoll.optim.pseudo_gradient import pseudo_gradient, round_to_working

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20).filter(str.isprintable)
parameters = st.builds(
    Parameter,
    names,
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    st.sampled_from(DTYPES),
)
manifests = (
    st.lists(parameters, min_size=1, max_size=12, unique_by=lambda p: p.name)
    .filter(lambda ps: sum(p.size for p in ps) > 0)
    .map(Manifest.of)
)


def small() -> Manifest:
    return Manifest.of(
        [
            Parameter("b", (2, 3), "bfloat16"),
            Parameter("a", (4,), "float32"),
            Parameter("d", (), "float16"),
            Parameter("c", (5,), "bfloat16"),
        ]
    )


def test_sorted_by_name_end_to_end():
    m = small()
    assert m.elements == 16
    assert m.offsets == {"a": (0, 4), "b": (4, 10), "c": (10, 15), "d": (15, 16)}
    assert list(m.segments(0, 16)) == [
        (0, 4, "float32"),
        (4, 15, "bfloat16"),
        (15, 16, "float16"),
    ]
    assert list(m.segments(3, 5)) == [(3, 4, "float32"), (4, 5, "bfloat16")]
    assert list(m.segments(7, 7)) == []


@given(manifests, st.data())
def test_segments_cover_any_range_with_the_right_dtype(m, data):
    lo = data.draw(st.integers(0, m.elements))
    hi = data.draw(st.integers(lo, m.elements))
    dtype_of = [p.dtype for p in m.parameters for _ in range(p.size)]
    covered = [(i, dtype) for start, end, dtype in m.segments(lo, hi) for i in range(start, end)]
    assert covered == [(i, dtype_of[i]) for i in range(lo, hi)]


@given(manifests)
def test_wire_round_trip(m):
    again = Manifest.from_wire(m.to_wire())
    assert again == m
    assert again.digest() == m.digest()


@given(manifests, manifests)
def test_digest_and_differences_tell_manifests_apart(a, b):
    assert (a == b) == (a.digest() == b.digest()) == (a.differences(b) == [])


@given(st.text())
def test_any_text_is_parsed_or_refused(text):
    with suppress(RemoteProtocolError):
        assert Manifest.from_wire(text).to_wire() == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "a\tfloat32\t-3",
        "a\tfloat32\t+3",
        "a\tfloat32\t1_0",
        "a\tfloat32\t 3",
        "a\tfloat32\t٣",
        "a\tfloat32\t3x",
        "a\tfloat32\t03",
        "a\tfloat32",
        "a\tint8\t3",
        "a\tfloat32\t0",  # no elements at all
        "a\tfloat32\t3\na\tfloat32\t3",  # twice
        "b\tfloat32\t3\na\tfloat32\t3",  # out of order
        "a\tfloat32\t3\n",
        "a\x07\tfloat32\t3",
        "a" * 513 + "\tfloat32\t3",
        "a\tfloat32\t1099511627776x2",
        "a\tfloat32\t" + "9" * 4_000,
        "a\tfloat32\t" + "9" * 10_000,
        "a\tfloat32\t" + "x".join("1" * 17),
        "\n" * PARAMETERS_MAX,
    ],
)
def test_malformed_wire_text_is_refused(text):
    with pytest.raises(RemoteProtocolError):
        Manifest.from_wire(text)


def test_what_a_user_gets_wrong_is_a_config_error_with_a_fix():
    with pytest.raises(ConfigError, match="requires_grad=True"):
        Manifest.of([])
    with pytest.raises(ConfigError, match="freeze it"):
        Parameter("w", (2,), "complex64")
    with pytest.raises(ConfigError, match="unique"):
        Manifest.of([Parameter("w", (2,)), Parameter("w", (3,))])


def test_differences_name_missing_extra_shape_and_dtype():
    run = Manifest.of([Parameter("a", (4,)), Parameter("b", (2, 3)), Parameter("c", (5,))])
    mine = Manifest.of(
        [Parameter("a", (4,), "bfloat16"), Parameter("b", (3, 2)), Parameter("z", ())]
    )
    assert mine.differences(run) == [
        "a: yours 4 bfloat16, run 4 float32",
        "b: yours 3x2 float32, run 2x3 float32",
        "c: yours missing, run 5 float32",
        "z: yours scalar float32, run missing",
    ]


def test_differences_are_capped():
    run = Manifest.of(Parameter(f"p{i:03}", (2,)) for i in range(100))
    lines = Manifest.of([Parameter("p000", (2,))]).differences(run)
    assert len(lines) == 21
    assert lines[-1] == "... and 79 more"


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_equals_torch_bit_for_bit(dtype):
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 2**32, 100_000, dtype=np.uint32)
    ties = (bits & np.uint32(0xFFFF0000)) | np.uint32(0x8000)  # half-way between two bfloat16
    values = np.concatenate([bits, ties]).view(np.float32)
    values = values[np.isfinite(values)]
    out = np.empty_like(values)
    round_to_working(values, dtype, out)
    expected = torch.from_numpy(values).to(getattr(torch, dtype)).to(torch.float32).numpy()
    np.testing.assert_array_equal(out.view(np.uint32), expected.view(np.uint32))


@given(manifests, st.integers(1, 7), st.integers(0, 2**32 - 1))
def test_zero_steps_give_exactly_zero_and_chunks_equal_the_whole(m, chunk, seed):
    theta = np.random.default_rng(seed).standard_normal(m.elements).astype(np.float32)
    working = np.concatenate(
        [
            torch.from_numpy(theta[lo:hi].copy()).to(getattr(torch, p.dtype)).float().numpy()
            for p, (lo, hi) in zip(m.parameters, m.offsets.values(), strict=True)
        ]
    )
    whole, pieces = np.full_like(theta, np.nan), np.full_like(theta, np.nan)
    pseudo_gradient(theta, working, whole, m, 0, m.elements)
    np.testing.assert_array_equal(whole, 0)
    moved = working + np.float32(0.25)
    pseudo_gradient(theta, moved, whole, m, 0, m.elements)
    for lo in range(0, m.elements, chunk):
        hi = min(lo + chunk, m.elements)
        pseudo_gradient(theta[lo:hi], moved[lo:hi], pieces[lo:hi], m, lo, hi)
    np.testing.assert_array_equal(whole, working - moved)
    np.testing.assert_array_equal(pieces, whole)


def test_an_outline_compares_models_and_holds_nothing() -> None:
    manifest = Manifest.of([Parameter("w", (3, 4), "bfloat16"), Parameter("v", (5,))])
    outline = manifest.outline("noloco", 7)
    assert outline.elements == 7
    assert Manifest.from_wire(outline.to_wire()) == outline
    other = Manifest.of([Parameter("w", (3, 5), "bfloat16"), Parameter("v", (5,))])
    assert other.outline("noloco", 7).differences(outline) == [
        "w: yours 0x3x5 bfloat16, run 0x3x4 bfloat16"
    ]
