"""A run of four peers as its daemon tells it: status and rows, for tests of what is shown."""

from __future__ import annotations

from typing import Any

NOW = 1_790_000_000.0
NAMES = ("4547bf59", "5d7bfdcb", "7c21d03e", "9a08e6f1")
SLOW = NAMES[2]


def member(name: str, **more: Any) -> dict[str, Any]:
    known = {"role": "replica", "outbound": False, "you": False, "state": "connected"}
    return {"peer": name, **known, "coordinator": False, "rtt_ms": 12.5, **more}


def status(**more: Any) -> dict[str, Any]:
    """Return what the coordinator says."""
    purposes = {"rounds": 9_000_000, "state": 1_000_000, "probes": 50_000, "control": 30_000}
    known: dict[str, Any] = {
        "run": "demo",
        "peer": NAMES[0],
        "role": "replica",
        "uptime_s": 120.0,
        "view": 4,
        "fork": False,
        "synced": True,
        "coordinator": NAMES[0],
        "round": 41,
        "parameters": 120_640,
        "spec": {"sync_every": 20},
        "trainer": {"pid": 7, "metrics": {}, "waiting": False},
        "reach": {"state": "reachable", "outbound": False, "text": ""},
        "members": [
            member(NAMES[0], you=True, coordinator=True, rtt_ms=0.0, round=41),
            member(NAMES[1], outbound=True, round=41),
            member(NAMES[2], round=41),
            member(NAMES[3], role="witness", state="no connection", round=40),
        ],
        "learners": [],
        "bytes": {"sent": purposes, "received": purposes, "sent_again": 0},
        "own_links": {"up_bytes_per_s": 12_500_000, "down_bytes_per_s": 25_000_000},
        "last_commit_unix_s": NOW - 1.5,
        "waiting": f"round 42 waits for the training of {SLOW} (1.5 s so far)",
        "layout": "butterfly, about 0.3 s per round, limited by the link up of 7c21d03e",
        "last_error": "",
        "rounds_spent": {
            "rounds": 40.0,
            "took_s": 160.0,
            "compute_s": 80.0,
            "wait_s": 60.0,
            "exchange_s": 16.0,
        },
        "event_counts": {"dead": 1, "round": 41},
    }
    return known | more


def rows(count: int = 8, slow_s: float = 3.5) -> list[dict[str, Any]]:
    """Return the last rows of three trainers; one takes ``slow_s``, the others 2 s."""
    found = []
    for number in range(42 - count, 42):
        for name in NAMES[:3]:
            compute_s = slow_s if name == SLOW else 2.0
            row = {
                "unix_s": NOW - 1.5 - 4.0 * (41 - number),
                "kind": "row",
                "peer": name,
                "first": number,
                "last": number,
                "took_s": 4.0,
                "compute_s": compute_s,
                "wait_s": slow_s - compute_s,
                "exchange_s": 0.4,
                "sent": [4_000_000, 0, 10_000, 0],
                "received": [4_000_000, 0, 10_000, 0],
                "up": 12_500_000,
                "down": 25_000_000,
                "peers": 3,
                "counted": True,
                "loss": 2.5,
                "tokens": 1e6 * number,
                "memory_bytes": 100 << 20,
            }
            row |= {"predicted_s": 0.3} if name == NAMES[0] else {}
            row |= {"waited_for": [SLOW]} if name != SLOW and slow_s > 2 else {}
            row |= {"heldout_loss": 2.75} if name == NAMES[1] else {}
            row |= {"error": "cannot reach 9a08e6f1"} if name == NAMES[1] else {}
            found.append(row)
    return found
