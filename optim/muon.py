"""Make Muon for the matrices of hidden layers, AdamW for the rest; choose an outer momentum.

Muon (Jordan et al. 2024) orthogonalizes the momentum of a matrix. Its authors use it for the
matrices of hidden layers alone, and AdamW for embeddings, the output layer, vectors and all else.
MuLoCo (arXiv 2505.23725) takes it inside DiLoCo, with an outer momentum of 0.6.

``muon_and_adamw`` gives Muon a parameter if all of this holds, and AdamW any other:

- it has exactly two dimensions, and the last part of its name has "weight" in it, as in Linear,
  MultiheadAttention and recurrent layers; a table of positions that is a bare parameter has not;
- it is not the weight of an ``nn.Embedding`` or ``nn.EmbeddingBag``, nor tied to one;
- it is not in the output layer: the last of ``model.modules()`` that has such a matrix, trainable
  or not, which is the head where modules are made in the order of use. Where the head is tied to
  an embedding, that is the embedding's weight and no layer before it is left out.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from atoll.collectives.errors import ConfigError
from atoll.optim.inner import Inner, unwrapped

MOMENTUM = 0.9  # arXiv 2311.08105
MUON_MOMENTUM = 0.6  # arXiv 2505.23725
ADAMW_SHARE = 0.5  # of Muon's rate
Choice = Callable[[str, nn.Parameter], bool]


def muon_and_adamw(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    betas: tuple[float, float] = (0.9, 0.95),
    hidden: Choice | None = None,
) -> tuple[Optimizer, ...]:
    """Return ``torch.optim.Muon`` and ``AdamW``, which share the trainable parameters of ``model``.

    Give them to a method as its ``inner``, in this order, and step both::

        optimizers = muon_and_adamw(model, lr=4e-3)
        outer = DiLoCo(model, optimizers, 100, peer=atoll.connect())
        ...
        for optimizer in optimizers:
            optimizer.step()

    Muon's steps are scaled to the size of AdamW's (``adjust_lr_fn="match_rms_adamw"``), so rates
    that suit AdamW are where to begin; AdamW itself has half of ``lr``. The head of this module
    says which parameters are Muon's. ``hidden(name, parameter)`` decides instead, for any of two
    dimensions. Where all parameters are Muon's there is no AdamW.

    Raise ConfigError if Muon would have none, or this torch has no Muon (it came with 2.9).
    """
    if not hasattr(torch.optim, "Muon"):
        raise ConfigError(
            f"torch {torch.__version__} has no torch.optim.Muon",
            fix="install torch 2.9 or newer, or give AdamW all parameters",
        )
    chosen = hidden or _rule_for(model)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [(name, p) for name, p in trained if chosen(name, p)]
    for name, p in matrices:
        if p.dim() != 2:
            raise ConfigError(
                f"hidden() gives Muon {name}, which has {p.dim()} dimensions",
                fix="choose parameters of two dimensions only",
            )
    if not matrices:
        raise ConfigError(
            f"the {type(model).__name__} has no trainable matrix of a hidden layer for Muon",
            fix="choose some with hidden=, or use AdamW alone",
        )
    taken = {id(p) for _, p in matrices}
    rest = [p for _, p in trained if id(p) not in taken]
    optimizers: list[Optimizer] = [
        torch.optim.Muon(
            [p for _, p in matrices],
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            adjust_lr_fn="match_rms_adamw",
        )
    ]
    if rest:
        adamw = torch.optim.AdamW(rest, ADAMW_SHARE * lr, betas=betas, weight_decay=weight_decay)
        optimizers.append(adamw)
    return tuple(optimizers)


def _rule_for(model: nn.Module) -> Choice:
    """Return the choice that the head of this module describes."""
    embeddings = (nn.Embedding, nn.EmbeddingBag)
    excluded: set[int] = set()
    output: list[int] = []
    for module in model.modules():
        mine = [id(p) for name, p in module.named_parameters(recurse=False) if _fits(name, p)]
        if isinstance(module, embeddings):
            excluded.update(mine)
        elif mine:
            output = mine
    excluded.update(output)
    return lambda name, p: _fits(name, p) and id(p) not in excluded


def _fits(name: str, parameter: nn.Parameter) -> bool:
    return parameter.dim() == 2 and "weight" in name.rpartition(".")[2]


def outer_momentum_of(inner: Inner) -> float:
    """Return the outer momentum that suits ``inner``: MuLoCo's, where one of them is Muon."""
    muon = getattr(torch.optim, "Muon", None)  # torch has it since 2.9
    is_muon = muon is not None and any(isinstance(one, muon) for one in unwrapped(inner))
    return MUON_MOMENTUM if is_muon else MOMENTUM
