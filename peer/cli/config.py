"""Carry out ``atoll config``: what every option is, and where that comes from."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

from atoll.collectives.errors import ConfigError
from atoll.peer.cli.checkpoint import EVERY_DEFAULT
from atoll.peer.cli.settings import DEFAULT, HIDDEN, Parser, Setting
from atoll.peer.membership.view import DEFAULT_RULES
from atoll.peer.net.identity import default_home
from atoll.peer.net.invite import DEFAULT_PORT

# What holds where nobody has said anything, and a daemon has to know that nobody has.
OPEN: Final = {
    "listen": f":{DEFAULT_PORT}",
    "every": str(EVERY_DEFAULT),
    "policy": DEFAULT_RULES.policy,
    "on-lost": DEFAULT_RULES.on_lost,
    "on-fork": DEFAULT_RULES.on_fork,
}


def add_config_verb(verbs: Any, daemons: Sequence[Parser]) -> Parser:
    """Add ``config`` to the sub-commands of ``atoll``, and return its parser.

    ``daemons``: the commands whose options it shows if none is named.
    """
    config: Parser = verbs.add_parser(
        "config",
        help="print every option, and where its value comes from",
        epilog="First a flag counts, then ATOLL_* in the environment, then the file, then what"
        " --from finds, then the default. docs/operations.md has more.",
    )
    config.add_argument("--json", action="store_true", help="for scripts")
    config.add_argument(
        "line",
        nargs=argparse.REMAINDER,
        metavar="COMMAND",
        help="up, for example, with its options if you like; none: all that start a peer",
    )
    config.set_defaults(command=show_config, verbs=verbs, daemons=daemons)
    return config


def show_config(parsed: argparse.Namespace) -> int:
    """Print what a line would be started with. Raises ConfigError for an unknown command."""
    verbs = parsed.verbs
    flags = {"--home": parsed.home, "--config": parsed.config}
    given = [word for flag, value in flags.items() if value is not None for word in (flag, value)]
    if parsed.line:
        command, *words = parsed.line
        parser = verbs.choices.get(command)
        if parser is None or not parser.known:
            fix = f"these have: {', '.join(name for name, p in verbs.choices.items() if p.known)}"
            raise ConfigError(f"{command[:80]} has no options in a file", fix=fix)
        found = [parser.settings_of([*given, *words])]
    else:
        found = [daemon.settings_of(given) for daemon in parsed.daemons]
    for hint in found[0].hints:
        print(hint, file=sys.stderr)
    options = {name: setting for part in found for name, setting in part.options.items()}
    if options["home"].origin == DEFAULT:
        options["home"] = Setting(str(default_home()))
    path = found[0].path
    if parsed.json:
        document = {name: _document(setting) for name, setting in sorted(options.items())}
        print(json.dumps({"file": str(path) if path else None, "options": document}))
        return 0
    print(f"file: {path or 'none'}")
    for line in _lines(options):
        print(line)
    return 0


def _document(setting: Setting) -> dict[str, Any]:
    value = None if setting.secret else setting.value
    shown = {"value": value, "origin": setting.origin, "where": setting.where}
    return shown | {"secret": True} if setting.secret else shown


def _lines(options: dict[str, Setting]) -> Iterator[str]:
    """Generate a line for each option; first those that somebody has set."""
    rows = [
        (name, _shown(name, setting), _where(setting))
        for name, setting in sorted(options.items(), key=lambda o: (o[1].origin == DEFAULT, o[0]))
    ]
    names, values = (max(len(row[column]) for row in rows) for column in (0, 1))
    for name, value, where in rows:
        yield f"{name:<{names}}  {value:<{values}}  {where}"


def _shown(name: str, setting: Setting) -> str:
    if setting.secret:
        return HIDDEN
    if setting.value is None:
        return OPEN.get(name, "-")
    return str(setting.value).lower() if isinstance(setting.value, bool) else str(setting.value)


def _where(setting: Setting) -> str:
    if setting.origin == DEFAULT:
        return DEFAULT
    return f"{setting.origin} {setting.where}"
