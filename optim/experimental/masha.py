"""Solve minimax problems with compressed differences: MASHA1 (Beznosikov et al., arXiv 2110.03313).

Saddle points min_x max_y f(x, y) are not found by descent: on a bilinear f it turns in circles that
grow. Extragradient looks a step ahead. With z = (x, y), F = (df/dx, -df/dy) the mean of all
peers' F_m, Q an unbiased codec and w a point at which all know F::

    h  = tau z + (1 - tau) w - gamma F(w)
    z' = h - gamma mean_m Q(F_m(h) - F_m(w))
    w' = z' with probability 1 - tau, and then F(w') is exchanged in full; else w

The coin is the same for all, and Q draws for each peer by itself, by keys that all know. So with a
tau near 1 a step costs the bytes of Q, and a full exchange comes once in 1 / (1 - tau) steps.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from typing import Final

import numpy as np

from atoll.collectives.codecs import F32, get_codec
from atoll.collectives.counter_rng import derive_key
from atoll.collectives.errors import CodecError, ConfigError, RemoteProtocolError
from atoll.optim.sessions import OperationsSession

Operator = Callable[[F32], F32]
_HEAD: Final = struct.Struct("<8sQ")  # before what is encoded: settings, and the step


class Masha:
    """Find a saddle point together: each peer knows F of its own data only.

    ``session``: of atoll, or of a ``Swarm``; all peers make the same calls, and ``point`` is the
    same float32[n] on all; all are there from the first step on, and who misses one cannot go on
    alone: make a new one on all of them, at a point that they share. ``operator``: F_m at a point,
    float32[n]; of a maximizing player with the sign turned. ``gamma``: the step size; ``tau``: how
    seldom all is exchanged, near 1 minus the codec's part of float32; ``seed``: of what is drawn,
    the same on all. ``codec``: unbiased, with a
    key: "randk", "ternary", "int4_sr".

    When it helps: games and adversarial losses in which plain compressed descent turns in circles.
    For minimization alone it costs two evaluations and brings nothing (``GradientAverage`` does);
    so it has no row in the convergence bench. A gather takes 64 KiB from each: of "randk" some two
    million elements. On a bilinear saddle of three peers, in ternary, compressed descent diverges,
    and this comes ten times nearer in 300 steps, and again in 300.
    """

    def __init__(
        self,
        session: OperationsSession,
        point: F32,
        operator: Operator,
        *,
        gamma: float,
        tau: float,
        codec: str = "randk",
        seed: int = 0,
    ) -> None:
        contract = get_codec(codec).contract
        if not (gamma > 0 and 0 <= tau < 1 and contract.kind in ("exact", "unbiased")):
            raise ConfigError(
                f"gamma {gamma}, tau {tau}, codec {codec}",
                fix="gamma is positive, tau in [0, 1), and the codec unbiased: randk, or ternary",
            )
        self._session, self._operator, self._codec = session, operator, get_codec(codec)
        self._gamma, self._tau, self._seed = np.float32(gamma), np.float32(tau), seed
        self.steps = self.full_exchanges = 0
        self.point = point.astype(np.float32)
        settings = repr((codec, gamma, tau, seed)).encode() + self.point.tobytes()
        self._settings = hashlib.sha256(settings).digest()[:8]
        self._remember()

    def step(self) -> None:
        """Move ``point``; RemoteProtocolError names a peer whose bytes are malformed."""
        tau, w = self._tau, self._known
        ahead = tau * self.point + (np.float32(1) - tau) * w - self._gamma * self._mean_known
        difference = self._operator(ahead) - self._own_known
        self.point = ahead - self._gamma * self._mean(difference)
        coin = derive_key(b"atoll masha coin", self._seed, self.steps) / 2**64
        self.steps += 1
        if coin >= tau:
            self._remember()

    def _remember(self) -> None:
        """Take the point as the one at which all know the mean of F."""
        self._known = self.point.copy()
        self._own_known = self._operator(self._known)
        found = self._session.all_reduce(self._own_known, "mean", codec="float32")
        self._mean_known: F32 = np.asarray(found.value, np.float32)
        self.full_exchanges += 1

    def _mean(self, difference: F32) -> F32:
        """Return the mean of what all have encoded, added up in one order."""
        data = np.empty(self._codec.encoded_bytes(difference.size), np.uint8)
        self._codec.encode(difference, data, self._key(self._session.peer_name))
        head = _HEAD.pack(self._settings, self.steps)
        given = self._session.all_gather(head + data.tobytes())
        mean = np.zeros_like(difference)
        for name, part in given:
            if len(part) != _HEAD.size + data.size:
                raise _malformed(name, f"{len(part):,} bytes instead of {_HEAD.size + data.size:,}")
            if part[: _HEAD.size] != head:
                raise _malformed(name, f"it is not at step {self.steps}, or its numbers are others")
            encoded = np.frombuffer(part, np.uint8, offset=_HEAD.size)
            try:
                self._codec.decode_add(encoded, 1 / len(given), mean)
            except CodecError as error:
                raise _malformed(name, error.what) from error
        return mean

    def _key(self, name: str) -> int:
        return derive_key(b"atoll masha", self._seed, self.steps, name.encode())


def _malformed(name: str, why: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"what {name} gave of its operator cannot be read: {why}",
        fix="give all peers the same numbers, codec and point, and begin them together",
    )
