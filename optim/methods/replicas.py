"""Fetch the parameters of the other replicas, in a run whose trainers keep their own.

They serve to begin with those of one, and to evaluate or export what all have become together.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from atoll.collectives.codecs import F32
from atoll.collectives.errors import RoundTimeoutError
from atoll.collectives.units import duration
from atoll.optim.run_spec import RunSpec
from atoll.optim.sessions import VectorChannel
from atoll.optim.side_channel import OF_PARTNERS
from atoll.peer.client.console import say

PHI = "phi"  # as which every trainer publishes its own, under the number of its outer step
FOUNDER_BYTES = 32  # the longest name of a founder, of which the run's state consists
LOOK_AGAIN_S = 0.25  # while nobody has parameters yet
PROGRESS_S = 10.0  # a wait longer than this says for whom
CURRENT_STEPS = 2  # a replica that is further behind is no part of what the run has become


class Replicas:
    """Find and fetch the parameters of replicas, seen from one trainer.

    Its vectors are float32[elements].
    """

    def __init__(self, channel: VectorChannel, spec: RunSpec, elements: int) -> None:
        self._channel, self._elements = channel, elements
        self._codec, self._deadline_s = spec.codec, spec.round_deadline_s

    def write_founder(self, flat: F32) -> None:
        """Write the state of a run that begins here: the name of the peer that founded it.

        All replicas begin with the parameters of that peer.
        """
        name = self._channel.peer_name.encode()[:FOUNDER_BYTES]
        flat.fill(0.0)
        flat[: len(name)] = list(name)

    def first(self, into: F32) -> int:
        """Take over the newest parameters that anybody has; return the outer step begun with them.

        Nobody has any at the beginning of a run: then the peer that founded it begins with its own
        (0 is returned, and nothing written), and everybody else waits for them.

        RoundTimeoutError if they do not come within the run's round deadline.
        """
        founder = self._founder()
        began_s = said_s = time.monotonic()
        while True:
            newest, silent = self._newest()
            if number := self._take_newest(newest, into):
                return number
            nobody = not silent and not any(newest.values())
            if nobody and founder == self._channel.peer_name:
                return 0
            waited_s = time.monotonic() - began_s
            so_far = duration(waited_s)
            text = f"no parameters to begin with after {so_far}: {founder} founded this run"
            text += f"; no answer from {', '.join(silent)}" if silent else ""
            if waited_s > self._deadline_s:
                raise RoundTimeoutError(
                    text,
                    fix=f"start a trainer on {founder}; or, if it was lost before anybody took its "
                    "parameters over, begin a run of another name",
                    phase="begin",
                    elapsed_s=waited_s,
                )
            if time.monotonic() - said_s > PROGRESS_S:
                said_s = time.monotonic()
                say(text)
            time.sleep(LOOK_AGAIN_S)

    def wait_for_others(self) -> None:
        """Wait until as many members have parameters as the run needs trainers.

        RoundTimeoutError as in ``first``.
        """
        began_s = said_s = time.monotonic()
        while (needed := self._channel.members().min_trainers) > 1:
            here = [name for name, number in self._newest()[0].items() if number]
            if len(here) >= needed:
                return
            waited_s = time.monotonic() - began_s
            text = (
                f"waited {waited_s:.0f} s for {needed - len(here)} more: min_trainers is {needed},"
                f" parameters have {', '.join(here)}"
            )
            fix = f"start another (python train.py) or lower it: atoll min-trainers {len(here)}"
            if waited_s > self._deadline_s:
                raise RoundTimeoutError(text, fix=fix, phase="begin", elapsed_s=waited_s)
            if time.monotonic() - said_s > PROGRESS_S:
                said_s = time.monotonic()
                say(f"{text}; {fix}")
            time.sleep(LOOK_AGAIN_S)

    def _founder(self) -> str:
        letters: list[int] = []
        self._channel.pull(lambda flat: letters.extend(int(value) for value in flat if value))
        return bytes(letters).decode(errors="replace")

    def _newest(self) -> tuple[dict[str, int], list[str]]:
        """Return the number of each member's newest parameters, 0 for none; and who is silent."""
        newest: dict[str, int] = {}
        silent = []
        for name in self._channel.members().names:
            try:
                newest[name] = self._channel.newest(name, PHI)
            except OF_PARTNERS:
                silent.append(name)
        return newest, silent

    def _take_newest(self, newest: dict[str, int], into: F32) -> int:
        """Take over the newest parameters; return their number, 0 if there are none to be had."""
        me = self._channel.peer_name  # a trainer that comes back begins with its own, if it can
        order = sorted(((n, name == me, name) for name, n in newest.items() if n), reverse=True)
        for number, _, name in order:
            try:
                np.copyto(into, self._fetch(name, number))
            except OF_PARTNERS as error:
                say(f"parameters of {name} cannot be taken over: {error.what}")
                continue
            say(f"begins outer step {number} with the parameters of {name}")
            return number
        return 0

    def newest_of(self, name: str) -> int:
        """Return the number of a member's newest parameters.

        0 for a member that has none, or does not say.
        """
        try:
            return self._channel.newest(name, PHI)
        except OF_PARTNERS:
            return 0

    def each(self, number: int, own: F32) -> Iterator[tuple[str, F32]]:
        """Yield name and φ of every member that is about as far as outer step ``number``.

        They come in the order of members; each is valid until the next. A member that is further
        behind, or cannot be reached, is left out, and a line says so.
        """
        me = self._channel.peer_name
        names = self._channel.members().names
        for name in names if me in names else (*names, me):
            if name == me:
                yield name, own
                continue
            try:
                newest = self._channel.newest(name, PHI)
                if newest < number - CURRENT_STEPS:
                    at = f"at outer step {newest}, here it is {number}" if newest else "without any"
                    say(f"the replica of {name} is left out: {at}")
                    continue
                values = self._fetch(name, newest)
            except OF_PARTNERS as error:
                say(f"the replica of {name} is left out: {error.what}")
                continue
            yield name, values

    def _fetch(self, name: str, number: int) -> F32:
        asked = self._channel.ask_vector(name, PHI, number, self._elements, self._codec)
        asked.wait(self._deadline_s)
        try:
            return asked.read()
        finally:
            asked.drop()
