"""Choose how many local steps a round has that is to take some time, not some steps.

Dynamic local updates (DyLU) of Async Local-SGD (arXiv 2401.09135) give worker w
``floor(v_w / max v * H)`` steps, v being speeds in steps per second. That is what each peer comes
to by itself where ``round_s`` is the time in which the fastest of them takes H steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

from atoll.collectives.errors import ConfigError
from atoll.optim.run_spec import ROUND_DEADLINE_S_MAX
from atoll.peer.client.console import say

# Rounds whose speeds are remembered: an evaluation or a pause in one or two of them is passed over.
ROUNDS_KEPT = 5
# With more steps than that, the outer rates that suit ``sync_every`` do not fit (the best one rises
# with the number of steps, arXiv 2503.09799), and a clock or a unit may be wrong.
STEPS_FACTOR_MAX = 10
WORTH = 0.1  # a smaller change is noise


class StepsBySpeed:
    """Choose how many local steps a round has, by this peer's own speed.

    That is ``floor(round_s / seconds of a step)``, at least one and at most ten times
    ``sync_every``, which the first round has; what changes by a tenth or less stays as it was.

    Time is taken of whole rounds, from their beginning until the submission is written: on an
    accelerator a step is over long after it has been launched. The very first step is left out,
    because it compiles and allocates. ``clock`` returns seconds.
    """

    def __init__(self, round_s: float, sync_every: int, clock: Callable[[], float]) -> None:
        if not 0 < round_s <= ROUND_DEADLINE_S_MAX:
            raise ConfigError(
                f"round_s={round_s}", fix=f"give seconds, up to {ROUND_DEADLINE_S_MAX:g}, or None"
            )
        self._round_s, self._clock = round_s, clock
        self._most = STEPS_FACTOR_MAX * sync_every
        self._sync_every = sync_every
        self._seconds: deque[float] = deque(maxlen=ROUNDS_KEPT)  # of a step, in each round
        self._is_warm = False
        self.begin()

    def begin(self) -> None:
        """Begin a round, or begin it anew."""
        self._began_s, self._steps = self._clock(), 0

    @property
    def speeds(self) -> list[float]:
        """Return the steps of a round, and the seconds of a step in each, for ``restore_speeds``.

        ``restore_speeds`` is for a trainer that comes back, which has compiled nothing yet.
        """
        return [self._sync_every, *self._seconds]

    def restore_speeds(self, known: Sequence[float]) -> None:
        self._sync_every = min(max(1, int(known[0])), self._most)
        self._seconds.extend(known[1:])

    def step(self) -> None:
        if self._is_warm:
            self._steps += 1
        else:
            self._is_warm = True
            self.begin()

    def end(self) -> None:
        """End a round: the submission has been written."""
        if self._steps:
            self._seconds.append((self._clock() - self._began_s) / self._steps)

    @property
    def step_s(self) -> float:
        """Return the seconds of a local step: the median of the last rounds.

        It is 0 before the first round is over.
        """
        return median(self._seconds) if self._seconds else 0.0

    def next_sync_every(self, step_s: float) -> int:
        """Return the steps of the round that begins, where one takes ``step_s`` seconds."""
        if not step_s > 0:
            return self._sync_every
        wanted = min(max(1, math.floor(min(self._round_s / step_s, self._most))), self._most)
        if abs(wanted - self._sync_every) > WORTH * self._sync_every:
            say(
                f"rounds have {wanted} local steps here from now on, after "
                f"{self._sync_every}: a step takes {step_s:.3g} s, and a round is to take "
                f"{self._round_s:g} s"
            )
            self._sync_every = wanted
        return self._sync_every


class LocalSteps:
    """Count the local steps of a trainer's round: ``taken`` so far, of ``wanted``.

    ``round_s``: as ``StepsBySpeed`` says; None: each round has ``sync_every``.
    """

    def __init__(self, sync_every: int, round_s: float | None, clock: Callable[[], float]) -> None:
        self._sync_every = sync_every
        self._by_speed = None if round_s is None else StepsBySpeed(round_s, sync_every, clock)
        self.taken, self.wanted = 0, sync_every

    def begin(self, agreed: Callable[[float], float] = lambda step_s: step_s) -> None:
        """Begin a round.

        ``agreed`` gives the seconds of a step that ranks with clocks of their own agree on.
        """
        self.taken, self.wanted = 0, self._sync_every
        if self._by_speed is not None:
            self.wanted = self._by_speed.next_sync_every(agreed(self._by_speed.step_s))
            self._by_speed.begin()

    @property
    def is_steady(self) -> bool:
        """Return whether all peers take equally many steps in a round."""
        return self._by_speed is None

    def step(self, check: Callable[[], None]) -> bool:
        """Count a step; return whether it was the last of the round.

        ``check`` is called after all others: an inner phase may be long, and so a dead daemon is
        noticed in the middle.
        """
        self.taken += 1
        is_last = self.taken >= self.wanted
        if not is_last:
            check()
        if self._by_speed is not None:
            self._by_speed.step()
        return is_last

    def end(self) -> None:
        """End a round.

        Its steps are done, on an accelerator too, and nothing has been waited for yet.
        """
        if self._by_speed is not None:
            self._by_speed.end()

    @property
    def position(self) -> list[int]:
        """Return the steps that are taken and wanted, for ``restore_position``."""
        return [self.taken, self.wanted]

    def restore_position(self, position: Sequence[int]) -> None:
        """Go on in the middle of a round."""
        self.taken, self.wanted = map(int, position)

    @property
    def speeds(self) -> list[float]:
        """Return what has been measured, for ``restore_speeds``; it holds wherever the run is."""
        return [] if self._by_speed is None else self._by_speed.speeds

    def restore_speeds(self, known: Sequence[float]) -> None:
        if self._by_speed is not None and known:
            self._by_speed.restore_speeds(known)
