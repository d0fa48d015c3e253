"""Steps whose learning rate depends on how many submissions are in a chunk's mean."""

from __future__ import annotations

import numpy as np
import pytest

from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.outer_step import outer_rate
from atoll.optim.run_spec import RunSpec, blob
from atoll.peer.rounds.entries import INIT, STEP, EntryHead, EntryOrigin
from atoll.peer.rounds.state import ReplicatedState, StateLoad

ELEMENTS = 3 * 4096 + 300  # four chunks, so two in each of two fragments


def origin(weights: tuple[float, ...]) -> EntryOrigin:
    return EntryOrigin(tuple(bytes([n]) * 32 for n in range(len(weights))), weights)


# Of each round: whose parts are in each of the fragment's two chunks. A part without weight does
# not count, and kept chunks are of more peers than those that were reduced again.
ROUNDS = [
    ((1.0,), (1.0,)),
    ((1.0, 2.0, 3.0), (1.0, 2.0, 3.0)),
    ((1.0,) * 6, (1.0,)),
    ((1.0, 0.0, 0.0), (1.0, 0.0, 0.0)),
    ((2.0,) * 5, (1.0, 1.0)),
    ((1.0,) * 9, (1.0,) * 7),
]


def head_of(number: int, fragment: int, sets: tuple[tuple[float, ...], ...]) -> EntryHead:
    kept = sets[0] != sets[1]
    origins = tuple(map(origin, sets if kept else sets[:1]))
    which = bytes([0, 1]) if kept else b""
    return EntryHead(number, STEP, fragment, origins, which, b"r" * 32, b"c" * 32)


@pytest.mark.parametrize("by_peers", [True, False])
def test_commits_and_replays_take_the_rate_of_each_chunk(by_peers: bool) -> None:
    spec = RunSpec(
        sync_every=1, codec="float32", fragments=2, outer_lr=0.9, outer_lr_by_peers=by_peers
    )
    packed = blob(spec, Manifest.of([Parameter("w", (ELEMENTS,))]))
    state, again = ReplicatedState(packed), ReplicatedState(packed)
    rng, grid = np.random.default_rng(3), state.grid
    theta, momentum = rng.standard_normal(ELEMENTS, np.float32), np.zeros(ELEMENTS, np.float32)
    first = EntryHead(1, INIT, 0, (origin((1.0,)),), b"", b"r" * 32, b"c" * 32)
    entries = [(first, theta.view(np.uint8).copy())]
    for number, sets in enumerate(ROUNDS, 2):
        fragment = number % 2
        parts, delta = [], rng.standard_normal(ELEMENTS, np.float32)
        for chunk, weights in zip(range(*state.chunks_of(fragment)), sets, strict=True):
            part = slice(*grid.bounds(chunk))
            rate = 0.9 * outer_rate(sum(w > 0 for w in weights)) if by_peers else 0.9
            momentum[part] = np.float32(0.9) * momentum[part] + delta[part]
            theta[part] -= np.float32(rate) * (delta[part] + np.float32(0.9) * momentum[part])
            parts.append(delta[part].view(np.uint8))
        entries.append((head_of(number, fragment, sets), np.concatenate(parts)))
    for entry in entries:
        state.apply(*entry)
    assert state.theta.tobytes() == theta.tobytes()
    assert state.momentum.tobytes() == momentum.tobytes()

    load = StateLoad(again)
    for head, encoded in entries:
        layout, chunks = again.layout(head), again.chunks_in(head)
        for chunk in chunks:
            load.replay(head, encoded[slice(*layout.slice(chunk - chunks.start))], chunk)
    load.finish(len(entries), state.digest)
    assert again.theta.tobytes() == theta.tobytes()
    state.close()
    again.close()
