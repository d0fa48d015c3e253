"""Find out from the environment of a job which machines found a run, and which of them this is.

For ``atoll up --from slurm|k8s|sky``. The job says who is there: the run's name, the addresses of
all founders, and this one's. It does not say the secret. Whatever a cluster makes known about a job
(its number, its name, the names of its machines) others on the cluster can read too, so nothing of
it may become the secret, and the secret is given: in a file or as ATOLL_SECRET.
"""

from __future__ import annotations

import itertools
import re
import socket
from collections.abc import Iterator, Mapping
from typing import Any, Final

from atoll.collectives.errors import ConfigError
from atoll.peer.membership.view import MEMBERS_MAX
from atoll.peer.net.invite import format_address, parse_listen

SLURM, K8S, SKY = LAUNCHERS = ("slurm", "k8s", "sky")
RUN_CHARACTERS_MAX: Final = 64  # of a run's name, see check_run_name

_NOT_OF_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")
_POD = re.compile(r"(.+)-(\d{1,4})")  # of a StatefulSet: its name, and which of its pods
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")

# The value of an option, as text, and in words where it is from.
Found = dict[str, tuple[str, str]]


def from_launcher(given: Mapping[str, Any], environ: Mapping[str, str]) -> Found:
    """Return what the system of the option ``from`` says about this job, by the name of the option.

    ``given``: the options that are given. Raises ConfigError where that system has not started
    this process.
    """
    listen = given.get("listen")
    port = parse_listen(listen or None)[1]
    if not port:
        fix = "leave --listen out, or give it with a port"
        raise ConfigError("--from needs one port that all can dial, and --listen has 0", fix=fix)
    system = given["from"]
    if system == SLURM:
        return _slurm(environ, port)
    if system == SKY:
        return _sky(environ, port)
    return _k8s(environ, port, given.get("expect"))


def _needed(environ: Mapping[str, str], system: str, *names: str) -> str:
    """Return the first of these variables that is set. Raise ConfigError if none is."""
    for name in names:
        if value := environ.get(name, "").strip():
            return value
    what = f"--from {system}: {names[0]} is not set"
    raise ConfigError(what, fix=f"start this inside a job of {_TITLES[system]}; deploy/ has one")


_TITLES = {SLURM: "Slurm", SKY: "SkyPilot", K8S: "Kubernetes"}


def _place(environ: Mapping[str, str], system: str, names: tuple[str, ...], hosts: int) -> int:
    """Return which of the job's machines this is, from 0. Raise ConfigError if it is none."""
    text = _needed(environ, system, *names)
    if not text.isascii() or not text.isdigit() or len(text) > 4 or int(text) >= hosts:
        raise ConfigError(f"--from {system}: {names[0]} is {text[:20]!r}, of {hosts} machines")
    return int(text)


def _founders(hosts: list[str], own: str, port: int, where: str) -> Found:
    """Return the options of those who found a run together; of one alone, nothing but its address.

    Raises ConfigError for more than a run can have.
    """
    if len(hosts) > MEMBERS_MAX:
        raise ConfigError(f"{where} has {len(hosts)} machines, and a run {MEMBERS_MAX} at most")
    found = {"advertise": (format_address(own, port), where)}
    if len(hosts) > 1:
        found["expect"] = str(len(hosts)), where
        found["peers"] = ",".join(format_address(host, port) for host in hosts), where
    return found


# ---------------------------------------------------------------- SkyPilot


def _sky(environ: Mapping[str, str], port: int) -> Found:
    """Return what SkyPilot says: a line with an IP address for each machine, and which is ours."""
    hosts = _needed(environ, SKY, "SKYPILOT_NODE_IPS").split()
    own = hosts[_place(environ, SKY, ("SKYPILOT_NODE_RANK",), len(hosts))]
    # The same after a recovery from preemption, unlike the name of the cluster.
    task = _needed(environ, SKY, "SKYPILOT_TASK_ID")
    run = _NOT_OF_A_NAME.sub("-", task)[:RUN_CHARACTERS_MAX]
    return {"run": (run, "SKYPILOT_TASK_ID")} | _founders(hosts, own, port, "SKYPILOT_NODE_IPS")


# ---------------------------------------------------------------- Kubernetes


def _k8s(environ: Mapping[str, str], port: int, expect: int | None) -> Found:
    """Return what a pod of a StatefulSet can know: its own name, and the domain of its service.

    How many pods there are no pod is told, so ``expect`` says how many found the run; the pods
    after those join it.
    """
    pod = _needed(environ, K8S, "HOSTNAME")
    match = _POD.fullmatch(pod)
    if match is None:
        what = f"--from k8s: this pod is called {pod[:80]}, not NAME-0, NAME-1 and so on"
        raise ConfigError(what, fix="use a StatefulSet, as in deploy/kubernetes.yaml")
    name, number = match[1], int(match[2])
    if expect is None:
        what = "--from k8s: no pod can see how many found the run with it"
        raise ConfigError(what, fix="set ATOLL_EXPECT to the replicas that the set begins with")
    full = socket.getfqdn(pod)
    domain = full.partition(".")[2]
    if not full.startswith(f"{pod}.") or not domain:
        what = f"--from k8s: {pod} has no name that other pods can dial"
        raise ConfigError(what, fix="give the StatefulSet the serviceName of a headless service")
    hosts = [f"{name}-{other}.{domain}" for other in range(min(expect, MEMBERS_MAX))]
    found = _founders(hosts, f"{name}-{number}.{domain}", port, f"the name of pod {pod}")
    return {"run": (_NOT_OF_A_NAME.sub("-", name)[:RUN_CHARACTERS_MAX], "HOSTNAME")} | found


# ---------------------------------------------------------------- Slurm


def _slurm(environ: Mapping[str, str], port: int) -> Found:
    """Return what Slurm says: the nodes of this step or job, and on which of them this task is."""
    listing = _needed(environ, SLURM, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    if (task := environ.get("SLURM_LOCALID", "0")) != "0":
        what = f"--from slurm: this is task {task[:20]} of its node, and a node is one peer"
        raise ConfigError(what, fix="start it with srun --ntasks-per-node=1")
    hosts = expand_hosts(listing)
    own = environ.get("SLURMD_NODENAME", "")
    if own not in hosts:
        own = hosts[_place(environ, SLURM, ("SLURM_NODEID", "SLURM_PROCID"), len(hosts))]
    run = f"slurm-{_NOT_OF_A_NAME.sub('-', _needed(environ, SLURM, 'SLURM_JOB_ID'))}"
    where = "SLURM_STEP_NODELIST" if environ.get("SLURM_STEP_NODELIST") else "SLURM_JOB_NODELIST"
    return {"run": (run[:RUN_CHARACTERS_MAX], "SLURM_JOB_ID")} | _founders(hosts, own, port, where)


def expand_hosts(listing: str) -> list[str]:
    """Return the names in a list of Slurm's: ``n[1-3,7],gpu[01-02]x[0-1],login``.

    Raises ConfigError for what is none, and for more names than a run can have members.
    """
    hosts: list[str] = []
    for item in re.split(r",(?![^\[]*\])", listing):
        fixed, ranges = _BRACKETS.sub("\0", item).split("\0"), _BRACKETS.findall(item)
        if not item or not _is_host("".join(fixed)):
            raise _no_listing(listing)
        numbers = [list(itertools.islice(_numbers(r, listing), MEMBERS_MAX + 1)) for r in ranges]
        chosen = itertools.product(*numbers)
        hosts += itertools.islice(
            ("".join(_woven(fixed, parts)) for parts in chosen), MEMBERS_MAX + 1 - len(hosts)
        )
        if len(hosts) > MEMBERS_MAX:
            what = f"{listing[:80]!r} has more names than a run has members, {MEMBERS_MAX}"
            raise ConfigError(what, fix="start peers on fewer nodes")
    return hosts


def _woven(fixed: list[str], parts: tuple[str, ...]) -> Iterator[str]:
    for text, part in itertools.zip_longest(fixed, parts, fillvalue=""):
        yield text + part


def _numbers(ranges: str, listing: str) -> Iterator[str]:
    """Generate the numbers in one pair of brackets, with the zeros that they have in front."""
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _no_listing(listing)
        first, last = match[1], match[2] or match[1]
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}d}"


def _is_host(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9._-]*", text) is not None


def _no_listing(listing: str) -> ConfigError:
    what = f"{listing[:80]!r} is no list of nodes as Slurm writes them"
    return ConfigError(what, fix="it looks like this: node[01-03,07],gpu5")
