"""A run of one peer without a network: a real state, a real log, rounds of random updates."""

from __future__ import annotations

import numpy as np

from atoll.collectives import get_codec
from atoll.collectives.digests import strong_digest
from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.run_spec import RunSpec, blob
from atoll.peer.membership.view import Member, View, genesis_chain
from atoll.peer.rounds.entries import (
    GATHER,
    INIT,
    STEP,
    EntryHead,
    EntryOrigin,
    entry_chain,
    entry_root,
)
from atoll.peer.rounds.log import RoundLog
from atoll.peer.rounds.state import ReplicatedState

PARAMETERS = (
    Parameter("blocks.0.weight", (80, 100), "bfloat16"),
    Parameter("blocks.1.bias", (3,), "float16"),
    Parameter("head.weight", (50, 41), "float32"),
    Parameter("head.zero", (0, 4), "float32"),
    Parameter("scale", (), "float64"),
)  # 10,054 elements: three chunks, of which the last is shorter


class TinyRun:
    """``theta`` and ``momentum`` after each round are on record, as bytes. Where results are
    gathered, or steps depend on who took part, each round is of others than the last."""

    def __init__(
        self,
        peer: bytes,
        *,
        parameters: tuple[Parameter, ...] = PARAMETERS,
        fragments: int = 1,
        codec: str = "int8",
        aggregate: str = "mean",
        by_peers: bool = False,
        momentum_codec: str = "float32",
        lineage: bytes = b"L" * 32,
        log_bytes: int = 1 << 28,
        seed: int = 0,
    ) -> None:
        self.peer, self.lineage = peer, lineage
        feedback = 0.0 if aggregate == "mean" else 0.95
        self.spec = RunSpec(
            sync_every=10,
            fragments=fragments,
            codec=codec,
            aggregate=aggregate,
            error_feedback=feedback,
            outer_lr_by_peers=by_peers,
            momentum_codec=momentum_codec,
        )
        self.manifest = Manifest.of(parameters)
        self.state = ReplicatedState(blob(self.spec, self.manifest))
        self.log = RoundLog(log_bytes)
        self.chain = genesis_chain(lineage)
        self.after: dict[int, tuple[bytes, bytes]] = {}
        self.chain_after: dict[int, bytes] = {}
        self._random = np.random.default_rng(seed)
        self.commit()

    @property
    def view(self) -> View:
        others = tuple(Member(bytes([n]) * 32, 1) for n in (1, 2))
        members = (Member(self.peer, 1), *others)
        return View(self.lineage, 7, members, self.peer, 1, genesis_chain(self.lineage))

    def commit(self) -> int:
        """One more round: the next fragment's, or INIT. Returns its number."""
        state, number = self.state, self.state.round + 1
        init = number == 1
        fragment = 0 if init else number % self.spec.fragments
        grid = state.grid if init else state.fragment_grid(fragment)
        origin = self._origin(number)
        parts = [self._encoded(grid.size(chunk), origin, init=init) for chunk in range(grid.count)]
        digests = [strong_digest(part) for part in parts]
        origins = (origin,)
        blob_bytes = state.blob if init else b""
        root = entry_root(origins, b"", digests, blob_bytes)
        kind = INIT if init else STEP
        head = EntryHead(number, kind, fragment, origins, b"", root, b"", blob_bytes)
        self.chain = entry_chain(self.chain, head)
        head = EntryHead(number, kind, fragment, origins, b"", root, self.chain, blob_bytes)
        result = np.concatenate(parts)
        state.apply(head, result)
        self.log.append(head, result, state.digest)
        self.after[number] = (state.theta.tobytes(), state.momentum.tobytes())
        self.chain_after[number] = self.chain
        return number

    def _origin(self, number: int) -> EntryOrigin:
        """One participant; or up to four, of which some have no weight."""
        alike = self.spec.aggregate == "mean" and not self.spec.outer_lr_by_peers
        if number == 1 or alike:
            return EntryOrigin((self.peer,), (1.0,))
        count = 1 + number % 4
        weights = (*(float(n % 3) for n in range(count - 1)), 2.0)
        return EntryOrigin(tuple(bytes([n]) * 32 for n in range(count)), weights)

    def _encoded(self, count: int, origin: EntryOrigin, *, init: bool) -> np.ndarray:
        """A chunk of random values. Of participants that count there is one part each."""
        result = get_codec("float32") if init else self.spec.result_codec(origin.weights)
        codec = result.part_codec
        parts = []
        for _ in range(result.encoded_bytes(count) // codec.encoded_bytes(count)):
            values = self._random.standard_normal(count).astype(np.float32)
            parts.append(np.empty(codec.encoded_bytes(count), np.uint8))
            codec.encode(values, parts[-1])
        return np.concatenate(parts)

    def operate(self) -> int:
        """One more round that is a collective of the trainers' own. Returns its number."""
        state, number = self.state, self.state.round + 1
        origins = (EntryOrigin((self.peer,), (1.0,)),)
        root = entry_root(origins, b"", (), b"what was gathered in round %d" % number)
        head = EntryHead(number, GATHER, 0, origins, b"", root, b"")
        self.chain = entry_chain(self.chain, head)
        head = EntryHead(number, GATHER, 0, origins, b"", root, self.chain)
        nothing = np.empty(0, np.uint8)
        state.apply(head, nothing)
        self.log.append(head, nothing, state.digest)
        self.after[number] = self.after[number - 1]
        self.chain_after[number] = self.chain
        return number

    def close(self) -> None:
        self.state.close()
