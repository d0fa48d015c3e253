"""Log steps that are short records: a newcomer needs the log, or a part of it.

Every peer keeps the log of the last steps. A trainer whose parameters are those of a point in it,
say the published ones that the run began with, or those of some rounds ago, gets the rest of the
log and replays it: bytes, not gigabytes. Any other takes the parameters, and the log begins anew at
all peers, because they all read them.
"""

from __future__ import annotations

import hashlib
import json
import struct
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import nn

from atoll.collectives.codecs import F32
from atoll.collectives.errors import ConfigError, RemoteProtocolError
from atoll.optim.every_step.every_step import CHECK_EVERY, AgainError
from atoll.optim.every_step.every_step_gather import EveryStepGather
from atoll.optim.every_step.scalar_log import CHAIN_BYTES, Record, ScalarLog
from atoll.optim.every_step.state_claim import StateClaim
from atoll.optim.run_spec import RunSpec
from atoll.optim.sessions import OperationsSession

STATE_VERSION = 1
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
        model: nn.Module,
        peer: OperationsSession,
        spec: RunSpec,
        log_bytes: int,
        check_every: int = CHECK_EVERY,
        frozen: str = "refuse",
    ) -> None:
        if not 0 <= log_bytes <= LOG_BYTES_MAX:
            raise ConfigError(f"log_bytes is {log_bytes}", fix=f"give it 0 to {LOG_BYTES_MAX}")
        # Replaying a log runs no forward pass, so buffers are each trainer's own here.
        super().__init__(model, (), peer, spec, check_every, buffers=False, frozen=frozen)
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
        self._schedules.go_to(self.steps)
