"""The text for Prometheus: what it holds, that it parses, and that its labels are bounded."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from typing import Any

import pytest
from harness.rooms import ROOT
from harness.telemetry_samples import NAMES, rows, status
from prometheus_client.parser import text_string_to_metric_families

from atoll.peer.telemetry.metrics import metrics_text

PROMTOOL = os.environ.get("PROMTOOL") or shutil.which("promtool")
FOLDER = ROOT / "deploy" / "prometheus"
RULES = FOLDER / "alerts.yml"


def values(text: bytes) -> dict[tuple[str, tuple[str, ...]], float]:
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_what_is_known_is_there_in_base_units() -> None:
    found = values(metrics_text(status(), rows()))
    assert found["atoll_round", ()] == 41
    assert found["atoll_rounds_total", ()] == 40
    assert found["atoll_round_seconds_sum", ()] == 160.0
    assert found["atoll_round_phase_seconds_total", ("wait",)] == 60.0
    assert found["atoll_sent_bytes_total", ("rounds",)] == 9_000_000
    assert found["atoll_events_total", ("dead", "view")] == 1
    assert found["atoll_trainer_attached", ()] == 1
    assert found["atoll_reachable", ()] == 1
    assert found["atoll_peer_round_trip_seconds", (NAMES[1],)] == pytest.approx(0.0125)
    assert found["atoll_peer_connected", (NAMES[3],)] == 0
    assert found["atoll_peer_round_phase_seconds", (NAMES[2], "compute")] == 3.5
    assert found["atoll_peer_loss", (NAMES[1],)] == 2.5
    assert found["atoll_peer_heldout_loss", (NAMES[1],)] == 2.75
    assert ("atoll_peer_heldout_loss", (NAMES[2],)) not in found


def test_peers_that_are_in_no_view_make_no_labels() -> None:
    strangers = [row | {"peer": f"{n:08x}"} for n, row in enumerate(rows())]
    assert values(metrics_text(status(), strangers)) == values(metrics_text(status(), []))


def test_a_witness_lacks_no_trainer() -> None:
    found = values(metrics_text(status(role="witness", trainer=None), []))
    assert ("atoll_trainer_attached", ()) not in found


def test_alerts_and_the_dashboard_ask_for_what_there_is() -> None:
    there = {name for name, _ in values(metrics_text(status(), rows()))}
    queries = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    assert len(queries) == 13
    asked = set(re.findall(r"atoll_\w+", RULES.read_text("utf-8") + " ".join(queries)))
    assert asked
    assert not asked - there


def dashboard() -> dict[str, Any]:
    found = json.loads((FOLDER / "grafana.json").read_text("utf-8"))
    assert isinstance(found, dict)
    return found


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
def test_promtool_finds_nothing() -> None:
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, "check", "metrics"],
        input=metrics_text(status(), rows()),
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")
    for what, file in (("rules", RULES), ("config", FOLDER / "prometheus.yml")):
        done = subprocess.run([PROMTOOL, "check", what, file], capture_output=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
