"""Which parameters are Muon's, and what its optimizers are to a method."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from atoll.collectives.errors import ConfigError
from atoll.optim import (
    ByteTransformer,
    DiLoCo,
    LocalSGD,
    StreamingDiLoCo,
    Swarm,
    muon_and_adamw,
)


class Net(nn.Module):
    """Two hidden layers in blocks, an embedding before and a head of its own after them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.position = nn.Parameter(torch.zeros(6, 4))
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embedding(x) + self.position[: x.shape[1]]
        for block in self.blocks:
            y = y + torch.tanh(block(y))
        return self.head(self.norm(y))


def split(model: nn.Module, **options: Any) -> tuple[set[str], set[str]]:
    """The names of Muon's parameters, and of AdamW's."""
    names = {id(p): name for name, p in model.named_parameters()}
    muon, *adamw = muon_and_adamw(model, lr=0.01, **options)
    assert isinstance(muon, torch.optim.Muon)
    found = [
        {names[id(p)] for o in some for group in o.param_groups for p in group["params"]}
        for some in ([muon], adamw)
    ]
    assert found[0] | found[1] == {n for n, p in model.named_parameters() if p.requires_grad}
    assert not found[0] & found[1]
    return found[0], found[1]


def test_matrices_of_hidden_layers_are_muons() -> None:
    muon, adamw = split(Net())
    assert muon == {"blocks.0.weight", "blocks.1.weight"}
    assert {"embedding.weight", "position", "head.weight", "head.bias", "norm.weight"} <= adamw


def test_a_tied_head_leaves_all_layers_before_it() -> None:
    muon, adamw = split(ByteTransformer(width=8, depth=2, heads=2, context=4))
    layers = ("attention_in", "attention_out", "mlp_in", "mlp_out")
    assert muon == {f"blocks.{n}.{layer}.weight" for n in range(2) for layer in layers}
    assert {"embedding.weight", "position"} <= adamw


def test_layers_of_all_kinds() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.MultiheadAttention(4, 2),
        nn.GRU(4, 4, bias=False),
        nn.EmbeddingBag(5, 4),
        nn.Linear(4, 2),
    )
    muon, adamw = split(model)
    attention = {"1.in_proj_weight", "1.out_proj.weight"}
    assert muon == attention | {"2.weight_ih_l0", "2.weight_hh_l0"}
    assert {"0.weight", "3.weight", "4.weight"} <= adamw


def test_frozen_parameters_are_nobodys_and_a_frozen_head_is_the_head() -> None:
    model = Net()
    model.head.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    assert split(model)[0] == {"blocks.1.weight"}


def test_the_choice_can_be_the_users() -> None:
    model = Net()
    muon, _ = split(model, hidden=lambda name, p: name == "position" or name.startswith("head.w"))
    assert muon == {"position", "head.weight"}
    with pytest.raises(ConfigError, match=r"Muon norm\.weight, which has 1 dimensions"):
        muon_and_adamw(model, lr=0.1, hidden=lambda name, p: "norm" in name)
    layer = nn.Linear(3, 3, bias=False)
    (only,) = muon_and_adamw(layer, lr=0.1, hidden=lambda name, p: True)
    assert isinstance(only, torch.optim.Muon)


def test_a_model_without_hidden_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="the Linear has no trainable matrix of a hidden layer"):
        muon_and_adamw(nn.Linear(3, 3), lr=0.1)


def test_steps_are_as_large_as_adamws_and_the_rest_has_half_the_rate() -> None:
    """Muon's steps have a root mean square of 0.2 times the rate; those of its authors, not scaled
    to AdamW's, are five times as large here."""
    model = Net()
    muon, adamw = muon_and_adamw(model, lr=0.01, weight_decay=0.0)
    assert (muon.param_groups[0]["lr"], adamw.param_groups[0]["lr"]) == (0.01, 0.005)
    before = model.blocks[0].weight.detach().clone()
    torch.manual_seed(0)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    muon.step()
    moved = (model.blocks[0].weight - before).square().mean().sqrt()
    # Of an orthogonal 4 x 4 matrix elements are 1 / 2 in the mean square, and 0.2 sqrt(4) / 2 is
    # 0.2; Newton-Schulz leaves singular values between 0.7 and 1.2.
    assert 0.7 * 0.002 < moved < 1.2 * 0.002


def test_an_older_torch_is_told_and_trains_without_muon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ConfigError, match=r"has no torch\.optim\.Muon.*\n.*torch 2\.9 or newer"):
        muon_and_adamw(Net(), lr=0.1)

    def each(session: Any) -> float:
        model = nn.Linear(2, 1)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with DiLoCo(model, inner, 2, session) as outer:
            return outer.spec.outer_momentum

    assert Swarm(1).run(each) == [0.9]


# ---------------------------------------------------------------- as inner optimizers


def train(session: Any, method: Any, **options: Any) -> tuple[float, int, torch.Tensor]:
    torch.manual_seed(0)
    model = Net()
    optimizers = muon_and_adamw(model, lr=0.02)
    outer = method(model, optimizers, 3, session, codec="float32", **options)
    for step in range(6):
        random = torch.Generator().manual_seed(10 * step + session.number)
        x = torch.randint(10, (4, 6), generator=random)
        nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with outer.outer_parameters():
        theta = torch.cat([p.detach().flatten() for p in model.parameters()])
    outer.close()
    return outer.spec.outer_momentum, outer.metrics()["steps"], theta


@pytest.mark.parametrize("method", [DiLoCo, StreamingDiLoCo])
def test_the_outer_momentum_follows(method: Any) -> None:
    found = Swarm(2).run(lambda session: train(session, method))
    assert [each[:2] for each in found] == [(0.6, 6)] * 2
    assert torch.equal(found[0][2], found[1][2])
    given = Swarm(1).run(lambda session: train(session, method, outer_momentum=0.8))
    assert given[0][0] == 0.8


def test_with_one_worker_local_sgd_is_the_plain_loop() -> None:
    found = Swarm(1).run(lambda session: train(session, LocalSGD))[0][2]

    torch.manual_seed(0)
    model = Net()
    optimizers = muon_and_adamw(model, lr=0.02)
    for step in range(6):
        random = torch.Generator().manual_seed(10 * step)
        x = torch.randint(10, (4, 6), generator=random)
        nn.functional.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    plain = torch.cat([p.detach().flatten() for p in model.parameters()])
    torch.testing.assert_close(found, plain, rtol=0, atol=2e-6)
