"""Keep parts beside each other until all are there; then a robust rule makes one of them.

Where the rule needs distances between whole vectors (robust/gram.py), the chunks of a shard wait
for each other: ``whole`` gives none of them until the inner products over all shards are known.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from atoll.collectives.codecs import F32, U8, Codec
from atoll.collectives.engine.parts import PartError, Parts
from atoll.collectives.engine.result import RoundResult
from atoll.collectives.errors import LocalProtocolError
from atoll.collectives.robust.columns import Columns
from atoll.collectives.robust.gram import (
    InnerProducts,
    Matrix,
    add_gram,
    packed_gram,
    packed_sum,
    unpacked_gram,
)
from atoll.collectives.schedule.plan import NOBODY, ReducePlan

# A vector that is so many times as long as the median of all is no honest mistake of scale: units,
# a lost decimal point and an exploded learning rate stay far below. Of whole vectors only: in a
# chunk that one peer alone has trained, such as an expert's, it may well be.
ABSURD: Final = 1e6


class Stacks(Parts):
    """Stack the parts of each chunk, and let a robust rule make one of them.

    ``codec`` is that of parts. A stack of a chunk holds the parts as they came, encoded, so that it
    takes no more memory than the frames did. ``matrix`` is that of the rule, where it is known:
    then nothing has to be told, and all chunks can be encoded.
    """

    def __init__(
        self,
        plan: ReducePlan,
        result: RoundResult,
        codec: Codec,
        is_root: Callable[[int], bool],
        source: Callable[[int, F32], None],
        own: Callable[[int], F32] | None = None,
        matrix: Matrix | None = None,
    ) -> None:
        super().__init__(result, codec, source, own)
        assert plan.rule is not None
        assert isinstance(result.codec, Codec)
        self._rule, self._key, self._whole = plan.rule, plan.key, result.codec
        self._counted = [p for p, weight in enumerate(plan.weights) if weight > 0]
        self._stacks: dict[int, dict[int, U8]] = {}
        self._lock = threading.Lock()  # guards the columns, and all below
        self._columns = Columns(codec)
        self._shards: dict[int, list[int]] = {}  # owner -> chunks that are aggregated here
        for chunk, owner in enumerate(plan.owners):
            if owner != NOBODY and is_root(chunk):
                self._shards.setdefault(owner, []).append(chunk)
        self._grams: dict[int, Matrix] = {}  # by chunk: summed in their order, whoever came first
        self._heard: dict[int, Matrix] = {}  # by owner
        self._owner_of, self._owners = plan.owners, sorted({*plan.owners} - {NOBODY})
        self._told: U8 | None = None
        self._own_grams = b""
        self._told_by_owner: dict[int, bytes] = {}
        self._matrix = matrix
        if not self._rule.needs_gram:
            self._matrix = self._rule.matrix(None, len(self._counted), self._key)

    @property
    def allocated_bytes(self) -> int:
        grams = sum(gram.nbytes for gram in [*self._grams.values(), *self._heard.values()])
        return super().allocated_bytes + self._columns.allocated_bytes + grams

    def in_place(self, chunk: int) -> bool:
        return False

    def add(self, chunk: int, participant: int | None, buffer: U8) -> None:
        assert participant is not None  # a plan with a rule is a butterfly: no partial sums
        self._codec.check(buffer[: self._layout.size(chunk)], self._grid.size(chunk))
        self._stacks.setdefault(chunk, {})[participant] = buffer  # one thread for each chunk

    def add_own(self, chunk: int, me: int, *, coded: bool) -> None:
        buffer = self.encoded.take()
        part = self._encode_own(chunk, buffer)
        if not np.may_share_memory(part, buffer):
            np.copyto(buffer[: part.size], part)
        self.add(chunk, me, buffer)

    # ------------------------------------------------------------ what owners tell each other

    @property
    def told_bytes(self) -> int:
        count = len(self._counted)
        return 4 * count * (count + 1) if self._rule.needs_gram else 0

    def whole(self, chunk: int) -> Sequence[int]:
        if not self._rule.needs_gram:
            return (chunk,)
        gram: Matrix = np.zeros((len(self._counted), len(self._counted)))
        with self._lock:
            for block in self._blocks(chunk):
                add_gram(block, gram)
            self._grams[chunk] = gram
            owner = self._owner_of[chunk]
            shard = self._shards[owner]
            if not self._grams.keys() >= {*shard}:
                return ()
            self._own_grams = b"".join(packed_gram(self._grams[c]) for c in shard)
            packed = packed_sum(self._own_grams, len(gram))
            self._heard[owner] = unpacked_gram(packed, len(gram))
            self._told = np.frombuffer(packed, np.uint8)
            self._told_by_owner[owner] = packed
            return self._released()

    def to_tell(self) -> U8 | None:
        return self._told

    @property
    def inner_products(self) -> InnerProducts:
        if self._matrix is None or not self._rule.needs_gram:
            return InnerProducts()
        matrix = self._matrix.astype("<f4").tobytes()
        return InnerProducts(self._told_by_owner, self._own_grams, matrix)

    def told(self, owner: int, data: U8) -> Sequence[int]:
        try:
            heard = unpacked_gram(data.tobytes(), len(self._counted))
        except ValueError as error:
            raise PartError(owner, f"its {error}") from error
        with self._lock:
            self._heard.setdefault(owner, heard)
            self._told_by_owner.setdefault(owner, data.tobytes())
            return self._released()

    def _released(self) -> Sequence[int]:
        """Return all chunks that are aggregated here, once, when every owner has been heard.

        Else none. Raises PartError for a vector of absurd length, and LocalProtocolError if the
        rule gives coefficients that are not finite.
        """
        if self._matrix is not None or len(self._heard) < len(self._owners):
            return ()
        count = len(self._counted)
        total = sum((self._heard[owner] for owner in self._owners), np.zeros((count, count)))
        if not self.is_audited:
            self._check_lengths(total)
        matrix = self._rule.matrix(total, count, self._key)
        self._matrix = np.eye(count) if matrix is None else matrix
        if not np.isfinite(self._matrix).all():
            raise LocalProtocolError(f"{self._rule.text} gives coefficients that are not finite")
        return tuple(sorted(self._grams))

    # ------------------------------------------------------------ the result

    def encode(self, chunk: int, out: U8) -> None:
        floats = self._floats.take()
        try:
            values = floats[: self._grid.size(chunk)]
            with self._lock:
                lo = 0
                for block in self._blocks(chunk):
                    hi = lo + block.shape[1]
                    values[lo:hi] = self._rule.aggregate(block, self._matrix)
                    lo = hi
                for buffer in self._stacks.pop(chunk).values():
                    self.encoded.give(buffer)
            self._whole.encode(values, out)
        finally:
            self._floats.give(floats)

    def _blocks(self, chunk: int) -> Iterator[F32]:
        """Yield the values of the stack of a chunk, in the order of the participants."""
        stack, length = self._stacks[chunk], self._layout.size(chunk)
        parts = [stack[participant][:length] for participant in self._counted]
        return self._columns.of(parts, self._grid.size(chunk))

    def _check_lengths(self, gram: Matrix) -> None:
        lengths = np.sqrt(gram.diagonal())
        limit = ABSURD * float(np.median(lengths))
        for participant, length in zip(self._counted, lengths, strict=True):
            if length > limit > 0:
                times = length / limit * ABSURD
                text = f"its contribution is {times:.1g} times as long as the others'"
                raise PartError(participant, text)
