"""Parts trained apart and joined later: a prototype of FlexOlmo (docs/studies/flexolmo.md).

    python tests/benchmarks/flex_olmo.py [--public-steps 1500] [--steps 750] [--seeds 1]

A public model is trained on Python's library. Each owner of other text (manual pages, C headers of
this machine) copies it, freezes it, and trains next to each perceptron one of its own, with an
embedding for the router. Then the experts are put side by side and the embeddings one below the
other, and nothing is trained any more. The table has the held-out loss of each text, in nats per
byte, of that and of what it is to be compared with. Three minutes of a core for each seed.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from atoll.optim import ByteTransformer, TextBatches
from atoll.peer.demo.text import Text, load_text

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.convergence.heldout import ON_THE_WAY, HeldOut
from benchmarks.convergence.texts import TEXTS, text_of

WIDTH, DEPTH, CONTEXT, BATCH, LR = 128, 4, 64, 8, 4e-3
HEADERS = Path("/usr/include")
SAMPLES = 64  # windows whose mean feature an owner's embedding begins with


class Experts(nn.Module):
    """Mix the perceptrons of all owners, in place of a block's own, by a router's weights."""

    def __init__(self, block: nn.Module, owners: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(copy.deepcopy(block.mlp_in) for _ in range(owners))
        self.down = nn.ModuleList(copy.deepcopy(block.mlp_out) for _ in range(owners))
        self.routes = nn.ParameterList(torch.zeros(WIDTH) for _ in range(owners))

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.stack([x @ route for route in self.routes], -1).softmax(-1)
        outs = [down(F.gelu(up(x))) for up, down in zip(self.up, self.down, strict=True)]
        return (torch.stack(outs, -1) * weights.unsqueeze(-2)).sum(-1)


def mixed(public: ByteTransformer, text: Text, owners: int) -> ByteTransformer:
    """Return a copy whose blocks mix so many copies of the public perceptron.

    The route of the first is the mean feature of the public text.
    """
    model = copy.deepcopy(public)
    for block, feature in zip(model.blocks, mean_features(public, text), strict=True):
        block.experts = Experts(block, owners)
        block.experts.routes[0].data.copy_(feature)
        block.forward = _forward_of(block)  # type: ignore[method-assign]
    return model


def _forward_of(block: nn.Module) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        qkv = block.attention_in(block.attention_norm(x)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (block.heads, -1)).transpose(1, 2) for t in qkv)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + block.attention_out(out.transpose(1, 2).flatten(2))
        return x + block.experts(block.mlp_norm(x))

    return forward


def train(model: nn.Module, text: Sequence[Text], steps: int, seed: int, lr: float = LR) -> None:
    """Train what is not frozen, on the texts by turns."""
    batches = [
        TextBatches(one, context=CONTEXT, batch=BATCH, seed=seed + n) for n, one in enumerate(text)
    ]
    inner = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=lr)
    for step in range(steps):
        for group in inner.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 50, 0.05 + (steps - step) / steps)
        model.loss(*batches[step % len(batches)].next()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        inner.step()
        inner.zero_grad()


def owners_part(
    public: ByteTransformer, common: Text, text: Text, steps: int, seed: int
) -> ByteTransformer:
    """Return a public expert, frozen, beside one that was trained on ``text``, with its route."""
    model = mixed(public, common, 2).requires_grad_(False)
    features = mean_features(public, text)
    for block, feature in zip(model.blocks, features, strict=True):
        block.experts.up[1].requires_grad_()
        block.experts.down[1].requires_grad_()
        block.experts.routes[1].data.copy_(feature)
        block.experts.routes[1].requires_grad_()
    train(model, [text], steps, seed)
    return model


@torch.no_grad()
def mean_features(public: ByteTransformer, text: Text) -> list[Tensor]:
    """Return what comes to each block's perceptron on this text, in the mean, of length 1."""
    found: list[Tensor] = []
    hooks = [
        block.mlp_norm.register_forward_hook(lambda _m, _a, out: found.append(out.mean((0, 1))))
        for block in public.blocks
    ]
    public(TextBatches(text, context=CONTEXT, batch=SAMPLES, seed=9).next()[0])
    for hook in hooks:
        hook.remove()
    return [F.normalize(one, dim=0) for one in found]


def joined(
    public: ByteTransformer, common: Text, parts: Sequence[ByteTransformer]
) -> ByteTransformer:
    """Return the public expert and those of all owners side by side, with their own routes."""
    model = mixed(public, common, 1 + len(parts))
    for number, block in enumerate(model.blocks):
        for owner, part in enumerate(parts, start=1):
            theirs = part.blocks[number].experts
            block.experts.up[owner].load_state_dict(theirs.up[1].state_dict())
            block.experts.down[owner].load_state_dict(theirs.down[1].state_dict())
            block.experts.routes[owner].data.copy_(theirs.routes[1])
    return model


@torch.no_grad()
def averaged(models: Sequence[ByteTransformer]) -> ByteTransformer:
    made = copy.deepcopy(models[0])
    for p, *others in zip(made.parameters(), *(m.parameters() for m in models[1:]), strict=True):
        p.copy_(torch.stack([p, *others]).mean(0))
    return made


def tuned(public: ByteTransformer, text: Sequence[Text], steps: int, seed: int) -> ByteTransformer:
    model = copy.deepcopy(public)
    train(model, text, steps, seed)
    return model


def texts() -> dict[str, Text]:
    """Return the public text and those of the owners that this machine has."""
    quiet = {"log": lambda _line: None}
    named = {name: text_of(name, **quiet) for name in TEXTS}
    return named | {"headers": load_text(HEADERS, **quiet)}


def compare(
    text: dict[str, Text], public_steps: int, steps: int, seed: int
) -> dict[str, list[float]]:
    """Return the losses on each text of each way, by its name."""
    torch.manual_seed(seed)
    public = ByteTransformer(width=WIDTH, depth=DEPTH, heads=4, context=CONTEXT)
    train(public, [text["library"]], public_steps, seed)
    common, owned = text["library"], [text["manual"], text["headers"]]
    parts = [owners_part(public, common, one, steps, seed) for one in owned]
    dense = [tuned(public, [one], steps, seed) for one in owned]
    ways = {
        "public": public,
        "dense, of manual": dense[0],
        "dense, of headers": dense[1],
        "mean of the dense ones": averaged([public, *dense]),
        "part of manual alone": parts[0],
        "part of headers alone": parts[1],
        "parts joined": joined(public, common, parts),
        "together on all text": tuned(public, list(text.values()), 2 * steps, seed),
    }
    return {way: [held_out(model, one) for one in text.values()] for way, model in ways.items()}


def held_out(model: ByteTransformer, text: Text) -> float:
    """Return the loss over 1,024 windows: of two models it is right to 0.01 nats."""
    windows = HeldOut(text, CONTEXT)
    starts = windows.windows(ON_THE_WAY)
    return windows.total(model, starts) / len(starts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--public-steps", type=int, default=1500)
    parser.add_argument("--steps", type=int, default=750)
    parser.add_argument("--seeds", type=int, default=1)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    text = texts()
    for seed in range(chosen.seeds):
        print(f"seed {seed:<18} {'  '.join(f'{name:>8}' for name in text)}", flush=True)
        found = compare(text, chosen.public_steps, chosen.steps, seed)
        for way, losses in found.items():
            print(f"{way:<23} {'  '.join(f'{loss:8.3f}' for loss in losses)}", flush=True)


if __name__ == "__main__":
    main()
