"""Fragments of whole blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.errors import ConfigError, RemoteProtocolError
from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.methods.fragment_patterns import fragmented

LAYERS = 8


def model(layers: int = LAYERS, width: int = 64) -> Manifest:
    blocks = [
        Parameter(f"blocks.{i}.{name}", shape)
        for i in range(layers)
        for name, shape in (("attention.weight", (width, 3 * width)), ("norm.weight", (width,)))
    ]
    rest = [Parameter("embedding.weight", (256, width)), Parameter("norm.weight", (width,))]
    return Manifest.of([*blocks, *rest])


def blocks_in(manifest: Manifest) -> list[list[int]]:
    """The numbers of the blocks of each fragment; of the rest, none."""
    found: list[set[int]] = [set() for _ in range(manifest.fragments)]
    for p in manifest.parameters:
        parts = p.name.split(".")
        if parts[0] == "blocks":
            found[p.fragment].add(int(parts[1]))
    return [sorted(numbers) for numbers in found]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("strided", [[0, 3, 6], [1, 4, 7], [2, 5], []]),
        ("sequential", [[0, 1, 2], [3, 4, 5], [6, 7], []]),
        ("balanced", [[0, 3, 6], [1, 4, 7], [2, 5], []]),
    ],
)
def test_blocks_of_each_pattern(pattern, expected):
    found = fragmented(model(), pattern)
    assert blocks_in(found) == expected
    last = [p.name for p in found.parameters if p.fragment == 3 and not p.is_padding]
    assert last == ["embedding.weight", "norm.weight"]


def test_balanced_evens_out_unequal_blocks():
    sizes = [9000, 1000, 1000, 1000, 4000, 5000]
    parameters = [Parameter(f"layers.{i}.w", (n,)) for i, n in enumerate(sizes)]
    found = fragmented(Manifest.of(parameters), "balanced", 3)
    totals = [
        sum(p.size for p in found.parameters if p.fragment == f and not p.is_padding)
        for f in range(2)
    ]
    assert sorted(totals) == [10_000, 11_000]
    assert found.fragments == 2  # nothing lies outside blocks


def test_ten_blocks_come_after_nine():
    found = fragmented(model(12), "sequential", 6)
    assert blocks_in(found) == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11], []]


@pytest.mark.parametrize("layers", [0, 1])
def test_too_few_blocks_are_one_fragment(layers):
    assert fragmented(model(layers), "strided") == model(layers)


def test_what_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="fragments='random'"):
        fragmented(model(), "random")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="0 blocks"):
        fragmented(model(), "strided", 0)
    with pytest.raises(ConfigError, match="at most 63"):
        fragmented(model(65, 1), "strided", 1)


@given(st.lists(st.integers(1, 9000), min_size=2, max_size=12), st.integers(1, 4))
def test_fragments_begin_with_chunks_and_cover_everything(sizes, per_fragment):
    parameters = [Parameter(f"layers.{i}.w", (n,)) for i, n in enumerate(sizes)]
    plain = Manifest.of([*parameters, Parameter("head", (7,))])
    found = fragmented(plain, "strided", per_fragment)
    count = found.fragments
    ranges = [found.chunks_of(f, count) for f in range(count)]
    assert [c for r in ranges for c in range(*r)] == list(range(found.grid.count))
    for p in found.parameters:
        lo, hi = found.offsets[p.name]
        first, end = ranges[p.fragment]
        assert found.grid.bounds(first)[0] <= lo
        assert hi <= found.grid.bounds(end - 1)[1]
    mine = {p.name: p.shape for p in found.parameters if not p.is_padding}
    assert mine == {p.name: p.shape for p in plain.parameters}
    assert Manifest.from_wire(found.to_wire()) == found
    padding = sum(p.size for p in found.parameters if p.is_padding)
    assert padding < (count - 1) * found.grid.chunk_elements or not padding


def test_the_wire_refuses_fragments_that_do_not_fit():
    text = fragmented(model(), "strided").to_wire()
    for bad in (
        text.replace("~padding.0\tfloat32\t", "~padding.0\tfloat32\t1"),
        text.replace("\t3\n", "\t4\n").removesuffix("3") + "4",  # fragment 3 is missing
        text.replace("\t0\n", "\t-1\n"),
        text.replace("\t0\n", "\t00\n"),
        text.replace("\t3", "\t64"),
    ):
        assert bad != text
        with pytest.raises(RemoteProtocolError):
            Manifest.from_wire(bad)


def test_a_run_has_as_many_fragments_as_its_parameters():
    found = fragmented(model(), "strided")
    with pytest.raises(ConfigError, match="sorted into 4"):
        found.chunks_of(0, 3)
    with pytest.raises(ConfigError, match="no fragment 4"):
        found.chunks_of(4, 4)
