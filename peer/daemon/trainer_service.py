"""Do the daemon's side of its trainer: attaching, submissions, parameters, collectives.

A daemon has at most one trainer. Its submission region belongs to the daemon: a trainer that is
started again gets a new one, so that a round in progress still reads what was submitted.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from atoll.collectives.errors import ConfigError, SessionError, TrainerRefusedError
from atoll.optim.manifest import Manifest
from atoll.optim.pseudo_gradient import submission_floats
from atoll.optim.run_spec import FROZEN, RunSpec, check_collectives, check_same, parse_blob
from atoll.peer.client.shared_memory import Region, send_region
from atoll.peer.daemon.ipc_server import Handler, IpcServer
from atoll.peer.daemon.ports import Log
from atoll.peer.daemon.trainer_async import AsyncSubmissions
from atoll.peer.membership import events as ev
from atoll.peer.membership.member import MemberState
from atoll.peer.membership.messages import GATHER, REDUCE, WEIGHT_MAX, Begin
from atoll.peer.membership.node import Node
from atoll.peer.membership.operations import (
    OBJECT_BYTES_MAX,
    Operation,
    object_sizes,
    unpack_objects,
)
from atoll.peer.membership.view import REPLICA, short
from atoll.peer.rounds.entries import fragment_of
from atoll.peer.rounds.executor import RoundExecutor
from atoll.peer.rounds.resumed_work import Fate, fate_of, why_not_on
from atoll.peer.rounds.state import Floats, ReplicatedState
from atoll.peer.telemetry.rows import is_figure

EXCHANGES_MAX = 16  # buffers of one trainer for collectives, each of twice a vector's size
# A round that is committed is applied before a submission is compared with it: so long, so often.
APPLY_WAIT_S, APPLY_POLL_S = 5.0, 0.002
METRICS_MAX = 32  # figures that a trainer may show in the status ...
NAME_CHARACTERS_MAX = 64  # ... and the length of their names
TOTALS = ("steps", "tokens")  # which methods count by themselves


@dataclass(slots=True)
class AttachedTrainer:
    """Keep what the daemon has of the trainer that is attached to it."""

    client: bytes
    spec: RunSpec
    manifest: Manifest
    pid: int
    frozen: str = FROZEN[0]  # what it does where frozen parameters are other ones than the run's
    region: Region | None = None  # of its submissions
    initial: Region | None = None  # of the parameters that it offers, until the run has begun
    # Of its collectives, by number: what goes in, then what comes out.
    exchanges: dict[int, Region] = field(default_factory=dict)
    in_step: bool = False  # the barrier waits for it
    submissions: AsyncSubmissions | None = None  # of an asynchronous run
    awaiting: dict[int, int] = field(default_factory=dict)  # fragment -> the call without an answer
    # Fragment -> the round before which what waits is in none; and of which fragments an earlier
    # process of this daemon had it.
    since: dict[int, int] = field(default_factory=dict)
    again: set[int] = field(default_factory=set)
    metrics: dict[str, float] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)  # as its method counts them

    @property
    def figures(self) -> dict[str, float]:
        """Return what rows tell of it.

        A script may report a total of its own beside the method's: two that take turns would look
        like one that falls and begins anew, again and again.
        """
        return self.metrics | self.totals


class TrainerService:
    """Answer the trainer's commands."""

    def __init__(
        self,
        run: str,
        node: Node,
        executor: RoundExecutor,
        ipc_server: IpcServer,
        feed: Callable[[ev.Event], None],
        log: Log,
    ) -> None:
        self._run = run
        self._log = log
        self._node = node
        self._executor = executor
        self.ipc_server = ipc_server
        self._feed = feed
        self._pids: dict[bytes, int] = {}
        self.trainer: AttachedTrainer | None = None
        self._new_loss: float | None = None  # that no line of the log has shown
        self._new_heldout_loss: float | None = None  # that no row has told
        self._exchange_numbers = itertools.count(1)
        self._submitted_s: dict[int, float] = {}  # fragment -> when the trainer was done with it

    def handlers(self) -> dict[str, Handler]:
        return {
            "hello": self._hello,
            "attach": self._attach,
            "resume": self._resume,
            "offer": self._offer,
            "region": self._region,
            "initial": self._initial,
            "base": self._base,
            "state": self._state,
            "submit": self._submit,
            "next": self._next,
            "operate": self._operate,
            "exchange": self._exchange,
            "moved": self._moved,
            "pull": self._pull,
            "valid": self._valid,
            "report": self._report,
            "validations": self._validations,
            "fits": self._fits,
            "shown": self._shown,
            "judged": self._judged,
        }

    def awaited_call(self, fragment: int) -> int | None:
        """Return the number of the call that waits for an answer; None if none does."""
        return self.trainer.awaiting.get(fragment) if self.trainer is not None else None

    def tell(self, effect: ev.TellTrainer, call: int | None) -> None:
        """Answer a call, if the trainer that made it is still there and waits for it.

        It may have given that up and made another one, whose answer this is not.
        """
        trainer = self.trainer
        if trainer is None or call != self.awaited_call(effect.fragment):
            return
        logged = self._as_logged(trainer, effect)
        effect, is_logged = logged or effect, logged is not None
        repeats = trainer.submissions
        if call is None or (repeats and not repeats.is_over(effect, is_logged=is_logged)):
            return
        del trainer.awaiting[effect.fragment]
        outcome = outcome_of(effect, call)
        if effect.kind == "committed" and effect.begin is None:
            head = self._executor.replica.log.head(effect.round)
            outcome["share"] = head.share_of(self._node.me.peer) if head is not None else 0.0
            outcome["peers"] = list(map(short, head.contributors)) if head is not None else []
        is_reduced = effect.begin is not None and effect.begin.kind == REDUCE
        if is_reduced and self._executor.replica.outputs.moved is not None:
            outcome["moved"] = True
        self.ipc_server.push(trainer.client, "outcome", outcome)

    def _as_logged(self, trainer: AttachedTrainer, effect: ev.TellTrainer) -> ev.TellTrainer | None:
        """Return what the log says of a pseudo-gradient that was not waited for.

        None if it is in no round: only then its trainer may hear "missed", and submit the same once
        more. In an asynchronous run the same is done for it, and after a "reload" as well.
        """
        since, kinds = trainer.since.get(effect.fragment), ["missed"]
        if trainer.submissions is not None:
            kinds.append("reload")
        if effect.kind not in kinds or since is None or trainer.spec.submits != "deltas":
            return None
        log, me = self._executor.replica.log, self._node.me.peer
        fate = fate_of(log, me, effect.fragment, since, effect.round)
        return None if fate.kind == "again" else replace(effect, kind=fate.kind, round=fate.round)

    def _was_counted(self, trainer: AttachedTrainer, fragment: int) -> bool | None:
        """Return whether what waits is in a round already, as submitted to an earlier process.

        Then its trainer is told, and it is not to count again. None: that cannot be said before a
        round that is committed is in the log, which the executor does a moment later.
        """
        if fragment not in trainer.again:
            return False
        fate = self._fate_of(fragment, trainer.since[fragment])
        if fate.kind == "again":
            is_all_here = self._executor.replica.log.last >= self._node.follower.round
            return False if is_all_here else None
        call = trainer.awaiting.pop(fragment)
        self.ipc_server.push(trainer.client, "outcome", dict(fate.to_trainer(call)))
        return True

    def _fate_of(self, fragment: int, since: int) -> Fate:
        """Return what the log says of a submission; its last rounds may not be in it yet."""
        log, now = self._executor.replica.log, self._node.follower.round
        return fate_of(log, self._node.me.peer, fragment, since, now)

    def gone(self, client: bytes) -> None:
        self._pids.pop(client, None)
        if self.trainer is not None and self.trainer.client == client:
            self._drop(self.trainer)

    def _drop(self, trainer: AttachedTrainer) -> None:
        self.trainer = None
        if trainer.submissions is not None:
            trainer.submissions.close()
        for region in (trainer.region, trainer.initial, *trainer.exchanges.values()):
            if region is not None:
                region.close()  # the mapping lives on while a round reads it
        self._executor.replica.outputs.forget_moved()
        if trainer.in_step:
            self._log.note("trainer", f"process {trainer.pid} trains no more", pid=trainer.pid)
        self._feed(ev.Detached())

    # ------------------------------------------------------------ commands

    async def _hello(self, client: bytes, arguments: dict[str, Any]) -> dict[str, Any]:
        self.ipc_server.lifeline(client)  # which tells when to forget it
        self._pids[client] = int(arguments["pid"])
        durability = self._executor.durability
        keeps_rounds = durability is not None and durability.keeps_rounds
        me = short(self._node.me.peer)
        return {"run": self._run, "peer": me, "keeps_rounds": keeps_rounds}

    async def _attach(self, client: bytes, arguments: dict[str, Any]) -> dict[str, Any]:
        self.ipc_server.lifeline(client)
        trainer = self.trainer
        if trainer is not None and trainer.client != client:
            raise TrainerRefusedError(
                f"this daemon already serves the trainer with process id {trainer.pid}",
                fix="end that one, or start another daemon with another --home",
            )
        if self._node.leave_by_s is not None:
            raise TrainerRefusedError("this daemon is leaving the run", fix="start it again")
        if self._node.me.role != REPLICA:
            raise TrainerRefusedError(
                f"this daemon's role is {self._node.me.role}, and that takes no trainer",
                fix="start one on this machine with `atoll join` and another --home",
            )
        if trainer is None:
            spec, manifest = await asyncio.to_thread(parse_blob, arguments["blob"])
            if self.trainer is not None:  # somebody else was faster meanwhile
                return await self._attach(client, arguments)
            self.ipc_server.lifeline(client)  # or it has ended meanwhile
            pid = self._pids.get(client, 0)
            trainer = AttachedTrainer(
                client, spec, manifest, pid, arguments.get("frozen", FROZEN[0])
            )
            self.trainer = trainer
        return self._readiness(trainer)

    def _readiness(self, trainer: AttachedTrainer) -> dict[str, Any]:
        node, state = self._node, self._executor.state
        if node.view is None:
            return {"state": "syncing", "text": f"this peer is {node.phase.value} of the view"}
        if node.may_be_behind():
            return {"state": "syncing", "text": "the daemon asks how far the run is"}
        if node.follower.loading:
            return {"state": "syncing", "text": "the daemon reads the run's state from its disk"}
        if node.follower.unsynced:
            loading = self._executor.sync.describe() or "the state of another member"
            return {"state": "syncing", "text": f"the daemon is loading {loading}"}
        if state is None or state.round != node.follower.round:
            text = "nobody's parameters have been taken yet"
            void = node.follower.round == 0
            offered = bool(node.follower.offer)
            return {"state": "void" if void else "syncing", "text": text, "offered": offered}
        try:
            mine, run = (trainer.spec, trainer.manifest), (state.spec, state.manifest)
            warning = check_same(mine, run, self._run, trainer.frozen)
        except Exception:
            self._drop(trainer)
            raise
        if not trainer.in_step:
            trainer.in_step = True
            self._log.note("trainer", f"process {trainer.pid} trains from now on", pid=trainer.pid)
            self._feed(ev.Attached(waits=not trainer.spec.is_asynchronous))
            if trainer.spec.is_asynchronous:
                trainer.submissions = self._asynchronous(trainer)
        return {"state": "ready", "text": warning}

    def _asynchronous(self, trainer: AttachedTrainer) -> AsyncSubmissions:
        def taken() -> None:
            if trainer.region is not None:
                self._take(trainer, trainer.region)

        return AsyncSubmissions(self._node.follower, self._feed, taken)

    async def _resume(self, client: bytes, arguments: dict[str, Any]) -> dict[str, Any]:
        """Say what has become of the work of a trainer whose daemon was started again.

        ``base``: round and chain of the state that it began with, if it has one. ``waiting``:
        fragments, and the last round of which it knows the outcome.
        """
        spec, own = self.known(client).spec, self._node.follower
        here = (own.round, own.chain)
        base = int(arguments["round"]), bytes(arguments["chain"])
        log, deltas = self._executor.replica.log, spec.submits == "deltas"
        why = why_not_on(log, base, here, fragments=spec.fragments, deltas=deltas)
        waiting = arguments["waiting"]
        fates = [self._fate_of(int(f), int(since)) for f, since in waiting]
        said = [dict(fate.to_trainer(0)) for fate in fates]
        return {"why_not": why, "round": own.round, "epoch": own.epoch, "fates": said}

    async def _offer(self, client: bytes, arguments: dict[str, Any]) -> None:
        trainer = self.known(client)
        if trainer.initial is None:
            raise SessionError("offer before its memory was asked for")
        # While INIT reads an earlier trainer's region it must stay; the trainer offers again.
        if self._node.follower.round == 0 and not self._node.follower.contributes:
            self._executor.replica.inputs = trainer.initial.floats
            self._feed(ev.Offered(bytes(arguments["blob"])))

    async def _region(self, client: bytes, _: dict[str, Any]) -> None:
        trainer = self.known(client)
        if trainer.region is None:
            count = submission_floats(trainer.spec, trainer.manifest)
            # Taking memory for a large model stops a thread for a second or more.
            region = await asyncio.to_thread(Region, "submission", count)
            trainer.region = trainer.region or region
        self._hand_out(client, trainer, trainer.region)

    async def _initial(self, client: bytes, _: dict[str, Any]) -> None:
        """Hand out memory for the parameters with which the run may begin."""
        trainer = self.known(client)
        if trainer.initial is None:
            region = await asyncio.to_thread(Region, "initial", trainer.manifest.elements)
            trainer.initial = trainer.initial or region
        self._hand_out(client, trainer, trainer.initial)

    def _hand_out(self, client: bytes, trainer: AttachedTrainer, region: Region) -> None:
        if self.trainer is not trainer:
            raise SessionError("this trainer has ended meanwhile")
        send_region(self.ipc_server.lifeline(client), region, writable=True)

    async def _state(self, client: bytes, _: dict[str, Any]) -> int:
        """Hand out the memory of the state; return how many parameters are at its beginning."""
        self.known(client)
        state = self._executor.state
        if state is None:
            raise SessionError("the run has no state yet")
        send_region(self.ipc_server.lifeline(client), state.shared, writable=False)
        return state.manifest.elements

    async def _base(self, client: bytes, arguments: dict[str, Any]) -> tuple[int, int]:
        """Return what tells the run's parameters of a fragment from later ones: see ``_submit``."""
        trainer, fragment = self.known(client), int(arguments["fragment"])
        until_s = time.monotonic() + APPLY_WAIT_S
        while self._has_to_apply() and time.monotonic() < until_s:  # noqa: ASYNC110  # a thread does it
            await asyncio.sleep(APPLY_POLL_S)
        state = self._executor.state
        if state is None or not 0 <= fragment < trainer.spec.fragments:
            raise SessionError("the run has no state yet, or no such fragment")
        while state.mark_of(fragment) % 2:
            await asyncio.to_thread(state.wait_complete)
        if self.known(client) is not trainer:
            raise SessionError("this trainer has ended meanwhile")
        return state.serial, state.mark_of(fragment)

    def _has_to_apply(self) -> bool:
        """Return whether a committed round waits for its outer step."""
        own, state = self._node.follower, self._executor.state
        return state is not None and not own.unsynced and state.round < own.round

    async def _submit(self, client: bytes, arguments: dict[str, Any]) -> tuple[int, int] | None:
        """Take a submission in.

        ``base``: which parameters of the run an encoded one is the difference from. Where these are
        others by now, nothing is taken in, and they are returned.
        """
        trainer = self.known(client)
        if trainer.region is None or not trainer.in_step:
            raise SessionError("submit before attach")
        weight, fragment = arguments["weight"], int(arguments["fragment"])
        if not 0 <= fragment < trainer.spec.fragments:
            raise ConfigError(f"fragment {fragment} of a run that has {trainer.spec.fragments}")
        if not 0 <= weight <= WEIGHT_MAX:
            raise ConfigError(f"a submission's weight is 0 to {WEIGHT_MAX:g}, not {weight}")
        self.note_figures(trainer, arguments.get("figures", {}))
        base = arguments.get("base")
        if base is not None and tuple(base) != (now := await self._base(client, arguments)):
            return now
        trainer.awaiting[fragment] = int(arguments["call"])
        self._submitted_s[fragment] = time.monotonic()
        self._note_since(trainer, fragment, arguments.get("since"))
        was_counted = self._was_counted(trainer, fragment)
        if was_counted:
            return None
        if trainer.submissions is not None:
            trainer.submissions.submit(weight, lambda: self._was_counted(trainer, fragment))
            return None
        base_round = self._node.follower.round
        if was_counted is None:  # nor may a round read it before: the trainer asks again at once
            missed = ev.TellTrainer("missed", base_round, self._node.follower.epoch, fragment)
            self.tell(missed, trainer.awaiting[fragment])
            return None
        submission = ev.Submitted(base_round, arguments["epoch"], weight, fragment)
        self._feed(submission)
        if self._node.follower.submissions.get(fragment) is submission:
            self._take(trainer, trainer.region)
            self._executor.replica.steps = bytes(arguments.get("steps", b""))
        return None

    def _take(self, trainer: AttachedTrainer, region: Region) -> None:
        """Have the rounds read what the trainer has submitted."""
        replica, trainer.initial = self._executor.replica, None
        if trainer.spec.encodes_submissions:
            replica.encoded, replica.inputs = region.floats.view(np.uint8), None
        else:
            replica.encoded, replica.inputs = None, region.floats

    def _note_since(self, trainer: AttachedTrainer, fragment: int, since: int | None) -> None:
        """Note before which round a submission is in none; None: this process had it first."""
        trainer.since[fragment] = self._node.follower.round if since is None else int(since)
        trainer.again.discard(fragment)
        if since is not None:
            trainer.again.add(fragment)

    async def _next(self, client: bytes, _: dict[str, Any]) -> int:
        """Return the fragment of which a submission is wanted next.

        It is that of the first round that has not begun and that none waits for already.
        """
        own, fragments = self._node.follower, self.known(client).spec.fragments
        begun = {number: begin.fragment for number, begin in own.begins.items()}
        number = max([own.round, *begun]) + 1
        waiting = own.submissions.keys() - set(begun.values())
        for later in range(number, number + fragments):
            if fragment_of(later, fragments) not in waiting:
                return fragment_of(later, fragments)
        return fragment_of(number, fragments)

    async def _operate(self, client: bytes, arguments: dict[str, Any]) -> str:
        """Take the trainer's call in; or say why it has to be made again in a moment."""
        trainer, own = self.known(client), self._node.follower
        if not trainer.in_step:
            raise SessionError(
                "a collective before attach", fix="make the optimizer first, or call a collective"
            )
        submission = call_of(arguments, own)
        number = int(arguments.get("memory", 0))
        halves = halves_of(trainer.exchanges.get(number), submission.operation)
        self.note_figures(trainer, arguments.get("figures", {}))
        why = why_not_now(own, self._executor.state, in_view=self._node.view is not None)
        if not why:
            trainer.awaiting[0] = int(arguments["call"])
            trainer.since.pop(0, None)
            self._feed(submission)
            if own.submissions.get(0) is submission and halves is not None:
                self._executor.replica.inputs = halves[0]
                self._executor.replica.outputs.expect(halves[1])
        return why

    async def _exchange(self, client: bytes, arguments: dict[str, Any]) -> int:
        """Hand out memory for vectors of so many elements; return its number.

        ``dropped``: what was handed out before and is not used again.
        """
        trainer = self.known(client)
        for number in arguments["dropped"]:
            if (dropped := trainer.exchanges.pop(int(number), None)) is not None:
                dropped.close()
        if len(trainer.exchanges) >= EXCHANGES_MAX:
            raise ConfigError(
                f"this trainer has {EXCHANGES_MAX} buffers for collectives",
                fix="let go of some, or make one large one and use views of it",
            )
        region = await asyncio.to_thread(Region, "exchange", 2 * int(arguments["elements"]))
        if self.trainer is not trainer:
            region.close()
            raise SessionError("this trainer has ended meanwhile")
        number = next(self._exchange_numbers)
        trainer.exchanges[number] = region
        send_region(self.ipc_server.lifeline(client), region, writable=True)
        return number

    async def _moved(self, client: bytes, _: dict[str, Any]) -> None:
        """Hand out the memory in which the result of the last call is."""
        self.known(client)
        region = self._executor.replica.outputs.take_moved()
        if region is None:
            raise SessionError("the result is where it was expected")
        send_region(self.ipc_server.lifeline(client), region, writable=True)
        region.close()

    async def _pull(self, client: bytes, _: dict[str, Any]) -> dict[str, Any]:
        self.known(client)
        state = self._executor.state
        if state is None:
            raise SessionError("the run has no state yet")
        while state.is_changing:  # the next commit may follow at once
            await asyncio.to_thread(state.wait_complete)
        generation, round_number = state.generation, state.round  # in this order
        return {
            "round": round_number,
            "epoch": self._node.follower.epoch,
            "chain": self._chain_after(round_number),
            "generation": generation,
            "serial": state.serial,
            "marks": [state.mark_of(fragment) for fragment in range(state.spec.fragments)],
        }

    def _chain_after(self, round_number: int) -> bytes:
        """Return the chain after a round that is here; empty where it is not known any more."""
        own = self._node.follower
        found = self._executor.replica.log.chain_after(round_number)
        return found or (own.chain if own.round == round_number else b"")

    async def _valid(self, client: bytes, arguments: dict[str, Any]) -> bool:
        state = self._executor.state
        return (
            state is not None
            and state.serial == arguments["serial"]  # else the numbers are another state's
            and state.generation == arguments["generation"]
            and arguments["generation"] % 2 == 0  # else a commit was under way all the while
        )

    def submitted_s(self, fragment: int) -> float | None:
        """Return when the trainer has submitted for the round that is over, once; else None."""
        return self._submitted_s.pop(fragment, None)

    def new_loss(self) -> float | None:
        """Return the loss that the trainer has reported since it was asked for last; or None."""
        loss, self._new_loss = self._new_loss, None
        return loss

    def new_heldout_loss(self) -> float | None:
        """Return the held-out loss that the trainer has reported since the last call; or None."""
        loss, self._new_heldout_loss = self._new_heldout_loss, None
        return loss

    async def _report(self, client: bytes, arguments: dict[str, Any]) -> None:
        self._note_reported(self.known(client), arguments["metrics"])

    def note_figures(self, trainer: AttachedTrainer, figures: dict[str, float]) -> None:
        """Keep figures that have come with a submission, among them the totals of its method."""
        self._note_reported(trainer, figures)
        trainer.totals |= {name: float(figures[name]) for name in TOTALS if name in figures}

    def _note_reported(self, trainer: AttachedTrainer, figures: dict[str, float]) -> None:
        """Keep what the trainer says of itself, for the status and the log.

        Of a loss that is no number any more the line of the round tells, and nothing else.
        """
        known = trainer.metrics
        for long_name, value in list(figures.items())[:METRICS_MAX]:
            name = str(long_name)[:NAME_CHARACTERS_MAX]
            if not is_figure(float(value)):
                known.pop(name, None)
            elif name in known or len(known) < METRICS_MAX:
                known[name] = float(value)
        if "loss" in figures:
            self._new_loss = float(figures["loss"])
        heldout = float(figures.get("heldout_loss", math.nan))
        if is_figure(heldout):
            self._new_heldout_loss = heldout

    async def _validations(self, client: bytes, _: dict[str, Any]) -> list[dict[str, Any]]:
        self.known(client)
        return self._executor.audits.validation.tasks()

    async def _fits(self, client: bytes, arguments: dict[str, Any]) -> bool:
        """Return whether what the trainer has written to its region fits a round.

        Raises SessionError while a submission of it may be read.
        """
        trainer = self.known(client)
        if trainer.region is None or trainer.awaiting:
            raise SessionError("the memory of submissions is in use")
        terms, target = bytes(arguments["terms"]), bytes(arguments["target"])
        fits = self._executor.audits.validation.fits
        return await asyncio.to_thread(
            fits, terms, target, trainer.region.floats, start=bool(arguments["start"])
        )

    async def _shown(self, client: bytes, arguments: dict[str, Any]) -> None:
        self.known(client)
        self._executor.audits.validation.shown(bytes(arguments["terms"]))

    async def _judged(self, client: bytes, arguments: dict[str, Any]) -> None:
        self.known(client)
        terms, target = bytes(arguments["terms"]), bytes(arguments["target"])
        judgement, why = arguments["judgement"], str(arguments["why"])
        self._executor.audits.validation.judged(terms, target, judgement, why)

    def known(self, client: bytes) -> AttachedTrainer:
        """Return the trainer, which is this client. Raise SessionError if it is not."""
        if self.trainer is None or self.trainer.client != client:
            raise SessionError(
                "this client is not the daemon's trainer",
                fix="make the optimizer first, or call a collective",
            )
        return self.trainer


# ------------------------------------------------------------ collectives of the trainers' own


def call_of(arguments: dict[str, Any], own: MemberState) -> ev.Submitted:
    """Return what the trainer has called. Raise ConfigError if that cannot be."""
    given = bytes(arguments.get("given", b""))
    if len(given) > OBJECT_BYTES_MAX:
        raise ConfigError(
            f"an object of {len(given):,} bytes; at most {OBJECT_BYTES_MAX:,}",
            fix="gather less, or use all_reduce for vectors",
        )
    try:
        operation = Operation(
            str(arguments["kind"]),
            int(arguments.get("elements", 0)),
            str(arguments.get("op", "")),
            str(arguments.get("codec", "")),
        )
    except ValueError as error:
        raise ConfigError(f"no such collective: {error}") from error
    return ev.Submitted(own.round, own.epoch, 1.0, 0, operation, given)


def halves_of(region: Region | None, operation: Operation | None) -> tuple[Floats, Floats] | None:
    """Return where the vector lies, and where its result goes; None for other operations.

    Raises SessionError if there is no memory for it.
    """
    if operation is None or operation.kind != REDUCE:
        return None
    elements, half = operation.elements, region.count // 2 if region is not None else 0
    if region is None or not 0 < elements <= half:
        raise SessionError(
            f"no memory was asked for {elements:,} elements",
            fix="call session.all_reduce(), which asks for it",
        )
    return region.floats[:elements], region.floats[half : half + elements]


def why_not_now(own: MemberState, state: ReplicatedState | None, *, in_view: bool) -> str:
    """Return why the call has to wait; "" if it need not.

    Raises ConfigError if waiting would not help.
    """
    if state is not None:
        check_collectives(state.spec)
    if own.is_behind or not in_view:
        return "this peer is catching up with the others"
    if own.contributes:  # what a trainer before this one has submitted
        return "a round is under way in which this peer takes part already"
    return ""


def outcome_of(effect: ev.TellTrainer, call: int) -> dict[str, Any]:
    """Return what the trainer hears, with the number of its call."""
    outcome = {"kind": effect.kind, "round": effect.round, "call": call, "text": effect.text}
    begin = effect.begin
    return outcome if begin is None else outcome | _result(begin)


def _result(begin: Begin) -> dict[str, Any]:
    names = [short(peer) for peer in begin.participants]
    if begin.kind != GATHER:
        return {"peers": names}
    objects = unpack_objects(begin.blob, len(names))
    if objects is None:
        return {"sizes": list(zip(names, object_sizes(begin.blob, len(names)), strict=True))}
    return {"objects": list(zip(names, objects, strict=True)), "sizes": []}
