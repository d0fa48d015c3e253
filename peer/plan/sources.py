"""Read what is to be planned: a list of hosts that somebody wrote, or what a run has measured.

A list is TOML or CSV (of commas, or of semicolons with decimal commas, as a spreadsheet writes it
where those are usual). Both have a host with its name, ``up_mbit`` and ``down_mbit`` (Mbit/s),
``rtt_ms`` (the usual round trip to the others) and, where hosts differ, ``step_s``,
``tokens_per_step``, ``price_hour`` and ``price_gb``. TOML may also say what is between two hosts::

    [[host]]                                   name,up_mbit,down_mbit,rtt_ms,step_s
    name = "home"                              home,20,200,40,1.5
    up_mbit = 20                               lab,500,500,10,0.8
    ...
    [[link]]
    between = ["home", "lab"]
    mbit = 15
    rtt_ms = 70

The round trip of two hosts is the mean of theirs. No input or output here: texts, status and rows
are given.
"""

from __future__ import annotations

import csv
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final

from atoll.collectives.errors import ConfigError
from atoll.collectives.planning.network_model import Network, measured
from atoll.peer.links.link_table import LOCAL_BYTES_PER_S, LinkTable
from atoll.peer.links.messages import LinkRow
from atoll.peer.plan.model import FRAGMENTS, WAITING_METHODS, RunSketch, TrainingHost, Variant
from atoll.peer.telemetry.findings import grown

FILE_BYTES_MAX: Final = 1 << 20  # a thousand hosts and some links; more is another file
NUMBERS: Final = (
    *("up_mbit", "down_mbit", "rtt_ms", "step_s"),
    *("tokens_per_step", "price_hour", "price_gb"),
)
NEEDED: Final = ("name", "up_mbit", "down_mbit", "rtt_ms")
LINK_FIELDS: Final = ("between", "mbit", "rtt_ms")
BYTES_PER_MBIT: Final = 1e6 / 8
ROWS_JUDGED: Final = 20  # of each peer: enough that one late round decides nothing
_NO_RATE: Final = "a link has more than 0 Mbit/s"
STEPS: Final = re.compile("[0-9]{1,9}")  # more of them in a round no method has
EXAMPLE: Final = "name,up_mbit,down_mbit,rtt_ms,step_s"


@dataclass(frozen=True, slots=True)
class HostDefaults:
    """Hold what holds for each host of which nothing else is known; None: nothing does."""

    step_s: float | None = None
    tokens_per_step: float | None = None
    price_hour: float | None = None
    price_gb: float | None = None


def sketch_of_list(
    text: str, parameters: int, defaults: HostDefaults, *, is_csv: bool
) -> RunSketch:
    """Return the run that a list describes; the first host founds it. Raises ConfigError."""
    rows, links = (_csv(text), []) if is_csv else _toml(text)
    if not rows:
        raise ConfigError("the list has no hosts", fix="write one: docs/choosing.md has an example")
    for row in rows:
        _check(row)
    names = [str(row["name"]) for row in rows]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ConfigError(f"host {twice[0]} is in the list twice", fix="give each host a name")
    hosts = tuple(_host(row, defaults) for row in rows)
    return RunSketch(hosts, _network(rows, names, links), parameters)


def _csv(text: str) -> list[dict[str, Any]]:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    by_semicolons = ";" in "".join(lines[:1])
    reader = csv.DictReader(lines, delimiter=";" if by_semicolons else ",", skipinitialspace=True)
    found = []
    for row in reader:
        if None in row or None in row.values():
            what = f"a line of the list has not as many values as its head: {row}"
            raise ConfigError(what, fix=f"the head says what they are, for example {EXAMPLE}")
        filled = {(name or "").strip(): value.strip() for name, value in row.items() if value}
        if by_semicolons:
            filled |= {n: v.replace(",", ".") for n, v in filled.items() if n in NUMBERS}
        found.append(filled)
    return found


def _toml(text: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the list of hosts is no TOML: {error}") from error
    unknown = found.keys() - {"host", "link"}
    tables = found.get("host", []), found.get("link", [])
    for table in tables:
        if not isinstance(table, list) or not all(isinstance(each, dict) for each in table):
            raise ConfigError("hosts are [[host]] tables, links [[link]] tables")
    if unknown:
        raise ConfigError(f"the list has {sorted(unknown)[0]!r}, which is neither host nor link")
    return tables


def _check(row: dict[str, Any]) -> None:
    """Turn the figures of a host into numbers. Raises ConfigError, which names the host."""
    name = row.get("name", "a host without a name")
    for field in sorted(row.keys() - {"name", *NUMBERS}):  # first: what is missing may be misspelt
        what = f"{name}: {field!r} is none of {', '.join(NUMBERS)}"
        raise ConfigError(what, fix=f"each host has {EXAMPLE}")
    for field in NEEDED:
        if field not in row:
            raise ConfigError(f"{name}: {field} is missing", fix=f"each host has {EXAMPLE}")
    for field in row.keys() - {"name"}:
        row[field] = _number(row[field], f"{name}: {field}")
    if row["up_mbit"] <= 0 or row["down_mbit"] <= 0:
        raise ConfigError(f"{name}: {_NO_RATE}")


def _number(value: Any, what: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{what} is {value!r}, no number") from None
    if not 0 <= number < 1e12:
        raise ConfigError(f"{what} is {number}, which cannot be")
    return number


def _host(row: Mapping[str, Any], defaults: HostDefaults) -> TrainingHost:
    def known(field: str) -> float:
        return float(row.get(field, getattr(defaults, field) or 0.0))

    return TrainingHost(
        name=str(row["name"]),
        step_s=known("step_s"),
        tokens_per_step=known("tokens_per_step"),
        price_hour=known("price_hour"),
        price_gb=known("price_gb"),
    )


def _network(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], links: Iterable[Mapping[str, Any]]
) -> Network:
    trips = [float(row["rtt_ms"]) for row in rows]
    everyone = range(len(rows))
    latency_s = {(i, j): (trips[i] + trips[j]) / 4e3 for i in everyone for j in everyone if i != j}
    pair: dict[tuple[int, int], float] = {}
    for link in links:
        one, other = _ends(link, names)
        for way in ((one, other), (other, one)):
            if "rtt_ms" in link:
                latency_s[way] = _number(link["rtt_ms"], "rtt_ms of a link") / 2e3
            if "mbit" in link:
                mbit = _number(link["mbit"], "mbit of a link")
                if mbit <= 0:
                    raise ConfigError(f"{names[one]} to {names[other]}: {_NO_RATE}")
                pair[way] = mbit * BYTES_PER_MBIT
    return measured(
        len(rows),
        up=[float(row["up_mbit"]) * BYTES_PER_MBIT for row in rows],
        down=[float(row["down_mbit"]) * BYTES_PER_MBIT for row in rows],
        pair=pair,
        latency_s=latency_s,
    )


def _ends(link: Mapping[str, Any], names: Sequence[str]) -> tuple[int, int]:
    ends: Any = link.get("between")
    known = isinstance(ends, list) and len(ends) == 2 and all(end in names for end in ends)
    if not known or ends[0] == ends[1] or link.keys() - set(LINK_FIELDS):
        fix = 'for example: between = ["a", "b"], mbit = 20, rtt_ms = 70'
        raise ConfigError(f"a link is between two hosts of the list, not {dict(link)}", fix=fix)
    return names.index(ends[0]), names.index(ends[1])


# ---------------------------------------------------------------- what a run has measured

Row = Mapping[str, Any]


def sketch_of_run(
    status: Mapping[str, Any], rows: Sequence[Row], defaults: HostDefaults, parameters: int = 0
) -> RunSketch:
    """Return the run as it is: who trained in the last rounds, how fast, and over which links.

    ``rows``: of the event file, the oldest first. Options count for more than what was measured.
    Raises ConfigError where nothing was measured yet.
    """
    of: dict[str, list[Row]] = {}
    for row in rows:
        of.setdefault(str(row["peer"]), []).append(row)
    members = [str(member["peer"]) for member in status["members"]]
    names = sorted(name for name in members if any(map(_is_trained, of.get(name, ()))))
    if len(names) < 2:
        fix = "wait for some rounds with training scripts, or write a list: --links FILE"
        raise ConfigError("fewer than two peers have trained in the rounds of this run", fix=fix)
    spec = status["spec"] or {}
    hosts = tuple(_measured_host(name, of[name], spec, defaults) for name in names)
    lead = str(status["coordinator"])
    return RunSketch(
        hosts,
        _measured_network(names, of, _on_this_machine(status)),
        parameters or int(status["parameters"]),
        fragments=fragments if (fragments := int(spec.get("fragments", 1))) > 1 else FRAGMENTS,
        coordinator=names.index(lead) if lead in names else 0,
    )


def _measured_host(
    name: str, rows: Sequence[Row], spec: Mapping[str, Any], defaults: HostDefaults
) -> TrainingHost:
    counted = [row for row in rows if _is_trained(row)][-ROWS_JUDGED:]
    rounds = [_rounds(row) for row in counted]
    usual = float(spec.get("sync_every", 1)) / int(spec.get("fragments", 1))
    steps = _each_round(counted, "steps") or usual
    each_s = median(row.get("compute_s", 0.0) / n for row, n in zip(counted, rounds, strict=True))
    if spec.get("method", WAITING_METHODS[0]) not in WAITING_METHODS:  # all of the time it trains
        each_s = (counted[-1]["unix_s"] - counted[0]["unix_s"]) / max(1, sum(rounds[1:]))
    step_s = defaults.step_s or each_s / steps
    if step_s <= 0:
        fix = "say --step-s: this run's training time was not measured"
        raise ConfigError(f"{name}: how long a step takes is not known", fix=fix)
    return TrainingHost(
        name=name,
        step_s=step_s,
        tokens_per_step=defaults.tokens_per_step or _each_round(counted, "tokens") / steps,
        price_hour=defaults.price_hour or 0.0,
        price_gb=defaults.price_gb or 0.0,
    )


def _is_trained(row: Row) -> bool:
    """Return whether a peer has trained for the rounds of a row; the first has only parameters."""
    return bool(row.get("counted")) and int(row["first"]) > 1


def _on_this_machine(status: Mapping[str, Any]) -> set[str]:
    """Return the peers on the machine of whoever was asked: between them nobody measures."""
    return {str(m["peer"]) for m in status["members"] if m["you"] or m.get("local")}


def _rounds(row: Row) -> int:
    return int(row["last"]) - int(row["first"]) + 1


def _each_round(rows: Sequence[Row], name: str) -> float:
    """Return by how much a trainer's total grows in a round; 0 if no two rows tell it."""
    told = [row for row in rows if name in row]
    return grown(told, name) / max(1, sum(map(_rounds, told[1:])))


def _measured_network(
    names: Sequence[str], of: Mapping[str, Sequence[Row]], together: set[str]
) -> Network:
    """Return the links of these peers as the planner of rounds would see them.

    ``together``: those on one machine.
    """
    table, ids = LinkTable(), {name: name.encode() for name in names}
    known = False
    for name in names:
        last: Row = next((row for row in reversed(of[name]) if row.get("links")), {})
        links = [link for link in last.get("links", ()) if link["peer"] in ids]
        out = tuple(
            LOCAL_BYTES_PER_S if {name, link["peer"]} <= together else link["out"] for link in links
        )
        known = known or any(out)
        table.put(
            ids[name],
            LinkRow(
                peers=tuple(ids[link["peer"]] for link in links),
                rtt_s=tuple(link["rtt_s"] for link in links),
                out=out,
                loss=tuple(link["loss"] for link in links),
                up=of[name][-1].get("up"),
                down=of[name][-1].get("down"),
            ),
        )
    if not known:
        fix = "wait a minute until peers have told of their links, or write a list: --links FILE"
        raise ConfigError("no link of this run has been measured yet", fix=fix)
    return table.network([ids[name] for name in names])


# ---------------------------------------------------------------- candidates


def parse_variants(text: str) -> tuple[Variant, ...]:
    """Read ``diloco:30:int8,streaming:100:fp4_e3m0``. Raises ConfigError."""
    found = []
    for word in filter(None, (part.strip() for part in text.split(","))):
        method, _, rest = word.partition(":")
        steps, _, codec = rest.partition(":")
        if not STEPS.fullmatch(steps) or not codec:
            fix = "for example: --candidates diloco:30:int8,streaming:100:fp4_e3m0"
            raise ConfigError(f"{word!r} is not METHOD:STEPS:CODEC", fix=fix)
        found.append(Variant(method, int(steps), codec))
    return tuple(found)


def with_fragments(run: RunSketch, fragments: int) -> RunSketch:
    """Return the run with so many fragments of StreamingDiLoCo; 0: as it is."""
    return replace(run, fragments=fragments) if fragments else run
