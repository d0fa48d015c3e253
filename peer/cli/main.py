"""Run the command line: ``atoll up``, ``join``, ``status``, ``checkpoint``, ``demo`` and more.

Exit codes: 0 done; 1 the demo's checks failed, or a defect; 2 usage, file or folder; 3 `atoll
doctor` found trouble; 10 to 16 connection, admission, daemon; 20 to 26 protocol, specification,
round, state; 130 second Ctrl+C.
"""

from __future__ import annotations

import os

# Before numpy is loaded. The small matrices of robust rules take it a hundred times as long with
# many threads on a busy machine, and cores are for trainers.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import ast
import secrets
import sys
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

from atoll.collectives.errors import AtollError, ConfigError
from atoll.collectives.version import VERSION
from atoll.peer.cli.admission import hide_secrets
from atoll.peer.cli.authority import add_authority_verbs
from atoll.peer.cli.checkpoint import add_checkpoint_verbs
from atoll.peer.cli.config import add_config_verb, show_config
from atoll.peer.cli.daemon import INTERRUPTED, add_daemon_verbs
from atoll.peer.cli.doctor import add_doctor_verb
from atoll.peer.cli.lab import add_lab_verb
from atoll.peer.cli.page import add_replay_verb
from atoll.peer.cli.plan import add_plan_verb
from atoll.peer.cli.run import add_run_verb
from atoll.peer.cli.running import add_running_verbs, show_status
from atoll.peer.cli.settings import FILE, Parser, Settings, let_settings
from atoll.peer.cli.verify import add_verify_verb
from atoll.peer.cli.views import add_view_verbs, show_events
from atoll.peer.net.hello import PROTOCOL_MAX
from atoll.peer.net.invite import SECRET_BYTES


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, run the command and return its exit code."""
    if arguments is None:
        hide_secrets()
    command: Callable[[argparse.Namespace], int] | None = None
    try:
        parsed = command_parser().parse_args(arguments)
        for hint in getattr(parsed, "settings", Settings()).hints:
            print(hint, file=sys.stderr)
        command = parsed.command
        return command(parsed)
    except AtollError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        piped = command in (show_status, show_config, show_events, _example)  # ... | head
        if isinstance(error, BrokenPipeError) and piped:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        broken = ConfigError(f"{error.strerror or error} ({error.filename or 'no file named'})")
        print(broken, file=sys.stderr)
        return broken.exit_code


def command_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands and options of ``atoll``."""
    parser = Parser(
        prog="atoll", description="Train one PyTorch model on machines joined by the internet."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="of atoll and its protocol")
    verbs = parser.add_subparsers(required=True, metavar="COMMAND")

    daemons = add_daemon_verbs(verbs)
    run = add_run_verb(verbs, *daemons[:2])
    running = add_running_verbs(verbs)
    views = add_view_verbs(verbs)
    told = add_authority_verbs(verbs)
    doctor = add_doctor_verb(verbs)
    plan = add_plan_verb(verbs)
    config = add_config_verb(verbs, (*daemons, run))
    for verb in (*daemons, run, *running, *views, *told, doctor, plan, config):
        verb.add_argument("--home", metavar="DIR", help="identity and sockets of this peer")
        verb.add_argument(
            "--config", metavar="FILE", help=f"options; default ./{FILE}, or {FILE} in the home"
        )

    secret = verbs.add_parser("secret", help="make a run secret for `atoll up --secret-file`")
    secret.set_defaults(command=_secret)

    example = verbs.add_parser("example", help="print a training script to begin with")
    example.add_argument("name", nargs="?", default="", metavar="NAME", help="none: list them")
    example.set_defaults(command=_example)

    add_checkpoint_verbs(verbs)
    add_verify_verb(verbs)
    add_lab_verb(verbs)
    add_replay_verb(verbs)

    demo = verbs.add_parser("demo", help="three peers on this machine train, one is killed")
    demo.add_argument("--peers", type=int, default=3, metavar="N", help="at first (default 3)")
    demo.add_argument("--rounds", type=int, default=24, metavar="N", help="default 24")
    demo.add_argument("--data", metavar="DIR", help="folder of UTF-8 text to train on")
    demo.add_argument("--no-chaos", action="store_true", help="kill nobody")
    demo.add_argument("--plain", action="store_true", help="lines instead of the live view")
    demo.set_defaults(command=_demo)
    let_settings(parser, apart=config)  # which looks at those of others
    return parser


class _Version(argparse.Action):
    """Print the versions of atoll and its protocol, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(f"atoll {VERSION}, protocol {PROTOCOL_MAX}")
        parser.exit()


def _secret(parsed: argparse.Namespace) -> int:
    print(secrets.token_bytes(SECRET_BYTES).hex())
    return 0


def _example(parsed: argparse.Namespace) -> int:
    """Print the bytes of an example, so that `atoll example lm > train.py` is a copy of it.

    Without a name, lists the examples. Raises ConfigError for an unknown name.
    """
    folder = resources.files("atoll.examples")
    files = {
        file.name.removeprefix("train_").removesuffix(".py").replace("_", "-"): file.read_bytes()
        for file in sorted(folder.iterdir(), key=lambda file: file.name)
        if file.name.startswith("train_")
    }
    if not parsed.name:
        for name, source in files.items():
            purpose = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
            print(f"{name:<10} {purpose}")
        print("To get one: atoll example lm > train.py")
        return 0
    if parsed.name not in files:
        fix = f"there are these: {', '.join(files)}"
        raise ConfigError(f"there is no example {parsed.name}", fix=fix)
    sys.stdout.buffer.write(files[parsed.name])
    sys.stdout.flush()
    return 0


def _demo(parsed: argparse.Namespace) -> int:
    from atoll.peer.demo.demo import DemoOptions, run_demo

    options = DemoOptions(
        peers=parsed.peers,
        rounds=parsed.rounds,
        data=os.path.abspath(parsed.data) if parsed.data is not None else None,
        chaos=not parsed.no_chaos,
        plain=parsed.plain or not sys.stdout.isatty(),
    )
    return run_demo(options)


if __name__ == "__main__":
    sys.exit(main())
