"""Draw random signs from Philox4x32-10, in torch: the same bits on every device.

Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011): ten rounds
turn a counter of 128 bits and a key of 64 into 128 random bits. Sign j of a stream is bit j mod 128
of block j div 128, low bits and words first. All arithmetic is on int64 and never overflows.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFF_FFFF
BLOCK = 128  # signs


@dataclass(frozen=True, slots=True)
class Stream:
    """Name a stream of random signs by what it is for.

    The signs are a function of ``step`` (64 bits), ``sample`` and ``number`` of a peer (16 bits
    each), which are the upper words of the counter, and of a seed, which is the key.
    """

    step: int
    sample: int
    number: int

    @property
    def words(self) -> tuple[int, int, int]:
        return self.sample | self.number << 16, self.step & MASK, self.step >> 32


def philox(counters: Tensor, seed: int) -> Tensor:
    """Return the random words for these counters under the key ``seed``.

    Counters and result are int64[4, n], each column four words below 2**32.
    """
    even, odd = counters[0::2], counters[1::2]
    whole = torch.tensor(MULTIPLIERS, device=counters.device)[:, None]
    upper, lower = whole >> 16, whole & 0xFFFF  # by halves: 64 bits would be one too many
    key = [seed & MASK, seed >> 32]
    keys = []
    for _ in range(ROUNDS):
        keys.append(list(key))
        key = [k + weyl & MASK for k, weyl in zip(key, WEYL, strict=True)]
    for k in torch.tensor(keys, device=counters.device)[:, :, None]:
        below = even * lower
        middle = even * upper + (below >> 16)
        even = (middle >> 16).flip(0) ^ odd ^ k
        odd = ((middle & 0xFFFF) << 16 | below & 0xFFFF).flip(0)
    return torch.stack([even[0], odd[0], even[1], odd[1]])


def sign_bits(
    seed: int, streams: Sequence[Stream], lo: int, hi: int, device: torch.device
) -> Tensor:
    """Return signs lo to hi - 1 of each stream, as int32[streams, hi - lo].

    Only the highest bit of each value may be set.
    """
    first, last = lo // BLOCK, -(-hi // BLOCK)
    index = torch.arange(first, last, device=device).repeat(len(streams), 1)
    upper = torch.tensor([stream.words for stream in streams], device=device)
    counters = [index, *(word[:, None].expand_as(index) for word in upper.T)]
    words = philox(torch.stack(counters).flatten(1), seed).T
    words = ((words ^ 1 << 31) - (1 << 31)).int().contiguous()  # the same bits, with a sign
    shifts = torch.arange(32, dtype=torch.int32, device=device)
    bits = (words[:, :, None] >> shifts & 1).mul_(-(2**31))
    return bits.view(len(streams), -1)[:, lo - first * BLOCK : hi - first * BLOCK]


def signed(value: float, bits: Tensor) -> Tensor:
    """Return ``value`` with these signs, float32: negated where the bit is set."""
    (raw,) = struct.unpack("<i", struct.pack("<f", value))
    return torch.bitwise_xor(bits, raw).view(torch.float32)
