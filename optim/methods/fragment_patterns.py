"""Choose the parameters of a fragment: whole blocks of a model; all the rest are one more.

A block is what one number in the parameters' names has in common, as ``blocks.7`` in
``blocks.7.attention.weight``. Embeddings, head and norms lie in no block: they are the last
fragment, because their gradients are unlike those of blocks (arXiv 2501.18512 syncs them apart).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Literal, TypeAlias, get_args

from atoll.collectives.errors import ConfigError
from atoll.optim.manifest import FRAGMENTS_MAX, Manifest, Parameter

# strided: block i belongs to fragment i mod P, which the paper found a little better than
# sequential: neighbours together. balanced: fragments of about equal size, whatever the order.
Pattern: TypeAlias = Literal["strided", "sequential", "balanced"]
BLOCKS_PER_FRAGMENT = 3  # at every scale of the paper
Block: TypeAlias = tuple[str, int]


def fragmented(
    manifest: Manifest, pattern: Pattern, blocks_per_fragment: int = BLOCKS_PER_FRAGMENT
) -> Manifest:
    """Return the parameters in fragments of ``blocks_per_fragment`` blocks, and one of the rest.

    With fewer than two blocks there is one fragment. Raise ConfigError for a pattern that there is
    not, or too many fragments.
    """
    if pattern not in get_args(Pattern):
        raise ConfigError(
            f"fragments={pattern!r}", fix=f"use one of {', '.join(get_args(Pattern))}"
        )
    if blocks_per_fragment < 1:
        raise ConfigError(f"fragments of {blocks_per_fragment} blocks", fix="give them 1 or more")
    sizes: dict[Block, int] = defaultdict(int)
    for p in manifest.parameters:
        if (block := _block_of(p.name)) is not None:
            sizes[block] += p.size
    blocks = sorted(block for block, size in sizes.items() if size)
    count = -(-len(blocks) // blocks_per_fragment)
    if count > FRAGMENTS_MAX - 1:
        raise ConfigError(
            f"{len(blocks)} blocks make {count} fragments of {blocks_per_fragment}; at most "
            f"{FRAGMENTS_MAX - 1}, and one for the rest",
            fix="give fragments more blocks",
        )
    if len(blocks) < 2:
        return manifest
    numbers = _numbers(blocks, sizes, pattern, count, blocks_per_fragment)
    numbers |= {block: 0 for block in sizes if block not in numbers}  # of parameters without values
    return Manifest.of(_placed(manifest.parameters, numbers, count))


def _numbers(
    blocks: list[Block], sizes: dict[Block, int], pattern: Pattern, count: int, most: int
) -> dict[Block, int]:
    """Return the number of each block's fragment."""
    if pattern == "strided":
        return {block: i % count for i, block in enumerate(blocks)}
    if pattern == "sequential":
        return {block: i // most for i, block in enumerate(blocks)}
    numbers, filled = {}, [0] * count
    for block in sorted(blocks, key=lambda b: (-sizes[b], b)):  # the largest first, where room is
        fragment = filled.index(min(filled))
        numbers[block] = fragment
        filled[fragment] += sizes[block]
    return numbers


def _placed(
    parameters: Iterable[Parameter], numbers: dict[Block, int], rest: int
) -> list[Parameter]:
    placed = []
    for p in parameters:
        block = _block_of(p.name)
        placed.append(replace(p, fragment=rest if block is None else numbers[block]))
    return placed


def _block_of(name: str) -> Block | None:
    """Return the block of a parameter, or None if it lies in no block.

    It is ``("blocks", 7)`` for ``blocks.7.attention.weight``.
    """
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal():
            return ".".join(parts[:i]), int(part)
    return None
