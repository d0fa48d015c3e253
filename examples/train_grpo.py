"""Train with rewards, by TRL's GRPO, together with the other peers of a run.

`pip install atoll[trl]`, start a daemon (`atoll up --run grpo`, or the `atoll join` line that it
prints for other machines), then this in another terminal, one for each daemon. The line marked (1)
is what makes the script a peer. Each peer generates with parameters of its own, as GRPO wants it,
and every `--sync-every` steps all go on from the run's.

Model and tokenizer are made here, so that nothing has to be downloaded: the model learns to write
the letter a. Take `from_pretrained` and a reward of your own.
"""

from __future__ import annotations

import argparse
import string
from pathlib import Path

from datasets import Dataset
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from atoll.integrations.transformers import AtollCallback


def letters() -> PreTrainedTokenizerFast:
    """Make a token of each letter."""
    vocabulary = {token: n for n, token in enumerate(["<end>", *string.ascii_lowercase])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>", padding_side="left"
    )


def share_of_a(completions: list[str], **_: object) -> list[float]:
    return [text.count("a") / max(1, len(text.replace(" ", ""))) for text in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with rewards, with other peers.")
    parser.add_argument("--home", type=Path, help="the daemon's home, as given to `atoll up`")
    parser.add_argument(
        "--output", type=Path, default=Path("grpo"), help="where the model is saved"
    )
    parser.add_argument("--steps", type=int, default=40, help="of the run, at each peer")
    parser.add_argument("--sync-every", type=int, default=5, help="steps for each round")
    parser.add_argument("--seed", type=int, default=0, help="of samples; one for each peer")
    args = parser.parse_args()

    tokenizer = letters()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    trainer = GRPOTrainer(
        LlamaForCausalLM(config),
        share_of_a,
        GRPOConfig(
            output_dir=str(args.output),
            max_steps=args.steps,
            per_device_train_batch_size=8,
            num_generations=8,
            max_completion_length=8,
            learning_rate=1e-2,
            logging_steps=5,
            save_strategy="no",
            seed=args.seed,
            bf16=False,
            report_to=[],
        ),
        train_dataset=Dataset.from_list([{"prompt": letter} for letter in string.ascii_lowercase]),
        processing_class=tokenizer,
        callbacks=[AtollCallback(sync_every=args.sync_every, home=args.home)],  # (1)
    )
    trainer.train()
    trainer.save_model()  # the run's parameters
    print(f"saved in {args.output}")


if __name__ == "__main__":
    main()
