"""Fine-tune a causal language model with HF Trainer, together with the other peers of a run.

`pip install atoll[transformers]`, start a daemon (`atoll up --run sft`, or the `atoll join` line
that it prints for other machines), then this in another terminal, one for each daemon. The line
marked (1) is what makes the script a peer; TRL's SFTTrainer takes the same callback.

The model is made here, so that nothing has to be downloaded: take `from_pretrained` for yours.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from atoll.integrations.transformers import AtollCallback
from atoll.peer.demo.text import load_text

CONTEXT = 64


class Windows(Dataset):
    """Pieces of text, one token for each byte; each peer has an order of its own."""

    def __init__(self, text, seed: int) -> None:
        self.text, self.seed = text, seed

    def __len__(self) -> int:
        return len(self.text) // CONTEXT

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        place = (number + 7919 * self.seed) % len(self) * CONTEXT
        ids = torch.from_numpy(self.text[place : place + CONTEXT]).long()
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a language model with other peers.")
    parser.add_argument("--home", type=Path, help="the daemon's home, as given to `atoll up`")
    parser.add_argument("--data", type=Path, help="folder of text (default: Python's own library)")
    parser.add_argument("--output", type=Path, default=Path("sft"), help="where the model is saved")
    parser.add_argument("--steps", type=int, default=200, help="of the run, at each peer")
    parser.add_argument("--sync-every", type=int, default=20, help="steps for each round")
    parser.add_argument("--seed", type=int, default=0, help="order of the text; one for each peer")
    args = parser.parse_args()

    text = load_text(args.data)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
    )
    trainer = Trainer(
        LlamaForCausalLM(config),
        TrainingArguments(
            output_dir=args.output,
            max_steps=args.steps,
            per_device_train_batch_size=8,
            learning_rate=2e-3,
            warmup_steps=10,
            logging_steps=10,
            eval_strategy="steps",
            eval_steps=args.sync_every,
            save_steps=args.sync_every,
            save_total_limit=2,
            seed=args.seed,
            report_to=[],
        ),
        train_dataset=Windows(text.train, args.seed),
        eval_dataset=Windows(text.heldout[: 64 * CONTEXT], 0),
        callbacks=[AtollCallback(sync_every=args.sync_every, home=args.home)],  # (1)
    )
    trainer.train()
    trainer.save_model()  # the run's parameters
    print(f"saved in {args.output}, held-out loss {trainer.evaluate()['eval_loss']:.3f}")


if __name__ == "__main__":
    main()
