"""Train a small vision model with Lightning, together with the other peers of a run.

`pip install atoll[lightning]`, start a daemon (`atoll up --run vision`, or the `atoll join` line
that it prints for other machines), then this in another terminal, one for each daemon. The line
marked (1) is what makes the script a peer. BatchNorm's statistics become the mean of all peers.

The images are drawn here, so that nothing has to be downloaded: in which quarter is the square?
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from atoll.integrations.lightning import AtollCallback

SIDE, SQUARE = 16, 3


class Squares(Dataset):
    """Noise with a bright square; each peer sees other ones."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        random = torch.Generator().manual_seed(self.seed * self.count + number)
        image = torch.rand(1, SIDE, SIDE, generator=random)
        quarter = int(torch.randint(4, (), generator=random))
        place = torch.randint(SIDE // 2 - SQUARE, (2,), generator=random)
        row, column = place + torch.tensor([quarter // 2, quarter % 2]) * (SIDE // 2)
        image[0, row : row + SQUARE, column : column + SQUARE] += 1.0
        return image, quarter


class Finder(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(4),
            nn.Flatten(),
            nn.Linear(8 * (SIDE // 4) ** 2, 4),
        )

    def training_step(self, batch, _number):
        images, quarters = batch
        loss = functional.cross_entropy(self.net(images), quarters)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, _number):
        images, quarters = batch
        right = (self.net(images).argmax(1) == quarters).float().mean()
        self.log("right", right, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a vision model with other peers.")
    parser.add_argument("--home", type=Path, help="the daemon's home, as given to `atoll up`")
    parser.add_argument("--steps", type=int, default=200, help="of the run, at each peer")
    parser.add_argument("--sync-every", type=int, default=20, help="steps for each round")
    parser.add_argument("--seed", type=int, default=1, help="of the images; one for each peer")
    args = parser.parse_args()

    trainer = lightning.Trainer(
        max_steps=args.steps,
        val_check_interval=args.sync_every,
        check_val_every_n_epoch=None,
        callbacks=[AtollCallback(sync_every=args.sync_every, home=args.home)],  # (1)
        logger=False,
        enable_checkpointing=False,
    )
    model = Finder()
    trainer.fit(
        model,
        DataLoader(Squares(10_000, args.seed), batch_size=32),
        DataLoader(Squares(256, 0), batch_size=64),
    )
    (found,) = trainer.validate(model, DataLoader(Squares(256, 0), batch_size=64), verbose=False)
    print(f"the run's model is right for {found['right']:.0%} of the images")


if __name__ == "__main__":
    main()
