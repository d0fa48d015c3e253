"""Run what the files in deploy/ start, on hosts of their own, with their commands and variables.

The files themselves are checked by `make check-deploy`, with the tools that read them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.netns import Net
from harness.processes import NET_PORT, TRAINER, Process, until
from harness.rooms import ROOT
from harness.supervised import trains

from atoll.collectives.errors import AtollError
from atoll.peer.client.ipc_client import ask
from atoll.peer.supervisor.machine import GRACE_S

DEPLOY = ROOT / "deploy"
BIN = Path(sys.executable).parent
SECRET = "5a" * 32
# Take a name and a list of names, as container runtimes do, and become the command.
AS_HOST = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'
ROUNDS = 3


class Machines:
    """Hosts a, b, c, ... that know each other by the names that a system gives them."""

    def __init__(self, folder: Path, net: Net) -> None:
        self.folder = folder
        self.net = net
        self.processes: list[Process] = []
        self.hosts = folder / "hosts"
        self.hosts.write_text("127.0.0.1 localhost\n")

    def call(self, host: str, *names: str) -> None:
        with self.hosts.open("a") as file:
            file.write(f"{self.net.address(host)} {' '.join(names)}\n")

    def command(self, host: str, *words: str, hostname: str = "") -> list[str]:
        inside = ["unshare", "--mount", "--uts", "sh", "-c", AS_HOST, str(self.hosts)]
        return self.net.command(host, [*inside, hostname or host, *words])

    def start(self, host: str, *words: str, hostname: str = "", **environment: str) -> Process:
        log = self.folder / f"{host}.{len(self.processes)}.log"
        path = f"{BIN}:{os.environ['PATH']}"
        command = self.command(host, *words, hostname=hostname)
        own = {"PATH": path, "HOME": str(self.folder / host)}
        process = Process(command, log, **own | environment)
        self.processes.append(process)
        return process

    def sees(self, home: Path, members: int) -> dict[str, Any]:
        """The status of the daemon at this home once it has so many members in its view."""

        def there() -> dict[str, Any] | None:
            with contextlib.suppress(AtollError):
                status: dict[str, Any] = ask(home, "status")
                found = len(status.get("members", ())) == members and status["view"]
                return status if found else None
            return None

        return until(there, f"{home.name} sees {members} members", *self.processes)


@contextlib.contextmanager
def machines(folder: Path, hosts: str) -> Iterator[Machines]:
    with Net(hosts) as net:
        made = Machines(folder, net)
        try:
            yield made
        except BaseException:
            for process in made.processes:
                print(f"--- {process.log.name}\n{process.text[-3000:]}")
            raise
        finally:
            for process in made.processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # its own session, see Process
            for process in made.processes:
                process.popen.wait(30)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("ATOLL_")]:
        monkeypatch.delenv(name)


def training(rounds: int) -> str:
    return f'exec {sys.executable} {TRAINER} "$ATOLL_HOME" 2e4 {rounds} 0.02 none'


def document(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def entrypoint() -> list[str]:
    found = re.search(r"^ENTRYPOINT (.*)$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    assert found is not None
    words: list[str] = json.loads(found[1])
    return words


def end(processes: list[Process]) -> None:
    """As every one of these systems does."""
    for process in processes:
        process.kill(signal.SIGTERM)
    for process in processes:
        assert process.ends() == 0, process.text


def rounds_of(text: str) -> list[int]:
    """The rounds in which trainers attached, and those that they were told of."""
    return [int(number) for number in re.findall(r'"(?:round|attached)": (\d+)', text)]


# ---------------------------------------------------------------- containers


def test_three_services_of_the_compose_file_are_one_run(tmp_path: Path) -> None:
    services = document("compose.yaml")["services"]
    with machines(tmp_path, "abc") as hosts:

        def start(name: str) -> Process:
            service = services[name]
            environment = service["environment"] | {"ATOLL_HOME": str(tmp_path / name)}
            assert environment["ATOLL_SECRET"].startswith("${ATOLL_SECRET:?")
            environment["ATOLL_SECRET"] = SECRET
            return hosts.start(name, *entrypoint(), *service["command"], **environment)

        def lineages() -> set[str]:
            return {hosts.sees(tmp_path / name, 3)["lineage"] for name in "abc"}

        for name in "abc":
            hosts.call(name, name)
        started = [start(name) for name in "abc"]
        first = lineages()
        assert len(first) == 1
        end(started)
        assert all("its place in run demo is kept" in process.text for process in started)

        # `docker compose down` and `up`: the same run, whoever is there first.
        started = [start(name) for name in "cab"]
        assert lineages() == first
        end(started)
    for name in "abc":  # each training script has the home of its peer
        assert services[f"train-{name}"]["volumes"] == services[name]["volumes"]


def test_pods_found_a_run_and_later_ones_join_it(tmp_path: Path) -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    pods = next(found for found in documents if found["kind"] == "StatefulSet")
    service = next(found for found in documents if found["kind"] == "Service")
    domain = f"{pods['spec']['serviceName']}.default.svc.cluster.local"
    assert service["metadata"]["name"] == pods["spec"]["serviceName"]
    container = pods["spec"]["template"]["spec"]["containers"][0]
    environment = {row["name"]: row["value"] for row in container["env"]}
    (tmp_path / "secret").write_text(SECRET)
    assert Path(environment["ATOLL_SECRET_FILE"]).name == "secret"
    environment["ATOLL_SECRET_FILE"] = str(tmp_path / "secret")
    with machines(tmp_path, "abcd") as hosts:
        names = {host: f"{pods['metadata']['name']}-{n}" for n, host in enumerate("abcd")}
        for host, name in names.items():
            hosts.call(host, f"{name}.{domain}", name)

        def start(host: str) -> Process:
            own = {"HOSTNAME": names[host], "ATOLL_HOME": str(tmp_path / host)}
            words = (*entrypoint(), *container["args"])
            return hosts.start(host, *words, hostname=names[host], **environment | own)

        assert len("abc") == pods["spec"]["replicas"]
        started = [start(host) for host in "cab"]
        for host in "abc":
            hosts.sees(tmp_path / host, 3)
        started.append(start("d"))  # kubectl scale --replicas=4
        status = hosts.sees(tmp_path / "d", 4)
        assert status["run"] == environment["ATOLL_RUN"]
        assert status["address"] == f"{names['d']}.{domain}:{NET_PORT}"
        end(started)


# ---------------------------------------------------------------- systemd


def unit(name: str) -> dict[str, list[str]]:
    """The settings of a unit, each as often as it is there."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / name).read_text().splitlines():
        if (key := line.partition("=")[0]) and re.match(r"[A-Z]\w+=", line):
            found.setdefault(key, []).append(line.partition("=")[2])
    return found


def test_a_unit_that_comes_after_another_one_starts_it() -> None:
    """Or it would begin alone where it is started by itself."""
    for path in sorted(DEPLOY.glob("*.service")):
        found = unit(path.name)
        assert found["After"] == found["Wants"], path.name


def placed(places: Mapping[str, str], text: str) -> str:
    """Return a line of a unit with the folders of this test in place of a machine's."""
    for place, folder in places.items():
        text = text.replace(place, folder)
    return text


def test_the_service_is_ready_alive_and_stops(tmp_path: Path) -> None:
    service = unit("atoll.service")
    assert service["Type"] == ["notify"]
    places = {
        "/opt/atoll/bin": str(BIN),
        "/etc/atoll": str(tmp_path),
        "/var/lib/atoll": str(tmp_path / "home"),
        "%d": str(tmp_path),
    }

    here = partial(placed, places)
    (tmp_path / "secret").write_text(SECRET)
    config = (DEPLOY / "atoll.toml").read_text()
    with machines(tmp_path, "abc") as hosts, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as at:
        at.bind(str(tmp_path / "notify"))
        at.settimeout(120)
        started = []
        for host in "abc":
            hosts.call(host, f"{host}.example.org")
        for host in "abc":
            places["/var/lib/atoll"] = str(tmp_path / host)
            own = config.replace('advertise = "a.', f'advertise = "{host}.')
            (tmp_path / f"{host}.toml").write_text(own)
            (line,) = service["ExecStart"]
            words = shlex.split(here(line).replace("atoll.toml", f"{host}.toml"))
            environment = dict(here(row).split("=", 1) for row in service["Environment"])
            if host == "a":
                environment |= {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "60000"}
            started.append(hosts.start(host, *words, **environment))
        told = {at.recv(100), at.recv(100)}
        assert told == {b"READY=1", b"WATCHDOG=1"}
        for host in "abc":
            hosts.sees(tmp_path / host, 3)
        started[0].kill(signal.SIGTERM)
        while (said := at.recv(100)) != b"STOPPING=1":
            assert said == b"WATCHDOG=1"
        assert started[0].ends() == 0
        end(started[1:])


def test_the_service_with_a_script_hands_in_its_steps_when_it_is_stopped(tmp_path: Path) -> None:
    """`atoll run` alone is told (``KillMode=mixed``), and has the time that it takes at most."""
    service = unit("atoll-run.service")
    assert (service["Type"], service["KillMode"]) == (["exec"], ["mixed"])
    (stop_s,) = service["TimeoutStopSec"]
    assert int(stop_s) > GRACE_S
    _, *words = trains()
    script = f"import runpy, sys\nsys.argv = {words!r}\n"
    runs = f"runpy.run_path({words[0]!r}, run_name='__main__')"
    (tmp_path / "train.py").write_text(script + runs)
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "atoll.toml").write_text('run = "demo"\nlisten = "127.0.0.1:0"\n')
    places = {
        "/opt/atoll/bin": str(BIN),
        "/opt/train": str(tmp_path),
        "/etc/atoll": str(tmp_path),
        "/var/lib/atoll": str(tmp_path / "home"),
        "%d": str(tmp_path),
    }

    here = partial(placed, places)
    (line,) = service["ExecStart"]
    environment = dict(here(row).split("=", 1) for row in service["Environment"])
    process = Process(shlex.split(here(line)), tmp_path / "log", **environment)
    try:
        until(lambda: '"since": 3' in process.text, "local steps", process)
        process.kill(signal.SIGTERM)
        assert process.ends() == 0, process.text
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert re.search(r"SIGTERM: its last \d+ local steps? counted in round", process.text)
    assert "keeps its place" in process.text


# ---------------------------------------------------------------- jobs

# Starts a command on every host with what Slurm tells its task; ends as the worst of them.
SRUN = """#!/usr/bin/env bash
number=0
for name in $({python} -c '
import os
from atoll.peer.cli.launchers import expand_hosts
print(*expand_hosts(os.environ["SLURM_JOB_NODELIST"]))'); do
    SLURM_NODEID=$number SLURM_PROCID=$number SLURM_LOCALID=0 SLURMD_NODENAME=$name \
        SLURM_STEP_NODELIST=$SLURM_JOB_NODELIST {enter} "$@" &
    number=$((number + 1))
done
status=0
for _ in 0 1 2; do wait -n || status=$?; done
exit $status
"""


def srun(hosts: Machines) -> str:
    """A folder with an srun for hosts a, b, c, called n1, n2, n3."""
    enter = hosts.folder / "enter"
    cases = (
        f'n{number}) exec {shlex.join(hosts.command(host))} "$@";;'
        for number, host in enumerate("abc", start=1)
    )
    enter.write_text(
        f"#!/usr/bin/env bash\ncase $SLURMD_NODENAME in\n{chr(10).join(cases)}\nesac\n"
    )
    folder = hosts.folder / "bin"
    folder.mkdir()
    script = SRUN.replace("{enter}", str(enter)).replace("{python}", sys.executable)
    (folder / "srun").write_text(script)
    for path in (enter, folder / "srun"):
        path.chmod(0o755)
    return f"{folder}:{BIN}:{os.environ['PATH']}"


def test_the_batch_script_is_a_run_that_the_next_job_goes_on_with(tmp_path: Path) -> None:
    with machines(tmp_path, "abc") as hosts:
        for number, host in enumerate("abc", start=1):
            hosts.call(host, f"n{number}")
        path = srun(hosts)

        def job(number: str, nodes: str, rounds: int = ROUNDS) -> str:
            environment = {"SLURM_JOB_ID": number, "SLURM_JOB_NODELIST": nodes, "RUN": "mine"}
            command = [str(DEPLOY / "slurm.sh"), "bash", "-c", training(rounds)]
            log = tmp_path / f"job-{number}.log"
            run = Process(command, log, PATH=path, HOME=str(tmp_path), **environment)
            hosts.processes.append(run)
            assert run.ends() == 0, run.text
            return run.text

        first = job("41", "n[1-3]")
        homes = tmp_path / ".local/state/atoll-slurm/mine"
        assert (homes / "secret").stat().st_mode & 0o777 == 0o600
        assert (homes / "secret").read_text().strip() not in first
        assert max(rounds_of(first)) >= ROUNDS
        assert "atoll://" not in first  # an invite has the secret in it, and others may read logs

        # The next job has other machines, and the homes of the first one.
        second = job("42", "n[2-3],n1", 2 * ROUNDS)
        assert min(rounds_of(second)) >= ROUNDS
        assert max(rounds_of(second)) >= 2 * ROUNDS


SLURM_CONF = """
ClusterName=test
SlurmctldHost=ctl
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/ctl.pid
SlurmdPidFile={folder}/%n.pid
NodeName=n[1-3]
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE
"""


@pytest.mark.skipif(
    shutil.which("slurmctld") is None or shutil.which("slurmd") is None,
    reason="Slurm is not installed; the test above has an srun of its own",
)
def test_the_batch_script_is_a_run_under_slurm(tmp_path: Path) -> None:
    config = tmp_path / "slurm.conf"
    config.write_text(SLURM_CONF.replace("{folder}", str(tmp_path)))
    with machines(tmp_path, "abcd") as hosts:
        for number, host in enumerate("abc", start=1):
            hosts.call(host, f"n{number}")
        hosts.call("d", "ctl")
        hosts.start("d", "slurmctld", "-D", "-f", str(config), hostname="ctl")
        for number, host in enumerate("abc", start=1):
            name = f"n{number}"
            hosts.start(host, "slurmd", "-D", "-N", name, "-f", str(config), hostname=name)
        log = tmp_path / "job.log"
        line = ["sbatch", "--wait", f"--output={log}", str(DEPLOY / "slurm.sh")]
        line += ["bash", "-c", training(ROUNDS)]
        environment = {"SLURM_CONF": str(config), "HOME": str(tmp_path)}
        job = hosts.start("d", *line, hostname="ctl", **environment)
        try:
            assert job.ends() == 0, job.text + log.read_text()
        finally:  # what a job has started is no child of ours
            cancel = hosts.command("d", "scancel", "1", hostname="ctl")
            subprocess.run(cancel, env=os.environ | environment, check=False)
        said = log.read_text()
        assert max(rounds_of(said)) >= ROUNDS
        assert said.count("its place in run slurm-1 is kept") == 3


def test_the_task_of_skypilot_is_a_run(tmp_path: Path) -> None:
    task = document("sky.yaml")
    assert task["secrets"] == {"ATOLL_SECRET": None}  # the user's
    with machines(tmp_path, "abc") as hosts:
        job = {
            "SKYPILOT_NODE_IPS": "\n".join(hosts.net.address(host) for host in "abc"),
            "SKYPILOT_TASK_ID": "sky-2026-11-26-15-17-15-563597_cluster_1",
            "ATOLL_SECRET": SECRET,
            "TRAIN": training(ROUNDS),
        }
        assert set(task["envs"]) == {"TRAIN"}
        started = [
            hosts.start(host, "bash", "-c", task["run"], SKYPILOT_NODE_RANK=str(rank), **job)
            for rank, host in enumerate("abc")
        ]
        assert len(started) == task["num_nodes"]
        for process in started:
            assert process.ends() == 0, process.text
            assert max(rounds_of(process.text)) >= ROUNDS
