"""What a seed of audited attempts stands for: who lies and how, rule, codec, delays."""

from __future__ import annotations

import random
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.peer.membership.signatures import verifies
from simulation.liars import KINDS

__all__ = ["Key", "Options", "expand", "keys"]

RULES = ("mean", "mean", "trimmed(f={f})", "multi_krum(f={f})", "gm(f={f})", "nnm+trimmed(f={f})")


@dataclass(frozen=True)
class Options:
    """What a seed stands for."""

    seed: int
    peers: int
    liars: dict[int, str]  # index -> kind of lie
    rule: str
    codec: str
    blocks: int  # of 256 elements in a chunk
    chunks: int
    delay_s: float
    pauses: int
    deaf_pair: bool  # two honest ones have no link to each other
    newcomers: tuple[int, ...] = ()  # who is on probation
    restarts: bool = False  # an honest one is started again in each attempt, and asked once more


def expand(seed: int) -> Options:
    rng = random.Random(seed)
    peers = rng.randint(3, 9)
    count = rng.randint(0, (peers - 1) // 2)
    liars = {i: rng.choice(sorted(KINDS)) for i in rng.sample(range(peers), count)}
    text = rng.choice(RULES)
    # So many may go, by twos where pairs are eliminated, before the rule has too few.
    f = max(0, min(count, (peers - 2 * count - 1) // 4))
    if "multi_krum" in text and peers - 2 * count < 2 * f + 3:
        text = "mean"
    return Options(
        seed=seed,
        peers=peers,
        liars=liars,
        rule=text.format(f=f) if f else "mean",
        codec=rng.choice(("int8", "int8", "bfloat16", "float32", "int4")),
        blocks=rng.randint(1, 3),
        chunks=rng.randint(peers, 3 * peers),
        delay_s=rng.choice((0.001, 0.05, 0.3)),
        pauses=rng.choice((0, 0, 2)),
        deaf_pair=rng.random() < 0.2 and peers - count >= 3,
        restarts=random.Random(f"restarts {seed}").random() < 0.2,
    )


class Key:
    """signing.Signer with a key that comes of a seed."""

    def __init__(self, rng: random.Random) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(rng.randbytes(32))
        self.me = self._key.public_key().public_bytes_raw()

    def sign(self, text: bytes) -> bytes:
        return self._key.sign(text)

    def verify(self, peer: bytes, text: bytes, signature: bytes) -> bool:
        return verifies(peer, text, signature)


def keys(options: Options) -> list[Key]:
    rng = random.Random(options.seed)
    return [Key(rng) for _ in range(options.peers)]
