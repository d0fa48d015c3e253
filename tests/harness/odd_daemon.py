"""A real daemon with one thing different, in a process of its own, for the command line of `atoll`.

    python tests/harness/odd_daemon.py ODDITY up --run demo ...

``commits-twice:R``   as coordinator, it signs two different COMMITs of round R, for one member
``votes-twice:M``     it signs two different votes at one ballot, for every other member, once, for
                      a view of M members
``fragments:N:M:D``   its trainer lives in it and hands over N fragments, each for rounds of its
                      own, once the view has M members; if D is not 0, the daemon dies from round D
                      on as soon as it reduces two rounds at a time
``stays``             it goes on after the authority of its run has revoked it
``audit:LIE``         it lies in audited rounds: as an owner in its ``result``; in the ``numbers``
                      of its parts; in each ``part``, which it has promised otherwise; it says
                      nothing once the draw begins (``withholds``); it signs ``two`` different sets
                      of numbers
``relay:HOW``         of what it relays for others it ``flips`` a bit, ``drops`` or ``replays`` a
                      piece, or passes nothing on any more (``holds``), once SPOIL_BYTES have gone
                      one way; it ``delays`` all of it; it ``records`` all of it, in the file
                      ``relayed`` of its home
``telemetry:HOW``     it records no events and rows, and tells none (``off``); it says after each
                      row what processor time that has taken (``timed``)
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from atoll.collectives.codecs import U8
from atoll.collectives.engine.parts import MeanParts, Parts
from atoll.collectives.errors import AtollError, PassRevokedError
from atoll.optim.manifest import Manifest, Parameter, chunk_range
from atoll.optim.run_spec import RunSpec, blob
from atoll.peer.cli import main as cli
from atoll.peer.daemon import daemon
from atoll.peer.membership import events as ev
from atoll.peer.membership import messages as ms
from atoll.peer.membership.view import View
from atoll.peer.net.wire import encode
from atoll.peer.relay import splicer
from atoll.peer.rounds.entries import ROUNDS_IN_FLIGHT_MAX
from atoll.peer.telemetry.event_file import EventFile
from atoll.peer.telemetry.reporter import RowReporter
from atoll.peer.telemetry.rows import RoundClock
from atoll.peer.verify.attempt_audit import AttemptAudit
from atoll.peer.verify.manager import AuditedAttempt
from atoll.peer.verify.statement import Check, SignedStatement, StatementPhase, body_of

# What events and rows take: methods that do nothing else.
TELEMETRY = (
    (EventFile, "append"),
    (RoundClock, "hears"),
    (RowReporter, "committed"),
    (RowReporter, "on_message"),
)
ELEMENTS = 2_000_000  # a reduction of a fragment of it takes some time
DIE_S = 0.005  # after the second of several rounds has begun: both are on their way then
INNER_S = 0.02
LOOK_S = 0.01
SPOIL_BYTES = 100_000  # of one way of a circuit: after its beginning, in the middle of a round
DELAY_S = 0.03  # for each piece of 64 KiB


def say(**values: object) -> None:
    print(json.dumps(values), flush=True)


class Liar(daemon.Daemon):
    """``_lie`` is what it says to that peer just before a message, None if nothing."""

    def _effect_table(self) -> dict[type, Callable[[Any], object]]:
        carriers = super()._effect_table()
        send = carriers[ev.Send]

        def send_twice(effect: ev.Send) -> None:
            lie = self._lie(effect.peer, effect.message)
            if lie is not None:
                signed = self.node.signatures.signed(lie, self.node.me.inc)
                send(ev.Send(effect.peer, signed))
                say(lied_to=effect.peer.hex())
            send(effect)

        return {**carriers, ev.Send: send_twice}

    def _lie(self, peer: bytes, message: object) -> object | None:
        raise AssertionError


class CommitsTwice(Liar):
    round = 0

    def _lie(self, peer: bytes, message: object) -> ms.Commit | None:
        others = [p for p in self.node.view.peers if p != self.node.me.peer]
        if not isinstance(message, ms.Commit) or peer != others[0] or message.round != self.round:
            return None
        return replace(message, chain=hashlib.sha256(message.chain).digest())


class VotesTwice(Liar):
    members = 0

    def __init__(self, *arguments: Any) -> None:
        self._lied: set[bytes] = set()
        self._proposals: dict[bytes, View] = {}  # by digest
        super().__init__(*arguments)

    def on_message(self, peer: bytes, message: object) -> None:
        if isinstance(message, ms.Packed):
            message = self._packing.unpacked(peer, message)
        if isinstance(message, ms.Accept):
            self._proposals[message.proposal.digest] = message.proposal
        super().on_message(peer, message)

    def _lie(self, peer: bytes, message: object) -> ms.Accepted | None:
        if not isinstance(message, ms.Accepted) or peer in self._lied:
            return None
        proposal = self._proposals.get(message.digest)
        if proposal is None or len(proposal.members) != self.members:
            return None
        self._lied.add(peer)
        return replace(message, digest=replace(proposal, base_chain=bytes(32)).digest)


class Stays(daemon.Daemon):
    def stop(self, error: AtollError | None = None) -> None:
        if isinstance(error, PassRevokedError):
            say(stays=error.what)
        else:
            super().stop(error)


class Fragmented(daemon.Daemon):
    """What it trains is of no interest: every parameter moves towards a target of its own."""

    fragments, members, dies_in = 1, 1, 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        in_flight = min(self.fragments, ROUNDS_IN_FLIGHT_MAX)
        spec = RunSpec(sync_every=1, fragments=self.fragments, rounds_in_flight=in_flight)
        self._blob = blob(spec, Manifest.of([Parameter("w", (ELEMENTS,))]))
        self._region = np.ones(ELEMENTS, np.float32)
        self._target = np.float32(self.node.me.peer[0] / 64)
        self.parts.trainers.tell = self._told
        self._loop.call_later(LOOK_S, self._attach)

    def _attach(self) -> None:
        own, state, view = self.node.follower, self.executor.state, self.node.view
        if view is None or len(view.members) < self.members or own.unsynced or own.offer:
            pass
        elif own.round == 0:
            self.executor.replica.inputs = self._region
            self.feed(ev.Offered(self._blob))
        elif state is not None and state.round == own.round:
            self.feed(ev.Attached())
            for fragment in range(self.fragments):
                self._submit(fragment)
            return
        self._loop.call_later(LOOK_S, self._attach)

    def _told(self, effect: ev.TellTrainer, call: int | None) -> None:
        if effect.kind != "reload":
            self._loop.call_later(INNER_S, self._submit, effect.fragment)
        elif self.node.follower.attached:
            for fragment in range(self.fragments):
                self._loop.call_later(INNER_S, self._submit, fragment)

    def _submit(self, fragment: int) -> None:
        own, state = self.node.follower, self.executor.state
        if own.unsynced or state is None or self.node.view is None:
            self._loop.call_later(LOOK_S, self._submit, fragment)
            return
        first, end = chunk_range(fragment, self.fragments, state.grid.count)
        part = slice(state.grid.bounds(first)[0], state.grid.bounds(end - 1)[1])
        self._region[part] = state.theta[part] * np.float32(0.9) + self._target * np.float32(0.1)
        self.executor.replica.inputs = self._region
        self.feed(ev.Submitted(own.round, own.epoch, 1.0, fragment))

    def feed(self, event: ev.Event) -> None:
        super().feed(event)
        own = self.node.follower
        reducing = [n for n, begin in own.begins.items() if n not in own.held]
        if len(reducing) > 1 and 0 < self.dies_in <= own.round:
            self.dies_in = 0
            self._loop.call_later(DIE_S, self._die, sorted(reducing))

    def _die(self, reducing: list[int]) -> None:
        say(reducing=reducing)
        os.kill(os.getpid(), signal.SIGKILL)


def lie_in_audits(lie: str) -> None:
    """In every one of them."""
    if lie == "result":
        encode = MeanParts.encode

        def wrong(self: MeanParts, chunk: int, out: U8) -> None:
            if self.contribution.coded is not None:  # not where it looks whether a result is right
                self._sums[chunk] *= np.float32(-3)
            encode(self, chunk, out)

        MeanParts.encode = wrong  # type: ignore[method-assign]
    elif lie == "part":
        source = Parts._encode_own

        def other(self: Parts, chunk: int, me: int, buffer: U8) -> U8:
            part = source(self, chunk, me, buffer)
            if self.contribution.coded is None:
                return part
            changed = part.copy()
            changed[part.size // 2] = 1 if part[part.size // 2] != 1 else 2  # one code
            return changed

        Parts._encode_own = other  # type: ignore[method-assign]
    elif lie == "numbers":
        numbers = AttemptAudit.numbers

        def shifted(self: AttemptAudit) -> Check:
            check = numbers(self)
            return replace(check, sketches=bytes(len(check.sketches)))

        AttemptAudit.numbers = shifted  # type: ignore[method-assign]
    else:
        tell = AuditedAttempt._tell

        def oddly(self: AuditedAttempt, message: object, peers: Collection[bytes]) -> None:
            own = isinstance(message, SignedStatement) and message.signer == self.audit.me
            if (
                own
                and lie == "withholds"
                and StatementPhase.REVEAL <= message.phase <= StatementPhase.VERDICT
            ):
                return
            tell(self, message, peers)
            if own and lie == "two" and message.phase is StatementPhase.CHECK:
                check = body_of(message.statement)
                assert isinstance(check, Check)
                other = replace(check, norms=bytes(len(check.norms)))
                words = self.audit
                tell(self, words._signed(StatementPhase.CHECK, other), peers)

        AuditedAttempt._tell = oddly  # type: ignore[method-assign]


def spoil_relaying(how: str) -> None:
    """Carry bytes through this process, which a real relay does not do, and spoil them."""

    class Spoiler(splicer._Flow):
        def __init__(self, source: socket.socket, sink: socket.socket) -> None:
            super().__init__(source, sink)
            self.passed = 0
            self.pending = b""
            self.last = b""
            self.ready_s = 0.0

        def write(self) -> int:
            fresh = b""
            if self.held > len(self.pending):
                fresh = os.read(self.pipe_out, self.held - len(self.pending))
                self.ready_s = time.monotonic() + (DELAY_S if how == "delays" else 0.0)
            self.pending += self._spoilt(fresh)
            self.last = fresh or self.last
            self.passed += len(fresh)
            self.held, count = len(self.pending), 0
            if self.held and time.monotonic() < self.ready_s:
                return 0  # the sink can be written to: it is asked again at once
            if self.held:
                with contextlib.suppress(BlockingIOError):
                    count = self.sink.send(self.pending)
            self.pending = self.pending[count:]
            self.held -= count
            if self.at_end and not self.held and not self.is_done:
                self.is_done = True
                self.sink.shutdown(socket.SHUT_WR)
            return count

        def _spoilt(self, data: bytes) -> bytes:
            if how == "records":
                with Path(sys.argv[-1], "relayed").open("ab") as file:
                    file.write(data)
            if self.passed < SPOIL_BYTES or not data:
                return data
            if how == "flips":
                return data[:-1] + bytes((data[-1] ^ 1,))
            if how == "drops":
                return data[len(data) // 2 :]
            if how == "holds":
                return b""
            return self.last + data if how == "replays" else data

    splicer._Flow = Spoiler  # type: ignore[misc]


def change_telemetry(how: str) -> None:
    if how == "off":
        for owner, name in TELEMETRY:
            if owner is not RoundClock:  # it measures the round itself
                setattr(owner, name, lambda *_, **__: None)
        return
    depth = row_bytes = 0
    spent_s: dict[str, float] = {}  # by the outermost of the methods

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def outer(*arguments: Any, **named: Any) -> Any:
            nonlocal depth
            depth, began_s = depth + 1, time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                depth -= 1
                if not depth:
                    name = function.__name__
                    spent_s[name] = spent_s.get(name, 0.0) + time.thread_time() - began_s

        return outer

    for owner, name in TELEMETRY:
        setattr(owner, name, timed(getattr(owner, name)))
    report, make = timed(RowReporter._report), RowReporter._row

    def made(self: RowReporter, pending: Any) -> Any:
        nonlocal row_bytes
        row = make(self, pending)
        row_bytes += len(encode(row))
        return row

    def told(self: RowReporter) -> None:
        report(self)
        say(telemetry_s=spent_s, cpu_s=time.process_time(), row_bytes=row_bytes)

    RowReporter._row = made  # type: ignore[method-assign]
    RowReporter._report = told  # type: ignore[method-assign]


def main() -> int:
    oddity, *values = sys.argv[1].split(":")
    if oddity == "commits-twice":
        CommitsTwice.round = int(values[0])
        kind: type[daemon.Daemon] = CommitsTwice
    elif oddity == "votes-twice":
        VotesTwice.members = int(values[0])
        kind = VotesTwice
    elif oddity == "stays":
        kind = Stays
    elif oddity == "audit":
        lie_in_audits(values[0])
        kind = daemon.Daemon
    elif oddity == "relay":
        spoil_relaying(values[0])
        kind = daemon.Daemon
    elif oddity == "telemetry":
        change_telemetry(values[0])
        kind = daemon.Daemon
    else:
        Fragmented.fragments, Fragmented.members, Fragmented.dies_in = map(int, values)
        kind = Fragmented
    daemon.Daemon = kind  # type: ignore[misc]
    return cli.main(sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
