"""Train with TorchTitan on each machine, together with the other peers of a run.

`pip install atoll[torchtitan]`, start a daemon on each machine (`atoll up --run titan`, or the
`atoll join` line that it prints), then TorchTitan's own command with this script in place of
`-m torchtitan.train`, beside each of them, with TorchTitan's own arguments:

    torchrun --standalone --nproc-per-node 8 train_torchtitan.py --module llama3 \
        --config llama3_debugmodel

The line marked (1) is what makes it a peer. The daemon is that of ATOLL_HOME, or of the default
home; ATOLL_SYNC_EVERY says how many steps a round has.
"""

from __future__ import annotations

import os

import torch
from torchtitan.config import ConfigManager
from torchtitan.tools.logging import init_logger

from atoll.integrations.torchtitan import join


def main() -> None:
    init_logger()
    config = ConfigManager().parse_args()
    trainer = config.build()
    try:
        join(trainer, sync_every=int(os.environ.get("ATOLL_SYNC_EVERY", "100")))  # (1)
        trainer.train()
    finally:
        trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
