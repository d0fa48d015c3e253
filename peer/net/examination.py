"""Ask a member what its run trains, what time it is there, and how fast bytes go. Both sides.

``atoll doctor`` asks on connections of kind EXAMINE, and joins nothing. Whoever asks
has proved that it knows the run's secret; what it may make a member send or read is bounded.
Rates are measured in steps: each sends four times the bytes of the one before, until a step takes
STEP_S or BYTES_MAX are reached, so a slow link is not filled for long and a fast one long enough.
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import replace
from typing import Annotated, Final, NamedTuple

from atoll.collectives.errors import ConnectError, RemoteProtocolError
from atoll.collectives.version import VERSION
from atoll.optim.footprint import EXCHANGED_BYTES, host_bytes, state_bytes
from atoll.optim.manifest import Manifest
from atoll.optim.run_spec import STEPPED, RunSpec
from atoll.peer.net.hello import PROTOCOL_MAX, PROTOCOL_MIN, Refused, refusal_error
from atoll.peer.net.tls import TlsChannel
from atoll.peer.net.wire import Within, message

STEP_BYTES_MIN: Final = 16 << 10  # half a second at 256 kbit/s
STEP_BYTES_MAX: Final = 4 << 20  # at 100 Mbit/s, 50 ms away, twice what is on the way at a time
STEP_S: Final = 0.5  # the next step takes four times that at most
BYTES_MAX: Final = 2 * STEP_BYTES_MAX  # of one connection: all steps one way are less
READINGS: Final = 3  # of the clock; the fastest errs least
AT_ONCE_MAX: Final = 4  # that are examined: they share the member's link with its rounds
STATE_BYTES: Final = 8  # of a parameter, which a joiner loads, where trainers hold the state
_TEXT_BYTES_MAX: Final = 64


@message(wire="AskOutline")
class AskOutline:
    """Ask what the run trains, and what time it is."""


@message(wire="RunOutline")
class RunOutline:
    """Say what the run trains, as far as this member knows it, and the time when this was sent.

    ``observed``: the IP address that the asker has here, behind whatever translates it; ``program``
    and ``protocol`` are the member's.
    ``elements`` are the model's parameters, 0 while no trainer has brought one; ``state_bytes``
    what a joiner loads, ``daemon_bytes`` what a daemon takes for it at most.
    """

    unix_s: float
    observed: Annotated[str, Within(0, _TEXT_BYTES_MAX)] = ""
    program: Annotated[str, Within(0, _TEXT_BYTES_MAX)] = ""
    protocol: Annotated[int, Within(0, 2**31)] = 0
    elements: Annotated[int, Within(0, 2**48)] = 0
    state_bytes: Annotated[int, Within(0, 2**53)] = 0
    daemon_bytes: Annotated[int, Within(0, 2**53)] = 0
    method: Annotated[str, Within(0, _TEXT_BYTES_MAX)] = ""
    codec: Annotated[str, Within(0, _TEXT_BYTES_MAX)] = ""

    def __post_init__(self) -> None:
        if not abs(self.unix_s) < 1e12:
            raise ValueError("a time that no clock shows")
        texts = self.observed, self.program, self.method, self.codec
        if not all(text.isprintable() for text in texts):
            raise ValueError("a name that nobody can read")


@message(wire="AskRate")
class AskRate:
    """Announce ``up`` bytes that follow this message, and ask for ``down`` bytes in return."""

    up: Annotated[int, Within(0, STEP_BYTES_MAX)] = 0
    down: Annotated[int, Within(0, STEP_BYTES_MAX)] = 0


@message(wire="RateIs")
class RateIs:
    """Say that so many bytes arrived in so many seconds, from the first piece to the last.

    The bytes of the first piece are not counted.
    """

    bytes: Annotated[int, Within(0, STEP_BYTES_MAX)]
    seconds: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.seconds < 1e6:
            raise ValueError("a time that no step takes")


class ClockReading(NamedTuple):
    """Hold what a member said, and how far away its answer was.

    ``offset_s``: how far its clock is ahead of ours; half a round trip is the most that it errs.
    """

    outline: RunOutline
    rtt_s: float
    offset_s: float


# ---------------------------------------------------------------- the member's side


class Examiner:
    """Answer those who examine this member, a few at a time."""

    def __init__(self) -> None:
        self._under_way = 0

    async def serve(self, channel: TlsChannel, outline: RunOutline) -> Refused | None:
        """Answer questions behind a hello of kind EXAMINE until the other side ends.

        Returns a refusal if too many others ask. Raises RemoteProtocolError for a question beyond
        the allowance; who serves limits the time.
        """
        if self._under_way >= AT_ONCE_MAX:
            what = f"{AT_ONCE_MAX} machines are being examined already; ask again in a minute"
            return Refused(ConnectError.code, what, PROTOCOL_MIN, PROTOCOL_MAX, VERSION)
        left_bytes = BYTES_MAX
        outline = replace(outline, program=VERSION, protocol=PROTOCOL_MAX)
        self._under_way += 1
        try:
            while True:
                question = await channel.receive_of(AskOutline, AskRate)
                if isinstance(question, AskOutline):
                    now_s = time.time()
                    await channel.send(replace(outline, unix_s=now_s, observed=channel.remote_ip))
                elif isinstance(question, AskRate):
                    left_bytes -= question.up + question.down
                    if left_bytes < 0:
                        raise RemoteProtocolError("it asked for more bytes than there are for it")
                    await channel.send(RateIs(*await channel.discard(question.up)))
                    await channel.send_zeros(question.down)
        except ConnectionError:
            return None
        finally:
            self._under_way -= 1


def outline_of(spec: RunSpec, manifest: Manifest) -> RunOutline:
    """Return the outline of a run with this specification and model.

    Where daemons do not hold the parameters, the manifest has their shapes behind a zero.
    """
    if spec.method in STEPPED:
        elements, daemon_bytes = manifest.elements, host_bytes(spec, manifest)
        loaded_bytes = state_bytes(spec, manifest)
    else:
        shapes = (p.shape[1:] if p.shape[:1] == (0,) else p.shape for p in manifest.parameters)
        elements = sum(math.prod(shape) for shape in shapes)
        daemon_bytes, loaded_bytes = EXCHANGED_BYTES * elements, STATE_BYTES * elements
    return RunOutline(
        0.0,
        elements=elements,
        state_bytes=loaded_bytes,
        daemon_bytes=daemon_bytes,
        method=spec.method,
        codec=spec.codec,
    )


# ---------------------------------------------------------------- the asker's side


async def read_clock(channel: TlsChannel) -> ClockReading:
    """Ask for the outline a few times; return the answer that came back fastest."""
    readings = []
    for _ in range(READINGS):
        asked_s, asked_unix_s = time.monotonic(), time.time()
        await channel.send(AskOutline())
        outline = await _answer(channel, RunOutline)
        assert isinstance(outline, RunOutline)
        rtt_s = time.monotonic() - asked_s
        readings.append(ClockReading(outline, rtt_s, outline.unix_s - asked_unix_s - rtt_s / 2))
    return min(readings, key=lambda reading: reading.rtt_s)


async def measure(channel: TlsChannel, *, up: bool) -> tuple[int, float]:
    """Return the bytes and the seconds of the last step of sending ``up``, or of receiving.

    Sent bytes count as the member has seen them arrive. If the connection ends, it is the last
    step that came to its end.
    """
    step_bytes, found = STEP_BYTES_MIN, (0, 0.0)
    with contextlib.suppress(OSError):
        while step_bytes <= STEP_BYTES_MAX and found[1] < STEP_S:
            await channel.send(AskRate(up=step_bytes) if up else AskRate(down=step_bytes))
            await channel.send_zeros(step_bytes if up else 0)
            taken = await _answer(channel, RateIs)
            assert isinstance(taken, RateIs)
            found = (taken.bytes, taken.seconds) if up else await channel.discard(step_bytes)
            step_bytes *= 4
    return found


async def _answer(channel: TlsChannel, kind: type) -> object:
    """Return the member's answer; raise the error of a refusal."""
    msg = await channel.receive_of(Refused, kind)
    if isinstance(msg, Refused):
        raise refusal_error(msg, "the member")
    return msg
