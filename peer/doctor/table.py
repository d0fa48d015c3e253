"""List every line of `atoll doctor` in the order in which it is printed.

Ids are stable: scripts read them with ``--json``, and docs/doctor.md has a row for each.
"""

from __future__ import annotations

from typing import Final

from atoll.peer.doctor import machine_checks as machine
from atoll.peer.doctor import run_checks as run
from atoll.peer.doctor.facts import Diagnosis, DoctorCheck, Facts

MACHINE: Final = "this machine"
RUN: Final = "the run"

CHECKS: Final = (
    # Can a peer live here at all?
    DoctorCheck("program", MACHINE, machine.program),
    DoctorCheck("kernels", MACHINE, machine.kernels),
    DoctorCheck("home", MACHINE, machine.home),
    DoctorCheck("home-room", MACHINE, machine.home_room),
    DoctorCheck("rounds-room", MACHINE, machine.rounds_room),
    DoctorCheck("checkpoint-room", MACHINE, machine.checkpoint_room),
    DoctorCheck("listen", MACHINE, machine.listen),
    DoctorCheck("files", MACHINE, machine.files),
    # Does the model fit, and how fast will it be?
    DoctorCheck("memory", MACHINE, machine.memory_room),
    DoctorCheck("gpu", MACHINE, machine.gpu),
    DoctorCheck("memfd", MACHINE, machine.memfd),
    DoctorCheck("aes", MACHINE, machine.aes),
    DoctorCheck("bbr", MACHINE, machine.bbr),
    DoctorCheck("address", MACHINE, machine.address),
    DoctorCheck("proxy", MACHINE, machine.proxy),
    # The way to the member of the invite, stage by stage: the first that fails ends it.
    DoctorCheck("invite", RUN, run.invite),
    DoctorCheck("name", RUN, run.name),
    DoctorCheck("tcp", RUN, run.tcp),
    DoctorCheck("tls", RUN, run.tls),
    DoctorCheck("secret", RUN, run.secret),
    DoctorCheck("identity", RUN, run.identity),
    DoctorCheck("version", RUN, run.version),
    DoctorCheck("admission", RUN, run.admission),
    # What it says, and how far away it is.
    DoctorCheck("model", RUN, run.model),
    DoctorCheck("clock", RUN, run.clock),
    DoctorCheck("round-trip", RUN, run.round_trip),
    DoctorCheck("dial-back", RUN, run.dial_back),
    DoctorCheck("rate-up", RUN, run.rate_up),
    DoctorCheck("rate-down", RUN, run.rate_down),
)


def diagnose(facts: Facts) -> list[tuple[DoctorCheck, Diagnosis]]:
    """Return what each check says of these facts, in the order of the table.

    Those about a run are left out where no invite was given.
    """
    return [
        (check, check.decide(facts))
        for check in CHECKS
        if check.group == MACHINE or facts.run is not None
    ]
