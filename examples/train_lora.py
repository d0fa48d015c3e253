"""Train LoRA adapters with PEFT and HF Trainer, together with the other peers of a run.

`pip install atoll[peft]`, start a daemon (`atoll up --run lora`, or the `atoll join` line that it
prints for other machines), then this in another terminal, one for each daemon. The line marked (1)
is what makes the script a peer. Only the adapters travel; the base must be the same on all peers,
and one that differs is refused by name.

The base is made here from a seed, so that nothing has to be downloaded: take `from_pretrained` for
yours.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from atoll.integrations.transformers import AtollCallback
from atoll.peer.demo.text import load_text

CONTEXT, BASE_SEED = 64, 7


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
    parser = argparse.ArgumentParser(description="Train LoRA adapters with other peers.")
    parser.add_argument("--home", type=Path, help="the daemon's home, as given to `atoll up`")
    parser.add_argument("--data", type=Path, help="folder of text (default: Python's own library)")
    parser.add_argument("--output", type=Path, default=Path("lora"), help="for the adapters")
    parser.add_argument("--steps", type=int, default=200, help="of the run, at each peer")
    parser.add_argument("--sync-every", type=int, default=20, help="steps for each round")
    parser.add_argument("--seed", type=int, default=0, help="order of the text; one for each peer")
    args = parser.parse_args()

    torch.manual_seed(BASE_SEED)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
    )
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(LlamaForCausalLM(config), adapters)
    model.print_trainable_parameters()
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=args.output,
            max_steps=args.steps,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            logging_steps=10,
            save_strategy="no",
            seed=args.seed,
            report_to=[],
        ),
        train_dataset=Windows(load_text(args.data).train, args.seed),
        callbacks=[AtollCallback(sync_every=args.sync_every, home=args.home)],  # (1)
    )
    trainer.train()
    trainer.save_model()  # the run's adapters
    print(f"saved in {args.output}")


if __name__ == "__main__":
    main()
