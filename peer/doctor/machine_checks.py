"""Judge this machine: each check takes the facts and returns what is said of one thing. Pure."""

from __future__ import annotations

import re
from typing import Final

from atoll.collectives.units import duration, listed, memory, size
from atoll.peer.doctor.facts import (
    Diagnosis,
    Facts,
    FolderFacts,
    fail,
    ok,
    skipped,
    warn,
)
from atoll.peer.net.address_kind import (
    CARRIER,
    LINK_LOCAL,
    LOOPBACK,
    PRIVATE,
    PUBLIC,
    WORDS,
    address_kind,
)

# A witness that is asked holds no state, and cannot tell this from a run before its first round.
NO_MODEL: Final = "the member that was asked knows of no model"
# A daemon writes its identity, its life's number, its run and a certificate: some KiB each.
HOME_BYTES_MIN: Final = 1 << 20
# Evidence against a peer is kept in the home, and one piece of it has up to 80 MiB.
HOME_BYTES_GOOD: Final = 128 << 20
# A daemon keeps its last two checkpoints, and writes the next one before it removes the older ...
CHECKPOINTS_KEPT: Final = 2
# ... and the rounds since the older one, ten for each (peer/durable/__init__.py).
ROUNDS_KEPT: Final = 20
# What the writing of a disk is reckoned by, beside its maker's rating: a round in half a minute.
ROUND_S: Final = 30
DAY_S: Final = 86400
# It keeps 40 descriptors for itself and has a dozen open: below this nobody can connect.
FILES_MIN: Final = 64
# A link and up to 16 streams with each of 50 peers.
FILES_GOOD: Final = 1024
# What a daemon takes beside the run's state, at most (optim/footprint.py).
DAEMON_BASE_BYTES: Final = 64 << 20
# A parameter in training: itself, its gradient, and what AdamW keeps of it, in float32.
TRAINING_BYTES: Final = 16


def program(facts: Facts) -> Diagnosis:
    """Name the versions of atoll, its protocol and Python."""
    machine = facts.machine
    what = f"atoll {machine.program} (protocol {machine.protocol}), Python {machine.python}"
    return ok(what, {"atoll": machine.program, "protocol": machine.protocol})


def kernels(facts: Facts) -> Diagnosis:
    """Tell whether the arithmetic of rounds runs in C or, ten times as slow, in numpy."""
    machine = facts.machine
    if machine.numpy_reason:
        what = f"codecs run in numpy, a tenth as fast: {machine.numpy_reason}"
        return warn(what, "install a C compiler, and then atoll again", "numpy")
    return ok(f"codecs run in C, with instructions of {machine.kernels}", machine.kernels)


def home(facts: Facts) -> Diagnosis:
    """Tell whether a daemon can keep its identity in the home folder."""
    folder = facts.machine.home
    if folder.problem:
        return fail(folder.problem, folder.fix or "choose a writable folder with --home")
    there = "can be written" if folder.disk == folder.path else "can be made"
    if folder.daemon:
        there = f"is in use by a running daemon: `atoll status --home {folder.path}` shows it"
    return ok(f"{folder.path} {there}", folder.path)


def home_room(facts: Facts) -> Diagnosis:
    """Tell whether the disk of the home has room for what a daemon keeps there."""
    folder = facts.machine.home
    free = folder.free_bytes
    what = f"{size(free)} are free in {folder.disk}"
    if free < HOME_BYTES_MIN:
        fix = "make room, or choose a folder on another disk with --home"
        return fail(f"{what}, a daemon needs {size(HOME_BYTES_MIN)}", fix, free)
    if free < HOME_BYTES_GOOD:
        fix = f"keep {size(HOME_BYTES_GOOD)} free: evidence against a peer is stored there"
        return warn(what, fix, free)
    return ok(what, free)


def rounds_room(facts: Facts) -> Diagnosis:
    """Tell whether rounds that survive a restart fit in the home, and what the disk writes a day.

    R is taken as int8 has it: a byte for each parameter.
    """
    folder, needs = facts.machine.home, facts.needs
    if needs is None:
        return skipped("the size of the model is not known: --params N says it")
    takes = CHECKPOINTS_KEPT * needs.checkpoint_bytes + ROUNDS_KEPT * needs.elements
    round_bytes = needs.elements + needs.checkpoint_bytes * CHECKPOINTS_KEPT // ROUNDS_KEPT
    day_bytes = round_bytes * DAY_S // ROUND_S
    what = (
        f"rounds that survive a restart take {size(takes)} in the home; a round every"
        f" {ROUND_S} s writes {size(day_bytes)} a day"
    )
    value = {"takes_bytes": takes, "day_bytes": day_bytes}
    free = folder.free_bytes + folder.taken_bytes
    if free < takes:
        fix = (
            "make room, or choose a folder on another disk with --home: else the peer remembers"
            " its votes only, and fetches the state from others after a restart"
        )
        return warn(f"{what}; {size(free)} are free", fix, value)
    return ok(what, value)


def checkpoint_room(facts: Facts) -> Diagnosis:
    """Tell whether checkpoints of the run's model fit on the disk that they are to be on."""
    folder, needs = facts.machine.checkpoint, facts.needs
    if folder is None:
        return skipped("no --checkpoint DIR is given")
    if folder.problem:
        return warn(folder.problem, "choose a writable folder with --checkpoint", 0)
    room = folder.free_bytes + folder.taken_bytes
    what = f"{_room_for_checkpoints(folder)} in {folder.disk}"
    if needs is None or not needs.checkpoint_bytes:  # a member may leave it out
        return ok(f"{what}; what one takes is not known (--params N)", room)
    what += f", one takes {size(needs.checkpoint_bytes)}"
    fits = room // needs.checkpoint_bytes
    if not fits:
        fix = "make room, or name another folder; without checkpoints the run would go on"
        return warn(f"{what}: none can be written", fix, room)
    if fits <= CHECKPOINTS_KEPT:
        fix = f"make room for {CHECKPOINTS_KEPT + 1}, so that the last ones are there to go back to"
        return warn(f"{what}: {fits} of {CHECKPOINTS_KEPT + 1} fit", fix, room)
    return ok(what, room)


def _room_for_checkpoints(folder: FolderFacts) -> str:
    free = f"{size(folder.free_bytes)} are free"
    taken = f" beside {size(folder.taken_bytes)} of checkpoints" if folder.taken_bytes else ""
    return f"{free}{taken}"


def listen(facts: Facts) -> Diagnosis:
    """Tell whether the port that a daemon would listen on is free."""
    machine = facts.machine
    if not machine.port_problem:
        is_any = machine.listen.rpartition(":")[2] == "0"
        what = (
            "port 0: each start takes one that is free" if is_any else f"{machine.listen} is free"
        )
        return ok(what, machine.listen)
    if machine.home.daemon:
        return ok(f"{machine.listen} is taken, and this home's daemon runs", machine.listen)
    return fail(machine.port_problem, machine.port_fix, machine.listen)


def files(facts: Facts) -> Diagnosis:
    """Tell how many files and connections a daemon may have open."""
    machine = facts.machine
    hard = machine.files_hard  # a daemon raises its own limit to this one
    what = f"a process may have {hard:,} files and connections open"
    fix = f"raise the hard limit (ulimit -Hn, or your container's) to {FILES_GOOD:,}"
    if hard < FILES_MIN:
        return fail(f"{what}: too few for a daemon", fix, hard)
    if hard < FILES_GOOD:
        return warn(f"{what}: few for a run of many peers", fix, hard)
    return ok(what, hard)


# ---------------------------------------------------------------- memory and GPU


def memory_room(facts: Facts) -> Diagnosis:
    """Tell whether the daemon's copy of the run's model fits into free memory, and training."""
    machine, needs = facts.machine, facts.needs
    free = available_bytes(machine.meminfo, machine.memory_limit_bytes, machine.memory_used_bytes)
    if free is None:
        return skipped("this system does not tell how much memory is free")
    what = f"{memory(free)} are free"
    if needs is None:
        why = NO_MODEL if facts.run and facts.run.answer else "no run was asked"
        return ok(f"{what}; what a model takes is not known: {why} (--params N)", free)
    daemon = needs.daemon_bytes + DAEMON_BASE_BYTES
    training = 0 if machine.gpu.names else TRAINING_BYTES * needs.elements
    of = f"{parameters(needs.elements)} ({needs.source})"
    what += f"; for {of} the daemon takes {memory(daemon)}"
    if free < daemon:
        return fail(what, "train on a machine with more memory, or `join --witness` here", free)
    if training:
        what += f" and training with AdamW on the CPU {memory(training)}"
    if free < daemon + training:
        return warn(what, "train on a GPU, or with an optimizer that keeps less", free)
    return ok(what, free)


def available_bytes(meminfo: str, limit_bytes: int, used_bytes: int) -> int | None:
    """Return the memory that is free, by /proc/meminfo and the limit of the control group.

    ``limit_bytes`` is 0 where there is no such limit. None if the text does not say.
    """
    found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    if found is None:
        return None
    free = 1024 * int(found[1])
    return min(free, max(0, limit_bytes - used_bytes)) if limit_bytes else free


def gpu(facts: Facts) -> Diagnosis:
    """Tell which GPUs torch sees, and whether the model's training fits into the largest."""
    found, needs = facts.machine.gpu, facts.needs
    if found.problem:
        fix = "install torch: pip install torch (pytorch.org has the line for your GPU)"
        return fail(f"torch cannot be used: {found.problem}", fix)
    value = list(found.names)
    if not found.names:
        fix = "for a GPU, install its driver and the torch build that is made for it"
        return warn(f"torch {found.torch} sees no GPU: training runs on the CPU", fix, value)
    largest = max(found.memory_bytes, default=0)
    names = listed(
        [f"{n} ({memory(b)})" for n, b in zip(found.names, found.memory_bytes, strict=True)]
    )
    what = f"torch {found.torch} sees {names}"
    if needs is not None and largest < TRAINING_BYTES * needs.elements:
        takes = memory(TRAINING_BYTES * needs.elements)
        fix = "use bfloat16, a smaller optimizer, or several GPUs for one trainer"
        return warn(f"{what}; in float32 with AdamW the model takes {takes}", fix, value)
    return ok(what, value)


# ---------------------------------------------------------------- the kernel


def memfd(facts: Facts) -> Diagnosis:
    """Tell whether the kernel shares memory without a file: daemon and trainer use that."""
    if facts.machine.has_memfd:
        return ok("daemon and trainer share memory without a file", True)
    fix = "use Linux 3.17 or newer; until then keep the folder for temporary files large and fast"
    return warn("this system has no memfd: shared memory lies in temporary files", fix, False)


def aes(facts: Facts) -> Diagnosis:
    """Tell whether the processor has instructions for AES, which all data streams use."""
    found = has_aes(facts.machine.cpuinfo)
    if found is None:
        return skipped("this system does not tell what its processor can do")
    if found:
        return ok("the processor has AES instructions: encryption costs little", True)
    fix = "none is needed; in a trusted network --plain-streams does without encryption"
    return warn("the processor has no AES instructions: a core encrypts about 1 Gbit/s", fix, False)


def has_aes(cpuinfo: str) -> bool | None:
    """Return whether the text of /proc/cpuinfo names AES instructions; None if it names none."""
    lines = re.findall(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    return all("aes" in line.split() for line in lines) if lines else None


def bbr(facts: Facts) -> Diagnosis:
    """Tell whether data streams can use BBR, which keeps its rate on lossy paths."""
    return bbr_line(facts.machine.controls, facts.machine.bbr_refusal)


def bbr_line(controls: str, refusal: str) -> Diagnosis:
    """Judge by the text of tcp_available_congestion_control and what a socket was told."""
    if not refusal:
        return ok("streams over lossy paths can use BBR", True)
    known = f" (it has {listed(controls.split())})" if controls.split() else ""
    what = f"{refusal}{known}: where packets are lost, streams keep a tenth of their rate"
    return warn(what, "load it: sudo modprobe tcp_bbr; in a container, on its host", False)


# ---------------------------------------------------------------- addresses


def proxy(facts: Facts) -> Diagnosis:
    """Tell whether the SOCKS5 proxy lets this machine in."""
    found = facts.machine.proxy
    if found is None:
        return skipped("no --proxy is given: this machine dials others directly")
    if found.problem:
        return fail(found.problem, found.fix, found.name)
    what = f"{found.name} answered in {duration(found.took_s)}, and lets this machine in"
    return ok(what, found.name)


def address(facts: Facts) -> Diagnosis:
    """Tell of what kind this machine's address is, and who can dial such a one."""
    own = facts.machine.address
    answer = facts.run.answer if facts.run is not None else None
    port = facts.machine.listen.rpartition(":")[2]
    return address_line(own, answer.observed if answer is not None else "", port)


def address_line(own: str, observed: str, port: str) -> Diagnosis:
    """Judge an address by its kind, and by the one that a member has ``observed``, if any."""
    if not own:
        fix = "connect this machine to a network"
        return warn("this machine has no route to other machines", fix, {"address": ""})
    kind, shown = address_kind(own), _kind_in_words(own)
    value = {"address": own, "kind": shown, "observed": observed}
    forward = f"forward TCP port {port} on the router, then"
    if kind == CARRIER:
        what = f"{own} is of carrier NAT: nobody outside can dial it"
        fix = "none is needed: it trains as an outbound peer; over IPv6 it could be dialled"
        return warn(what, fix, value)
    if observed and observed != own and address_kind(observed) == PUBLIC:
        what = f"behind NAT: {own} here ({shown}), {observed} outside"
        return warn(what, f"to be dialled, {forward} --advertise {observed}:{port}", value)
    if kind == PRIVATE and not observed:
        what = f"{own} is private: only machines of its own network can dial it"
        return warn(what, f"for others, {forward} --advertise PUBLIC_ADDRESS:{port}", value)
    if observed == own and kind != PUBLIC:
        return ok(f"{own} ({shown}) is what the run's member sees, too", value)
    if kind in (LOOPBACK, LINK_LOCAL):
        fix = "connect this machine to a network, or name its address with --advertise"
        return warn(f"{own} is {WORDS[kind]}: others cannot dial it", fix, value)
    seen = f", and members see {observed}" if observed and observed != own else ""
    return ok(f"{own} is {shown}{seen}", value)


def _kind_in_words(own: str) -> str:
    kind = address_kind(own)
    if kind == PUBLIC:
        return "a global IPv6 address" if ":" in own else "a global IPv4 address"
    return kind


def parameters(elements: int) -> str:
    """Return a number of parameters for people: "1.2 B parameters", "100 M parameters"."""
    for unit, step in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if elements >= 0.9995 * step:  # three digits of it are 1
            return f"{elements / step:.3g} {unit} parameters"
    return f"{elements} parameters"
