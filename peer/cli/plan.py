"""Carry out ``atoll plan``: which method and settings suit these links, and what that comes to."""

from __future__ import annotations

import argparse
import json
import time
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from atoll.collectives.errors import ConfigError, NoDaemonError
from atoll.peer.cli.doctor import parameter_count
from atoll.peer.net.identity import default_home

if TYPE_CHECKING:
    from atoll.peer.plan.losses import LossTable
    from atoll.peer.plan.model import RunSketch
    from atoll.peer.plan.sources import HostDefaults

LOOKED_BACK_S: Final = 3600.0  # for rows of the run: what links and trainers were like lately


def add_plan_verb(verbs: Any) -> argparse.ArgumentParser:
    """Add ``plan`` to the sub-commands of ``atoll``, and return its parser."""
    plan: argparse.ArgumentParser = verbs.add_parser(
        "plan",
        help="which method, H and codec suit these links? round time, bytes, cost, what would help",
        epilog="Without --links it asks the daemon of the home: links as measured, trainers as"
        " fast as they were in the last rounds. A list has a line for each host, beginning with:"
        " name,up_mbit,down_mbit,rtt_ms,step_s. docs/choosing.md explains what comes out.",
    )
    plan.add_argument("--links", metavar="FILE", help="hosts and links: a .csv, or TOML")
    plan.add_argument(
        "--parameters", type=parameter_count, metavar="N", help="of the model: 124M, 1.3B"
    )
    plan.add_argument("--step-s", type=float, metavar="S", help="seconds of a local step")
    plan.add_argument(
        "--tokens-per-step", type=float, metavar="N", help="tokens (or samples) of a local step"
    )
    plan.add_argument("--price-hour", type=float, metavar="P", help="of a machine, in any currency")
    plan.add_argument("--price-gb", type=float, metavar="P", help="of 10^9 bytes that are sent")
    plan.add_argument(
        "--fragments", type=int, default=0, metavar="N", help="of StreamingDiLoCo (default 5)"
    )
    plan.add_argument(
        "--candidates",
        default="",
        metavar="LIST",
        help="METHOD:STEPS:CODEC,... of diloco, streaming, sparse_loco, gradient_average;"
        " default: eight that suit slow links or fast ones",
    )
    plan.add_argument("--json", action="store_true", help="for scripts")
    plan.set_defaults(command=_plan)
    return plan


def _plan(parsed: argparse.Namespace) -> int:
    from atoll.peer.plan.advice import DEFAULT_VARIANTS, advise
    from atoll.peer.plan.report import document, text_of
    from atoll.peer.plan.sources import HostDefaults, parse_variants, with_fragments

    defaults = HostDefaults(
        parsed.step_s, parsed.tokens_per_step, parsed.price_hour, parsed.price_gb
    )
    run = _listed(parsed, defaults) if parsed.links else _running(parsed, defaults)
    run, losses = with_fragments(run, parsed.fragments), read_losses()
    advice = advise(run, losses, parse_variants(parsed.candidates) or DEFAULT_VARIANTS)
    if parsed.json:
        print(json.dumps(document(run, advice, losses)), flush=True)
    else:
        print(text_of(run, advice, losses), flush=True)
    return 0


def read_losses() -> LossTable:
    """Return the losses that this version documents."""
    from atoll.peer.plan.losses import parse_losses

    file = resources.files("atoll.peer.plan").joinpath("losses.json")
    return parse_losses(file.read_text("utf-8"))


def _listed(parsed: argparse.Namespace, defaults: HostDefaults) -> RunSketch:
    from atoll.peer.plan.sources import FILE_BYTES_MAX, sketch_of_list

    if not parsed.parameters:
        raise ConfigError("how large is the model?", fix="say --parameters, 124M for example")
    path = Path(parsed.links)
    if not path.is_file():
        fix = "write one: docs/choosing.md has an example; without --links it asks the daemon here"
        raise ConfigError(f"there is no list of hosts at {path}", fix=fix)
    if path.stat().st_size > FILE_BYTES_MAX:
        raise ConfigError(f"{path} is larger than {FILE_BYTES_MAX:,} bytes: no list of hosts")
    try:
        text = path.read_text("utf-8-sig")  # Excel writes a byte order mark
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text: {error.reason}") from error
    return sketch_of_list(text, parsed.parameters, defaults, is_csv=path.suffix.lower() == ".csv")


def _running(parsed: argparse.Namespace, defaults: HostDefaults) -> RunSketch:
    """Return the run of the daemon of this home, as it has gone lately."""
    from atoll.peer.client.ipc_client import ask
    from atoll.peer.plan.sources import sketch_of_run
    from atoll.peer.telemetry.event_file import read

    try:
        status = ask(parsed.home, "status")
    except NoDaemonError as error:
        fix = f"list the machines: --links FILE; or, for a run here, {error.fix}"
        raise NoDaemonError(error.what, fix=fix) from None
    since_s = time.time() - LOOKED_BACK_S
    rows = [row for row in read(default_home(parsed.home), since_s) if row["kind"] == "row"]
    return sketch_of_run(status, rows, defaults, parsed.parameters or 0)
