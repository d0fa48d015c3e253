"""The state that a newcomer takes over: round trips with the optimizers of torch, and refusals."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from harness.gradients import flat, loss_of, model, state_of
from torch import nn

from atoll.collectives.codecs import F32
from atoll.collectives.errors import ConfigError, RemoteProtocolError
from atoll.optim import model_io
from atoll.optim.every_step.snapshot import Snapshot
from atoll.optim.model_io import ModelVector

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
MAKERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
}
each = pytest.mark.parametrize("name", MAKERS)


class Trainer:
    """``shared``: what a method keeps."""

    def __init__(self, name: str, seed: int, dtype: torch.dtype = torch.float32) -> None:
        self.net = model(seed).to(dtype)
        self.inner = MAKERS[name](self.net.parameters())
        self.shared: F32 = np.full(5, seed, np.float32)
        self.snapshot = Snapshot(ModelVector(self.net), [self.inner], [self.shared])

    def step(self, number: int, dtype: torch.dtype = torch.float32) -> None:
        self.inner.zero_grad()
        if dtype == torch.float32:
            loss_of(self.net, 0, number).backward()
        else:
            for p in self.net.parameters():
                p.grad = torch.full_like(p, 0.1 + number)
        self.inner.step()

    def hand_over(self, other: Trainer, steps: int) -> int:
        description = self.snapshot.describe(steps)
        vector = np.empty(self.snapshot.elements(description), np.float32)
        self.snapshot.write(vector)
        assert other.snapshot.elements(description) == vector.size
        vector.flags.writeable = False
        return other.snapshot.read(description, vector)


@each
@pytest.mark.parametrize("donor_steps", [0, 3])
@pytest.mark.parametrize("newcomer_steps", [0, 2])
def test_who_takes_a_state_goes_on_as_its_donor(
    name: str, donor_steps: int, newcomer_steps: int
) -> None:
    donor, newcomer = Trainer(name, 1), Trainer(name, 2)
    for number in range(donor_steps):
        donor.step(number)
    for number in range(newcomer_steps):
        newcomer.step(100 + number)
    assert donor.hand_over(newcomer, 17) == 17
    assert newcomer.shared.tolist() == [1] * 5
    for number in range(3):
        donor.step(number)
        newcomer.step(number)
        assert torch.equal(flat(donor.net), flat(newcomer.net))
        assert torch.equal(*map(state_of, (donor.inner, newcomer.inner)))


def test_states_of_sixteen_bits_keep_their_dtype() -> None:
    donor, newcomer = (Trainer("adamw", seed, torch.bfloat16) for seed in (1, 2))
    donor.step(0, torch.bfloat16)
    donor.hand_over(newcomer, 0)
    kept = newcomer.inner.state[newcomer.inner.param_groups[0]["params"][0]]
    assert {name: value.dtype for name, value in kept.items()} == {
        "step": torch.float32,
        "exp_avg": torch.bfloat16,
        "exp_avg_sq": torch.bfloat16,
    }
    assert torch.equal(flat(donor.net), flat(newcomer.net))


@pytest.mark.parametrize("capturable", [False, True])
def test_scalars_lie_where_the_newcomers_optimizer_wants_them(
    capturable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a donor on the host, for a newcomer elsewhere; the other way round it says where."""
    donor = Trainer("adamw", 1)
    donor.step(0)
    net = model(2).to("meta")  # in place of an accelerator, so it may have no values here
    monkeypatch.setattr(model_io, "_check_values", lambda *_: None)
    inner = torch.optim.AdamW(net.parameters(), lr=0.01, capturable=capturable)
    newcomer = Snapshot(ModelVector(net), [inner], [np.zeros(5, np.float32)])
    description = donor.snapshot.describe(1)
    newcomer.read(description, np.zeros(newcomer.elements(description), np.float32))
    for p in net.parameters():
        devices = {name: value.device.type for name, value in inner.state[p].items()}
        step = "meta" if capturable else "cpu"
        assert devices == {"step": step, "exp_avg": "meta", "exp_avg_sq": "meta"}
        inner.state[p]["step"] = torch.tensor(1.0)
    _, kept = json.loads(zlib.decompress(newcomer.describe(1)))
    assert all({name: host for name, *_, host in entries}["step"] == 1 for entries in kept)
    assert all({name: host for name, *_, host in entries}["exp_avg"] == 0 for entries in kept)


def test_a_state_is_written_into_the_tensors_that_are_there() -> None:
    donor, newcomer = Trainer("adam", 1), Trainer("adam", 2)
    donor.step(0)
    newcomer.step(0)
    first = newcomer.inner.param_groups[0]["params"][0]
    tensors = dict(newcomer.inner.state[first])
    donor.hand_over(newcomer, 1)
    assert all(newcomer.inner.state[first][name] is tensor for name, tensor in tensors.items())


def test_a_description_of_a_large_model_is_short() -> None:
    """12,000 tensors: all_gather takes 64 KiB of it."""
    net = nn.ParameterList([nn.Parameter(torch.zeros(1 + n % 7, 3)) for n in range(12_000)])
    inner = torch.optim.AdamW(net.parameters(), lr=0.1)
    for p in net.parameters():
        inner.state[p] = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.zeros_like(p),
            "exp_avg_sq": torch.zeros_like(p),
        }
    snapshot = Snapshot(ModelVector(net), [inner])
    description = snapshot.describe(5)
    assert len(description) < 8_000
    elements = sum(p.numel() for p in net.parameters())
    assert snapshot.elements(description) == 3 * elements + 12_000


def test_several_optimizers_and_numbers() -> None:
    class Counting(torch.optim.SGD):
        """Keeps a number and a None as well."""

        def step(self, closure: Any = None) -> Any:
            for p in self.param_groups[0]["params"]:
                self.state[p]["calls"] = self.state[p].get("calls", 0) + 1
                self.state[p]["nothing"] = None
            return super().step(closure)

    def trainer(seed: int) -> tuple[nn.Module, list[torch.optim.Optimizer], Snapshot]:
        net = model(seed)
        first, *rest = net.parameters()
        inners = [Counting([first], lr=0.1), torch.optim.Adam(rest, lr=0.1)]
        return net, inners, Snapshot(ModelVector(net), inners)

    (net, inners, donor), (other_net, others, newcomer) = trainer(1), trainer(2)
    loss_of(net, 0, 0).backward()
    for inner in inners:
        inner.step()
    description = donor.describe(1)
    vector = np.empty(donor.elements(description), np.float32)
    donor.write(vector)
    newcomer.read(description, vector)
    assert torch.equal(flat(net), flat(other_net))
    assert others[0].state[next(other_net.parameters())] == {"calls": 1}
    assert torch.equal(state_of(inners[1]), state_of(others[1]))


def test_what_cannot_be_handed_over_is_refused() -> None:
    net = model()
    inner = torch.optim.LBFGS(net.parameters())

    def closure() -> torch.Tensor:
        inner.zero_grad()
        loss = loss_of(net, 0, 0)
        loss.backward()
        return loss

    inner.step(closure)
    with pytest.raises(ConfigError, match="cannot be handed to newcomers"):
        Snapshot(ModelVector(net), [inner]).describe(0)
    shapes = np.random.default_rng(0).integers(1, 4, (20_000, 6))
    odd = nn.ParameterList([nn.Parameter(torch.zeros(*map(int, shape))) for shape in shapes[:4000]])
    many = torch.optim.SGD(odd.parameters(), lr=0.1)
    for number, p in enumerate(odd.parameters()):
        many.state[p] = {f"{number * 7919 % 10**9:09}{k}": float(number**k) for k in range(9)}
    with pytest.raises(ConfigError, match="bytes to describe"):
        Snapshot(ModelVector(odd), [many]).describe(0)


def test_malformed_descriptions_are_refused_and_change_nothing() -> None:
    trainer = Trainer("adamw", 1)
    trainer.step(0)
    before = flat(trainer.net), state_of(trainer.inner).clone()
    fine = trainer.snapshot.describe(3)
    steps, kept = json.loads(zlib.decompress(fine))
    assert steps == 3
    entry = kept[0][1]
    assert entry == ["exp_avg", "float32", None, 0, 0]

    def packed(value: object) -> bytes:
        return zlib.compress(json.dumps(value).encode())

    def with_entry(*changed: object) -> bytes:
        return packed([3, [[list(changed)], *kept[1:]]])

    wrong = [
        b"",
        b"not packed",
        fine[:-3],
        zlib.compress(b"\xff\xfe"),
        zlib.compress(b"[" * 100_000),
        zlib.compress(b"[0,[" + b" " * 17 * 2**20 + b"]]"),
        packed(None),
        packed([3]),
        packed([3, 5]),
        packed([3, []]),
        packed([3, kept[:-1]]),
        packed([3, [*kept, []]]),
        packed([-1, kept]),
        packed([2**53 + 1, kept]),
        packed([3.5, kept]),
        packed([True, kept]),
        packed([3, [5, *kept[1:]]]),
        packed([3, ["abc", *kept[1:]]]),
        packed([3, [kept[0] * 6, *kept[1:]]]),
        with_entry(),
        with_entry("exp_avg", "float32", None, 0),
        with_entry(7, "float32", None, 0, 0),
        with_entry("exp_avg", "complex64", None, 0, 0),
        with_entry("exp_avg", ["float32"], None, 0, 0),
        with_entry("exp_avg", "float32", 5, 0, 0),
        with_entry("exp_avg", "float32", [-1], 0, 0),
        with_entry("exp_avg", "float32", [1.5], 0, 0),
        with_entry("exp_avg", "float32", [True], 0, 0),
        with_entry("exp_avg", "float32", [10**9], 0, 0),
        with_entry("exp_avg", "float32", [10**30, 0], 0, 0),
        with_entry("exp_avg", "float32", [1] * 17, 0, 0),
        with_entry("exp_avg", "", [], "text", 0),
        with_entry("exp_avg", "", [], None, 0),
    ]
    for description in wrong:
        with pytest.raises(RemoteProtocolError, match="cannot be read"):
            trainer.snapshot.elements(description)
        with pytest.raises(RemoteProtocolError, match="cannot be read"):
            trainer.snapshot.read(description, np.zeros(10_000, np.float32))
    assert torch.equal(flat(trainer.net), before[0])
    assert torch.equal(state_of(trainer.inner), before[1])
    assert trainer.snapshot.elements(fine) > 0
