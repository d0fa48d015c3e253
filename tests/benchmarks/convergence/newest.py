"""Try on this bench what the newest papers, fewer bits, longer rounds and more workers come to.

    make bench-convergence-newest [ARGS="--trials snoo dion --minutes 30"]

Each trial is one row of 0.1M with one seed, at the rates that the grid has found, and stands beside
the row that it would replace. What helps is built and gets lines in the large table; what does not
is kept here with its figure. What is finished is kept, and the same command goes on.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.optim import ByteTransformer, LocalSGD, muon_and_adamw
from atoll.optim.swarm import SwarmSession
from benchmarks.convergence.methods import Case, Entry, Make, diloco
from benchmarks.convergence.results import Results
from benchmarks.convergence.row import WARM, Line, Row
from benchmarks.convergence.runner import add_options, one_row, run_pending
from benchmarks.convergence.sizes import (
    BETAS,
    SIZES,
    WEIGHT_DECAY,
    Together,
    adamw,
    muon,
    set_rate,
)
from benchmarks.convergence.table import markdown, megabytes, sources
from benchmarks.convergence.training import Run

ROOT = Path(__file__).parents[3]
KEPT = ROOT / "docs" / "convergence" / "newest"
CACHE = ROOT / ".cache" / "convergence"
STEPS, H = 1200, 30
OWN_STEPS = STEPS - STEPS // 4
ADAMW_RATE, MUON_RATE = 8e-3, 1.6e-2  # the best of data-parallel and of DiLoCo with AdamW (grid.py)
# At AdamW's best rate seeds differ by a tenth of the loss where the warm start ends, and at half of
# it by a hundredth: rows of different warm starts are compared there.
STEADY_RATE = 4e-3
OUTER = {"outer_lr": 1.0, "outer_momentum": 0.8}  # the best of DiLoCo with AdamW

Inner = Optimizer | Together
Wrap = Callable[[nn.Module, Inner], Together]


# ---------------------------------------------------------------- around an inner optimizer


class Around(Together):
    """Stand for the inner optimizers of a model, which some method steps in its own way."""

    def __init__(self, model: nn.Module, inner: Inner) -> None:
        super().__init__(inner if isinstance(inner, Together) else [inner])
        self._parameters = [*model.parameters()]

    def _copies(self) -> list[Tensor]:
        return [p.detach().clone() for p in self._parameters]

    @torch.no_grad()
    def _write(self, values: Sequence[Tensor]) -> None:
        for p, value in zip(self._parameters, values, strict=True):
            p.copy_(value)

    @contextmanager
    def _instead(self, values: Sequence[Tensor]) -> Iterator[None]:
        """Let the model have these parameters meanwhile."""
        kept = self._copies()
        self._write(values)
        try:
            yield
        finally:
            self._write(kept)


class Averaged(Around):
    """Evaluate an exponential average of the iterates, which training does not see."""

    def __init__(self, model: nn.Module, inner: Inner, decay: float) -> None:
        super().__init__(model, inner)
        self._average, self._decay = self._copies(), decay

    def step(self) -> None:
        super().step()
        self.note()

    @torch.no_grad()
    def note(self) -> None:
        """Take the present parameters into the average."""
        for average, p in zip(self._average, self._parameters, strict=True):
            average.lerp_(p, 1 - self._decay)

    def outer_parameters(self) -> Any:
        return self._instead(self._average)


class PrimalAveraging(Around):
    """Take gradients at y between an average x and the iterates z (GPA, arXiv 2512.17131).

    y = mu_y x + (1 - mu_y) z; the inner optimizer steps z; x' = mu_x x + (1 - mu_x) z'. The model
    has y while it is trained, and x is evaluated.
    """

    def __init__(self, model: nn.Module, inner: Inner, mu_x: float, mu_y: float) -> None:
        super().__init__(model, inner)
        self._x, self._z = self._copies(), self._copies()
        self._mu_x, self._mu_y = mu_x, mu_y

    @torch.no_grad()
    def step(self) -> None:
        self._write(self._z)
        super().step()
        for p, x, z in zip(self._parameters, self._x, self._z, strict=True):
            z.copy_(p)
            x.lerp_(z, 1 - self._mu_x)
            p.copy_(torch.lerp(z, x, self._mu_y))

    def outer_parameters(self) -> Any:
        return self._instead(self._x)


class Snoo(Around):
    """Take a step of Nesterov after every ``every`` of the inner optimizer (arXiv 2510.15830)."""

    def __init__(
        self, model: nn.Module, inner: Inner, every: int, outer_lr: float, momentum: float
    ) -> None:
        super().__init__(model, inner)
        self._slow = self._copies()
        self._moved = [torch.zeros_like(p) for p in self._slow]
        self._every, self._outer_lr, self._mu, self._taken = every, outer_lr, momentum, 0

    @torch.no_grad()
    def step(self) -> None:
        super().step()
        self._taken += 1
        if self._taken % self._every:
            return
        for p, slow, moved in zip(self._parameters, self._slow, self._moved, strict=True):
            pseudo = slow - p
            moved.mul_(self._mu).add_(pseudo)
            slow.sub_(pseudo.add_(moved, alpha=self._mu), alpha=self._outer_lr)
            p.copy_(slow)

    def outer_parameters(self) -> Any:
        return self._instead(self._slow)


# ---------------------------------------------------------------- low-rank orthonormal updates


class Dion(Optimizer):
    """Step matrices by low-rank orthonormal updates (Dion, arXiv 2504.05295, algorithm 1).

    Data-parallel workers average P = M Q and R = M^T P, and so send (rows + columns) x rank values
    of a matrix instead of rows x columns; all of it is linear in the gradient, so that one model
    with the mean gradient is what they compute. Steps are scaled as Muon's are here, to the size of
    AdamW's.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], lr: float, rank: int, momentum: float = 0.95
    ) -> None:
        super().__init__(parameters, {"lr": lr})
        self._rank, self._momentum = rank, momentum
        self._random = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._step(p, group["lr"])

    def _step(self, p: nn.Parameter, lr: float) -> None:
        state = self.state[p]
        rows, columns = p.shape
        rank = min(self._rank, rows, columns)
        if not state:
            state["momentum"] = torch.zeros_like(p)
            state["right"] = torch.randn(columns, rank, generator=self._random).to(p.device)
        whole = state["momentum"].add_(p.grad)
        left, _ = torch.linalg.qr(whole @ state["right"])
        right = whole.T @ left
        whole.sub_(left @ right.T, alpha=1 - self._momentum)  # what is left is error feedback
        right /= right.norm(dim=0, keepdim=True).clamp(min=1e-8)
        state["right"] = right
        # The root mean square of an orthonormal factor of this rank becomes 0.2, as AdamW's is.
        scale = 0.2 * (rows * columns / rank) ** 0.5
        p.mul_(1 - lr * WEIGHT_DECAY).sub_(left @ right.T, alpha=lr * scale)


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the matrices of hidden layers, as Muon would have them, and the rest."""
    matrices, *others = muon_and_adamw(model, lr=1.0)
    return matrices.param_groups[0]["params"], [
        p for other in others for group in other.param_groups for p in group["params"]
    ]


def dion(model: nn.Module, lr: float, rank: int) -> Together:
    matrices, rest = split(model)
    other = torch.optim.AdamW(rest, lr / 2, betas=BETAS, weight_decay=WEIGHT_DECAY)
    return Together([Dion(matrices, lr, rank), other])


# ---------------------------------------------------------------- around rounds


class AroundRounds:
    """Do something after each round of a method whose peers wait for each other."""

    def __init__(self, outer: Any, inner: Any, act: Callable[[int], None]) -> None:
        self._outer, self._act, self._rounds = outer, act, 0
        last = inner[-1] if isinstance(inner, Together) else inner
        last.register_step_post_hook(self._stepped)  # after the method's own hook

    def _stepped(self, *_: Any) -> None:
        if self._outer._local.taken == 0:
            self._rounds += 1
            self._act(self._rounds)

    def close(self) -> None:
        self._outer.close()


class AveragedRounds(AroundRounds):
    """Evaluate an exponential average of the run's parameters after each round."""

    def __init__(self, outer: Any, model: nn.Module, inner: Any, decay: float) -> None:
        self._averaged = Averaged(model, inner, decay)
        super().__init__(outer, inner, lambda _: self._averaged.note())

    def outer_parameters(self) -> Any:
        return self._averaged.outer_parameters()


def averaged(decay: float) -> Make:
    def make(model: nn.Module, inner: Any, session: SwarmSession, case: Case) -> AveragedRounds:
        outer = diloco("int4", **OUTER)(model, inner, session, case)
        return AveragedRounds(outer, model, inner, decay)

    return make


def of_lengths(first: int, last: int) -> Make:
    """Return what makes rounds that grow or shrink evenly; they are as many as of ``H`` steps."""
    lengths = rounds_between(first, last, OWN_STEPS // H, OWN_STEPS)

    def make(model: nn.Module, inner: Any, session: SwarmSession, case: Case) -> AroundRounds:
        outer = diloco("int4", **OUTER)(model, inner, session, case)

        def next_length(rounds: int) -> None:
            if rounds < len(lengths):
                outer._local.wanted = lengths[rounds]

        next_length(0)
        return AroundRounds(outer, inner, next_length)

    return make


def rounds_between(first: int, last: int, rounds: int, steps: int) -> list[int]:
    """Return the lengths of so many rounds, from ``first`` to ``last``, of so many steps in all."""
    even = [first + (last - first) * n / (rounds - 1) for n in range(rounds)]
    ends = [round(end * steps / sum(even)) for end in accumulate(even)]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def desynced(rounds_of: Make) -> Make:
    """Return what averages AdamW's moments too, every third and every sixth round (DES-LOC).

    arXiv 2505.22549, with the periods that it recommends.
    """

    def make(model: nn.Module, inner: Any, session: SwarmSession, case: Case) -> AroundRounds:
        def average(rounds: int) -> None:
            for name, every in (("exp_avg", 3), ("exp_avg_sq", 6)):
                if rounds % every == 0:
                    average_state(name, inner, session)

        return AroundRounds(rounds_of(model, inner, session, case), inner, average)

    return make


@torch.no_grad()
def average_state(name: str, inner: Optimizer, session: SwarmSession) -> None:
    values = [state[name] for state in inner.state.values()]
    flat = torch.cat([value.flatten() for value in values])
    mean = torch.as_tensor(session.all_reduce(flat, "mean").value)
    for value, part in zip(values, mean.split([v.numel() for v in values]), strict=True):
        value.copy_(part.view_as(value))


def local_sgd(model: nn.Module, inner: Any, session: SwarmSession, case: Case) -> LocalSGD:
    return LocalSGD(model, inner, case.sync_every, session)


# ---------------------------------------------------------------- the trials


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Say what one row does, and beside which other trial it stands; "" for itself."""

    name: str
    label: str
    beside: str = ""
    lr: float = ADAMW_RATE
    size: str = "0.1M"
    workers: int = 4
    make: Make | None = None
    wrap: Wrap | None = None
    inner: str = ""  # "muon" or "dion"
    rank: int = 0
    sync_every: int = H

    @property
    def row(self) -> Row:
        h = 1 if self.make is None else self.sync_every
        return Row(Line(self.size, WARM, STEPS, self.workers, self.name, h), self.lr, 0)


def wrapped(kind: Callable[..., Together], **options: Any) -> Wrap:
    return lambda model, inner: kind(model, inner, **options)


def averages(prefix: str, **common: Any) -> Iterator[Trial]:
    for decay in (0.95, 0.98, 0.99):
        wrap = wrapped(Averaged, decay=decay)
        label = f"average of iterates, decay {decay:g}"
        yield Trial(name=f"{prefix}-ema@{decay:g}", label=label, beside=prefix, wrap=wrap, **common)
    rates = ((0.95, 0.9, 1), (0.98, 0.9, 1), (0.98, 0.7, 1), (0.9, 0.7, 0.5), (0.98, 0.9, 0.25))
    for mu_x, mu_y, share in rates:
        yield Trial(
            name=f"{prefix}-gpa@{mu_x:g},{mu_y:g}",
            label=f"GPA, mu_x {mu_x:g}, mu_y {mu_y:g}",
            beside=prefix,
            wrap=wrapped(PrimalAveraging, mu_x=mu_x, mu_y=mu_y),
            **common | {"lr": share * common["lr"]},
        )
    yield from of_snoo(prefix, **common)


def of_snoo(prefix: str, **common: Any) -> Iterator[Trial]:
    for every, rate, momentum in ((10, 0.7, 0.3), (10, 0.5, 0.5), (30, 0.7, 0.5), (30, 1.0, 0.5)):
        wrap = wrapped(Snoo, every=every, outer_lr=rate, momentum=momentum)
        label = f"SNOO, every {every}, outer rate {rate:g}, momentum {momentum:g}"
        name = f"{prefix}-snoo@{every},{rate:g},{momentum:g}"
        yield Trial(name=name, label=label, beside=prefix, wrap=wrap, **common)


def of_workers() -> Iterator[Trial]:
    """Yield rows of four workers, of sixteen with a quarter of their windows, and with as many."""
    for size, workers in (("0.1M", 4), ("0.1M-few", 16), ("0.1M", 16)):
        ceiling = f"data-parallel-{workers}x{SIZES[size].batch}"
        common: dict[str, Any] = {"size": size, "workers": workers, "lr": STEADY_RATE}
        label = f"{workers} workers of {SIZES[size].batch} windows each"
        yield Trial(name=ceiling, label=f"{label}: data-parallel", **common)
        if workers == 4:
            yield from of_snoo(ceiling, **common)
        for rate, momentum in ((0.7, 0.8), (1.0, 0.8), (1.0, 0.6)):
            options = {"outer_lr": rate, "outer_momentum": momentum}
            yield Trial(
                name=f"diloco-{workers}x{SIZES[size].batch}@{rate:g},{momentum:g}",
                label=f"{label}: DiLoCo int4, outer rate {rate:g}, momentum {momentum:g}",
                beside=ceiling,
                make=diloco("int4", **options),
                **common,
            )
    for rate, momentum, steps in ((1.4, 0.8, H), (1.0, 0.9, H), (1.0, 0.8, 10)):
        label = f"16 workers of 2 windows each: DiLoCo int4, outer rate {rate:g}, momentum"
        yield Trial(
            name=f"diloco-16x2@{rate:g},{momentum:g}-h{steps}",
            label=f"{label} {momentum:g}, H={steps}",
            beside="data-parallel-16x2",
            make=diloco("int4", outer_lr=rate, outer_momentum=momentum),
            size="0.1M-few",
            workers=16,
            lr=STEADY_RATE,
            sync_every=steps,
        )


def all_trials() -> Iterator[Trial]:
    yield Trial(name="data-parallel", label="data-parallel, AdamW")
    yield from averages("data-parallel", lr=ADAMW_RATE)
    muons: dict[str, Any] = {"inner": "muon", "lr": MUON_RATE}
    yield Trial(name="data-parallel-muon", label="data-parallel, Muon", **muons)
    yield from averages("data-parallel-muon", **muons)
    for rank in (8, 16, 32):
        yield Trial(
            name=f"dion@{rank}",
            label=f"Dion of rank {rank}, of 64",
            beside="data-parallel-muon",
            lr=MUON_RATE,
            inner="dion",
            rank=rank,
        )
    yield Trial(name="diloco", label="DiLoCo int4, H=30, AdamW", make=diloco("int4", **OUTER))
    of_rounds = partial(Trial, beside="diloco")
    for decay in (0.3, 0.6):
        label = f"average over rounds, decay {decay:g}"
        yield of_rounds(name=f"diloco-ema@{decay:g}", label=label, make=averaged(decay))
    for first, last in ((15, 45), (45, 15)):
        label = f"rounds of {first} to {last} steps"
        yield of_rounds(name=f"diloco-h@{first},{last}", label=label, make=of_lengths(first, last))
    for codec in ("int2", "sign"):
        label = f"{codec} with error feedback"
        yield of_rounds(name=f"diloco-{codec}", label=label, make=diloco(codec, **OUTER))
    synced = desynced(diloco("int4", **OUTER))
    yield of_rounds(name="diloco-desloc", label="moments averaged as in DES-LOC", make=synced)
    yield Trial(name="local-sgd", label="LocalSGD int8, H=30, AdamW", make=local_sgd)
    yield Trial(name="desloc", label="DES-LOC", beside="local-sgd", make=desynced(local_sgd))
    yield from of_workers()


def key_of(trial: Trial) -> str:
    """Return what a trial is found by: its name, and its inner rate where that is not the usual."""
    usual = MUON_RATE if trial.inner else ADAMW_RATE
    is_usual = trial.lr == usual or trial.workers == 16 or "4x8" in trial.name
    return trial.name if is_usual else f"{trial.name}/lr{trial.lr:g}"


TRIALS = {key_of(trial): trial for trial in all_trials()}
OF_ROWS = {trial.row.name: trial for trial in TRIALS.values()}


class TrialRun(Run):
    """Train the row of a trial."""

    def __init__(self, row: Row, *given: Any) -> None:
        self._trial = OF_ROWS[row.name]
        super().__init__(row, *given)

    def entry_of(self, method: str) -> Entry:
        return Entry(name=method, label=method, make=self._trial.make)

    @property
    def inner_name(self) -> str:
        trial = self._trial
        return f"{trial.inner}-{trial.rank}" if trial.rank else trial.inner

    def inner_of(self, model: ByteTransformer) -> Inner:
        if self._trial.rank:
            return dion(model, self.row.lr, self._trial.rank)
        return (muon if self._trial.inner else adamw)(model, self.row.lr)

    def wrapped(self, model: ByteTransformer, inner: Inner) -> Inner:
        if self._trial.wrap is None:
            return inner
        found = self._trial.wrap(model, inner)
        set_rate(found, self._rate(self.line.first_step))
        return found

    def sent_elements(self, model: ByteTransformer) -> int:
        rank = self._trial.rank
        if not rank:
            return self.elements
        matrices, rest = split(model)
        return sum(rank * sum(p.shape) for p in matrices) + sum(p.numel() for p in rest)


# ---------------------------------------------------------------- what it came to

HEAD = """# The newest papers, fewer bits, round lengths and more workers

Generated by `make bench-convergence-newest` from `results.jsonl`; do not edit it here.

0.1M (width 64, depth 2, the library), 1,200 steps of which the first quarter is data-parallel,
gradients clipped at 1, one seed, rates as the grid has found them, and half of AdamW's where rows
have other numbers of workers: there seeds agree. *Beside* is by how much a row is
above the one that it would replace: negative is better. Bytes are those of each peer in the
method's own steps. What follows from it is in docs/log.md.
"""


def document(results: Results) -> str:
    table = [("trial", "inner rate", "held-out loss", "beside", "sent")]
    for trial in TRIALS.values():
        if (found := results.get(trial.row)) is None:
            continue
        other = results.get(TRIALS[trial.beside].row) if trial.beside else None
        above = f"{100 * (found.loss / other.loss - 1):+.1f} %" if other is not None else ""
        loss = "diverged" if found.failed else f"{found.loss:.3f}"
        label = trial.label if trial.beside else f"**{trial.label}**"
        table.append((label, f"{trial.lr:g}", loss, above, megabytes(found.sent_bytes)))
    return "\n".join([HEAD, *sources(results.all()), markdown(table)])


def main() -> int:
    chosen = parsed()
    if chosen.one:
        row = Row.of(chosen.one)
        text = SIZES[row.line.size].text
        return one_row(lambda *given: TrialRun(row, *given).result(), chosen.cache, text)
    results = Results(chosen.out / "results.jsonl")

    def pending() -> list[Row]:
        trials = [t for key, t in TRIALS.items() if any(part in key for part in chosen.trials)]
        return [trial.row for trial in trials if results.get(trial.row) is None]

    if chosen.list:
        print("\n".join(row.name for row in pending()))
        return 0
    return run_pending("benchmarks.convergence.newest", chosen, results, pending, document)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make bench-convergence-newest", description=(__doc__ or "").splitlines()[0]
    )
    a = parser.add_argument
    a("--trials", nargs="+", default=("",), metavar="PART", help="in whose names this is found")
    add_options(parser, KEPT, CACHE)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
