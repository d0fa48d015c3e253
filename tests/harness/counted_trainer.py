"""A trainer each of whose submissions can be seen in the run's parameters, and how often.

Its n-th local step moves one element by 1, an element of its own. So at the end the element holds
the step's share in the mean of the round that it was in; twice that, if it was in two; 0, if in
none. Arguments: home, which trainer (0, 1, ...), min_trainers, a file with the round after which it
ends. Prints a JSON line for each outcome, and at the end its elements of the run.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

import atoll
from atoll.collectives.errors import AtollError
from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.run_spec import RunSpec

STEPS_MAX = 4096


def main() -> int:
    home, number, min_trainers, end = (
        sys.argv[1],
        int(sys.argv[2]),
        int(sys.argv[3]),
        Path(sys.argv[4]),
    )
    spec = RunSpec(
        method="co2",
        sync_every=1,
        outer="heavy_ball",
        outer_lr=1.0,
        outer_momentum=0.0,
        submits="deltas",
        codec="float32",
        min_trainers=min_trainers,
    )
    session = atoll.connect(home)
    manifest = Manifest.of([Parameter("w", (3 * STEPS_MAX,))])
    session.channel.attach(spec, manifest, lambda flat: flat.fill(0.0))
    run = np.zeros(3 * STEPS_MAX, np.float32)
    session.channel.pull(lambda flat: np.copyto(run, flat))
    delta, carried, step = np.zeros_like(run), [], 0
    while step < STEPS_MAX and not (end.exists() and session.round >= int(end.read_text() or 1e9)):
        time.sleep(0.01)
        session.channel.check()
        delta[number * STEPS_MAX + step] = -1.0
        carried.append(step)
        step += 1
        session.channel.submit(lambda out, lo: np.copyto(out, delta[lo : lo + out.size]), 1.0)
        outcome = session.channel.wait()
        line = {"steps": carried, "kind": outcome.kind, "share": outcome.share}
        print(json.dumps({**line, "round": outcome.round}), flush=True)
        if outcome.kind != "missed":
            session.channel.pull(lambda flat: np.copyto(run, flat))
            delta.fill(0.0)
            carried = []
    session.channel.pull(lambda flat: np.copyto(run, flat))
    own = run[number * STEPS_MAX : (number + 1) * STEPS_MAX]
    print(json.dumps({"own": own[:step].tolist(), "at": session.round}), flush=True)
    session.close()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AtollError as error:
        print(json.dumps({"error": error.code, "what": error.what}), flush=True)
        sys.exit(error.exit_code)
