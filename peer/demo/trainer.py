"""Train for `atoll demo`: the loop of examples/train_lm.py, told when to end.

It ends when the run has ``--rounds`` rounds; with ``--last-round-file`` it goes on after that until
the file holds the number of the last round, because the demo waits for a newcomer. What the
demo shows travels by ``session.report``; the last printed line repeats the last report.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import count
from pathlib import Path

import torch

from atoll.collectives.errors import AtollError
from atoll.optim.methods.diloco import DiLoCo
from atoll.peer.client.session import connect
from atoll.peer.demo.byte_lm import ByteTransformer, TextBatches, heldout_loss
from atoll.peer.demo.text import load_text

FIRST_ROUND = 1  # of every run: it only hands out the initial parameters
BATCH = 12  # a round of 40 steps then takes 2 s when three trainers share two cores
LEARNING_RATE = 2e-3
OUTER_MOMENTUM = 0.6  # the usual 0.9 overshoots within the few rounds that a demo has
CONNECT_TIMEOUT_S = 60.0  # its daemon is started at the same time and may have to join first


def main() -> int:
    """Run the training process; return the exit code: 0, or that of the error that ended it."""
    parser = argparse.ArgumentParser(description="One trainer of `atoll demo`.")
    parser.add_argument("--home", type=Path, required=True, help="the daemon's home")
    parser.add_argument("--data", type=Path, help="folder of text (default: Python's own library)")
    parser.add_argument("--rounds", type=int, required=True, help="train until the run has these")
    parser.add_argument("--last-round-file", type=Path, help="go on until it names the last round")
    parser.add_argument("--sync-every", type=int, required=True, help="local steps per round")
    parser.add_argument("--seed", type=int, required=True, help="one for each peer")
    args = parser.parse_args()
    torch.set_num_threads(1)  # as many trainers as peers share this machine
    try:
        _train(args)
    except AtollError as error:
        print(error, flush=True)
        return error.exit_code
    return 0


def _train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    text = load_text(args.data)
    model = ByteTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95))
    batches = TextBatches(text, context=model.context, batch=BATCH, seed=args.seed)

    session = connect(home=args.home, timeout_s=CONNECT_TIMEOUT_S, reconnect_s=0)
    outer = DiLoCo(model, optimizer, args.sync_every, session, outer_momentum=OUTER_MOMENTUM)
    heldout = heldout_loss(model, text)  # the model has the run's parameters now
    if session.round == FIRST_ROUND:
        session.report(untrained_loss=heldout)
    started_s = time.monotonic()
    for step in count(1):
        loss = model.loss(*batches.next())
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        optimizer.step()
        optimizer.zero_grad()
        if step % args.sync_every == 0:
            with outer.outer_parameters():  # what the run has, not what this replica has
                heldout = heldout_loss(model, text)
            totals = outer.metrics()
            figures = {
                "loss": loss.item(),
                "heldout_loss": heldout,
                "heldout_round": session.round,
                "steps": totals["steps"],
                "contributed": totals["rounds"],
                "missed": totals["missed"],
                "waited_s": totals["waited_s"],
                "elapsed_s": time.monotonic() - started_s,
            }
            session.report(**figures)
            print(json.dumps(figures), flush=True)  # a daemon forgets a trainer that has ended
            if session.round >= _last_round(args.rounds, args.last_round_file):
                break
    outer.close()


def _last_round(rounds: int, file: Path | None) -> float:
    if file is None:
        return rounds
    try:
        return max(rounds, int(file.read_text("ascii")))
    except FileNotFoundError:
        return float("inf")  # the newcomer has not contributed yet


if __name__ == "__main__":
    sys.exit(main())
