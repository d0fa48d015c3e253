"""Train a small byte-level language model together with the other peers of a run.

Start a daemon (`atoll up --run demo`, or the `atoll join` line that it prints for other machines),
then this in another terminal, one for each daemon. The lines marked (1), (2), (3) are what makes a
plain PyTorch loop a peer. It trains on a GPU where torch sees one.
"""

from __future__ import annotations

import argparse
from itertools import count
from pathlib import Path

import torch

import atoll
from atoll.optim import ByteTransformer, DiLoCo, TextBatches, heldout_loss, muon_and_adamw
from atoll.peer.demo.text import load_text


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small language model with other peers.")
    parser.add_argument("--home", type=Path, help="the daemon's home, as given to `atoll up`")
    parser.add_argument("--data", type=Path, help="folder of text (default: Python's own library)")
    parser.add_argument("--sync-every", type=int, default=20, help="local steps per round")
    parser.add_argument("--rounds", type=int, default=25, help="train until the run has so many")
    parser.add_argument("--seed", type=int, default=0, help="order of the text; one for each peer")
    parser.add_argument("--muon", action="store_true", help="Muon for hidden layers; on all peers")
    args = parser.parse_args()

    text = load_text(args.data)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = ByteTransformer().to(device)  # before the optimizer is made
    optimizers = [torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95))]
    if args.muon:
        optimizers = muon_and_adamw(model, lr=4e-3)
    batches = TextBatches(text, context=model.context, seed=args.seed)

    outer = DiLoCo(model, optimizers, args.sync_every, peer=atoll.connect(home=args.home))  # (1)
    for step in count(1):
        loss = model.loss(*batches.next())
        loss.backward()
        outer.report(loss=loss)  # for the daemon's log and `atoll top`: the mean of each round
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % args.sync_every == 0:
            with outer.outer_parameters():  # (2) evaluate what the run has, not what we have
                heldout = heldout_loss(model, text)
            outer.peer.report(heldout_loss=heldout)  # for `atoll status`
            print(
                f"round {outer.peer.round}  step {step}  loss {loss.item():.3f}  "
                f"held-out {heldout:.3f} nats per byte",
                flush=True,
            )
            if outer.peer.round >= args.rounds:
                break
    print(f"done: the run has {outer.peer.round} rounds (--rounds)", flush=True)
    outer.close()  # (3)


if __name__ == "__main__":
    main()
