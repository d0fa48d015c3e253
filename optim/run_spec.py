"""Hold what all peers of a run must agree on, and the blob that carries it with the manifest.

The blob goes into the run's first log entry and is handed to every joiner and trainer as it is.
It is zlib over UTF-8 text: the specification as one line of JSON, then the manifest's lines.
Compare specifications and manifests, not blobs: two zlib versions may pack one text differently.

``RunSpec`` has three groups of fields: of the outer optimizer, of a round, and of trust.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from atoll.collectives.audit.sketch import AUDITED_PEERS_MAX, check_codec
from atoll.collectives.codecs import (
    CODECS,
    RULES,
    Decoder,
    gathered_codec,
    get_codec,
    is_coarse,
    mean_codec,
)
from atoll.collectives.counter_rng import derive_key
from atoll.collectives.errors import (
    CodecError,
    ConfigError,
    IncompatibleRunError,
    RemoteProtocolError,
)
from atoll.collectives.robust import RobustRule, get_rule
from atoll.optim.manifest import FRAGMENTS_MAX, Manifest

# The method of a run that its trainers use for collectives alone; nothing is ever stepped.
COLLECTIVES = "collectives"
# Methods whose parameters daemons step, and those for which they only carry what trainers exchange.
STEPPED = ("diloco", "local_sgd", "streaming_diloco", "co2", "sparse_loco", "async_diloco")
CARRIED = ("gradient_average", "demo", "zeroth_order", "population", "noloco", COLLECTIVES)
METHODS = STEPPED + CARRIED
# Methods whose rounds are of whoever has submitted: nobody waits for those still computing.
ASYNCHRONOUS = ("async_diloco",)
# Methods of which a round's local steps can be taken again by others (optim/replay/).
REPLAYED = ("diloco", "local_sgd")
# Methods that may begin with short rounds of a mean.
WARMED = ("diloco",)
OUTER_RULES = ("nesterov", "heavy_ball", "sgd")  # optim/outer_step.py
FIRST_ROUND = 2  # the first one with steps; the round before gives a run its parameters
# How the outer momentum is kept: as it is, or with a byte for each value (collectives/codecs).
MOMENTUM_CODECS = ("float32", "dynamic8")
# What becomes of the peers' parts: a mean, encoded once more, or what each replica makes of all of
# them (collectives/codecs/gathered.py); anything else is a robust rule (collectives/robust/).
MEAN = "mean"
AGGREGATES = (MEAN, *RULES)
SUBMITS = ("parameters", "deltas")
# What a trainer does where its frozen parameters differ from the run's; the last does not look.
FROZEN = ("refuse", "warn", "ignore")
SCHEDULE_CHARACTERS_MAX = 200
SYNC_EVERY_MAX = 1_000_000  # local steps; published runs use at most 1,000
WARM_ROUNDS_MAX = 1_000_000  # some days of steps
OUTER_LR_MAX = 10.0  # the outer rate is 0.4 to 1 everywhere in the literature
OUTER_DELAY_MAX = 1024  # about as many arrivals as there are peers, and a run has as many at most
GOSSIP_MAX = 4.0  # nothing above is stable: optim/methods/gossip.py
GROUP_MAX = 32  # each fetches from all others of its group; for more there are reductions
ROUND_DEADLINE_S_MAX = 7 * 24 * 3600.0  # a week: beyond it a wait is a hang
ROUNDS_IN_FLIGHT_MAX = 4  # hides a reduction of three times the time between two rounds
MIN_TRAINERS_MAX = 1024  # a view has no more members
PROBATION_MAX = 1000  # a week of rounds of ten minutes: nobody computes longer for nothing
VALIDATORS_MAX = 32  # for a round; half of the most that an audited round has
SPEC_BYTES_MAX = 4096  # the JSON line; today's has about 190
# What participants say of each chunk has to fit a message: 5.6 billion parameters in a fragment.
AUDITED_CHUNKS_MAX = 21_500
SAID_BYTES_MAX = 36 * AUDITED_CHUNKS_MAX  # eight projections and a distance of each
BLOB_BYTES_MAX = 512 * 1024  # must fit into one control frame of 1 MiB with room to spare
LENGTH_BYTES = 4  # before each object of an all-gather, where they travel together as a blob
# The largest relative squared error of a codec, for Gaussian values, of which parts are averaged
# with error feedback. What is kept for later comes
# late, and with an outer momentum that oscillates: a mean of topk (0.88) exploded (docs/log.md),
# those of sign (0.36) and int2 (0.12) do not.
AVERAGED_ERROR_MAX = 0.5
# The order of the fields in the blob, whatever group they are in.
WIRE_ORDER = (
    *("method", "sync_every", "schedule"),
    *("outer", "outer_lr", "outer_lr_by_peers", "outer_momentum", "outer_clip", "outer_delay"),
    "momentum_codec",
    *(
        "submits",
        "codec",
        "round_deadline_s",
        "fragments",
        "rounds_in_flight",
        "aggregate",
        "audit",
    ),
    *("error_feedback", "check_every", "buffers", "gossip", "group"),
    *("probation", "validators", "segment_steps", "min_trainers"),
    *("warm_rounds", "warm_every"),
)
# Newer fields, which are in the blob only where they have another value than this: a run that does
# without them is one that older versions can join.
UNSAID = {"momentum_codec": MOMENTUM_CODECS[0], "warm_rounds": 0, "warm_every": 1}
TEXT_BYTES_MAX = 16 * 1024 * 1024  # 65,536 parameters with names of 200 characters


@dataclass(frozen=True, kw_only=True)
class OuterSpec:
    """Describe the outer optimizer: what becomes of the mean of a round (outer_step.py)."""

    outer: str = "nesterov"
    outer_lr: float = 0.7
    # Whether outer_lr is a factor of the rate that belongs to the peers of a round: ``outer_rate``.
    outer_lr_by_peers: bool = False
    outer_momentum: float = 0.9
    outer_clip: float = 0.0  # bounds every element of the momentum, if it is positive
    outer_delay: int = 1  # rounds that make up one step of Nesterov; above 1 it is the delayed one
    momentum_codec: str = MOMENTUM_CODECS[0]  # in which daemons keep the momentum between rounds
    submits: str = "parameters"  # or deltas: pseudo-gradients, if the trainer must form them itself
    gossip: float = 0.0  # how much trainers that exchange in groups draw together (gossip.py)
    group: int = 1  # ... and of how many

    def _check_outer(self) -> None:
        _require(self, self.outer in OUTER_RULES, "outer", f"one of {', '.join(OUTER_RULES)}")
        _require(self, 0 < self.outer_lr <= OUTER_LR_MAX, "outer_lr", f"in (0, {OUTER_LR_MAX:g}]")
        _require(self, 0 <= self.outer_momentum < 1, "outer_momentum", "in [0, 1)")
        _require(self, self.outer_clip >= 0, "outer_clip", "0 (none) or positive")
        can_wait = self.outer == "nesterov" and not self.outer_clip
        delay_max = OUTER_DELAY_MAX if can_wait else 1
        _require(
            self,
            0 < self.outer_delay <= delay_max,
            "outer_delay",
            f"1, or up to {OUTER_DELAY_MAX} rounds of outer='nesterov' without a clip",
        )
        codecs = MOMENTUM_CODECS if self.outer_momentum else MOMENTUM_CODECS[:1]
        wanted = (
            f"one of {', '.join(codecs)}"
            if self.outer_momentum
            else "float32, as there is no momentum"
        )
        _require(self, self.momentum_codec in codecs, "momentum_codec", wanted)
        _require(self, self.submits in SUBMITS, "submits", f"one of {', '.join(SUBMITS)}")
        _require(self, 0 <= self.gossip <= GOSSIP_MAX, "gossip", f"in [0, {GOSSIP_MAX:g}]")
        _require(self, 0 < self.group <= GROUP_MAX, "group", f"1 to {GROUP_MAX} trainers")


@dataclass(frozen=True, kw_only=True)
class RoundSpec:
    """Describe a round: when it is, of what, and how its parts become one result."""

    sync_every: int
    # How sync_every changes, or what compresses gradients: a trainer's own text, equal for all.
    schedule: str = ""
    codec: str = "int8"
    round_deadline_s: float = 600.0
    fragments: int = 1  # parts of the vector, each with rounds of its own
    rounds_in_flight: int = 1  # rounds of different fragments that may be reducing at once
    aggregate: str = MEAN
    error_feedback: float = 0.0  # what is kept of what a round has left out, for the next; 0: none
    check_every: int = 0  # steps between two comparisons of parameters that trainers hold; 0: none
    buffers: str = ""  # those of the model that trainers share beside rounds (buffer_sync.py)
    # Trainers that have to be there for a round to begin. The run's first value: its members may
    # agree on another one (peer/membership/view.py, Rules).
    min_trainers: int = 1
    # The first rounds of a run may be short ones, each of which gives it the mean of the peers.
    warm_rounds: int = 0
    warm_every: int = 1  # steps of each

    def _check_round(self) -> None:
        fits = 0 < self.sync_every <= SYNC_EVERY_MAX
        _require(self, fits, "sync_every", f"1 to {SYNC_EVERY_MAX} steps")
        for name in ("schedule", "buffers"):
            text = getattr(self, name)
            fits = text.isprintable() and len(text) <= SCHEDULE_CHARACTERS_MAX
            _require(self, fits, name, f"a line of at most {SCHEDULE_CHARACTERS_MAX} characters")
        fits = 0 <= self.check_every <= SYNC_EVERY_MAX
        _require(self, fits, "check_every", f"up to {SYNC_EVERY_MAX} steps, or 0")
        fits = 0 < self.round_deadline_s <= ROUND_DEADLINE_S_MAX
        wanted = f"in (0, {ROUND_DEADLINE_S_MAX:g}] seconds"
        _require(self, fits, "round_deadline_s", wanted)
        in_flight_max = min(self.fragments, ROUNDS_IN_FLIGHT_MAX)
        _require(
            self,
            0 < self.rounds_in_flight <= in_flight_max,
            "rounds_in_flight",
            f"1 to {ROUNDS_IN_FLIGHT_MAX}, and at most the number of fragments ({self.fragments})",
        )
        _require(self, 0 <= self.error_feedback <= 1, "error_feedback", "in [0, 1]")
        self._check_codec()

    @property
    def encodes_again(self) -> bool:
        """Return whether anybody encodes parts beside the reduction."""
        return self.error_feedback > 0

    def _check_codec(self) -> None:
        try:
            contract = get_codec(self.codec).contract
        except CodecError as error:
            raise ConfigError(f"codec {self.codec[:32]!r}: {error.what}", fix=error.fix) from error
        lacking, coarse = "", is_coarse(self.codec)
        fix = "use int8, or int4 where bytes count for more"
        if contract.keyed and coarse:
            lacking = "error feedback that knows its keys, which rounds do not have"
        elif contract.keyed and self.encodes_again:
            lacking = "rounds in which nobody encodes its parts again: it draws at random"
        elif coarse and not self.error_feedback:
            lacking = (
                "error_feedback, 0.95 say, or what it leaves out would be lost: DiLoCo and "
                "StreamingDiLoCo take it, and SparseLoCo as its decay"
            )
            fix += f"; with GradientAverage compressor=ErrorFeedback(codec={self.codec!r})"
        elif contract.errors.gauss > AVERAGED_ERROR_MAX and self.aggregate not in RULES:
            lacking = f'aggregate="{RULES[-1]}", as of SparseLoCo: so little of it is sent'
        if lacking:
            what = f"codec {self.codec!r} needs {lacking}"
            raise ConfigError(what, fix=fix)

    def result_codec(self, weights: Sequence[float]) -> Decoder:
        """Return the codec in which the result of a round is encoded.

        ``weights`` are those of its participants, in the order of peer ids. Parts are encoded with
        the ``part_codec`` of it.
        """
        if self.aggregate in RULES:
            return gathered_codec(get_codec(self.codec), tuple(weights), self.aggregate)
        return mean_codec(self.codec)

    @property
    def rule(self) -> RobustRule | None:
        """Return what takes the place of the mean; None where parts are averaged, or gathered.

        ConfigError if it is neither of these.
        """
        if self.aggregate in AGGREGATES:
            return None
        try:
            return get_rule(self.aggregate)
        except ConfigError as error:
            text = f"aggregate is none of {', '.join(AGGREGATES)}, and no rule: {error.what}"
            raise ConfigError(text, fix=error.fix) from error

    @property
    def least_peers(self) -> int:
        """Return how many have to count in a round: what its robust rule needs."""
        return self.rule.least if self.rule is not None else 1


@dataclass(frozen=True, kw_only=True)
class TrustSpec:
    """Describe whom a run believes, and what it verifies (peer/verify/)."""

    audit: bool = False  # whether what owners of shards make of the parts is verified, and by all
    probation: int = 0  # rounds in which who joins takes part before it counts; 0: it does at once
    validators: int = 0  # peers in each audited round that take local steps of others again ...
    segment_steps: int = 0  # ... so many of them


@dataclass(frozen=True, kw_only=True)
class RunSpec(OuterSpec, RoundSpec, TrustSpec):
    """Describe the method of a run and its numbers.

    ConfigError names the field that is out of range.
    """

    method: str = "diloco"

    def __post_init__(self) -> None:
        for field in fields(self):
            self._check_type(field.name, str(field.type))
        _require(self, self.method in METHODS, "method", f"one of {', '.join(METHODS)}")
        # On these the ranges of others depend.
        fragments_max = 1 if self.is_asynchronous else FRAGMENTS_MAX
        fits = 0 < self.fragments <= fragments_max
        _require(self, fits, "fragments", f"1 to {fragments_max}")
        self._check_outer()
        _require(
            self,
            self.submits == "deltas" or not self.is_asynchronous,
            "submits",
            "deltas: the run's parameters have moved on since an asynchronous round was begun",
        )
        _require(
            self,
            self.rule is None or self.is_averaged,
            "aggregate",
            f"one of {', '.join(AGGREGATES)}: in a run of {self.method} no round is of all peers",
        )
        self._check_audited_codec()
        self._check_round()
        self._check_feedback()
        self._check_warm_start()
        self._check_trust()
        trainers_max = AUDITED_PEERS_MAX if self.audit else MIN_TRAINERS_MAX
        fits = 1 <= self.min_trainers <= trainers_max
        _require(self, fits, "min_trainers", f"1 to {trainers_max} trainers")

    @property
    def encodes_again(self) -> bool:
        """Return whether anybody does, audits, or publishes vectors beside rounds."""
        return super().encodes_again or self.audit or self.method not in STEPPED

    def _check_audited_codec(self) -> None:
        """Raise ConfigError for a codec that cannot be audited, whatever else it may need."""
        if self.audit and self.codec in CODECS:
            try:
                check_codec(get_codec(self.codec))
            except ConfigError as error:
                what = f"codec {self.codec!r} with audit=True: {error.what}"
                raise ConfigError(what, fix=f"{error.fix}, or leave audit out") from error

    def _check_feedback(self) -> None:
        """Raise ConfigError where nobody keeps what is left out, or others cannot know it."""
        kept = self.is_averaged and not self.audit
        why = "with audits, which go by what is submitted" if self.audit else f"in {self.method}"
        _require(self, kept or not self.error_feedback, "error_feedback", f"0 {why}")

    def _check_warm_start(self) -> None:
        rounds_max = WARM_ROUNDS_MAX if self.method in WARMED and not self.validators else 0
        wanted = f"0 to {rounds_max:,} rounds"
        wanted += "" if rounds_max else f" in a run of {self.method} or with validators"
        _require(self, 0 <= self.warm_rounds <= rounds_max, "warm_rounds", wanted)
        steps_max = self.sync_every if self.warm_rounds else 1
        fits = 1 <= self.warm_every <= steps_max
        _require(self, fits, "warm_every", f"1 to {steps_max} steps")

    def _check_trust(self) -> None:
        """Raise ConfigError where joiners cannot be tried, or a result not be verified."""
        rounds = PROBATION_MAX if self.is_averaged else 0
        wanted = f"0 to {rounds} rounds" if rounds else f"0 in a run of {self.method}"
        _require(self, 0 <= self.probation <= rounds, "probation", wanted)
        if self.audit:
            wanted = "False: only averages and robust rules of all peers can be audited"
            _require(self, self.is_averaged and self.aggregate not in RULES, "audit", wanted)
            wanted = f"a rule for {AUDITED_PEERS_MAX} peers: no more can be audited"
            _require(self, self.least_peers <= AUDITED_PEERS_MAX, "aggregate", wanted)
        validators_max = VALIDATORS_MAX if self.audit and self.method in REPLAYED else 0
        wanted = f"0 to {validators_max}; only an audited run of DiLoCo or LocalSGD has any"
        _require(self, 0 <= self.validators <= validators_max, "validators", wanted)
        steps_max = SYNC_EVERY_MAX if self.validators else 0
        fits = bool(self.validators) <= self.segment_steps <= steps_max
        _require(self, fits, "segment_steps", "a positive number of steps; 0 without validators")

    def _check_type(self, name: str, kind: str) -> None:
        value = getattr(self, name)
        if kind == "float" and type(value) is int:  # outer_lr=1 means 1.0, on the wire as well
            object.__setattr__(self, name, float(value))
        elif type(value).__name__ != kind or (kind == "float" and not math.isfinite(value)):
            raise ConfigError(f"{name} is {repr(value)[:80]}", fix=f"{name} must be a {kind}")

    def is_warm(self, round_number: int) -> bool:
        """Return whether a round is one of the short ones with which a run begins."""
        return FIRST_ROUND <= round_number < FIRST_ROUND + self.warm_rounds

    def steps_of(self, round_number: int) -> int:
        """Return how many local steps each peer takes in a round."""
        return self.warm_every if self.is_warm(round_number) else self.sync_every

    def steps_until(self, round_number: int) -> int:
        """Return how many steps a peer takes in all rounds up to this one, collectives left out."""
        rounds = max(0, round_number - FIRST_ROUND + 1)
        warm = min(rounds, self.warm_rounds)
        return warm * self.warm_every + (rounds - warm) * self.sync_every

    @property
    def is_averaged(self) -> bool:
        """Return whether a round is of all peers, and daemons make new parameters of it."""
        return self.method in STEPPED and not self.is_asynchronous

    @property
    def encodes_submissions(self) -> bool:
        """Return whether a trainer hands over its pseudo-gradient as it travels.

        It is encoded once, and kept like that for every attempt at its round. Not where somebody
        needs the values: error feedback, robust rules, audits, validators, and a daemon that adds
        up several submissions before it takes part.
        """
        contract = get_codec(self.codec).contract
        is_lossy = contract.kind != "exact" and not contract.keyed
        needs_values = self.error_feedback or self.audit or self.validators or self.is_asynchronous
        is_mean = self.method in STEPPED and self.aggregate == MEAN
        return is_mean and is_lossy and not needs_values

    @property
    def is_asynchronous(self) -> bool:
        """Return whether a round is of those who have submitted, while others still compute.

        What they submit holds against any parameters of the run, so none of it comes too late.
        """
        return self.method in ASYNCHRONOUS

    @property
    def needs_butterfly(self) -> bool:
        """Return whether every part has to come to a chunk's owner as it was encoded.

        It has to where it gets a slot, a rule compares it, or what it has left out is kept.
        Otherwise some are added up on their way.
        """
        return self.aggregate != MEAN or self.error_feedback > 0 or self.audit

    def to_wire(self) -> dict[str, str | int | float]:
        values = {name: getattr(self, name) for name in WIRE_ORDER}
        return {name: value for name, value in values.items() if UNSAID.get(name) != value}

    @classmethod
    def from_wire(cls, values: object) -> RunSpec:
        """Read what ``to_wire`` gave; RemoteProtocolError for anything else.

        A field that this version does not know is refused, not ignored: a peer that did not act on
        it would train something else than the others.
        """
        known = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or not values.keys() <= known:
            raise RemoteProtocolError(
                f"run specification has fields {_names(values)}; known are {sorted(known)}",
                fix="run the same version of atoll on all peers",
            )
        try:
            return cls(**values)
        except (ConfigError, TypeError, OverflowError) as error:  # TypeError: a field is missing
            raise RemoteProtocolError(f"malformed run specification: {error}") from error

    def differences(self, run: RunSpec) -> list[str]:
        """Return a line for each field in which this (your) specification and the run's differ."""
        both = ((name, getattr(self, name), getattr(run, name)) for name in WIRE_ORDER)
        return [f"{name}: yours {mine}, run {its}" for name, mine, its in both if mine != its]


def feedback_of(codec: str, given: float | None) -> float:
    """Return how much of what a codec leaves out is kept, unless somebody has said it.

    All of it, where the codec is coarse, and else none. An unknown codec is RunSpec's to refuse.
    """
    if given is not None:
        return given
    return float(isinstance(codec, str) and codec in CODECS and is_coarse(codec))


def _require(spec: object, ok: bool, name: str, wanted: str) -> None:
    """Raise ConfigError, which names the field, unless its value is as wanted."""
    if not ok:
        value = repr(getattr(spec, name))[:80]
        raise ConfigError(f"{name} is {value}", fix=f"{name} must be {wanted}")


def _names(values: object) -> list[str]:
    return sorted(str(key)[:32] for key in values)[:20] if isinstance(values, dict) else []


def blob(spec: RunSpec, manifest: Manifest) -> bytes:
    """Pack specification and manifest for the wire.

    ConfigError if the model has too many names, fewer chunks than the run has fragments, or more
    than can be audited.
    """
    _check_chunks(spec, manifest)
    packed = zlib.compress(f"{json.dumps(spec.to_wire())}\n{manifest.to_wire()}".encode())
    if len(packed) > BLOB_BYTES_MAX:
        raise ConfigError(
            f"the manifest of {len(manifest.parameters)} parameters packs to {len(packed)} bytes; "
            f"the limit is {BLOB_BYTES_MAX}"
        )
    return packed


def parse_blob(packed: bytes) -> tuple[RunSpec, Manifest]:
    """Unpack what ``blob`` gave, for bytes from anyone.

    Its memory is bounded, and it raises RemoteProtocolError only.
    """
    if len(packed) > BLOB_BYTES_MAX:
        raise RemoteProtocolError(f"run blob of {len(packed)} bytes; limit {BLOB_BYTES_MAX}")
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(packed, TEXT_BYTES_MAX).decode()
        if not unpacker.eof or unpacker.unused_data:
            raise RemoteProtocolError(
                f"run blob is cut, has a tail or is over {TEXT_BYTES_MAX} bytes"
            )
        head, _, tail = text.partition("\n")
        if len(head) > SPEC_BYTES_MAX:
            raise RemoteProtocolError(f"specification of {len(head)} bytes; limit {SPEC_BYTES_MAX}")
        spec, manifest = RunSpec.from_wire(json.loads(head)), Manifest.from_wire(tail)
        _check_chunks(spec, manifest)
        return spec, manifest
    except (zlib.error, ValueError, RecursionError, ConfigError) as error:
        raise RemoteProtocolError(f"run blob cannot be read: {error}") from error


def _check_chunks(spec: RunSpec, manifest: Manifest) -> None:
    sizes = [stop - first for first, stop in fragment_ranges(spec, manifest)]
    least = spec.least_peers
    most = min(AUDITED_CHUNKS_MAX, least * shard_chunks_max(spec.rule, least))
    if spec.audit and max(sizes) > most:
        raise ConfigError(
            f"a fragment of {max(sizes):,} chunks; rounds of {most:,} can be audited",
            fix="cut the model into more fragments (StreamingDiLoCo), or found it without audit",
        )


def shard_chunks_max(rule: RobustRule | None, count: int) -> int:
    """Return how many chunks one peer can own in an audited round in which so many count.

    Of each chunk it says a digest, and n (n + 1) / 2 inner products where the rule needs them,
    beside its matrix.
    """
    if rule is None or not rule.needs_gram:
        return AUDITED_CHUNKS_MAX
    return (SAID_BYTES_MAX - 4 * count**2) // (32 + 4 * count * (count + 1))


def fragment_ranges(spec: RunSpec, manifest: Manifest) -> list[tuple[int, int]]:
    """Return the chunks [first, end) of each fragment; ConfigError if there are not so many."""
    return [manifest.chunks_of(number, spec.fragments) for number in range(spec.fragments)]


def round_key(lineage: bytes, round_number: int) -> int:
    """Return the key of what is drawn at random in a round: the same for all its peers.

    Robust rules draw, and codecs that round at random.
    """
    return derive_key(b"atoll robust rule", lineage, round_number)


def check_same(
    mine: tuple[RunSpec, Manifest],
    run: tuple[RunSpec, Manifest],
    run_name: str,
    frozen: str = FROZEN[0],
) -> str:
    """Raise IncompatibleRunError with a line for each difference between a trainer's and the run's.

    ``frozen``: what to do about tensors that are not trained, one of ``FROZEN``. Return what there
    is to warn of, or "".
    """
    lines = mine[0].differences(run[0]) + mine[1].differences(run[1])
    others = mine[1].frozen_differences(run[1])
    warns = frozen != FROZEN[0]
    if lines or (others and not warns):
        fix = "give the method the run's values and model, before a collective is called, or start "
        fix += "a run of another name"
        if others and not lines:
            fix = "load the same frozen parameters on all peers; if they are meant to differ, in "
            fix += 'quantized bases say, give the method frozen="warn" or "ignore"'
        raise IncompatibleRunError(
            "\n    ".join([f"this trainer differs from run {run_name}:", *lines, *others]), fix=fix
        )
    head = f"what is not trained differs here from run {run_name}:"
    return "\n    ".join([head, *others]) if others else ""


def check_collectives(spec: RunSpec) -> None:
    """Raise ConfigError for a run in which sessions have no collectives of their own."""
    if spec.fragments > 1 or spec.rounds_in_flight > 1:
        raise ConfigError(
            f"this run has {spec.fragments} fragments, of which"
            f" {spec.rounds_in_flight} may be in flight; collectives need a run with one",
            fix="call collectives in a run with fragments=1 and rounds_in_flight=1",
        )
    if spec.is_asynchronous:
        raise ConfigError(
            f"in a run of {spec.method} nobody waits for the others, and collectives would",
            fix="call collectives in a run of another method",
        )


def settings_text(wire: str, settings: Any) -> str:
    """Return ``wire(field=value, ...)`` of a dataclass.

    Peers compare it in the specification, so it must not follow the name of the class. Fields with
    ``repr=False`` are left out.
    """
    values = (
        (field.name, getattr(settings, field.name)) for field in fields(settings) if field.repr
    )
    shown = (f"{name}={value if hasattr(value, 'wire') else repr(value)}" for name, value in values)
    return f"{wire}({', '.join(shown)})"
