"""Describe the keyword arguments that methods have in common: once, with their defaults.

A method takes those of one of these dictionaries as ``**options``, besides its own arguments. The
decorator ``takes`` gives it all of them, refuses any other keyword, and lets ``help()`` and editors
show them, with what each is.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from typing import Any, Final, TypedDict, TypeVar, cast

from atoll.optim.replay.recorder import Replay


class RunOptions(TypedDict, total=False):
    """Take what every method does.

    ``min_trainers``: no round or step begins with fewer trainers, nor goes on with fewer after a
    death; the run then waits and says for whom. It must be the same on all peers. ``atoll up
    --min-trainers`` and ``atoll min-trainers N`` win where they are used.

    ``round_deadline_s``: whoever waits longer for a round gets RoundTimeoutError, or another error
    that says why.

    ``frozen``: parameters that are not trained must be the same on all peers, and the persistent
    buffers must be alike: IncompatibleRunError names the tensors that differ. "warn" prints them
    instead of "refuse", and "ignore" does not look, for those who mean it; it need not be the same
    on all. Parameters that are frozen, unfrozen or added later are a ConfigError at the next step.
    """

    min_trainers: int
    round_deadline_s: float
    frozen: str


class BufferOptions(RunOptions, total=False):
    """Take what methods do that share the buffers of a model.

    ``buffers``: of a model that has persistent float buffers (BatchNorm statistics and the like)
    all peers that take part in a round share them after it: float ones become their mean, weighted
    as the submissions are, integers the maximum. In an asynchronous run a peer takes those that all
    had after their last rounds; replicas (NoLoCo) average those of a group. Methods of every step
    hand them to newcomers, and share them every ``check_every`` steps. False leaves them alone; it
    must be the same on all peers.
    """

    buffers: bool


class SpeedOptions(BufferOptions, total=False):
    """Take what methods do whose rounds may have other numbers of steps.

    ``round_s``: each peer takes as many local steps as it gets done in so many seconds, by its own
    speed in the last rounds, and ``sync_every`` in the first (``StepsBySpeed``, where ``clock`` is
    explained). So peers of different speed come at the same time. It need not be equal on all; what
    each has done weighs by its steps or tokens, as ever.
    """

    round_s: float | None
    clock: Callable[[], float]


class TrustOptions(BufferOptions, total=False):
    """Take what methods do whose rounds are of all peers.

    ``aggregate``: what becomes of the peers' parts: "mean", or the name of a robust rule.
    ``audit``: whether what owners of shards make of them is verified.

    ``probation``: a peer that joins counts after so many rounds in which it has taken part, each of
    one fragment; see docs/admission.md. All that count weigh alike then.
    """

    aggregate: str
    audit: bool
    probation: int


class AllRoundOptions(SpeedOptions, TrustOptions, total=False):
    """Take both: rounds are of all peers, and may have other numbers of steps."""


class ReplayOptions(AllRoundOptions, total=False):
    """Take what methods do whose local steps others can take again.

    ``replay``: keep what others need to take local steps of a round again (docs/replay.md); then
    ``note_batch`` says which samples they are of, and ``recorder`` keeps it. It need not be equal
    on all. A round that was under way when a state is loaded then begins anew.

    ``validators`` (with ``audit=True``): so many peers, drawn anew in each round, take a segment of
    the local steps of as many others again; a peer that did other steps than it says is banned.
    This needs a ``replay`` with a ``task``. Steps of a round that went on without a trainer are
    dropped then.
    """

    replay: Replay | None
    validators: int


KINDS: Final = (RunOptions, BufferOptions, SpeedOptions, TrustOptions, ReplayOptions)
DEFAULTS: Final[ReplayOptions] = {
    "aggregate": "mean",
    "audit": False,
    "probation": 0,
    "min_trainers": 1,
    "round_deadline_s": 600.0,
    "buffers": True,
    "round_s": None,
    "clock": time.monotonic,
    "replay": None,
    "validators": 0,
    "frozen": "refuse",
}
# Of these the specification of a run has fields of the same name and meaning.
SPECIFIED: Final = (
    "aggregate",
    "audit",
    "probation",
    "validators",
    "min_trainers",
    "round_deadline_s",
)
Init = TypeVar("Init", bound=Callable[..., None])


def takes(kind: type) -> Callable[[Init], Init]:
    """Let a constructor have all options of this dictionary in its ``**options``.

    Those that are not given have their defaults. TypeError, which names it, for any other keyword.
    """

    def decorate(init: Init) -> Init:
        shared = {name: value for name, value in DEFAULTS.items() if name in kind.__annotations__}
        signature = inspect.signature(init)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        known = shared.keys() | {p.name for p in own}

        @functools.wraps(init)
        def taking(self: Any, *given: Any, **named: Any) -> None:
            for name in named:
                if name not in known:
                    text = f"{init.__qualname__}() got an unexpected keyword argument {name!r}"
                    raise TypeError(text)
            init(self, *given, **{**shared, **named})

        options = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=value,
                annotation=_text(kind.__annotations__[name]),
            )
            for name, value in shared.items()
        ]
        taking.__doc__ = "\n\n".join([*filter(None, [init.__doc__]), _described(kind)])
        taking.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*own, *options]
        )
        return cast(Init, taking)

    return decorate


def _described(kind: type) -> str:
    """Return what the options of a dictionary are, as it and those before it describe them."""
    known = kind.__annotations__.keys()
    extended = [each for each in KINDS if each.__annotations__.keys() <= known]
    parts = [(inspect.getdoc(each) or "").partition("\n\n")[2] for each in extended]
    return "\n\n".join(["Options:", *filter(None, parts)])


def _text(annotation: Any) -> Any:
    """Return an annotation as it is written, which is how a signature has the others."""
    return getattr(annotation, "__forward_arg__", annotation)


def specified(options: RunOptions) -> dict[str, Any]:
    """Return the options that the specification of a run has too."""
    return {name: value for name, value in options.items() if name in SPECIFIED}
