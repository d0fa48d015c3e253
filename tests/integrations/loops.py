"""Training loops of other libraries, and the plain loop that each must equal bit for bit.

A loop is a function of a session and the number of the peer, so it runs in a swarm too. In a
process of its own it waits, after it has attached, for a line of standard input: rounds must be of
both.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import lightning
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import atoll
from atoll.integrations.accelerate import attach
from atoll.integrations.lightning import AtollCallback as LightningCallback
from atoll.integrations.transformers import AtollCallback as TrainerCallback

# What these libraries warn each other of is theirs; all other warnings are errors.
LIBRARIES = r"(accelerate|lightning|peft|transformers)\."
SYNC_EVERY, ROUNDS = 3, 3
STEPS, MICRO = SYNC_EVERY * ROUNDS, 2  # optimizer steps; batches that are accumulated for each
CLIP = 0.5
LR = 0.01


class Net(nn.Module):
    """With statistics that are shared after each round."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 2))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (self.layers(x) - x[:, :2].sin()).square().mean()
        return loss


def llama(seed: int = 3) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    return LlamaForCausalLM(config)


def with_lora(base: int = 3) -> Any:
    model = llama(base)
    torch.manual_seed(4)
    adapters = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(model, adapters)


class Batches(IterableDataset):  # type: ignore[type-arg]
    """Those of one peer, in order: ``each`` makes one from a generator."""

    def __init__(self, peer: int, each: Callable[[torch.Generator], Any]) -> None:
        self.peer, self.each = peer, each

    def __iter__(self) -> Iterator[Any]:
        random = torch.Generator().manual_seed(100 + self.peer)
        for _ in range(STEPS * MICRO):
            yield self.each(random)


def numbers(random: torch.Generator) -> Tensor:
    return torch.randn(4, 6, generator=random)


def tokens(random: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(0, 32, (2, 8), generator=random)
    return {"input_ids": ids, "labels": ids}


def loader(peer: int, each: Callable[[torch.Generator], Any]) -> DataLoader[Any]:
    return DataLoader(Batches(peer, each), batch_size=None)


def diloco(model: nn.Module, inner: Any, peer: Any) -> atoll.DiLoCo:
    """As users make it; the trainers of a test then wait for each other."""
    outer = atoll.DiLoCo(model, inner, SYNC_EVERY, peer)
    if isinstance(peer, atoll.Session):
        while not all(member.get("attached", True) for member in peer.status()["members"]):
            time.sleep(0.05)
        print("here", flush=True)
        sys.stdin.readline()
    return outer


def trained(model: nn.Module) -> Tensor:
    """What it has in common with other peers, in order of name."""
    found = [p for _, p in sorted(model.named_parameters()) if p.requires_grad]
    return torch.cat([p.detach().flatten() for p in found])


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)


def plain(
    model: nn.Module, session: Any, batches: Batches, loss_of: Callable[[Any], Tensor]
) -> Tensor:
    """The loop without any library."""
    inner = adamw(model)
    diloco(model, inner, session)
    for number, batch in enumerate(batches):
        loss_of(batch).backward()
        if number % MICRO == MICRO - 1:
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            inner.step()
            inner.zero_grad()
    return trained(model)


# ---------------------------------------------------------------- accelerate


def with_accelerate(session: Any, peer: int) -> Tensor:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO)
    model = Net()
    model, inner, batches = accelerator.prepare(model, adamw(model), loader(peer, numbers))
    attach(accelerator, model, inner, method=diloco, peer=session)
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
            inner.step()
            inner.zero_grad()
    return trained(model)


def plain_net(session: Any, peer: int) -> Tensor:
    model = Net()
    return plain(model, session, Batches(peer, numbers), lambda x: model(x) / MICRO)


# ---------------------------------------------------------------- Lightning


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: Tensor, _number: int) -> Tensor:
        loss: Tensor = self.net(batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self)


class ManualModule(Module):
    """Its optimizer is the one that Lightning wraps."""

    automatic_optimization = False

    def training_step(self, batch: Tensor, number: int) -> None:
        inner = self.optimizers()
        self.manual_backward(self.net(batch) / MICRO)
        if number % MICRO == MICRO - 1:
            nn.utils.clip_grad_norm_(self.parameters(), CLIP)
            inner.step()
            inner.zero_grad()


def with_lightning(session: Any, peer: int, kind: type[Module] = Module) -> Tensor:
    how = {"accumulate_grad_batches": MICRO, "gradient_clip_val": CLIP}
    if kind is ManualModule:
        how = {}
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[LightningCallback(diloco, peer=session)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **how,
    )
    module = kind()
    trainer.fit(module, loader(peer, numbers))
    return trained(module.net)


def with_lightning_by_hand(session: Any, peer: int) -> Tensor:
    return with_lightning(session, peer, ManualModule)


# ---------------------------------------------------------------- transformers, PEFT


class Rows(Batches):
    """As HF Trainer batches them: one row at a time."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for batch in super().__iter__():
            for row in batch["input_ids"]:
                yield {"input_ids": row, "labels": row}


def with_trainer(session: Any, peer: int, model: Any = None) -> Tensor:
    model = model or llama()
    arguments = TrainingArguments(
        output_dir="unused",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=MICRO,
        max_steps=STEPS,
        learning_rate=LR,
        weight_decay=0.01,  # as torch's AdamW has it, which `plain` takes
        lr_scheduler_type="constant",
        optim="adamw_torch",
        max_grad_norm=CLIP,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    rows = Rows(peer, tokens)
    trainer = Trainer(
        model, arguments, train_dataset=rows, callbacks=[TrainerCallback(diloco, peer=session)]
    )
    # All parameters decay, as in `plain`.
    trainer.get_decay_parameter_names = lambda model: [n for n, _ in model.named_parameters()]
    trainer.train()
    return trained(model)


def plain_llama(session: Any, peer: int, model: Any = None) -> Tensor:
    model = model or llama()
    labels = (
        2 * 7 * MICRO
    )  # of a step, by which HF Trainer divides the sum; none for the first token
    return plain(
        model,
        session,
        Batches(peer, tokens),
        lambda batch: model(**batch, num_items_in_batch=torch.tensor(labels)).loss,
    )


def with_peft(session: Any, peer: int) -> Tensor:
    return with_trainer(session, peer, with_lora())


def plain_lora(session: Any, peer: int) -> Tensor:
    return plain_llama(session, peer, with_lora())


# Loop -> what it must equal.
LOOPS: dict[Callable[[Any, int], Tensor], Callable[[Any, int], Tensor]] = {
    with_accelerate: plain_net,
    with_lightning: plain_net,
    with_lightning_by_hand: plain_net,
    with_trainer: plain_llama,
    with_peft: plain_lora,
}


def main(loop: str, home: str, peer: str) -> None:
    """Train, and print the bytes of the parameters."""
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", module=LIBRARIES)
    session = atoll.connect(home)
    found = {each.__name__: each for each in LOOPS}[loop](session, int(peer))
    print("found", found.numpy().tobytes().hex(), flush=True)
