"""Write what the doctor has found for people and for scripts. Pure."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeAlias

from atoll.collectives.errors import UnfitMachineError
from atoll.collectives.units import count, listed
from atoll.peer.doctor.facts import FAIL, OK, SKIPPED, WARN, Diagnosis, DoctorCheck, Facts

# Of the document that --json prints; a higher one may lack or rename what this one has.
SCHEMA: Final = 1
COLOURS: Final = {OK: "\x1b[32m", WARN: "\x1b[33m", FAIL: "\x1b[31m", SKIPPED: "\x1b[2m"}
PLAIN: Final = "\x1b[0m"
_MARKS: Final = {OK: "ok", WARN: "warn", FAIL: "FAIL", SKIPPED: "-"}
_LABEL: Final = 16  # characters of the longest id, and a space
_INDENT: Final = " " * (2 + 6 + _LABEL)
_WIDTH_MIN: Final = 60  # narrower, every other word would have a line of its own

Diagnoses: TypeAlias = Sequence[tuple[DoctorCheck, Diagnosis]]


def lines(found: Diagnoses, *, width: int, colours: bool) -> Iterator[str]:
    """Yield the lines for people: a group's name, then each check with what to do below it.

    Checks one after the other that were not made for the same reason share one line.
    """
    width = max(width, _WIDTH_MIN)
    for group, in_group in itertools.groupby(found, lambda one: one[0].group):
        yield group
        for diagnosis, alike in itertools.groupby(in_group, lambda one: one[1]):
            ids = [check.id for check, _ in alike]
            yield from _entry(ids, diagnosis, width, colours=colours)


def _entry(ids: list[str], diagnosis: Diagnosis, width: int, *, colours: bool) -> Iterator[str]:
    label, what = ids[0], diagnosis.what
    if len(ids) > 1:
        label, what = "...", f"{what}: {listed(ids)}"
    mark = f"{_MARKS[diagnosis.status]:<6}"
    if colours:
        mark = f"{COLOURS[diagnosis.status]}{mark}{PLAIN}"
    first, *others = _wrapped(what, width)
    yield f"  {mark}{label:<{_LABEL}}{first}"
    yield from (f"{_INDENT}{line}" for line in others)
    if diagnosis.fix:
        yield from (f"{_INDENT}{line}" for line in _wrapped(f"fix: {diagnosis.fix}", width))


def _wrapped(text: str, width: int) -> list[str]:
    """Break a text into lines; words that are longer stay whole: they may be copied."""
    room = width - len(_INDENT)
    return textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]


def document(facts: Facts, found: Diagnoses) -> dict[str, Any]:
    """Return what --json prints; docs/doctor.md has its fields."""
    run = facts.run
    return {
        "schema": SCHEMA,
        "fit": not failures(found),
        "run": run.run if run else None,
        "address": run.address if run else None,
        "checks": [
            {
                "id": check.id,
                "group": check.group,
                "status": diagnosis.status,
                "value": diagnosis.value,
                "what": diagnosis.what,
                "fix": diagnosis.fix,
            }
            for check, diagnosis in found
        ],
    }


def failures(found: Diagnoses) -> list[str]:
    """Return the ids of the checks that keep this machine from training."""
    return [check.id for check, diagnosis in found if diagnosis.status == FAIL]


def verdict(found: Diagnoses) -> str:
    """Return the last line. Raise UnfitMachineError if something keeps this machine from training.

    It names the lines that say so.
    """
    failed = failures(found)
    if failed:
        raise UnfitMachineError(
            f"this machine cannot train: see {listed(failed)} above",
            fix="do what their lines say, and ask again",
        )
    warned = sum(diagnosis.status == WARN for _, diagnosis in found)
    return f"nothing keeps this machine from training ({count(warned, 'warning')})"
