"""Log steps that are short records: a newcomer needs the log, or a part of it.

Every peer keeps the log of the last steps. A trainer whose parameters are those of a point in it,
say the published ones that the run began with, or those of some rounds ago, gets the rest of the
log and replays it: bytes, not gigabytes. Any other takes the parameters, and the log begins anew at
all peers, because they all read them.

One byte is a projected gradient: its sign, and 7 bits of the logarithm of its magnitude, in steps
of an eighth from ``exp(-63 / 8)`` to ``exp(63 / 8)``, that is 0.0004 to 2,600::

    bits 0 to 6   0 for zero, or c for exp((c - 64) / 8)
    bit 7         1 for negative; not with zero

A step's record, little-endian: the learning rate (float32), how many parts, and of each part in the
order of their numbers: number, count, and so many bytes. The *chain* is a hash of parameters and of
all records since: whoever has the same chain after as many steps has the same parameters.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from typing import Any

import numpy as np

from atoll.collectives.codecs import F32
from atoll.collectives.errors import ConfigError, RemoteProtocolError
from atoll.optim.every_step.every_step import (
    CAME_BACK,
    AgainError,
    EveryStepGather,
    StateClaim,
)
from atoll.optim.model_io import ModelVector
from atoll.optim.run_spec import RunSpec
from atoll.optim.sessions import OperationsSession

STATE_VERSION = 1
CHAIN_BYTES = 32
SAMPLES_MAX = 4096  # of one peer in one step; each costs two evaluations, and published runs use 30
PARTS_MAX = 1024  # a run has as many members at most
_HEAD = struct.Struct("<fH")
_PART = struct.Struct("<HH")
_ZERO, _MIDDLE, _PER_UNIT = 0, 64, 8
# What is replayed must also be carried: 256 KiB are five calls, and 2,400 steps of three peers
# with 30 samples. To replay a byte takes far less than the two evaluations that it came from.
LOG_BYTES_DEFAULT = 256 * 1024
LOG_BYTES_MAX = 4 * 1024 * 1024  # 65 calls; any model but the largest comes sooner than a replay
_PLACES, _OFFERS = b"lo"  # what gathers are for, beside those of every_step.py
_PLACE = struct.Struct(f"<Q{CHAIN_BYTES}s")  # steps, chain
_OFFER = struct.Struct("<?Q")  # whether it is the log that follows, and from which step on


class EveryStepLog(EveryStepGather):
    """Train with steps that are logged, so that newcomers can replay them.

    ``log_bytes``: how much of the log is kept.
    """

    def __init__(
        self,
        vector: ModelVector,
        peer: OperationsSession,
        spec: RunSpec,
        log_bytes: int,
        *,
        check_every: int,
        frozen: str,
    ) -> None:
        if not 0 <= log_bytes <= LOG_BYTES_MAX:
            raise ConfigError(f"log_bytes is {log_bytes}", fix=f"give it 0 to {LOG_BYTES_MAX}")
        # Replaying a log runs no forward pass, so buffers are each trainer's own here.
        super().__init__(
            vector, (), peer, spec, check_every=check_every, buffers=False, frozen=frozen
        )
        self._log_bytes = log_bytes
        self._log = self._new_log()

    @abstractmethod
    def _apply(self, record: Record) -> None:
        """Take the step number ``steps``: a function of the parameters and the record only."""

    def _add(self, record: Record, data: bytes) -> None:
        """Take this step, and log it: ``data`` are the record's bytes."""
        self._apply(record)
        self._log.add(data)
        self.steps += 1

    # ------------------------------------------------------------ newcomers

    def _compare(self) -> None:
        super()._compare()
        if self._is_new:
            self._log = self._new_log()  # of the parameters that are here, not of what led to them

    def _take_over(self, donor: StateClaim, is_behind: bool) -> bool:
        """Take over the state of ``donor``; return whether it is what it was here.

        It is done by the log, where all who lack something stand somewhere in it; else by the
        donor's parameters. Raise AgainError if the donor has gone.
        """
        mine = _PLACE.pack(self.steps, self._log.chain)
        given, _ = self._gather(_PLACES, mine)
        here = {name: self._place(name, data) for name, _, data in given}
        if donor.name not in here:
            raise AgainError
        is_donor, goal = donor.name == self.peer.peer_name, here[donor.name]
        said = self._offer(list(here.values())) if is_donor else b""
        given, _ = self._gather(_OFFERS, said)
        offer = next((data for name, _, data in given if name == donor.name), b"")
        if not offer:
            raise AgainError
        by_log, begin, tail = self._offered(donor.name, offer)
        if not by_log:
            unchanged = super()._take_over(donor, is_behind)
            self._log = self._new_log()
            return unchanged
        is_there = (self.steps, self._log.chain) == goal
        if is_donor or (is_there and (self._is_whole() or not is_behind)):
            return True
        self._replay(donor.name, begin, tail, goal)
        self._forget()
        return False

    def _offer(self, places: list[tuple[int, bytes]]) -> bytes:
        """Return what the donor gives; the others give nothing.

        It is the log from the earliest of ``places`` on, or no log if one of them is not in it.
        """
        if not all(self._log.has(*place) for place in places):
            return _OFFER.pack(False, 0)
        begin = min(steps for steps, _ in places)
        return _OFFER.pack(True, begin) + self._log.since(begin)

    def _replay(self, donor: str, begin: int, tail: bytes, goal: tuple[int, bytes]) -> None:
        steps, chain = goal
        records = Record.split(tail)
        if steps - begin != len(records):
            raise RemoteProtocolError(f"{donor} sent {len(records)} steps from step {begin} on")
        for record, data in records[self.steps - begin :]:
            self._add(record, data)
        if self._log.chain != chain:
            raise RemoteProtocolError(f"the log that {donor} sent is not that of its parameters")

    def _place(self, name: str, data: bytes) -> tuple[int, bytes]:
        if len(data) != _PLACE.size:
            raise RemoteProtocolError(f"{name} sent {len(data)} bytes that are no place in the log")
        steps, chain = _PLACE.unpack(data)
        return steps, chain

    def _offered(self, donor: str, data: bytes) -> tuple[bool, int, bytes]:
        if _OFFER.size <= len(data) <= _OFFER.size + LOG_BYTES_MAX:
            by_log, begin = _OFFER.unpack_from(data)
            if begin <= self.steps and (by_log or len(data) == _OFFER.size):
                return by_log, begin, data[_OFFER.size :]
        raise RemoteProtocolError(f"{donor} sent {data[:32].hex()}, which offers nothing")

    def _new_log(self) -> ScalarLog:
        return ScalarLog(self.steps, self._digest(), self._log_bytes)

    def _digest(self) -> bytes:
        """Return the SHA-256 of all that decides what a step of the log does.

        It copies the parameters to the host.
        """
        flat: F32 = np.empty(self.manifest.elements, np.float32)
        self._vector.write(flat)
        head = json.dumps([self.steps, self.spec.to_wire(), self.manifest.digest().hex()])
        text = hashlib.sha256(head.encode())
        text.update(flat.data)
        return text.digest()

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return the log, to be saved beside the model.

        Whoever comes back with both gets what it has missed.
        """
        return {
            "version": STATE_VERSION,
            "steps": self.steps,
            "parameters": self._digest().hex(),
            "begin": self._log.begin,
            "chain": self._log.first_chain.hex(),
            "log": self._log.since(self._log.begin).hex(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` gave, after the model's parameters.

        Raise ConfigError if these are not of this state, or for anything else.
        """
        if state.get("version") != STATE_VERSION or state.keys() != self.state_dict().keys():
            raise ConfigError(
                f"not a {type(self).__name__} state of version {STATE_VERSION}",
                fix="load what state_dict() gave",
            )
        steps, self.steps = self.steps, int(state["steps"])
        if self._digest().hex() != state["parameters"]:
            self.steps = steps
            raise ConfigError(
                "the model's parameters are not those that this state was saved with",
                fix="load the model's state_dict first, and give the method the run's numbers",
            )
        chain = bytes.fromhex(state["chain"])
        self._log = ScalarLog(int(state["begin"]), chain, self._log_bytes)
        for _, data in Record.split(bytes.fromhex(state["log"])):
            self._log.add(data)
        self._is_new = self._is_back = True
        self._came_back = CAME_BACK
        self._follow()


def _scalars() -> F32:
    """Return the value of each byte, float32[256].

    By Decimal, whose exp is rounded correctly: a library's may differ in the last bit.
    """
    steps = (Decimal(code - _MIDDLE) / _PER_UNIT for code in range(1, 128))
    magnitudes = np.array([0.0, *(float(step.exp()) for step in steps)], np.float32)
    return np.concatenate([magnitudes, -magnitudes])


SCALARS: F32 = _scalars()  # the value of each byte
SCALARS.setflags(write=False)


def to_byte(value: float) -> int:
    """Return the nearest byte, in the logarithm; larger values are cut off, smaller are zero."""
    if value == 0:
        return _ZERO
    code = round(_PER_UNIT * math.log(abs(value))) + _MIDDLE
    return 0 if code < 1 else min(code, 127) | (128 if value < 0 else 0)


@dataclass(frozen=True, slots=True)
class ScalarPart:
    """Hold what the peer with this number has found in a step: a byte for each sample."""

    number: int
    codes: bytes


@dataclass(frozen=True, slots=True)
class Record:
    """Hold the learning rate and the parts of one step."""

    lr: float
    parts: tuple[ScalarPart, ...]

    @classmethod
    def of(cls, lr: float, parts: Iterable[ScalarPart]) -> Record:
        """Make a record of unordered parts; RemoteProtocolError for what cannot be a step."""
        record = cls(lr, tuple(sorted(parts, key=lambda part: part.number)))
        record._check()
        return record

    def to_bytes(self) -> bytes:
        parts = (_PART.pack(p.number, len(p.codes)) + p.codes for p in self.parts)
        return _HEAD.pack(self.lr, len(self.parts)) + b"".join(parts)

    @classmethod
    def split(cls, data: bytes) -> list[tuple[Record, bytes]]:
        """Return records that lie one after the other, each with its own bytes.

        RemoteProtocolError for what is cut off, or cannot be a step.
        """
        found, at = [], 0
        try:
            while at < len(data):
                begin = at
                lr, count = _HEAD.unpack_from(data, at)
                at += _HEAD.size
                parts = []
                for _ in range(count):
                    number, size = _PART.unpack_from(data, at)
                    at += _PART.size + size
                    parts.append(ScalarPart(number, data[at - size : at]))
                record = cls(lr, tuple(parts))
                record._check()
                found.append((record, data[begin:at]))
        except struct.error as error:
            raise RemoteProtocolError("a log of steps is cut off") from error
        if at > len(data):
            raise RemoteProtocolError("a log of steps is cut off")
        return found

    def _check(self) -> None:
        numbers = [part.number for part in self.parts]
        sizes = [len(part.codes) for part in self.parts]
        if not 0 <= self.lr < math.inf:
            raise RemoteProtocolError(f"a learning rate of {self.lr}")
        if any(a >= b for a, b in pairwise(numbers)):
            raise RemoteProtocolError(f"two peers have one number in a step: {numbers[:20]}")
        if len(numbers) > PARTS_MAX or max(sizes, default=0) > SAMPLES_MAX:
            raise RemoteProtocolError(f"a step of {len(numbers)} parts and {sum(sizes)} bytes")
        if any(128 in part.codes for part in self.parts):
            raise RemoteProtocolError("a byte that stands for minus zero")


class ScalarLog:
    """Keep the records of the last steps, up to ``bytes_max``; then drop the older half.

    A trainer that stands before ``begin`` must take the parameters instead.
    """

    def __init__(self, steps: int, chain: bytes, bytes_max: int) -> None:
        if bytes_max < 0:
            raise ConfigError(f"a log of {bytes_max} bytes")
        self.begin, self._bytes_max, self._bytes = steps, bytes_max, 0
        self._records: list[bytes] = []
        self._chains = [chain]  # before each record, and after the last

    @property
    def steps(self) -> int:
        return self.begin + len(self._records)

    @property
    def chain(self) -> bytes:
        return self._chains[-1]

    @property
    def first_chain(self) -> bytes:
        return self._chains[0]

    def add(self, record: bytes) -> None:
        self._records.append(record)
        self._chains.append(hashlib.sha256(self.chain + record).digest())
        self._bytes += len(record)
        if self._bytes > self._bytes_max:
            self._drop(-(-len(self._records) // 2))

    def has(self, steps: int, chain: bytes) -> bool:
        """Return whether a trainer at this step and chain can come here by what is in the log."""
        at = steps - self.begin
        return 0 <= at < len(self._chains) and self._chains[at] == chain

    def since(self, steps: int) -> bytes:
        """Return all records after so many steps, one after the other."""
        return b"".join(self._records[steps - self.begin :])

    def _drop(self, count: int) -> None:
        self._bytes -= sum(map(len, self._records[:count]))
        del self._records[:count], self._chains[:count]
        self.begin += count
