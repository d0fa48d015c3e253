"""Deal the samples of a data set to a run's trainers: each once an epoch, whoever comes or goes.

    outer = atoll.DiLoCo(model, optimizer, sync_every=100, peer=atoll.connect())
    shards = Shards(len(dataset), outer, epochs=3)
    for x, y in shards.loader(dataset, batch_size=32, num_workers=4):
        ...                                  # the loop as it was, with optimizer.step()

After each committed round all trainers tell each other how far they have come, in one small gather,
and go on with new hands (deck.py decides). A newcomer has nothing to draw: it joins the others in
their next gather. Each trainer publishes the deal, so that a newcomer can have it, and writes it to
a file, so that those who were all killed at once go on from it.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, get_worker_info

from atoll.collectives.codecs import F32
from atoll.collectives.errors import (
    AtollError,
    CollectiveLostError,
    CollectiveMismatchError,
    CollectiveMissedError,
    ConfigError,
    DataError,
    RemoteProtocolError,
    RoundTimeoutError,
)
from atoll.collectives.units import count
from atoll.optim.deck import (
    DRAWN_BLOCKS_MAX,
    LOST_MAX,
    STATE_BYTES_MAX,
    Deal,
    Deck,
    HandReport,
    Span,
    advance,
    hand_of,
    makes_deal,
    usual_block,
    without,
)
from atoll.optim.every_step.every_step import EveryStep
from atoll.optim.every_step.gather import gather_parts
from atoll.optim.method import Method
from atoll.optim.methods.round_method import RoundMethod
from atoll.optim.sessions import LeadingRank, OperationsSession, VectorChannel
from atoll.optim.side_channel import CODEC, OF_PARTNERS, fetched
from atoll.peer.client.console import say

NAME = "shards"  # under which deals are published
PURPOSE = b"b"[0]  # of gathers: blocks
FILE = "shards.json"
FILE_BYTES_MAX = 4 * STATE_BYTES_MAX  # a deal as text within text, which may double it
VERSION = 1
HALVES = STATE_BYTES_MAX // 2  # two bytes of a deal in each float32, which holds 24 bits
ELEMENTS = 1 + HALVES  # and how many there are
TRIES = 3  # gathers of those who wait alone, until the others are held for dead ...
PAUSES_S = (
    0.5,
    2.0,
    5.0,
)  # ... and what they leave between these: a daemon that ends is seen in 2 s
# The others do something else, or gather something else.
OUT_OF_STEP = (
    CollectiveMismatchError,
    CollectiveMissedError,
    CollectiveLostError,
    RemoteProtocolError,
)
STEPS_OUT = 3  # times that the others make another call when it is time for a deal
PREFETCH = 2  # batches of each worker, as DataLoader has it


class Shards:
    """Deal ``samples`` of a data set to the trainers of a run.

    ``trainer``: a method with rounds (DiLoCo, LocalSGD, SparseLoCo), and a deal is made after each
    committed round; or a session, or a method that exchanges at every step, and all trainers
    call ``deal()`` at the same step, every so many steps. All give the same numbers. Draw with one
    of ``loader``, ``sampler`` and ``iterable``.

    ``epochs``: how often each sample is used; None: there is no end. ``block``: samples that follow
    each other in the data set and are dealt together, in an order drawn by ``seed``; None: one, and
    more from 131,072 samples on. ``folder``: where the last deal is kept; None: the daemon's home.

    What holds: while trainers come, go in order, are late or are started again with what they have
    saved, each sample is used once an epoch. Of a trainer that dies nothing is skipped: what it has
    drawn since the last deal is dealt again, two deals later. Twice are used: what a trainer has
    used in a round that was committed, if it dies before the deal that follows; and what one that
    lives has used since its last deal, if the others make two deals without it (a line says so).

    ``epoch``: which it is at, from 0. ``is_over``: this trainer has nothing to draw any more.
    """

    def __init__(
        self,
        samples: int,
        trainer: Method | OperationsSession,
        *,
        epochs: int | None = None,
        block: int | None = None,
        seed: int = 0,
        folder: str | Path | None = None,
    ) -> None:
        if not isinstance(samples, int):
            raise ConfigError(
                f"the samples of Shards are {type(samples).__name__}, and not how many they are",
                fix="say Shards(len(dataset), outer), and shards.loader(dataset, batch_size=...)",
            )
        if block is None:
            block = usual_block(samples)
        self.deck = Deck(samples, block, epochs or 0, seed)
        if epochs is not None and epochs < 1:
            raise ConfigError(f"epochs={epochs}", fix="give a number of epochs, or None")
        self._peer, self._by_rounds = _session_of(trainer), isinstance(trainer, RoundMethod)
        if isinstance(self._peer, LeadingRank):
            raise ConfigError(
                f"Shards is for trainers of one process, and this one has {self._peer.ranks}",
                fix="draw by torch's DistributedSampler, with another seed for each trainer",
            )
        self._channel = cast(VectorChannel, self._peer.channel)
        home = getattr(self._channel, "home", None) if folder is None else Path(folder)
        self._file = None if home is None else Path(home) / FILE
        self._deal, self._at = Deal(0, 0), 0  # where it has drawn last
        self._lost: list[Span] = []  # of its hand, and so are ``_drawn``, ``_done`` and ``_mark``
        self._hand: Iterator[Span] | None = None  # None: it has none yet
        self._span: Span | None = None  # of which a part is drawn
        self._reset()
        self._ahead = 0  # drawn, and not handed to the loop yet
        self._has_left = self.is_over = False
        self._said: set[str] = set()
        self._read_file()
        if isinstance(trainer, RoundMethod):
            trainer.watch_rounds(self)

    # ------------------------------------------------------------ for everybody

    @property
    def epoch(self) -> int:
        return self._at // self.deck.samples

    @property
    def deals(self) -> int:
        """Return the number of the last deal, the same at all trainers."""
        return self._deal.number

    def deal(self) -> None:
        """Deal anew, after a step that all trainers have taken; of methods without rounds.

        What the loop has used so far is done.
        """
        if self._by_rounds:
            raise ConfigError(
                "deal() of a method with rounds, which deals after each of them",
                fix="leave it out",
            )
        self._done = self._trained
        self._make_deal(waits=False)

    def sampler(self, ahead: int = 0) -> Sampler[int]:
        """Return a sampler that draws this trainer's samples, of all epochs one after the other.

        ``ahead``: how many it draws before the loop has them. That is 0 where a DataLoader has no
        workers, else its ``num_workers * prefetch_factor * batch_size``. It matters when this
        trainer dies, or its loop breaks out of the DataLoader: so many are dealt again. Once all
        are drawn, a sampler does not see which of them the loop has had, and takes them for used.
        ``loader`` counts by itself, and sees it.
        """
        return _Drawn(self, ahead)

    def loader(self, dataset: Dataset[Any], batch_size: int, **options: Any) -> Iterable[Any]:
        """Return a DataLoader's batches of this trainer's samples, of all epochs.

        ``options`` are DataLoader's: ``num_workers``, ``collate_fn`` and so on. The last batch may
        be smaller.
        """
        return _Loader(self, dataset, batch_size, options)

    def iterable(
        self, open_block: Callable[[range], Iterable[Any]], *, workers: int = 0
    ) -> IterableDataset[Any]:
        """Return this trainer's samples one by one, for a DataLoader without workers of its own.

        ``open_block(indices)`` gives the samples with these indices, which follow each other, in
        their order: a file, or a part of one, is read in one go. With ``workers`` it is called in
        so many processes, which work ahead: two blocks each.
        """
        return _Samples(self, open_block, workers)

    def state_dict(self) -> dict[str, Any]:
        """Return where this trainer is, within its hand too: ``outer.save(folder, shards=shards)``.

        What the loop has not got yet is drawn again.
        """
        return {
            "version": VERSION,
            "deck": str(self.deck),
            "deal": self._deal.to_bytes().decode(),
            "done": self._done,
            "drawn": self._trained,
            "lost": [list(span) for span in self._lost],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` gave; raise ConfigError for anything else.

        It counts where the group still is at that deal, or one further. Otherwise what was used
        since is dealt again.
        """
        if state.get("version") != VERSION or state.get("deck") != str(self.deck):
            raise ConfigError(
                f"a state of {str(state.get('deck'))[:200]}, and these are {self.deck}",
                fix="load what Shards.state_dict() gave, with the same numbers",
            )
        saved = Deal.from_bytes(str(state["deal"]).encode())
        if saved.number < self._deal.number:
            say(
                f"samples: saved at deal {saved.number}, and this trainer has been in deal "
                f"{self._deal.number} since: it goes on from there"
            )
            return
        self._deal = saved
        self._reset()
        self._done, self._drawn = int(state["done"]), int(state["drawn"])
        self._lost = [(int(begin), int(end)) for begin, end in state["lost"]]

    # ------------------------------------------------------------ for the method

    def submitted(self) -> None:
        self._mark = self._trained

    def round_over(self, kind: str, *, counted: bool, leaves: bool) -> None:
        """Deal anew after a committed round; see ``RoundWatcher``."""
        self._has_left = self._has_left or leaves
        if kind == "committed":
            self._done = self._mark
            if not counted:
                self._lose(0, self._done)
        elif kind == "reload":
            self.dropped()
        if kind != "committed" and (leaves or self._others_are_ahead()):
            return  # a round that was missed ends with a deal as well, unless that is over
        try:
            self._make_deal(waits=False)
        except AtollError as error:
            if not leaves:
                raise
            say(f"samples that this trainer has used are dealt again: {error.what}")

    def dropped(self) -> None:
        """Note that steps that are in no round are given up: their samples are dealt again."""
        self._lose(self._done, self._trained)

    # ------------------------------------------------------------ drawing

    @property
    def _trained(self) -> int:
        """Return how many samples of the hand the loop has had."""
        return max(self._done, self._drawn - self._ahead)

    def draw(self, most: int) -> Span | None:
        """Return the next positions, at most so many, within one block; None at the end.

        Where there is nothing left it waits for the next deal of the others.
        """
        while not self._has_left and not self.is_over:
            if self._span is None and self._hand is not None:
                self._span = next(self._hand, None)
            if self._span is not None:
                begin, end = self._span
                cut = min(end, begin + most)
                self._span = (cut, end) if cut < end else None
                self._drawn += cut - begin
                if self._drawn > DRAWN_BLOCKS_MAX * self.deck.block:
                    raise ConfigError(
                        f"{self._drawn:,} samples were drawn since the last deal: too many",
                        fix="deal more often: smaller sync_every, or more calls of deal(); or give "
                        "Shards larger blocks",
                    )
                self._at = begin
                return begin, cut
            if self._hand is not None and not self._lost and self._deal.is_over(self.deck):
                self.is_over = True
                break
            self._make_deal(waits=True)
        return None

    def put_back(self, ahead: int) -> None:
        """Note that the last samples that were drawn do not reach the loop."""
        if ahead:
            self.is_over = False  # it may have been: workers had drawn all there was
            # Of a hand that was given up meanwhile there is nothing to note.
            self._lose(max(0, self._drawn - ahead), self._drawn)
            self._ahead -= ahead

    def went(self, ahead: int) -> None:
        """Note that so many more are drawn and not with the loop yet; less than 0: with it now."""
        self._ahead += ahead

    def _lose(self, begin: int, end: int) -> None:
        new = list(without([(begin, end)], self._lost))
        if len(self._lost) + len(new) <= LOST_MAX:
            self._lost = sorted([*self._lost, *new])
        else:
            say("samples of steps that were given up are not dealt again: that is too often")

    def _reset(self) -> None:
        """Forget the hand: it is begun once the others have dealt with what is known of it."""
        self._drawn = self._done = self._mark = 0
        self._lost = []
        self._hand = self._span = None

    # ------------------------------------------------------------ deals

    def _make_deal(self, *, waits: bool) -> None:
        """Gather with the others until there is a new deal, and begin its hand.

        At its own time it gives up, and goes on with its hand, where the others do something else.
        """
        tries = out = 0
        looked = False
        while True:
            mine = self._report(waits, tries, looked)
            try:
                told = self._gather(mine)
            except OUT_OF_STEP as error:
                out += 1
                if isinstance(error, CollectiveLostError) and self._adopt_own(mine):
                    return
                if waits:
                    text = "this trainer waits for the others' next round, to get samples to draw"
                    self._say_once("waits", text)
                elif out >= STEPS_OUT:
                    say(f"no deal of samples this time, it goes on with its hand: {error.what}")
                    return
                continue
            except RoundTimeoutError as error:
                if not waits:
                    raise
                say(f"this trainer still waits for samples to draw: {error.what}")
                continue
            reports = list(told.values())
            newest = max(report.number for report in reports)
            if not newest and not all(report.looked for report in reports):
                looked = self._look()
                continue
            if not makes_deal(reports, TRIES):
                text = "trainers that have samples to draw are not here; they may be dead, and then"
                self._say_once("alone", f"{text} these samples are dealt again")
                time.sleep(PAUSES_S[min(tries, len(PAUSES_S) - 1)])
                tries += 1
                continue
            if self._advance(told, newest, mine):
                return

    def _advance(self, told: dict[str, HandReport], newest: int, mine: HandReport) -> bool:
        """Compute the next deal, or get it from who can; return whether it is here."""
        digest = next(report.digest for report in told.values() if report.number == newest)
        known = [n for n, r in told.items() if (r.number, r.digest) == (newest, digest)]
        if not newest:
            new, twice = advance(self.deck, Deal.first(self.deck), told)
        elif self._peer.peer_name in known:
            told = {
                n: r if n in known or r.number < newest else HandReport(takes=r.takes)
                for n, r in told.items()
            }
            new, twice = advance(self.deck, self._deal, told)
        else:
            found = self._fetch(known, newest + 1)
            if found is None:
                return False
            new, twice = found, {}
        for name, samples in twice.items():
            say(f"{count(samples, 'sample')} that {name} has used were dealt again meanwhile")
        self._begin(new, mine)
        return True

    def _begin(self, new: Deal, mine: HandReport) -> None:
        """Begin the hand of a deal, to which this trainer has given ``mine``."""
        missed = new.number - 1 - mine.number
        if mine.drawn and missed > 1:
            say(
                f"{count(mine.drawn, 'sample')} that this trainer has used since its last deal are "
                f"dealt again: the others have made {missed} deals without it"
            )
        seat = new.seat_of(self._peer.peer_name)
        kept = sum(end - begin for begin, end in seat.kept) if seat is not None else 0
        mark = self._mark - mine.done
        self._deal = new
        self._reset()
        self._drawn, self._mark = kept, min(max(0, mark), kept)
        self._hand = hand_of(self.deck, new, self._peer.peer_name, kept)
        self._publish()
        self._write_file()

    def _report(self, waits: bool, tries: int, looked: bool) -> HandReport:
        deal, name = self._deal, self._peer.peer_name
        seats = [seat.name for seat in deal.seated]
        return HandReport(
            deal.number,
            deal.digest if deal.number else "",
            name in seats,
            len(seats),
            self._done,
            self._drawn,
            tuple(self._lost),
            not self._has_left,
            waits,
            tries,
            looked,
        )

    def _gather(self, mine: HandReport) -> dict[str, HandReport]:
        parts = gather_parts(self._peer, PURPOSE, mine.to_bytes(self.deck))
        return {
            part.name: HandReport.from_bytes(part.name, part.data, self.deck)
            for part in parts
            if part.purpose == PURPOSE
        }

    # ------------------------------------------------------------ deals of others

    def _newest(self) -> dict[str, int]:
        """Return the number of the newest deal that each member has published."""
        found: dict[str, int] = {}
        for member in self._channel.members().names:
            with contextlib.suppress(*OF_PARTNERS):
                found[member] = self._channel.newest(member, NAME)
        return found

    def _look(self) -> bool:
        """Take the newest deal that anybody has published; return whether there is none."""
        found = self._newest()
        newest = max(found.values(), default=0)
        if not newest:
            return True
        deal = self._fetch([name for name, number in found.items() if number == newest], newest)
        if deal is not None:
            self._deal = deal
            self._reset()
        return False

    def _others_are_ahead(self) -> bool:
        return max(self._newest().values(), default=0) > self._deal.number

    def _adopt_own(self, mine: HandReport) -> bool:
        """Begin the next deal if the others have made it with what this trainer has told.

        So it is where this peer's daemon has ended in the middle.
        """
        found = self._newest()
        number = mine.number + 1
        have = [name for name, newest in found.items() if newest == number]
        deal = self._fetch(have, number) if mine.number and have else None
        seat = deal.seat_of(self._peer.peer_name) if deal is not None else None
        if deal is None or seat is None or seat.number != number:
            return False
        self._begin(deal, mine)
        return True

    def _fetch(self, members: Iterable[str], number: int) -> Deal | None:
        for member in members:
            try:
                deal = unpacked(fetched(self._channel, member, NAME, number, ELEMENTS))
            except OF_PARTNERS:
                continue
            if deal.number == number:
                return deal
        return None

    def _publish(self) -> None:
        self._channel.publish(NAME, self._deal.number, packed(self._deal), CODEC)

    # ------------------------------------------------------------ the file

    def _read_file(self) -> None:
        if self._file is None or not self._file.exists():
            return
        try:
            with self._file.open("rb") as file:
                found = json.loads(file.read(FILE_BYTES_MAX))
            if found["run"] != self._run or found["deck"] != str(self.deck):
                say(f"{self._file} is of other samples ({found['deck']}): it is not used")
                return
            self._deal = Deal.from_bytes(found["deal"].encode())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, AtollError) as error:
            say(f"{self._file} cannot be read, and is not used: {str(error)[:100]}")
            return
        self._reset()

    def _write_file(self) -> None:
        if self._file is None:
            return
        whole = {
            "run": self._run, "deck": str(self.deck), "deal": self._deal.to_bytes().decode(),
        }  # fmt: skip
        begun = self._file.with_suffix(".writing")
        try:
            begun.parent.mkdir(parents=True, exist_ok=True)
            with begun.open("wb") as file:
                file.write(json.dumps(whole).encode())
                file.flush()
                os.fsync(file.fileno())
            begun.replace(self._file)
        except OSError as error:
            self._say_once(
                "disk", f"{self._file} cannot be written ({error}): if all trainers die at once, "
                "they begin the data anew"
            )  # fmt: skip

    @property
    def _run(self) -> str:
        return str(getattr(self._peer, "run", ""))

    def _say_once(self, what: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            say(text)


def _session_of(trainer: Method | OperationsSession) -> OperationsSession:
    """Return the session of a trainer; ConfigError if it cannot make collectives."""
    if not isinstance(trainer, Method):
        return trainer
    fix = "use DiLoCo, LocalSGD or SparseLoCo; or give each trainer samples of its own"
    what = "Shards deals in a collective of all trainers after each round, and"
    meets = isinstance(trainer, EveryStep) or (isinstance(trainer, RoundMethod) and trainer.meets)
    if not meets:
        raise ConfigError(
            f"{what} {type(trainer).__name__} has no moment at which all are between two rounds",
            fix=fix,
        )
    return cast(OperationsSession, trainer.peer)


def packed(deal: Deal) -> F32:
    """Return a deal as float32[ELEMENTS], for ``unpacked``."""
    text = deal.to_bytes()
    values: F32 = np.zeros(ELEMENTS, np.float32)
    halves = np.frombuffer(text + b" " * (len(text) % 2), "<u2")
    values[0] = halves.size
    values[1 : 1 + halves.size] = halves
    return values


def unpacked(values: F32) -> Deal:
    """Return the deal; RemoteProtocolError for what is none."""
    fine = values.size == ELEMENTS and bool(((values >= 0) & (values < 1 << 16)).all())
    size = min(int(values[0]), HALVES) if fine else 0
    return Deal.from_bytes(values[1 : 1 + size].astype("<u2").tobytes())


# ---------------------------------------------------------------- for torch


class _Drawn(Sampler[int]):
    """Draw samples one by one."""

    def __init__(self, shards: Shards, ahead: int) -> None:
        self._shards, self._most = shards, ahead

    def __iter__(self) -> Iterator[int]:
        shards, ahead = self._shards, 0
        try:
            while (span := shards.draw(1)) is not None:
                if ahead < self._most:
                    ahead += 1
                    shards.went(1)
                yield shards.deck.indices(span)[0]
        except BaseException:  # GeneratorExit above all: the loop broke out of its DataLoader
            shards.put_back(ahead)
            raise
        shards.went(-ahead)


class _Batches(Sampler[list[int]]):
    """Draw batches, and note how large each is."""

    def __init__(self, shards: Shards, batch_size: int) -> None:
        self._shards, self._batch_size = shards, batch_size
        self.sizes: deque[int] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        shards, batch = self._shards, list[int]()
        while (span := shards.draw(1)) is not None:
            shards.went(1)
            batch.append(shards.deck.indices(span)[0])
            if len(batch) == self._batch_size:
                self.sizes.append(len(batch))
                yield batch
                batch = []
        if batch:
            self.sizes.append(len(batch))
            yield batch


class _Loader:
    """Iterate over a DataLoader, and count what the loop has got."""

    def __init__(
        self, shards: Shards, dataset: Dataset[Any], batch_size: int, options: dict[str, Any]
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size={batch_size}", fix="give at least one sample")
        self._shards, self._batch_size = shards, batch_size
        self._dataset, self._options = dataset, options

    def __iter__(self) -> Iterator[Any]:
        batches = _Batches(self._shards, self._batch_size)
        loader: DataLoader[Any] = DataLoader(self._dataset, batch_sampler=batches, **self._options)
        try:
            for batch in loader:
                self._shards.went(-batches.sizes.popleft())
                yield batch
        finally:
            self._shards.put_back(sum(batches.sizes))


class _BlockPieces(Sampler[Span]):
    """Draw what is left of blocks, as indices, and note how large each is."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        self.sizes: deque[int] = deque()

    def __iter__(self) -> Iterator[Span]:
        shards = self._shards
        while (span := shards.draw(shards.deck.block)) is not None:
            indices = shards.deck.indices(span)
            shards.went(len(indices))
            self.sizes.append(len(indices))
            yield indices.start, indices.stop


class _Opened(Dataset[list[Any]]):
    """Read blocks, in whatever process."""

    def __init__(self, open_block: Callable[[range], Iterable[Any]]) -> None:
        self._open = open_block

    def __getitem__(self, piece: Span) -> list[Any]:
        indices = range(*piece)
        samples = list(self._open(indices))
        if len(samples) != len(indices):
            raise DataError(
                f"open_block({indices}) gave {count(len(samples), 'sample')}",
                fix="let it give one sample for each of the indices, in their order",
            )
        return samples


class _Samples(IterableDataset[Any]):
    """Give samples one by one, of blocks that are read by workers."""

    def __init__(
        self, shards: Shards, open_block: Callable[[range], Iterable[Any]], workers: int
    ) -> None:
        self._shards, self._open, self._workers = shards, open_block, workers

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            raise ConfigError(
                "shards.iterable() in a worker of a DataLoader, which has no session",
                fix="give the workers to iterable(workers=...), and the DataLoader num_workers=0",
            )
        pieces = _BlockPieces(self._shards)
        blocks: DataLoader[Any] = DataLoader(
            _Opened(self._open),
            sampler=pieces,
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=self._workers,
        )
        left = 0
        try:
            for block in blocks:
                left = pieces.sizes.popleft()
                for sample in block:
                    left -= 1
                    self._shards.went(-1)
                    yield sample
        finally:
            self._shards.put_back(left + sum(pieces.sizes))


def _as_it_is(block: list[Any]) -> list[Any]:
    return block
