"""Write the events of a long run that never was, to try on them what shows events.

Arguments: folder, peers, hours, seconds of a round. Rows and files are as daemons make them; the
run ends now. One peer trains longer than the others, one has a slow link, one is killed at half
time and comes back after ten minutes; a member coordinates until it is killed.
"""

from __future__ import annotations

import math
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

from atoll.peer.telemetry.event_file import EVENTS_FILE, EventFile
from atoll.peer.telemetry.rows import LINKS_EVERY_S, LinkSeen, RoundRow, brief, plain_row

PARAMETERS = 25e6
STEPS, TOKENS = 100, 100 * 8192
AWAY_S = 600.0
HELDOUT_ABOVE = 0.5  # by which a held-out loss is above that of training


def write(
    folder: Path, peers: int, hours: float, round_s: float, seed: int = 0, heldout_every: int = 0
) -> list[str]:
    """Write the files; the names of the peers.

    ``heldout_every``: rounds from one held-out loss of each to the next; 0: nobody tells any.
    """
    drawn = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    ids = [drawn.randbytes(32) for _ in range(peers)]
    names = [brief(peer).hex() for peer in ids]
    file = EventFile(folder / EVENTS_FILE, print)
    end_s, count = time.time(), int(hours * 3600 / round_s)
    begun_s = end_s - count * round_s
    dies, back = begun_s + hours * 1800, begun_s + hours * 1800 + min(AWAY_S, hours * 600)

    def event(unix_s: float, kind: str, text: str) -> None:
        file.append({"unix_s": unix_s, "kind": kind, "text": text})

    event(begun_s, "view", f"view 1 of {peers} members, coordinator {names[0]}")
    event(
        begun_s + 1, "plan", "butterfly, about 1.1 s per round, limited by the link of " + names[1]
    )
    for number in range(1, count + 1):
        over_s = begun_s + number * round_s
        away = dies < over_s < back
        if dies < over_s <= dies + round_s:
            event(dies, "link", f"connection to {names[2]} ended: the other side is gone")
            event(dies + 1.3, "view", f"view 2 of {peers - 1} members, {names[2]} is gone")
        if back < over_s <= back + round_s:
            event(back, "view", f"view 3 of {peers} members, {names[2]} is back")
        if number % 720 == 0:
            event(over_s, "checkpoint", f"round {number} is written")
        here = [i for i in range(peers) if i != 2 or not away]
        who = f"{len(here)} peers  {round_s:.1f} s"
        event(over_s, "round", f"round {number}  {who}  4.1 MB sent")
        for i in here:
            told = row(drawn, ids, i, number, over_s, round_s, len(here))
            if heldout_every and number % heldout_every == 0:
                told = replace(told, heldout_loss=(told.loss or 0.0) + HELDOUT_ABOVE)
            file.append(plain_row(ids[i], told))
    file.close()
    return names


def row(
    drawn: random.Random, ids: list[bytes], i: int, number: int, over_s: float, round_s: float,
    here: int,
) -> RoundRow:  # fmt: skip
    exchange_s = (0.2 + 0.05 * drawn.random()) * round_s
    slowest_s = round_s - exchange_s
    compute_s = slowest_s if i == 3 else slowest_s * (0.7 + 0.1 * drawn.random())
    links = tuple(
        LinkSeen(
            brief(peer),
            0.02 + 0.01 * abs(i - k),
            (1.2e6 if 1 in (i, k) else 2e7) * (0.8 + 0.4 * drawn.random()),
            0.002 if 1 in (i, k) else 0.0,
        )
        for k, peer in enumerate(ids)
        if k != i
    )
    return RoundRow(
        first=number,
        last=number,
        unix_s=over_s + 0.01 * drawn.random(),
        took_s=round_s,
        compute_s=compute_s,
        wait_s=max(0.0, slowest_s - compute_s),
        exchange_s=exchange_s,
        waited_for=(brief(ids[3]),) if i != 3 else (),
        sent=(int(2 * PARAMETERS), 0, 1000, 40_000),
        received=(int(2 * PARAMETERS), 0, 1000, 40_000),
        up=12_000_000,
        down=11_000_000,
        peers=here,
        counted=True,
        loss=2.0 + 3 * math.exp(-number / 800) + 0.05 * drawn.random() + 0.01 * i,
        tokens=float(TOKENS * number),
        steps=float(STEPS * number),
        memory_bytes=int(400e6 + 20e6 * drawn.random() + 5e6 * i),
        predicted_s=1.1,
        phase="coordinator" if i == 0 else "member",
        links=links if number % max(1, round(LINKS_EVERY_S / round_s)) == 0 else (),
    )


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
