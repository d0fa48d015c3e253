"""The bytes of published vectors, while some are read and others are written."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from atoll.collectives import get_codec
from atoll.collectives.errors import CodecError, StateError
from atoll.peer.vectors.store import StoredVector, VectorStore

ELEMENTS = 10_000  # three chunks
F32 = NDArray[np.float32]


def vector(seed: int, elements: int = ELEMENTS) -> F32:
    return np.random.default_rng(seed).standard_normal(elements).astype(np.float32)


def decoded(store: VectorStore, stored: StoredVector) -> F32:
    grid, codec = stored.encoded.grid, stored.encoded.codec
    out = np.empty(grid.total, np.float32)
    for chunk in range(grid.count):
        codec.decode(store.read(stored, chunk), out[slice(*grid.bounds(chunk))])
    return out


@pytest.mark.parametrize("codec", ["float32", "bfloat16", "int8", "fp4_e3m0"])
def test_the_one_who_publishes_sees_what_the_others_get(codec: str) -> None:
    store, values = VectorStore(), vector(0)
    seen = values.copy()
    store.put("phi", 1, seen, codec)
    stored = store.open("phi", 1)
    assert decoded(store, stored).tobytes() == seen.tobytes()
    assert (codec == "float32") == (seen.tobytes() == values.tobytes())
    nbytes = get_codec(codec).encoded_bytes(ELEMENTS)
    assert abs(stored.encoded.array.nbytes - nbytes) < 64


def test_memory_is_used_again_and_never_under_a_reader() -> None:
    store = VectorStore()
    store.put("phi", 1, vector(1), "float32")
    store.put("phi", 2, vector(2), "float32")
    reader = store.open("phi", 1)
    store.drop("phi", [1])
    with pytest.raises(StateError, match="phi 1 is not kept"):
        store.open("phi", 1)
    store.put("phi", 3, vector(3), "float32")
    assert decoded(store, reader).tobytes() == vector(1).tobytes()  # it goes on to the end
    late = store.open("phi", 2)
    store.drop("phi", [2])  # there is one already that is only kept for its reader
    with pytest.raises(StateError, match="newer ones"):
        store.read(late, 0)
    store.close("phi", late)
    used_again = late.encoded.array
    store.put("phi", 4, vector(4), "float32")
    assert store.open("phi", 4).encoded.array is used_again
    store.close("phi", reader)
    with pytest.raises(StateError, match="newer ones"):
        store.read(reader, 0)
    store.put("phi", 5, vector(5), "float32")
    assert store.open("phi", 5).encoded.array is reader.encoded.array


def test_a_reader_of_what_was_replaced_does_not_hold_what_came_instead() -> None:
    """Another trainer may publish the same number again."""
    store = VectorStore()
    store.put("phi", 1, vector(1), "float32")
    pinned, late = store.open("phi", 1), store.open("phi", 1)
    store.drop("phi", [1])
    store.put("phi", 1, vector(2), "float32")
    store.close("phi", late)
    assert decoded(store, pinned).tobytes() == vector(1).tobytes()
    store.close("phi", pinned)
    assert decoded(store, store.open("phi", 1)).tobytes() == vector(2).tobytes()


def test_another_size_or_codec_gets_other_memory() -> None:
    store = VectorStore()
    for number, (elements, codec) in enumerate([(5000, "int8"), (5000, "float32"), (70, "int8")]):
        values = vector(number, elements)
        store.put("phi", 1, values, codec)
        assert decoded(store, store.open("phi", 1)).tobytes() == values.tobytes()
        store.drop("phi", [1])


def test_what_cannot_be_encoded_is_named_before_it_is_stored() -> None:
    store, values = VectorStore(), vector(0)
    store.check("phi", 7, values, "int8")
    with pytest.raises(CodecError, match="no codec 'int3'"):
        store.check("phi", 7, values, "int3")
    for wrong in (np.nan, np.inf, -np.inf):
        values[-1] = wrong
        with pytest.raises(CodecError, match="phi 7: NaN"):
            store.check("phi", 7, values, "int8")
