"""A plain reference for the replicated state: two arrays, no buffers, whole copies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atoll.collectives import get_codec, grid_for
from atoll.collectives.digests import strong_digest
from atoll.collectives.merkle import merkle_climb, merkle_root
from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.run_spec import RunSpec, blob
from atoll.peer.rounds.entries import INIT, STEP, EntryHead, EntryOrigin
from atoll.peer.rounds.state import CHUNK_COPY_BYTES_MAX, U8, ReplicatedState, state_digest

ELEMENTS = 4 * 4096 + 300  # five chunks, the last one short
GRID = grid_for(ELEMENTS)
LR, MU = np.float32(0.7), np.float32(0.9)
ORIGIN = EntryOrigin((b"p" * 32,), (1.0,))


def run_blob(fragments: int = 1, codec: str = "int8", momentum_codec: str = "float32") -> bytes:
    spec = RunSpec(sync_every=1, codec=codec, fragments=fragments, momentum_codec=momentum_codec)
    return blob(spec, Manifest.of([Parameter("w", (ELEMENTS,))]))


def head_of(number: int, fragment: int = 0, kind: str = STEP, packed: bytes = b"") -> EntryHead:
    return EntryHead(number, kind, fragment, (ORIGIN,), b"", b"r" * 32, b"c" * 32, packed)


def vector(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(ELEMENTS, dtype=np.float32)


def encode(codec: str, values: np.ndarray, chunks: range) -> U8:
    """R of these chunks."""
    parts = []
    for chunk in chunks:
        lo, hi = GRID.bounds(chunk)
        parts.append(np.empty(get_codec(codec).encoded_bytes(hi - lo), np.uint8))
        get_codec(codec).encode(values[lo:hi], parts[-1])
    return np.concatenate(parts)


@dataclass(frozen=True)
class Plain:
    """A state of the reference; its momentum is what ``kept`` has left of it."""

    round: int
    theta: np.ndarray
    momentum: np.ndarray
    versions: tuple[int, ...]
    kept: str = "float32"

    def after(self, codec: str, chunks: range, encoded: U8) -> Plain:
        theta, momentum = self.theta.copy(), self.momentum.copy()
        start = 0
        for chunk in chunks:
            lo, hi = GRID.bounds(chunk)
            size = get_codec(codec).encoded_bytes(hi - lo)
            delta = np.empty(hi - lo, np.float32)
            get_codec(codec).decode(encoded[start : start + size], delta)
            momentum[lo:hi] = MU * momentum[lo:hi] + delta
            theta[lo:hi] -= LR * (delta + MU * momentum[lo:hi])
            get_codec(self.kept).decode(self.encoded(momentum[lo:hi]), momentum[lo:hi])
            start += size
        number = self.round + 1
        versions = tuple(number if c in chunks else v for c, v in enumerate(self.versions))
        return Plain(number, theta, momentum, versions, self.kept)

    def encoded(self, momentum: np.ndarray) -> U8:
        out = np.empty(get_codec(self.kept).encoded_bytes(momentum.size), np.uint8)
        get_codec(self.kept).encode(momentum, out)
        return out

    def chunk(self, chunk: int) -> bytes:
        lo, hi = GRID.bounds(chunk)
        return self.theta[lo:hi].tobytes() + self.encoded(self.momentum[lo:hi]).tobytes()

    def digest(self, packed: bytes) -> bytes:
        leaves = [strong_digest(self.chunk(c)) for c in range(GRID.count)]
        return state_digest(packed, merkle_root(leaves))


def check_same(state: ReplicatedState, plain: Plain) -> None:
    assert state.round == plain.round
    assert state.theta.tobytes() == plain.theta.tobytes()
    assert state.digest == plain.digest(state.blob)
    out = memoryview(bytearray(CHUNK_COPY_BYTES_MAX))
    for chunk in range(GRID.count):
        copy = state.read_chunk(chunk, out)
        assert copy.round == plain.round
        assert bytes(out[: copy.nbytes]) == plain.chunk(chunk)
        check_proof(state.blob, chunk, copy.leaf, copy.proof, state.digest)


def check_proof(packed: bytes, chunk: int, leaf: bytes, proof: bytes, digest: bytes) -> None:
    root = merkle_climb(leaf, chunk, GRID.count, proof)
    assert root is not None
    assert state_digest(packed, root) == digest


def commit(state: ReplicatedState, fragment: int = 0, seed: int = 1) -> None:
    chunks = range(*state.chunks_of(fragment))
    encoded = encode("int8", vector(seed), chunks)
    head = head_of(state.round + 1, fragment)
    assert encoded.nbytes == state.layout(head).total_bytes
    state.apply(head, encoded)


def initialise(state: ReplicatedState, theta: np.ndarray) -> None:
    """Log entry 1, whatever its specification is said to be."""
    state.apply(head_of(1, kind=INIT), theta.view(np.uint8).copy())
