"""Follow one committed round through all processes, and count what a trainer waits for.

How many functions it runs through is reported (`make figures`), and bound by no test.
"""

from __future__ import annotations

from pathlib import Path

from harness.round_trace import trace_round

WAITS_MAX = 4  # submit, pull and what the run's clock publishes; an outcome is no question


def test_a_round_can_be_followed_through_all_processes(tmp_path: Path) -> None:
    traces = trace_round(tmp_path)
    functions = {role: {n.split(":")[1] for n in trace.in_round} for role, trace in traces.items()}
    assert "Coordinator.on_ready" in functions["coordinator"]
    assert "Coordinator.on_ready" not in functions["member"]
    for role in ("coordinator", "member"):
        assert {"MemberState.on_begin", "MemberState.committed"} <= functions[role], role
    assert "Method._after_step" in functions["trainer"]
    assert 0 < traces["trainer"].asks <= WAITS_MAX
    assert traces["member"].asks == traces["coordinator"].asks == 0
