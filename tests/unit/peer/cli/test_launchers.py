"""`atoll up --from slurm|k8s|sky`: who founds the run with whom, as the job's environment says."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from atoll.collectives.errors import ConfigError
from atoll.peer.cli import main
from atoll.peer.cli.launchers import expand_hosts, from_launcher
from atoll.peer.daemon.options import DaemonOptions
from atoll.peer.net.identity import Home, RunRecord

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NODELIST": "n[01-02],gpu7",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
SKY = {
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_TASK_ID": "sky-2026-11-26-15-17-15-563597_my cluster_1",
}


def values(system: str, environ: dict[str, str], **given: Any) -> dict[str, str]:
    found = from_launcher(given | {"from": system}, environ)
    return {name: value for name, (value, _) in found.items()}


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What names resolve to in full."""
    known: dict[str, str] = {}
    monkeypatch.setattr(socket, "getfqdn", lambda name: known.get(name, name))
    return known


@pytest.mark.parametrize(
    ("listing", "names"),
    [
        # What `scontrol show hostnames` of Slurm 22.05 makes of them.
        ("n1", "n1"),
        ("n[1-3,7],gpu5", "n1 n2 n3 n7 gpu5"),
        ("a[08-12]", "a08 a09 a10 a11 a12"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[009-011],login", "n009 n010 n011 login"),
        ("r[1-2]n[01-02]", "r1n01 r1n02 r2n01 r2n02"),
        ("gpu[01-02]x[0-1]", "gpu01x0 gpu01x1 gpu02x0 gpu02x1"),
        # Of other versions.
        ("x[1,3-4]-ib.site", "x1-ib.site x3-ib.site x4-ib.site"),
    ],
)
def test_lists_of_nodes(listing: str, names: str) -> None:
    assert expand_hosts(listing) == names.split()


@pytest.mark.parametrize(
    "wrong", ["", "n[", "n[1", "n1]", "n[a-b]", "n[1-]", "n1,,n2", "a b", "n[]"]
)
def test_what_is_no_list_of_nodes(wrong: str) -> None:
    with pytest.raises(ConfigError, match="no list of nodes"):
        expand_hosts(wrong)


@pytest.mark.parametrize("many", ["n[1-999999999]", "n[0-99]x[0-99]", "n[1-1000],m[1-1000]"])
def test_more_nodes_than_a_run_has_members(many: str) -> None:
    with pytest.raises(ConfigError, match="more names than a run has members"):
        expand_hosts(many)


def test_slurm() -> None:
    peers = "n01:29600,n02:29600,gpu7:29600"
    expected = {"run": "slurm-4711", "expect": "3", "peers": peers, "advertise": "n02:29600"}
    assert values("slurm", SLURM) == expected
    # In a step of fewer nodes, and with another port.
    step = SLURM | {"SLURM_STEP_NODELIST": "n02,gpu7", "SLURM_NODEID": "1"}
    found = values("slurm", step, listen="0.0.0.0:7000")
    assert (found["peers"], found["advertise"]) == ("n02:7000,gpu7:7000", "gpu7:7000")
    # Where the name of this node is known it counts.
    assert values("slurm", SLURM | {"SLURMD_NODENAME": "gpu7"})["advertise"] == "gpu7:29600"
    # One node founds its run alone.
    alone = SLURM | {"SLURM_JOB_NODELIST": "n1", "SLURM_NODEID": "0"}
    assert values("slurm", alone) == {"run": "slurm-4711", "advertise": "n1:29600"}


def test_sky() -> None:
    assert values("sky", SKY) == {
        "run": "sky-2026-11-26-15-17-15-563597_my-cluster_1",
        "expect": "2",
        "peers": "10.0.0.1:29600,10.0.0.2:29600",
        "advertise": "10.0.0.2:29600",
    }


def test_kubernetes(names: dict[str, str]) -> None:
    names["atoll-1"] = "atoll-1.peers.ml.svc.cluster.local"
    found = values("k8s", {"HOSTNAME": "atoll-1"}, expect=2)
    at = "peers.ml.svc.cluster.local:29600"
    assert found == {
        "run": "atoll",
        "expect": "2",
        "peers": f"atoll-0.{at},atoll-1.{at}",
        "advertise": f"atoll-1.{at}",
    }


@pytest.mark.parametrize(
    ("system", "environ", "given", "says"),
    [
        ("slurm", {}, {}, "SLURM_STEP_NODELIST is not set"),
        ("slurm", SLURM | {"SLURM_NODEID": "3"}, {}, "SLURM_NODEID is '3', of 3 machines"),
        ("slurm", SLURM | {"SLURM_LOCALID": "2"}, {}, "task 2 of its node, and a node is one peer"),
        ("slurm", SLURM, {"listen": "0.0.0.0:0"}, "needs one port that all can dial"),
        ("sky", {}, {}, "SKYPILOT_NODE_IPS is not set"),
        ("sky", SKY | {"SKYPILOT_NODE_RANK": "x"}, {}, "SKYPILOT_NODE_RANK is 'x', of 2 machines"),
        ("k8s", {"HOSTNAME": "web-5d8f"}, {"expect": 2}, "not NAME-0, NAME-1"),
        ("k8s", {"HOSTNAME": "atoll-0"}, {}, "set ATOLL_EXPECT|no pod can see"),
        ("k8s", {"HOSTNAME": "atoll-0"}, {"expect": 2}, "no name that other pods can dial"),
    ],
)
def test_elsewhere_it_is_an_error(
    system: str,
    environ: dict[str, str],
    given: dict[str, Any],
    says: str,
    names: dict[str, str],
) -> None:
    with pytest.raises(ConfigError, match=says):
        values(system, environ, **given)


# ---------------------------------------------------------------- what is started


def up(home: Path, *more: str) -> int:
    return main.main(["up", "--from", "sky", "--home", str(home), *more])


def test_a_job_founds_its_run_with_a_secret_that_is_given(
    tmp_path: Path,
    started: list[DaemonOptions],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing that the system tells everybody is made into one."""
    for name, value in SKY.items():
        monkeypatch.setenv(name, value)
    assert up(tmp_path / "home") == 2
    said = capsys.readouterr().err
    assert "the founders need one secret in common" in said
    assert "ATOLL_SECRET" in said
    monkeypatch.setenv("ATOLL_SECRET", "22" * 32)
    assert up(tmp_path / "home", "--run", "mine", "--policy", "majority") == 0
    (options,) = started
    assert (options.run, options.secret) == ("mine", b"\x22" * 32)
    assert options.founders == ("10.0.0.1:29600", "10.0.0.2:29600")
    assert options.advertise == "10.0.0.2:29600"


def test_who_comes_back_elsewhere_asks_where_the_job_is_now(
    tmp_path: Path, started: list[DaemonOptions], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that is started again has other machines, and homes on a disk that they share."""
    with Home.open(tmp_path / "home") as home:
        home.save_run(RunRecord("mine", b"\x22" * 32, ("10.9.0.1:29600", "10.9.0.2:29600")))
    for name, value in SKY.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ATOLL_SECRET", "22" * 32)
    assert up(tmp_path / "home", "--run", "mine") == 0
    assert started[0].contacts == ("10.9.0.1:29600", "10.0.0.1:29600")
    assert (started[0].founders, started[0].returns) == ((), True)


def test_a_pod_after_those_that_founded_the_run_joins_them(
    tmp_path: Path,
    started: list[DaemonOptions],
    names: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names["atoll-2"] = "atoll-2.peers.ml.svc.cluster.local"
    monkeypatch.setenv("HOSTNAME", "atoll-2")
    monkeypatch.setenv("ATOLL_EXPECT", "2")
    monkeypatch.setenv("ATOLL_SECRET", "22" * 32)
    assert main.main(["up", "--from", "k8s", "--home", str(tmp_path / "home")]) == 0
    (options,) = started
    assert (options.founders, options.found, options.returns) == ((), False, False)
    at = "peers.ml.svc.cluster.local:29600"
    assert options.contacts == (f"atoll-0.{at}", f"atoll-1.{at}")
