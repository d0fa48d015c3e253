"""Carry out ``atoll doctor``: can this machine train, and reach the run of an invite?"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any, Final

from atoll.peer.cli.admission import given_invite
from atoll.peer.cli.proxy import add_proxy_option, given_proxy
from atoll.peer.cli.settings import SecretAction
from atoll.peer.net.identity import default_home
from atoll.peer.net.invite import DEFAULT_PORT, parse_listen

# A machine of today holds no larger model, and the figure is a typing mistake (optim/manifest.py).
PARAMETERS_MAX: Final = 1 << 40
UNITS: Final = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9}
TERMINAL: Final = (80, 24)  # where the size of the terminal is not known


def add_doctor_verb(verbs: Any) -> argparse.ArgumentParser:
    """Add ``doctor`` to the sub-commands of ``atoll``, and return its parser."""
    doctor: argparse.ArgumentParser = verbs.add_parser(
        "doctor",
        help="can this machine train, and reach the run of an invite? what to do if not",
        epilog="It joins nothing and changes nothing. Exit code 0: nothing keeps this machine from"
        " training; 3: something does. docs/doctor.md explains each line.",
    )
    doctor.add_argument(
        "address",
        action=SecretAction,
        in_file="invite-file",
        nargs="?",
        metavar="INVITE",
        help="what `atoll invite` prints on a member; none: look at this machine alone",
    )
    doctor.add_argument("--invite-file", metavar="FILE", help="a file that holds the invite")
    doctor.add_argument(
        "--listen", metavar="HOST:PORT", help=f"as for `atoll join`; default :{DEFAULT_PORT}"
    )
    add_proxy_option(doctor)
    doctor.add_argument("--checkpoint", metavar="DIR", help="a folder that is to hold checkpoints")
    doctor.add_argument(
        "--params",
        type=parameter_count,
        metavar="N",
        help="parameters of the model, 100M say, where the run does not tell",
    )
    doctor.add_argument(
        "--no-rates",
        action="store_true",
        help="do not measure how fast bytes go (5.6 MB each way at most)",
    )
    doctor.add_argument("--json", action="store_true", help="for scripts")
    doctor.set_defaults(command=_doctor)
    return doctor


def parameter_count(text: str) -> int:
    """Parse a number of parameters: 1000000, 100M, 1.3B.

    Raises ArgumentTypeError for anything else.
    """
    wrong = argparse.ArgumentTypeError(f"{text!r} is no number of parameters: say 100M or 1.3B")
    unit = text[-1:].lower() if text[-1:].isalpha() else ""
    number = text[: len(text) - len(unit)]
    if unit not in UNITS or not number.isascii() or not number.replace(".", "", 1).isdigit():
        raise wrong
    count = int(float(number) * UNITS[unit])
    if not 1 <= count <= PARAMETERS_MAX:
        raise wrong
    return count


def _doctor(parsed: argparse.Namespace) -> int:
    """Print what is found; raise UnfitMachineError if it keeps this machine from training."""
    from atoll.peer.doctor.examine import Question, examine
    from atoll.peer.doctor.report import document, lines, verdict
    from atoll.peer.doctor.table import diagnose

    given = parsed.address is not None or parsed.invite_file is not None
    question = Question(
        home=default_home(parsed.home),
        invite=given_invite(parsed) if given else None,
        checkpoint=Path(parsed.checkpoint).absolute() if parsed.checkpoint else None,
        listen=parse_listen(parsed.listen),
        elements=parsed.params or 0,
        rates=not parsed.no_rates,
        proxy=given_proxy(parsed),
    )
    if not parsed.json and sys.stdout.isatty():
        print("looking, which takes up to half a minute ...", flush=True)
    facts = examine(question)
    found = diagnose(facts)
    if parsed.json:
        print(json.dumps(document(facts, found)), flush=True)
        verdict(found)
        return 0
    width = shutil.get_terminal_size(TERMINAL).columns
    for line in lines(found, width=width, colours=_has_colours()):
        print(line)
    sys.stdout.flush()
    print(verdict(found))
    return 0


def _has_colours() -> bool:
    """Return whether lines are in colours: on a terminal, unless the user wants none."""
    return (
        sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )
