"""Carry out the commands that show a run: ``atoll top``, ``events`` and ``trace``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any, Final

from atoll.collectives.errors import ConfigError
from atoll.collectives.units import count, listed
from atoll.peer.net.identity import default_home

TAIL: Final = 10  # events that `--follow` shows first, as `tail -f` does
OVERLAP_S: Final = 2.0  # what is appended meanwhile is read twice, and shown once
TRACE_ROUNDS: Final = 20


def add_view_verbs(verbs: Any) -> tuple[argparse.ArgumentParser, ...]:
    """Add these commands to the sub-commands of ``atoll``, and return their parsers."""
    top = verbs.add_parser("top", help="live: who trains how fast, who is slow and why, when done")
    top.add_argument(
        "--until-rounds", type=int, default=0, metavar="N", help="when is round N done?"
    )
    top.add_argument(
        "--until-tokens", type=float, default=0.0, metavar="T", help="when are T tokens seen? 1e9"
    )
    top.add_argument("--once", action="store_true", help="one screen as plain text, for scripts")
    top.set_defaults(command=_top)

    events = verbs.add_parser(
        "events", help="what happened, when: from the file of a home, also of a dead daemon"
    )
    events.add_argument("file", nargs="?", metavar="FILE", help="events.jsonl, or a home")
    events.add_argument("--follow", action="store_true", help="go on with what happens from now on")
    events.add_argument("--since", metavar="TIME", help="10m (ago), 14:03, or 2026-11-26T14:03")
    events.add_argument("--until", metavar="TIME", help="likewise")
    events.add_argument(
        "--kind",
        default="",
        metavar="K,K",
        help="kinds or types of events, view,disk say; row: what each peer has told of a round",
    )
    events.add_argument("--json", action="store_true", help="the lines as they are in the file")
    events.set_defaults(command=show_events)

    trace = verbs.add_parser("trace", help="the last rounds as a Chrome trace, for ui.perfetto.dev")
    trace.add_argument("file", nargs="?", metavar="FILE", help="events.jsonl, or a home")
    trace.add_argument(
        "--rounds", type=int, default=TRACE_ROUNDS, metavar="N", help=f"default {TRACE_ROUNDS}"
    )
    trace.add_argument("-o", "--output", default="trace.json", metavar="FILE", help="trace.json")
    trace.set_defaults(command=_trace)
    return top, events, trace


def _top(parsed: argparse.Namespace) -> int:
    from atoll.peer.cli.top import print_once, show_live
    from atoll.peer.telemetry.overview import RunGoal

    goal = RunGoal(max(0, parsed.until_rounds), max(0.0, parsed.until_tokens))
    if parsed.once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return print_once(parsed.home, goal)
    return show_live(parsed.home, goal)


def show_events(parsed: argparse.Namespace) -> int:
    from atoll.peer.telemetry.event_file import follow, read
    from atoll.peer.telemetry.event_lines import chosen, moment

    path, now_s, kinds = _path(parsed), time.time(), _kinds(parsed.kind)
    since_s = moment(parsed.since, now_s) if parsed.since else 0.0
    until_s = moment(parsed.until, now_s) if parsed.until else float("inf")
    if not parsed.follow:
        for event in chosen(read(path, since_s), kinds, since_s, until_s):
            _show(event, as_json=parsed.json)
        return 0
    later = follow(path)
    next(later)  # it is at the end of the file from here on
    before = list(chosen(read(path, since_s), kinds, since_s, until_s))
    for event in before if parsed.since else before[-TAIL:]:
        _show(event, as_json=parsed.json)
    shown = [event for event in before if event["unix_s"] >= now_s - OVERLAP_S]
    for appended in later:
        if time.time() > until_s:
            return 0
        new = [appended] if appended is not None and appended not in shown else []
        for each in chosen(new, kinds, since_s, until_s):
            _show(each, as_json=parsed.json)
    return 0


def _show(event: dict[str, Any], *, as_json: bool) -> None:
    from atoll.peer.telemetry.event_lines import event_line

    print(json.dumps(event) if as_json else event_line(event), flush=True)


def _kinds(given: str) -> set[str]:
    """Return the kinds and types that are asked for. Raise ConfigError for one that is none."""
    from atoll.peer.daemon.event_log import EVENT_TYPES
    from atoll.peer.telemetry.event_lines import ROW

    asked = {kind for kind in given.split(",") if kind}
    types = sorted(set(EVENT_TYPES.values()))
    unknown = asked - {*EVENT_TYPES, *types, ROW}
    if unknown:
        fix = f"types are {listed(types)}; or row, or what `atoll events` shows in its third column"
        raise ConfigError(f"no kind of events is called {listed(sorted(unknown))}", fix=fix)
    return asked


def _path(parsed: argparse.Namespace) -> Path:
    """Return the file or home that is meant. Raise ConfigError if it has no events."""
    from atoll.peer.telemetry.event_file import files_of

    path = Path(parsed.file) if parsed.file else default_home(parsed.home)
    if not files_of(path):
        fix = "name a home (--home DIR) of a daemon that has run, or a file: atoll events FILE"
        raise ConfigError(f"there are no events at {path}", fix=fix)
    return path


def _trace(parsed: argparse.Namespace) -> int:
    """Write the trace. Raise ConfigError if there is nothing to be drawn."""
    from atoll.peer.telemetry.event_file import read
    from atoll.peer.telemetry.trace import chrome_trace

    if parsed.rounds < 1:
        raise ConfigError(f"--rounds {parsed.rounds}", fix="draw at least one round")
    path = _path(parsed)
    trace = chrome_trace(read(path), parsed.rounds)
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    if not slices:
        raise ConfigError(f"no round is in the events at {path}", fix="draw it after a round")
    Path(parsed.output).write_text(json.dumps(trace), "utf-8")
    peers = len({event["pid"] for event in slices})
    print(f"{parsed.output}: {count(peers, 'peer')}; open it at https://ui.perfetto.dev")
    return 0
