"""Take a trainer's part in validation: show its own local steps, take those of others again.

Between two rounds it asks its daemon what was drawn (peer/verify/validation.py). Its own segment it
publishes; that of another it fetches, within a few rounds, and judges:

==================================================  =========
nothing that fits the commitment was shown          withheld
it begins or ends elsewhere than the round did      wrong
its steps lead elsewhere here, by twice what is     wrong
borne, and two times
its steps lead elsewhere, but by less, or so do     nothing
own ones that are taken again
==================================================  =========

Only what the commitment proves is called wrong: everybody who looks at it finds the same.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from atoll.collectives.codecs import F32
from atoll.collectives.errors import (
    CheckpointError,
    CodecError,
    ConfigError,
    RemoteProtocolError,
    SessionError,
)
from atoll.optim.manifest import Manifest
from atoll.optim.pseudo_gradient import Writer
from atoll.optim.replay.checkpoint import WorkCheckpoint
from atoll.optim.replay.recorder import Recorder, Replay
from atoll.optim.replay.replaying import ReplayTask, replay
from atoll.optim.replay.step_disclosure import Extent, Opened, StepDisclosure
from atoll.optim.sessions import ValidationChannel, VectorAsked
from atoll.optim.side_channel import OF_PARTNERS
from atoll.peer.client.console import say
from atoll.peer.client.trainer_channel import Outcome, Validation

RIGHT, WRONG, WITHHELD = 0, 1, 2  # peer/verify/statement.py: Judgement
ASKED, HERE = "asked", "here"  # states of what was asked for; between the two it is on its way
SIZE, SEGMENT = "replay.size", "replay.segment"  # names of a size in bytes, and of the bytes
EXACT = 1 << 20  # numbers below it are the same in float32; sizes are two of them
LOOK_S = 0.2  # between two rounds, for all that is on its way; then again after the next one
# Rounds until a segment is called withheld, if nothing of it comes, and if it comes slowly. Whoever
# looks because of an accusation takes as long, and is still in time (peer/verify/validation.py:
# VALIDATED_MAX).
PATIENCE_ROUNDS = 2
COMING_ROUNDS = 8
SIZES_MAX = 2  # times an own segment ...
MORE_BYTES = 64 << 20  # ... and more samples, or random states
FETCHES_MAX = 16  # at a time; the daemon takes four times as many
EXTENTS_MAX = 16  # own rounds that are remembered, with which those of others are compared


@dataclass
class _Fetch:
    """Hold a segment on its way here: first its size, then its bytes."""

    size: VectorAsked
    rounds: int = 0  # without a byte of it ...
    coming: int = 0  # ... and with some
    nbytes: int = 0
    segment: VectorAsked | None = None


@dataclass
class Validator:
    """Carry out a trainer's part in the validation of local steps.

    ``steady``: whether all trainers take as many steps in a round, so that all know where the run
    stands.
    """

    session: ValidationChannel
    recorder: Recorder
    replay: Replay
    manifest: Manifest
    steady: bool
    _task: ReplayTask | None = None
    _own_bytes: int = 0  # the size of an own segment
    _until_s: float = 0.0
    _fetches: dict[tuple[bytes, bytes], _Fetch] = field(default_factory=dict)
    _extents: dict[int, Extent] = field(default_factory=dict)

    def submit(self, write: Writer, weight: float) -> None:
        """Submit with the commitment to the steps; without one nobody would count it."""
        commitment = self.recorder.commitment()
        if commitment is None:
            self.session.submit(write, 0.0, 0, b"")
        else:
            self.session.submit(write, weight, 0, commitment.digest)

    def round_over(self, outcome: Outcome) -> None:
        """Show the own steps and judge those of others, between two rounds.

        ConfigError if the task does not lead where the own steps led.
        """
        if outcome.kind == "committed":
            self._remember(outcome.round)
        open_now = self.session.validations()
        self._until_s = time.monotonic() + LOOK_S
        wanted = {(each.terms, each.target) for each in open_now}
        for key in self._fetches.keys() - wanted:
            self._drop(self._fetches.pop(key))
        for each in open_now:
            if each.own:
                self._show(each)
            else:
                self._examine(each)

    def _remember(self, round_number: int) -> None:
        commitment = self.recorder.commitment(round_number)
        if commitment is None:
            return
        self._extents = {n: e for n, e in self._extents.items() if n < round_number}
        self._extents[round_number] = commitment.extent
        while len(self._extents) > EXTENTS_MAX:
            del self._extents[min(self._extents)]
        if self._task is None:
            assert self.replay.task is not None
            task = self.replay.task()
            if why := self._unlike_own(task):
                raise ConfigError(
                    f"the replay's task does not lead where the own steps have led: {why}",
                    fix="make model and inner optimizer there as here, and train in the same way",
                )
            self._task = task

    def _unlike_own(self, task: ReplayTask) -> str:
        """Return why the own steps lead elsewhere when they are taken again; "" if they do not.

        A task that is wrong would accuse everybody, and so would a machine without memory.
        """
        number = max(self._extents)
        commitment = self.recorder.commitment(number)
        if commitment is None:
            return ""
        opening = self.recorder.opening(number, 0)
        self._own_bytes = len(opening.encode())
        return replay(opening.open(commitment.digest), task, self.replay.tolerance).why

    # ------------------------------------------------------------ the own steps

    def _show(self, validation: Validation) -> None:
        commitment = self.recorder.commitment(validation.round)
        try:
            if commitment is not None and commitment.digest == validation.work:
                segment = validation.number % commitment.extent.segments
                data = self.recorder.opening(validation.round, segment).encode()
                size = np.array(divmod(len(data), EXACT), np.float32)
                self.session.publish(SEGMENT, validation.round, as_floats(data), "float32")
                self.session.publish(SIZE, validation.round, size, "float32")
        except (CheckpointError, ConfigError) as error:  # training goes on without
            what = f"local steps of round {validation.round} cannot be shown: {error}"
            say(f"{what}")
        self.session.shown(validation)

    # ------------------------------------------------------------ those of others

    def _examine(self, validation: Validation) -> None:
        if self._task is None:  # no round of its own yet with which it could be tried
            return
        key = validation.terms, validation.target
        try:
            data = self._fetched(key, validation)
        except OF_PARTNERS as error:
            self._judge(validation, WITHHELD, error.what)
            return
        if data is None:
            return
        self._drop(self._fetches.pop(key))
        self._judge(validation, *self._judgement(validation, data, self._task))

    def _fetched(self, key: tuple[bytes, bytes], validation: Validation) -> bytes | None:
        """Return the bytes of a segment; None if it is still on its way.

        AtollError if it cannot be had.
        """
        name, number = validation.target.hex(), validation.round
        fetch = self._fetches.get(key)
        if fetch is None and len(self._fetches) >= FETCHES_MAX:
            return None
        if fetch is None:
            asked = self.session.ask_vector(name, SIZE, number, 2, "float32")
            fetch = self._fetches[key] = _Fetch(asked)
        if fetch.segment is None and fetch.size.look(self._left_s) == HERE:
            high, low = fetch.size.read().tolist()
            fetch.nbytes = int(high) * EXACT + int(low)
            if not 0 < fetch.nbytes <= SIZES_MAX * self._own_bytes + MORE_BYTES:
                raise RemoteProtocolError(f"a segment of {fetch.nbytes:,} bytes")
            elements = -(-fetch.nbytes // 3)
            fetch.segment = self.session.ask_vector(name, SEGMENT, number, elements, "float32")
        state = ASKED if fetch.segment is None else fetch.segment.look(self._left_s)
        if fetch.segment is not None and state == HERE:
            return as_bytes(fetch.segment.read(), fetch.nbytes)
        fetch.rounds += state == ASKED
        fetch.coming += state != ASKED
        if fetch.rounds > PATIENCE_ROUNDS or fetch.coming > COMING_ROUNDS:
            looks = fetch.rounds + fetch.coming
            raise RemoteProtocolError(f"nothing came, or not all of it, within {looks} rounds")
        return None

    @property
    def _left_s(self) -> float:
        return max(0.0, self._until_s - time.monotonic())

    def _drop(self, fetch: _Fetch) -> None:
        for asked in (fetch.size, fetch.segment):
            if asked is not None:
                asked.drop()

    def _judgement(
        self, validation: Validation, data: bytes, task: ReplayTask
    ) -> tuple[int | None, str]:
        try:
            opened = StepDisclosure.decode(data, self.manifest).open(validation.work)
        except (RemoteProtocolError, RecursionError, MemoryError) as error:
            return WITHHELD, str(error)
        extent = opened.extent
        if opened.end is None or opened.segment != validation.number % extent.segments:
            return WITHHELD, "another segment was shown, or not all of it"
        if extent.segment_steps != self.replay.segment_steps:
            return WITHHELD, f"segments of {extent.segment_steps} steps"
        try:
            judgement, why = self._ends(validation, opened)
        except SessionError as error:  # the round is too long ago
            return None, error.what
        except (CodecError, RemoteProtocolError) as error:  # proven, and still no parameters
            return WRONG, error.what
        return (judgement, why) if judgement != RIGHT else self._replayed(opened, task)

    def _replayed(self, opened: Opened, task: ReplayTask) -> tuple[int | None, str]:
        verdict = replay(opened, task, self.replay.tolerance)
        if verdict.passed:
            return RIGHT, ""
        again = replay(opened, task, self.replay.tolerance.doubled)
        if again.passed or not (again.decided and verdict.decided):
            return None, verdict.why
        try:
            why = self._unlike_own(task)
        except (CheckpointError, ConfigError) as error:
            why = error.what
        if why:
            return None, f"{verdict.why}; but own steps differ as well: {why}"
        return WRONG, again.why

    def _ends(self, validation: Validation, opened: Opened) -> tuple[int, str]:
        """Judge whether the segment fits what came before it, and what came of it."""
        extent, mine = opened.extent, self._extents.get(validation.round)
        same = mine is not None and mine.steps == extent.steps
        if self.steady and mine is not None and same and mine.first_step != extent.first_step:
            return WITHHELD, f"it stands at step {extent.first_step}, here {mine.first_step}"
        if opened.is_first and validation.before:
            if opened.before is None or not opened.before.leads_to(validation.before):
                if not opened.start.is_fresh:
                    return WITHHELD, "how its last round ended was not shown"
            elif not opened.carries_over(validation.before):
                return WRONG, "its inner optimizer begins elsewhere than it had ended"
        if opened.is_first and not self._fits(validation, opened.start, start=True):
            return WRONG, "it begins elsewhere than the run was"
        if opened.is_last and not self._fits(validation, opened.end, start=False):
            return WRONG, "it has submitted something else than its steps end in"
        return RIGHT, ""

    def _fits(self, validation: Validation, point: WorkCheckpoint | None, *, start: bool) -> bool:
        assert point is not None  # its digests alone would not have been taken
        flat = point.flat(self.manifest)
        return self.session.fits(validation, lambda out: np.copyto(out, flat), start=start)

    def _judge(self, validation: Validation, judgement: int | None, why: str) -> None:
        if judgement != RIGHT:
            what = {WRONG: "are wrong", WITHHELD: "were withheld", None: "cannot be judged"}
            say(
                f"local steps of {validation.name} in round {validation.round} "
                f"{what[judgement]}: {why}"
            )
        self.session.judged(validation, judgement, why)


def as_floats(data: bytes) -> F32:
    """Put three bytes into each float32, which has their number exactly.

    Vectors hold no other bits.
    """
    padded = np.frombuffer(data + bytes(-len(data) % 3), np.uint8).reshape(-1, 3)
    return padded.astype(np.float32) @ np.array([1, 256, 65536], np.float32)


def as_bytes(values: F32, nbytes: int) -> bytes:
    """Return the bytes in values of anyone; RemoteProtocolError for what are no bytes."""
    if not (np.isfinite(values).all() and (values >= 0).all() and (values < 1 << 24).all()):
        raise RemoteProtocolError("a segment of local steps that holds no bytes")
    numbers = values.astype("<u4")
    return numbers.view(np.uint8).reshape(-1, 4)[:, :3].tobytes()[:nbytes]
