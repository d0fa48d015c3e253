"""The smallest script with the same failure.

Lines of the script go first (halves, quarters, single lines), then hosts from the end, then
options towards the plain ones. A change stays if the same invariant still breaks.
"""

from __future__ import annotations

from dataclasses import replace

from simulation.options import Options, draw
from simulation.run import Outcome, run_script
from simulation.script import Fault, draw_script

__all__ = ["shrink", "shrink_script"]

PLAIN: tuple[tuple[str, object], ...] = (
    ("jitter", 0.0),
    ("loss", 0.0),
    ("double", 0.0),
    ("clock_drift", 0.0),
    ("fragments", 1),
    ("in_flight", 1),
    ("witnesses", 0),
    ("network", "streams"),
    ("delay_s", 0.005),
    ("log_rounds", 16),
)
RUNS_MAX = 400


def shrink(seed: int) -> tuple[Options, list[Fault], Outcome]:
    options = draw(seed)
    return shrink_script(options, draw_script(options))


def shrink_script(options: Options, script: list[Fault]) -> tuple[Options, list[Fault], Outcome]:
    wanted = run_script(options, script).invariant
    if not wanted:
        return options, script, run_script(options, script, tracing=True)
    runs = 0

    def fails(options: Options, script: list[Fault]) -> bool:
        nonlocal runs
        runs += 1
        return runs <= RUNS_MAX and run_script(options, script).invariant == wanted

    size = max(1, len(script) // 2)
    while size:
        at = 0
        while at < len(script):
            fewer = script[:at] + script[at + size :]
            if fails(options, fewer):
                script = fewer
            else:
                at += size
        size //= 2
    while options.hosts > 1 and fails(replace(options, hosts=options.hosts - 1), script):
        options = replace(options, hosts=options.hosts - 1)
    for name, plain in PLAIN:
        simpler = replace(options, **{name: plain})  # type: ignore[arg-type]
        if simpler != options and fails(simpler, script):
            options = simpler
    return options, script, run_script(options, script, tracing=True)
