"""Find out everything at once: this machine, torch in a process of its own, the run's member."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from atoll.optim.footprint import host_bytes
from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.run_spec import RunSpec
from atoll.peer.doctor.facts import Facts, GpuFacts, ModelNeeds, RunFacts
from atoll.peer.doctor.machine_probe import ask_torch, look_at_machine
from atoll.peer.doctor.run_probe import ask_proxy, ask_run
from atoll.peer.net.invite import Invite
from atoll.peer.net.own_address import own_address
from atoll.peer.net.proxy import Proxy

# What a model is taken to be trained with where nobody says: DiLoCo, with updates in int8.
USUAL_SPEC: Final = RunSpec(sync_every=100)
# θ and momentum, float32: a checkpoint, and what a joiner loads.
STATE_BYTES: Final = 8


class Question(NamedTuple):
    """Hold what is to be examined. ``elements``: parameters of the model, 0 if unknown."""

    home: Path
    invite: Invite | None
    checkpoint: Path | None
    listen: tuple[str, int]
    elements: int
    rates: bool
    proxy: Proxy | None = None


def examine(question: Question) -> Facts:
    """Return the facts about this machine, and about the run if there is an invite."""
    invite, run = question.invite, None
    with ThreadPoolExecutor(1) as pool:
        gpu = pool.submit(ask_torch)  # the slowest, beside the rest
        machine = look_at_machine(
            question.home,
            question.checkpoint,
            invite.run if invite else "",
            question.listen,
            GpuFacts(),
        )
        if question.proxy is not None:
            machine = replace(machine, proxy=asyncio.run(ask_proxy(question.proxy)))
        if invite is not None:
            ask = ask_run(invite, question.home, question.listen, question.rates, question.proxy)
            run = asyncio.run(ask)
            machine = replace(machine, address=own_address(*run.found[:1]))
        machine = replace(machine, gpu=gpu.result())
    return Facts(machine, run, needs_of(run, question.elements))


def needs_of(run: RunFacts | None, elements: int) -> ModelNeeds | None:
    """Return what the model takes: the run's own, or one of ``elements`` parameters."""
    answer = run.answer if run is not None else None
    if answer is not None and answer.elements:
        return ModelNeeds(
            answer.elements,
            answer.daemon_bytes,
            answer.state_bytes,
            f"run {run.run}" if run else "",
        )
    if not elements:
        return None
    manifest = Manifest((Parameter("model", (elements,)),))
    daemon_bytes = host_bytes(USUAL_SPEC, manifest)
    return ModelNeeds(elements, daemon_bytes, STATE_BYTES * elements, "--params")
