"""Commits, loads and failures in any order give the bits of a plain reference."""

from __future__ import annotations

import numpy as np
import pytest
from harness.plainstate import ELEMENTS, GRID, Plain, check_same, encode, head_of, run_blob, vector
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from atoll.collectives import get_codec
from atoll.collectives.errors import CodecError, StateError
from atoll.optim.manifest import chunk_range
from atoll.peer.rounds.entries import INIT, EntryHead
from atoll.peer.rounds.state import U8, ReplicatedState, StateLoad


class AgainstPlainArrays(RuleBasedStateMachine):
    @initialize(
        fragments=st.integers(1, 5),
        codec=st.sampled_from(["int8", "float32"]),
        momentum_codec=st.sampled_from(["float32", "dynamic8"]),
    )
    def found(self, fragments: int, codec: str, momentum_codec: str) -> None:
        self.fragments, self.codec = fragments, codec
        self.blob = run_blob(fragments, codec, momentum_codec)
        self.state = ReplicatedState(self.blob)
        init = vector(0).view(np.uint8)
        self.entries = [(head_of(1, 0, INIT, self.blob), init)]
        self.state.apply(*self.entries[0])
        zeros = np.zeros(ELEMENTS, np.float32)
        self.history = [Plain(1, vector(0), zeros, (1,) * GRID.count, momentum_codec)]
        self.versions = self.history[0].versions
        self.torn = False  # by a commit that has failed half-way: a load mends it

    def teardown(self) -> None:
        if hasattr(self, "state"):
            self.state.close()

    def chunks(self, fragment: int) -> range:
        return range(*chunk_range(fragment, self.fragments, GRID.count))

    @precondition(lambda self: not self.torn)
    @rule(fragment=st.integers(0, 4), seed=st.integers(0, 1 << 32))
    def commit(self, fragment: int, seed: int) -> None:
        fragment %= self.fragments
        encoded = encode(self.codec, vector(seed), self.chunks(fragment))
        number = self.history[-1].round + 1
        self.entries.append((head_of(number, fragment), encoded))
        self.state.apply(*self.entries[-1])
        self.history.append(self.history[-1].after(self.codec, self.chunks(fragment), encoded))
        touched = self.chunks(fragment)
        self.versions = tuple(number if c in touched else v for c, v in enumerate(self.versions))

    @precondition(lambda self: not self.torn)
    @rule(fragment=st.integers(0, 4), seed=st.integers(0, 1 << 32))
    def fail_to_commit(self, fragment: int, seed: int) -> None:
        """Malformed bytes in the last chunk: the first ones are written when that is found."""
        fragment %= self.fragments
        encoded = encode(self.codec, vector(seed), self.chunks(fragment))
        last = self.chunks(fragment)[-1]
        size = get_codec(self.codec).encoded_bytes(GRID.size(last))
        encoded[-size : encoded.size - size + 4] = 255  # a NaN, as scale and as value
        with pytest.raises(CodecError):
            self.state.apply(head_of(self.state.round + 1, fragment), encoded)
        self.torn = True

    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        """Each chunk of another round (0: missing, so from INIT on), then the log replayed."""
        goal = data.draw(st.integers(1, self.history[-1].round))
        load = StateLoad(self.state)
        start = [data.draw(st.integers(0, goal)) for _ in range(GRID.count)]
        for chunk, version in enumerate(start):
            if version == self.state.round and not self.torn:
                load.keep(chunk, version)
            elif version:
                load.put(chunk, version, self.history[version - 1].chunk(chunk))
            assert load.has(chunk) == bool(version)
        for head, encoded in self.entries[:goal]:
            self.replay(load, head, encoded)
        load.finish(goal, self.history[goal - 1].digest(self.blob))
        del self.history[goal:], self.entries[goal:]
        self.versions = tuple(map(max, start, self.history[-1].versions))
        self.torn = False

    def replay(self, load: StateLoad, head: EntryHead, encoded: U8) -> None:
        init = head.kind == INIT
        chunks = range(GRID.count) if init else self.chunks(head.fragment)
        codec = get_codec("float32" if init else self.codec)
        at = 0
        for chunk in chunks:
            size = codec.encoded_bytes(GRID.size(chunk))
            before = load.version(chunk)
            assert load.replay(head, encoded[at : at + size], chunk) == (before < head.round)
            at += size

    @rule(chunk=st.integers(0, 4), fragment=st.integers(0, 4))
    def give_up_a_load(self, chunk: int, fragment: int) -> None:
        load = StateLoad(self.state)
        load.put(chunk, 1, bytes(self.state.chunk_bytes(chunk)))
        load.cancel()
        with pytest.raises(StateError, match="given up"):
            load.put(chunk, 1, bytes(self.state.chunk_bytes(chunk)))

    @precondition(lambda self: hasattr(self, "state"))
    @invariant()
    def same(self) -> None:
        assert self.state.is_changing == self.torn
        if self.torn:
            return
        check_same(self.state, self.history[-1])
        assert tuple(self.state.version(c) for c in range(GRID.count)) == self.versions


AgainstPlainArrays.TestCase.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None
)
TestAgainstPlainArrays = AgainstPlainArrays.TestCase
