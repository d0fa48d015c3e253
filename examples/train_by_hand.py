"""Write a training loop of your own: gradients are averaged over all peers at every step.

Start a daemon (`atoll up --run mine`, or the `atoll join` line that it prints for other machines),
then this in another terminal, one for each daemon. There is no outer optimizer: each trainer owns
its parameters, and what the lines marked (1), (2), (3) exchange keeps them equal. Trainers may
come, go and die at any time; a newcomer, and one that has missed a step, is given what the others
have.

Every step sends all gradients, so this is for networks that bear it, and for methods that atoll
does not have. Over the internet use `DiLoCo` (train_lm.py), which sends 100 times less.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

import atoll
from atoll.collectives.errors import (
    CollectiveLostError,
    CollectiveMismatchError,
    CollectiveMissedError,
)
from atoll.optim import ByteTransformer, TextBatches
from atoll.peer.demo.text import load_text


def main() -> None:
    parser = argparse.ArgumentParser(description="Average gradients with other peers.")
    parser.add_argument("--home", type=Path, help="the daemon's home, as given to `atoll up`")
    parser.add_argument("--data", type=Path, help="folder of text (default: Python's own library)")
    parser.add_argument("--steps", type=int, default=200, help="of the run, not of this trainer")
    parser.add_argument("--peers", type=int, default=1, help="wait for so many before the first")
    parser.add_argument("--codec", default="int8", help="how gradients travel")
    parser.add_argument("--seed", type=int, default=0, help="order of the text; one for each peer")
    args = parser.parse_args()

    model = ByteTransformer()
    batches = TextBatches(load_text(args.data), context=model.context, seed=args.seed)
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters, lr=2e-3)
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step()  # without gradients: makes the optimizer's state and changes nothing else
    state = [p.data for p in parameters]
    state += [value for p in parameters for value in optimizer.state[p].values()]
    step = optimizer.state[parameters[0]]["step"]  # part of the state, so it is the run's

    session = atoll.connect(home=args.home)
    while True:
        session.share(state, at_least=args.peers)  # (1) a newcomer gets what the others have
        if step.item() > args.steps:
            break
        loss = model.loss(*batches.next())
        loss.backward()
        gradients = [p.grad for p in parameters if p.grad is not None]
        try:
            mean = session.all_reduce(flatten(gradients), codec=args.codec)  # (2)
        except (CollectiveMissedError, CollectiveMismatchError, CollectiveLostError) as error:
            print(f"the others may have taken a step without this one: {error.what}", flush=True)
        else:
            fill(gradients, mean.value)
            optimizer.step()
            if step.item() % 5 == 0:
                text = f"step {step.item():.0f}  loss {loss.item():.3f}  {len(mean.peers)} peers"
                print(text, flush=True)
        optimizer.zero_grad(set_to_none=False)
    marks = hashlib.sha256(flatten(parameters).detach().numpy().tobytes()).hexdigest()
    print(f"done after step {step.item():.0f}, parameters {marks[:16]}", flush=True)
    session.close()  # (3)


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


def fill(tensors: Sequence[Tensor], flat: Tensor) -> None:
    """Copy ``flat`` back into the tensors, in place."""
    with torch.no_grad():
        for t, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            t.copy_(part.view(t.shape))


if __name__ == "__main__":
    main()
