"""A trainer without torch: it moves every parameter towards a target of its own.

Starts in a fraction of a second and makes rounds as large as a test wants. Prints one JSON line per
outcome. Arguments: home, elements, rounds (0: until killed), seconds of "training" per round,
fault ("none", "nan" or "fork"), codec, method ("diloco", "sparse_loco" or "async_diloco"; "noisy"
or "audited": DiLoCo where each parameter has a target of its own, which peers only partly share;
"restless": one whose target moves at random, so that a round that is done again has other bytes;
"reporting": one that reports its loss, steps and tokens; "diloco8": DiLoCo with its momentum in 8
bits).
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from dataclasses import replace

import numpy as np

import atoll
from atoll.collectives.codecs import F32
from atoll.collectives.errors import AtollError
from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.run_spec import RunSpec, feedback_of

SPARSE_LOCO = RunSpec(  # as optim/methods/sparse_loco.py has it
    method="sparse_loco",
    sync_every=1,
    outer="sgd",
    outer_lr=1.0,
    outer_momentum=0.0,
    codec="topk",
    aggregate="senders",
    error_feedback=0.95,
)
ASYNC_DILOCO = RunSpec(  # as optim/methods/async_diloco.py has it
    method="async_diloco",
    sync_every=1,
    outer_lr=0.5,
    outer_momentum=0.5,
    outer_delay=3,
    submits="deltas",
)


def targets(name: str, elements: int) -> F32:
    """As far from those of others as from zero, as the parameters of a model are."""
    common, own = (
        np.random.default_rng(seed).standard_normal(elements, np.float32)
        for seed in (0, int.from_bytes(name.encode()))
    )
    return np.add(common, own, out=own)


def main() -> int:
    home, elements, rounds, inner_s = sys.argv[1], *map(float, sys.argv[2:5])
    spoils = sys.argv[5] == "nan"  # hands over what no codec can take
    codec = sys.argv[6] if len(sys.argv) > 6 else "int8"
    if sys.argv[7:] == ["sparse_loco"]:
        spec = replace(SPARSE_LOCO, codec=codec)
    elif sys.argv[7:] == ["async_diloco"]:
        spec = replace(ASYNC_DILOCO, codec=codec)
    else:
        spec = RunSpec(
            sync_every=1,
            outer_lr=0.5,
            outer_momentum=0.5,
            codec=codec,
            error_feedback=feedback_of(codec, None),
            momentum_codec="dynamic8" if sys.argv[7:] == ["diloco8"] else "float32",
        )
        spec = replace(spec, audit=sys.argv[7:] == ["audited"])
    manifest = Manifest.of([Parameter("w", (int(elements),))])
    session = atoll.connect(home, reconnect_s=float(os.environ.get("RECONNECT_S", "0")))
    session.channel.attach(spec, manifest, lambda flat: flat.fill(1.0))
    target: F32 | np.float32 = np.float32(session.peer_name.encode()[0] / 64)
    if sys.argv[7:] in (["noisy"], ["audited"]):
        target = targets(session.peer_name, int(elements))
    here = np.zeros(int(elements), np.float32)
    began = np.zeros_like(here)

    def take(flat: np.ndarray) -> None:
        here[:] = began[:] = flat

    def hand_over(out: np.ndarray, lo: int) -> None:
        part = slice(lo, lo + out.size)
        if spec.submits == "deltas":
            np.subtract(began[part], here[part], out=out)
        else:
            np.copyto(out, here[part])

    if sys.argv[5] == "fork":  # as a DataLoader's workers do
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        print(json.dumps({"child": child}), flush=True)
    session.channel.pull(take)
    print(json.dumps({"attached": session.round}), flush=True)
    while rounds == 0 or session.round < rounds:
        time.sleep(inner_s)
        if sys.argv[7:] == ["restless"]:
            target = np.float32(random.random())
        np.multiply(here, 0.9, out=here)
        np.add(here, target * np.float32(0.1), out=here)
        if spoils:
            here[0] = np.nan
        session.channel.submit(hand_over, 1.0)
        outcome = session.channel.wait()
        if sys.argv[7:] == ["reporting"]:
            done = max(0, session.round)
            session.report(loss=4.0 / (1 + done), steps=10.0 * done, tokens=1000.0 * done)
        if outcome.kind != "missed":
            session.channel.pull(take)
        print(
            json.dumps({"kind": outcome.kind, "round": outcome.round, "unix_s": time.time()}),
            flush=True,
        )
    session.close()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AtollError as error:
        print(json.dumps({"error": error.code, "what": error.what}), flush=True)
        sys.exit(error.exit_code)
