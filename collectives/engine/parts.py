"""Bring the parts of one reduction together, chunk by chunk, and encode what they give.

Three kinds of ``Parts`` say what becomes of them: most are added up (``MeanParts``), those of a
codec that gathers are put beside each other (``GatheredParts``), and those to which a robust rule
is applied are kept until all are there (``RobustParts``). Nothing is decided here: the engine says
whose part is added when, one thread at a time for each chunk.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from atoll.collectives.chunks import encoded_layout
from atoll.collectives.codecs import F32, U8, Codec, Gathered, get_codec
from atoll.collectives.counter_rng import derive_key
from atoll.collectives.engine.buffers import BufferPool
from atoll.collectives.engine.result import RoundResult
from atoll.collectives.errors import ConfigError, LocalProtocolError
from atoll.collectives.native import KERNELS
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

# Chunks that are filled and encoded at the same time. Each takes a float32 chunk, and this many
# cores encode more than 100 Gbit/s of float32, so more would take memory and bring nothing.
ENCODERS_MAX: Final = 4
EXACT: Final = get_codec("float32")
# A vector that is so many times as long as the median of all is no honest mistake of scale: units,
# a lost decimal point and an exploded learning rate stay far below. Of whole vectors only: in a
# chunk that one peer alone has trained, such as an expert's, it may well be.
ABSURD: Final = 1e6
# What a key is for: a participant's own part, a sum of several on its way, and the result.
PART, SUM, WHOLE = b"atoll part", b"atoll sum", b"atoll result"


class Parts(ABC):
    """Take in the parts of one reduction, chunk by chunk, and encode what they give.

    ``codec`` is that of parts. Buffers that ``encoded`` lends are given back to it, but where bytes
    could not be decoded: then the reduction fails anyway. What ``contribution`` raises goes on to
    the caller. ``key``: that of the round, for codecs that round at random.
    """

    def __init__(
        self, result: RoundResult, codec: Codec, contribution: Contribution, key: int = 0
    ) -> None:
        self._result, self._codec, self._grid = result, codec, result.grid
        self._key = key
        self.layout = encoded_layout(result.grid, codec)
        self.encoded = BufferPool(self.layout.chunk_bytes, np.uint8)
        self._floats = BufferPool(result.grid.size(0), np.float32)
        self.contribution = contribution
        self._encoders = threading.BoundedSemaphore(ENCODERS_MAX)

    @property
    def allocated_bytes(self) -> int:
        return self.encoded.allocated_bytes + self._floats.allocated_bytes

    @abstractmethod
    def in_place(self, chunk: int) -> bool:
        """Return whether a chunk grows where the result lies: then each addition writes there."""

    @abstractmethod
    def add(self, chunk: int, participant: int | None, buffer: U8) -> None:
        """Add the part of a participant, or a sum of several, and give the buffer back.

        ``participant`` is None for a sum of several, which has its weights already. Raises
        CodecError for bytes that cannot be decoded.
        """

    @abstractmethod
    def add_own(self, chunk: int, me: int, *, coded: bool) -> None:
        """Add the own part as it is or, if ``coded``, as others decode it. Raises CodecError."""

    def whole(self, chunk: int) -> Sequence[int]:
        """Note that all parts of a chunk are added, and return the chunks that can be encoded now.

        Each chunk is returned once. Raises PartError.
        """
        return (chunk,)

    @property
    def told_bytes(self) -> int:
        """Return the bytes of what owners tell each other (``GramExchange``); 0 for nothing."""
        return 0

    def to_tell(self) -> U8 | None:
        """Return what this owner tells others, uint8[told_bytes]; None while it is not known."""
        return None

    @property
    def inner_products(self) -> InnerProducts:
        """Return the inner products that a rule has used, once all owners have told theirs.

        Before that, and where the rule needs none, they are empty.
        """
        return InnerProducts()

    def told(self, owner: int, data: U8) -> Sequence[int]:
        """Take in what another owner has told, and return the chunks that can be encoded now.

        Raises PartError if it cannot be used, and LocalProtocolError where owners tell each other
        nothing.
        """
        raise LocalProtocolError("these parts need nothing from other owners")

    @abstractmethod
    def encode(self, chunk: int, out: U8) -> None:
        """Encode what the parts of a chunk give into ``out``, when all are added, and forget it.

        Raises CodecError or PartError.
        """

    def part(self, chunk: int, me: int, buffer: U8, *, own: bool) -> U8:
        """Return what participant ``me`` sends of a chunk: the sum here, or else the own part.

        It is the own part too if it must be ``own``. It lies in ``buffer``, or where it was before.
        Raises CodecError.
        """
        return self._encode_own(chunk, me, buffer)

    def copied(self, payload: U8, buffer: U8) -> U8 | None:
        """Return a copy, for ``add``, of the own part that lies in ``buffer``.

        Return None if ``payload`` shows where the part lies: from there ``add_own`` adds it.
        """
        if not np.may_share_memory(payload, buffer):
            return None
        copy = self.encoded.take()
        copy[: payload.size] = payload
        return copy

    def _key_of(self, codec: Codec, what: bytes, *numbers: int) -> int:
        """Return a key for a vector that is encoded; 0 where the codec needs none.

        It is the same in attempts of the same participants, and another for each of them and chunk.
        """
        return derive_key(what, self._key, *numbers) if codec.contract.keyed else 0

    def _encode_own(self, chunk: int, me: int, buffer: U8) -> U8:
        own = self.contribution
        if own.coded is not None:
            return own.coded(chunk)
        if own.own is not None and self._codec.contract.kind == "exact":
            where = own.own(chunk).view(np.uint8)
            self._codec.check(where, self._grid.size(chunk))
            return where
        out, key = buffer[: self.layout.size(chunk)], self._key_of(self._codec, PART, me, chunk)
        if own.own is not None:
            self._codec.encode(own.own(chunk), out, key)
            return out
        self._fill(chunk, lambda values: self._codec.encode(values, out, key))
        return out

    def _fill(self, chunk: int, use: Callable[[F32], None]) -> None:
        """Let ``source`` fill in the values of the own part, and ``use`` take them."""
        with self._encoders:
            floats = self._floats.take()
            try:
                values = floats[: self._grid.size(chunk)]
                self.contribution.source(chunk, values)
                use(values)
            finally:
                self._floats.give(floats)


@dataclass(frozen=True, slots=True)
class Contribution:
    """Hold what gives one participant's own part of each chunk.

    ``source(chunk, out)`` fills ``out``, float32[grid.size(chunk)]. It is called once per chunk,
    from several threads at a time. ``own(chunk)``, if given, shows the part where it lies, and
    ``source`` is not called: nobody changes it before the reduction has ended and its threads have
    been joined. ``coded(chunk)``, if given, shows the part as it was encoded before.
    """

    source: Callable[[int, F32], None]
    own: Callable[[int], F32] | None = None
    coded: Callable[[int], U8] | None = None


def parts_for(
    plan: ReducePlan,
    result: RoundResult,
    codec: Codec,
    is_root: Callable[[int], bool],
    contribution: Contribution,
    matrix: Matrix | None = None,
    *,
    audited: bool = False,
) -> Parts:
    """Return the kind of ``Parts`` that the plan's rule and the codec of the result ask for.

    ``codec`` is that of the parts. ``is_root(chunk)``: whether the sum of a chunk here is the
    whole. ``matrix``: what the rule gives, where it is known. ``audited``: see ``Reduction``.
    Raises ConfigError if this plan cannot give it: gathered parts have to come to a chunk's owner
    as they are.
    """
    whole = result.codec
    if plan.rule is not None and not plan.rule.is_mean:
        return RobustParts(plan, result, codec, is_root, contribution, matrix, audited=audited)
    if not isinstance(whole, Gathered):
        return MeanParts(result, codec, plan.factors(), is_root, contribution, plan.fold, plan.key)
    if plan.shape is not None or plan.is_pairwise or plan.fold != "mean":
        raise ConfigError("gathered parts can only be reduced in a butterfly, to their mean")
    if plan.weights != whole.weights or codec is not whole.part_codec:
        raise ConfigError("this plan has other weights, or other parts, than its result")
    return GatheredParts(result, whole, contribution, plan.key)


class MeanParts(Parts):
    """Add up the parts of each chunk, and encode the sum once more: this makes most results.

    ``codec`` is that of parts and partial sums; ``factors`` are the weights of the participants'
    parts; ``is_root(chunk)`` says whether the sum of a chunk here is the whole; ``fold`` is one of
    plan.FOLDS: what is called a sum may be the largest or smallest of each element.
    """

    def __init__(
        self,
        result: RoundResult,
        codec: Codec,
        factors: tuple[float, ...],
        is_root: Callable[[int], bool],
        contribution: Contribution,
        fold: str = "mean",
        key: int = 0,
    ) -> None:
        super().__init__(result, codec, contribution, key)
        assert isinstance(result.codec, Codec)
        self._whole, self._is_root = result.codec, is_root
        self._pick = {"max": np.maximum, "min": np.minimum}.get(fold)  # instead of adding
        self._is_exact = self._whole.contract.kind == "exact"
        self._factors = factors
        self._sums: dict[int, F32] = {}
        self._doubtful: set[int] = set()  # in place, and not known to be finite

    def in_place(self, chunk: int) -> bool:
        return self._is_exact and self._is_root(chunk)

    def part(self, chunk: int, me: int, buffer: U8, *, own: bool) -> U8:
        if own or chunk not in self._sums:
            return self._encode_own(chunk, me, buffer)
        payload = buffer[: self.layout.size(chunk)]
        self._encode_sum(chunk, payload, SUM, me)
        return payload

    def add(self, chunk: int, participant: int | None, buffer: U8) -> None:
        factor = 1.0 if participant is None else self._factors[participant]
        self._weigh(self._codec, chunk, factor, buffer[: self.layout.size(chunk)])
        self.encoded.give(buffer)

    def add_own(self, chunk: int, me: int, *, coded: bool) -> None:
        if coded and self._codec.contract.kind != "exact":
            encoded = self.encoded.take()
            part = self._encode_own(chunk, me, encoded)  # there, or where it lies already
            self._weigh(self._codec, chunk, self._factors[me], part)
            self.encoded.give(encoded)
            return
        if self.contribution.own is not None:
            where = self.contribution.own(chunk)
            self._weigh(EXACT, chunk, self._factors[me], where.view(np.uint8))
            return
        factor = self._factors[me]
        self._fill(chunk, lambda values: self._weigh(EXACT, chunk, factor, values.view(np.uint8)))

    def _weigh(self, codec: Codec, chunk: int, factor: float, data: U8) -> None:
        is_first = chunk not in self._sums
        if is_first:
            place = self._result.view(chunk).view(np.float32) if self.in_place(chunk) else None
            self._sums[chunk] = self._floats.take() if place is None else place
        total = self._sums[chunk][: self._grid.size(chunk)]
        if self._pick is not None:
            self._pick_from(codec, data, total, is_first)
            return
        if codec.contract.kind == "exact" and KERNELS is not None:
            if not KERNELS.weigh(data, factor, total, is_first):
                codec.check(data, total.size)  # else the sum is too large: see `encode`
                self._doubtful.add(chunk)
            return
        if is_first:
            total.fill(0)
        codec.decode_add(data, factor, total)
        self._doubtful.add(chunk)

    def _pick_from(self, codec: Codec, data: U8, total: F32, is_first: bool) -> None:
        if is_first:
            codec.decode(data, total)
            return
        assert self._pick is not None
        buffer = self._floats.take()
        try:
            values = buffer[: total.size]
            codec.decode(data, values)
            self._pick(total, values, out=total)
        finally:
            self._floats.give(buffer)

    def encode(self, chunk: int, out: U8) -> None:
        """Encode the sum of a chunk into ``out``, and forget it.

        Raises CodecError for values next to the largest float32 only: the parts have been checked.
        """
        self._encode_sum(chunk, out, WHOLE)

    def _encode_sum(self, chunk: int, out: U8, what: bytes, *numbers: int) -> None:
        total = self._sums.pop(chunk)
        codec = self._whole if self._is_root(chunk) else self._codec
        if self.in_place(chunk):
            if chunk in self._doubtful:
                codec.check(out, self._grid.size(chunk))
            return
        key = self._key_of(codec, what, *numbers, chunk)
        try:
            codec.encode(total[: self._grid.size(chunk)], out, key)
        finally:
            self._floats.give(total)


class GatheredParts(Parts):
    """Put each participant's part into its slot, where the result of the codec ``Gathered`` lies.

    Where the result is the aggregate (see Gathered), parts are added to it, and the weights of
    those who sent each element take another float32 chunk.
    """

    def __init__(
        self,
        result: RoundResult,
        whole: Gathered,
        contribution: Contribution,
        key: int = 0,
    ) -> None:
        super().__init__(result, whole.part_codec, contribution, key)
        self._whole = whole
        self._weights: dict[int, F32] = {}  # by chunk, while it is being aggregated

    def in_place(self, chunk: int) -> bool:
        return True

    def add(self, chunk: int, participant: int | None, buffer: U8) -> None:
        assert participant is not None  # there are no partial sums: see ``parts_for``
        self._put(chunk, participant, buffer[: self.layout.size(chunk)])
        self.encoded.give(buffer)

    def add_own(self, chunk: int, me: int, *, coded: bool) -> None:
        buffer = self.encoded.take()
        self._put(chunk, me, self._encode_own(chunk, me, buffer))
        self.encoded.give(buffer)

    def _put(self, chunk: int, participant: int, part: U8) -> None:
        where, size = self._result.view(chunk), self._grid.size(chunk)
        slot = self._whole.part(where, participant)
        if slot is not None:
            self._codec.check(part, size)
            np.copyto(slot, part)
            return
        total = where.view(np.float32)
        if chunk not in self._weights:
            self._weights[chunk] = self._floats.take()
            self._weights[chunk].fill(0)
            total.fill(0)
        self._whole.add(participant, part, total, self._weights[chunk][:size])

    def encode(self, chunk: int, out: U8) -> None:
        weights = self._weights.pop(chunk, None)
        if weights is not None:
            self._whole.finish(out.view(np.float32), weights[: self._grid.size(chunk)])
            self._floats.give(weights)


class RobustParts(Parts):
    """Stack the parts of each chunk, and let a robust rule make one of them when all are there.

    Where the rule needs distances between whole vectors (robust/gram.py), the chunks of a shard
    wait for each other: ``whole`` gives none of them until the inner products over all shards are
    known.

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
        contribution: Contribution,
        matrix: Matrix | None = None,
        *,
        audited: bool = False,
    ) -> None:
        super().__init__(result, codec, contribution, plan.key)
        assert plan.rule is not None
        assert isinstance(result.codec, Codec)
        self._rule, self._whole = plan.rule, result.codec
        self.audited = audited
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
        self._codec.check(buffer[: self.layout.size(chunk)], self._grid.size(chunk))
        self._stacks.setdefault(chunk, {})[participant] = buffer  # one thread for each chunk

    def add_own(self, chunk: int, me: int, *, coded: bool) -> None:
        buffer = self.encoded.take()
        part = self._encode_own(chunk, me, buffer)
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
        if not self.audited:  # else no word of a single owner names somebody else
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
            self._whole.encode(values, out, self._key_of(self._whole, WHOLE, chunk))
        finally:
            self._floats.give(floats)

    def _blocks(self, chunk: int) -> Iterator[F32]:
        """Yield the values of the stack of a chunk, in the order of the participants."""
        stack, length = self._stacks[chunk], self.layout.size(chunk)
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


class PartError(Exception):
    """Report that a participant has sent what cannot be used: which one, and the reason."""

    def __init__(self, participant: int, why: str) -> None:
        super().__init__(why)
        self.participant, self.why = participant, why
