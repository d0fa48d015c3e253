"""Train a language model that FSDP2 shards over the GPUs of each machine, with other peers.

Start a daemon on each machine (`atoll up --run fsdp`, or the `atoll join` line that it prints),
then this beside each of them:

    torchrun --standalone --nproc-per-node 8 train_fsdp2.py

The ranks of a machine are one trainer of the run and share its daemon: (1) is all that they need
for that. Without a GPU the ranks are processes of the CPU.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import atoll
from atoll.optim import ByteTransformer, DiLoCo, TextBatches
from atoll.peer.demo.text import load_text


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a sharded model with other peers.")
    parser.add_argument("--home", type=Path, help="the daemon's home, as given to `atoll up`")
    parser.add_argument("--data", type=Path, help="folder of text (default: Python's own library)")
    parser.add_argument("--steps", type=int, default=200, help="of the run, at each peer")
    parser.add_argument("--sync-every", type=int, default=20, help="steps for each round")
    parser.add_argument("--seed", type=int, default=0, help="order of the text; one for each peer")
    args = parser.parse_args()

    peer = atoll.attach(args.home)  # (1) on every rank; it makes torchrun's process group
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)  # the ranks of a machine begin alike; the run's parameters replace these
    model = ByteTransformer().to(device)
    batches = TextBatches(
        load_text(args.data), context=model.context, seed=args.seed * ranks + rank
    )
    fully_shard(model, mesh=init_device_mesh(device, (ranks,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    outer = DiLoCo(model, optimizer, args.sync_every, peer=peer)  # (2)
    while outer.global_step < args.steps:
        inputs, targets = (part.to(device) for part in batches.next())
        logits = model(inputs)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        outer.report(loss=loss)
        if rank == 0 and outer.global_step % args.sync_every == 0:
            print(f"round {outer.metrics()['round']}  loss {loss.item():.3f}", flush=True)
    outer.finish()  # (3)
    outer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
