"""Lines of `atoll doctor` for what cannot be brought about here, from the text that a kernel would
give, or a member's answer; with the exit code and what --json prints."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll.collectives.errors import UnfitMachineError
from atoll.peer.daemon.reachability import DialledBy
from atoll.peer.doctor.examine import needs_of
from atoll.peer.doctor.facts import (
    Facts,
    FolderFacts,
    GpuFacts,
    MachineFacts,
    MemberAnswer,
    RateFacts,
    RunFacts,
    Trouble,
)
from atoll.peer.doctor.machine_checks import address_line, available_bytes, has_aes, parameters
from atoll.peer.doctor.machine_probe import gpus_of, memory_limit
from atoll.peer.doctor.report import document, lines, verdict
from atoll.peer.doctor.table import CHECKS, diagnose
from atoll.peer.membership.view import short
from atoll.peer.net.reach_messages import REFUSED, ReachAnswer

UNFIT = 3
ASKED, OTHER = b"a" * 32, b"b" * 32
X86 = "processor\t: 0\nflags\t\t: fpu sse2 {}avx2\n\nprocessor\t: 1\nflags\t\t: fpu sse2 {}avx2\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd {}crc32\n"

MACHINE = MachineFacts(
    program="0.2.0",
    protocol=3,
    python="3.11.7",
    kernels="avx2",
    numpy_reason="",
    home=FolderFacts("/home/ada/atoll", "/home/ada", 10 << 30),
    checkpoint=None,
    listen="0.0.0.0:29600",
    port_problem="",
    port_fix="",
    files_soft=1024,
    files_hard=4096,
    meminfo="MemTotal: 16000000 kB\nMemAvailable:    8000000 kB\n",
    memory_limit_bytes=0,
    memory_used_bytes=0,
    cpuinfo=X86.format("aes ", "aes "),
    controls="reno cubic bbr\n",
    bbr_refusal="",
    has_memfd=True,
    address="203.0.113.7",
    gpu=GpuFacts("2.13", ("Big GPU",), (80 << 30,)),
)
ANSWER = MemberAnswer(
    program="0.2.0",
    protocol=3,
    observed="203.0.113.7",
    rtt_s=0.05,
    clock_offset_s=0.01,
    clock_error_s=0.025,
    elements=100_000_000,
    state_bytes=800_000_000,
    daemon_bytes=3_000_000_000,
    method="diloco",
    codec="int8",
)
RUN = RunFacts(
    run="demo",
    host="run.example.org",
    address="run.example.org:29600",
    tag="00112233",
    found=("198.51.100.4", "2001:db8::4"),
    answer=ANSWER,
    dialled=DialledBy(
        ASKED, "203.0.113.7", (ReachAnswer(ASKED, "ok", 0.1), ReachAnswer(OTHER, "ok", 0.1))
    ),
    up=RateFacts(4_000_000, 0.5),
    down=RateFacts(4_000_000, 0.5),
)


def told(machine: MachineFacts = MACHINE, run: RunFacts | None = RUN) -> tuple[int, dict[str, Any]]:
    """The exit code, and the lines of --json by their ids."""
    facts = Facts(machine, run, needs_of(run, 0))
    found = diagnose(facts)
    printed = json.loads(json.dumps(document(facts, found)))
    try:
        verdict(found)
    except UnfitMachineError as error:
        code = error.exit_code
    else:
        code = 0
    assert printed["fit"] == (code == 0)
    assert list(lines(found, width=80, colours=True))
    return code, {check["id"]: check for check in printed["checks"]}


def test_a_machine_that_is_well_and_a_run_that_can_be_reached() -> None:
    code, found = told()
    assert code == 0
    assert {check["status"] for check in found.values()} == {"ok", "skipped"}
    assert [name for name, check in found.items() if check["status"] == "skipped"] == [
        "checkpoint-room",
        "proxy",
    ]
    assert list(found) == [check.id for check in CHECKS]
    assert "12.5 s" not in found["rate-down"]["what"]
    assert "joining loads the state in about 100 s" in found["rate-down"]["what"]


# ---------------------------------------------------------------- this machine


def test_a_kernel_without_bbr() -> None:
    machine = replace(MACHINE, controls="reno cubic\n", bbr_refusal="this kernel has no bbr")
    code, found = told(machine)
    assert (code, found["bbr"]["status"], found["bbr"]["value"]) == (0, "warn", False)
    assert "this kernel has no bbr (it has reno and cubic)" in found["bbr"]["what"]
    assert "modprobe tcp_bbr" in found["bbr"]["fix"]


def test_a_system_without_memfd() -> None:
    code, found = told(replace(MACHINE, has_memfd=False))
    assert (code, found["memfd"]["status"], found["memfd"]["value"]) == (0, "warn", False)


@pytest.mark.parametrize("text", [X86, ARM], ids=["x86", "arm"])
def test_aes_by_the_text_of_proc_cpuinfo(text: str) -> None:
    with_aes, without = text.format(*["aes "] * 2), text.format(*["vaes_not "] * 2)
    assert has_aes(with_aes) is True
    assert has_aes(without) is False
    code, found = told(replace(MACHINE, cpuinfo=without))
    assert (code, found["aes"]["status"], found["aes"]["value"]) == (0, "warn", False)


def test_a_system_that_does_not_tell() -> None:
    code, found = told(replace(MACHINE, cpuinfo="", meminfo=""))
    assert (code, found["aes"]["status"], found["memory"]["status"]) == (0, "skipped", "skipped")


def test_memory_that_a_control_group_limits(tmp_path: Path) -> None:
    assert available_bytes("MemAvailable: 1000 kB", 0, 0) == 1_024_000
    assert available_bytes("MemAvailable: 1000 kB", 500_000, 100_000) == 400_000
    code, found = told(replace(MACHINE, memory_limit_bytes=2 << 30, memory_used_bytes=1 << 30))
    assert (code, found["memory"]["status"], found["memory"]["value"]) == (UNFIT, "fail", 1 << 30)

    assert memory_limit(tmp_path) == (0, 0)
    for name, text in (
        ("memory.max", "max\n"),
        ("memory.current", "5000000\n"),
        ("memory.stat", "anon 1\ninactive_file 1000000\n"),
    ):
        (tmp_path / name).write_text(text)
    assert memory_limit(tmp_path) == (0, 0), "version 2 without a limit"
    (tmp_path / "memory.max").write_text("8000000\n")
    assert memory_limit(tmp_path) == (8_000_000, 4_000_000)


def test_memory_that_control_groups_of_version_1_limit(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(f"{2**63 - 4096}\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("5000000\n")
    assert memory_limit(tmp_path) == (0, 0)
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("8000000\n")
    assert memory_limit(tmp_path) == (8_000_000, 5_000_000)


def test_what_a_process_that_asked_torch_has_said() -> None:
    assert gpus_of(0, b'warned\n["2.1", [["A", 5], ["B", 6]]]\n', b"") == GpuFacts(
        "2.1", ("A", "B"), (5, 6)
    )
    assert gpus_of(1, b"", b"Traceback\nOSError: no libcuda\n").problem == "OSError: no libcuda"
    assert gpus_of(-11, b"", b"").problem == "it ended with exit code -11"


@pytest.mark.parametrize(
    ("own", "observed", "status", "word"),
    [
        ("203.0.113.7", "203.0.113.7", "ok", "a global IPv4 address"),
        ("2001:db8::7", "", "ok", "a global IPv6 address"),
        ("192.168.1.5", "", "warn", "private"),
        ("fd00::5", "", "warn", "private"),
        ("192.168.1.5", "192.168.1.5", "ok", "private"),
        ("192.168.1.5", "203.0.113.7", "warn", "behind NAT"),
        ("100.64.3.2", "203.0.113.7", "warn", "carrier NAT"),
        ("100.127.255.254", "", "warn", "carrier NAT"),
        ("192.0.0.2", "203.0.113.7", "warn", "carrier NAT"),
        ("100.128.0.1", "", "ok", "a global IPv4 address"),
        ("169.254.3.2", "", "warn", "one cable"),
        ("127.0.0.1", "127.0.0.1", "ok", "loopback"),
        ("127.0.0.1", "", "warn", "this machine alone"),
        ("", "", "warn", "no route"),
    ],
)
def test_addresses(own: str, observed: str, status: str, word: str) -> None:
    line = address_line(own, observed, "29600")
    assert (line.status, word in line.what) == (status, True), line
    run = replace(RUN, answer=replace(ANSWER, observed=observed))
    code, found = told(replace(MACHINE, address=own), run if observed else None)
    assert (code, found["address"]["status"]) == (0, status)
    assert found["address"]["value"]["address"] == own


def test_parameters_in_words() -> None:
    numbers = (999, 1_500, 100_000_000, 1_300_000_000, 7 * 10**9, 999_499_999, 999_999_999, 10**12)
    assert [parameters(number) for number in numbers] == [
        "999 parameters",
        "1.5 k parameters",
        "100 M parameters",
        "1.3 B parameters",
        "7 B parameters",
        "999 M parameters",
        "1 B parameters",
        "1 T parameters",
    ]


# ---------------------------------------------------------------- the run


@pytest.mark.parametrize(
    ("stage", "line"),
    [
        ("DNS", "name"),
        ("TCP", "tcp"),
        ("TLS", "tls"),
        ("secret", "secret"),
        ("identity", "identity"),
        ("version", "version"),
        ("admission", "admission"),
        ("anything", "admission"),
    ],
)
def test_trouble_stands_in_the_line_of_its_stage(stage: str, line: str) -> None:
    run = replace(RUN, answer=None, dialled=None, trouble=Trouble(stage, "it broke", "mend it"))
    code, found = told(run=run)
    assert code == UNFIT
    failed = [name for name, check in found.items() if check["status"] == "fail"]
    assert failed == [line]
    assert (found[line]["what"], found[line]["fix"]) == ("it broke", "mend it")
    assert found["clock"]["what"] == f"not checked, because {line} failed"


@pytest.mark.parametrize("program", ["0.1.9", "0.10.0"])
def test_another_program_of_the_same_protocol(program: str) -> None:
    code, found = told(run=replace(RUN, answer=replace(ANSWER, program=program)))
    assert (code, found["version"]["status"]) == (0, "warn")
    where = "here" if program == "0.10.0" else "there"
    assert found["version"]["fix"] == f"update atoll {where} when it suits"


@pytest.mark.parametrize(
    ("offset_s", "error_s", "status", "word"),
    [
        (0.01, 0.025, "ok", "as the member's"),
        (-2.0, 0.1, "ok", "ahead of"),
        (9.0, 0.1, "ok", "behind"),
        (-86_400.0, 0.1, "warn", "24 h ahead of"),
        (3600.0, 0.1, "warn", "60 min behind"),
        (11.0, 2.0, "ok", "behind"),
    ],
)
def test_clocks(offset_s: float, error_s: float, status: str, word: str) -> None:
    answer = replace(ANSWER, clock_offset_s=offset_s, clock_error_s=error_s)
    code, found = told(run=replace(RUN, answer=answer))
    assert (code, found["clock"]["status"], found["clock"]["value"]) == (0, status, offset_s)
    assert word in found["clock"]["what"]


def test_a_member_that_is_far_away() -> None:
    code, found = told(run=replace(RUN, answer=replace(ANSWER, rtt_s=0.6)))
    assert (code, found["round-trip"]["status"], found["round-trip"]["value"]) == (0, "warn", 0.6)


@pytest.mark.parametrize(
    ("asked", "other", "status", "word"),
    [
        ("ok", "ok", "ok", "others can dial port 29600"),
        ("refused", "ok", "ok", "others can dial port 29600"),
        ("ok", "silent", "warn", "others cannot dial"),
        ("ok", None, "warn", "not confirmed"),
        ("silent", None, "warn", "got no answer"),
        ("refused", "refused", "warn", "got a refusal"),
        ("other", "other", "warn", "another program or peer"),
    ],
)
def test_dial_back(asked: str, other: str | None, status: str, word: str) -> None:
    answers = [ReachAnswer(ASKED, asked, 0.1)]
    answers += [ReachAnswer(OTHER, other, 0.1, "198.51.100.9")] if other else []
    run = replace(RUN, dialled=DialledBy(ASKED, "203.0.113.7", tuple(answers)))
    code, found = told(run=run)
    assert (code, found["dial-back"]["status"]) == (0, status), "it trains all the same"
    assert word in found["dial-back"]["what"]
    assert found["dial-back"]["value"] == {short(one.by): one.outcome for one in answers}


def test_dial_back_that_nobody_could_try() -> None:
    code, found = told(run=replace(RUN, dialled=None, not_dialled="the port is taken"))
    assert (code, found["dial-back"]["status"]) == (0, "skipped")
    assert found["dial-back"]["what"] == "not checked, because the port is taken"
    nobody = replace(RUN, dialled=DialledBy(ASKED, "203.0.113.7", ()))
    assert told(run=nobody)[1]["dial-back"]["status"] == "skipped"


def test_rates() -> None:
    run = replace(RUN, up=RateFacts(100_000, 1.0), down=RateFacts(problem="the line went dead"))
    code, found = told(run=run)
    assert (code, found["rate-up"]["status"], found["rate-up"]["value"]) == (0, "warn", 0.8)
    assert found["rate-down"]["status"] == "skipped"
    assert "the line went dead" in found["rate-down"]["what"]
    _, found = told(run=replace(RUN, up=None, down=None))
    assert found["rate-up"]["status"] == "skipped"


def test_a_rate_of_nothing_says_not_how_long_joining_takes() -> None:
    _, found = told(run=replace(RUN, down=RateFacts(0, 1.0)))
    assert found["rate-down"]["status"] == "warn"
    assert "joining" not in found["rate-down"]["what"]


def test_a_member_that_does_not_say_how_large_the_state_is() -> None:
    machine = replace(MACHINE, checkpoint=FolderFacts("/big", "/big", 1 << 40))
    code, found = told(machine, replace(RUN, answer=replace(ANSWER, state_bytes=0)))
    assert (code, found["checkpoint-room"]["status"]) == (0, "ok")
    assert "what one takes is not known (--params N)" in found["checkpoint-room"]["what"]


def test_a_run_without_a_model() -> None:
    answer = replace(ANSWER, elements=0, state_bytes=0, daemon_bytes=0, method="", codec="")
    code, found = told(run=replace(RUN, answer=answer))
    assert (code, found["model"]["status"], found["model"]["value"]) == (0, "ok", None)
    for line in ("model", "memory"):
        assert "the member that was asked knows of no model" in found[line]["what"]
    assert "a witness holds none" in found["model"]["what"]


def test_any_free_port_is_none_to_forward() -> None:
    machine = replace(MACHINE, listen="0.0.0.0:0")
    dialled = DialledBy(ASKED, "203.0.113.7", (ReachAnswer(ASKED, REFUSED, 0.1, "198.51.100.4"),))
    code, found = told(machine, run=replace(RUN, dialled=dialled))
    assert (code, found["listen"]["status"], found["dial-back"]["status"]) == (0, "ok", "skipped")
    assert "port 0" in found["listen"]["what"]
    assert told(machine, run=RUN)[1]["dial-back"]["status"] == "ok"  # others got through


def test_behind_a_proxy_no_port_is_to_be_opened() -> None:
    dialled = DialledBy(ASKED, "203.0.113.7", (ReachAnswer(ASKED, REFUSED, 0.1, "198.51.100.4"),))
    direct = told(run=replace(RUN, dialled=dialled))[1]["dial-back"]
    proxied = told(run=replace(RUN, dialled=dialled, proxy="socks5://p:1080"))[1]["dial-back"]
    assert direct["status"] == proxied["status"] == "warn"
    assert "firewall" in direct["fix"]
    assert "firewall" not in proxied["fix"]


# ---------------------------------------------------------------- the page


def test_checks_that_were_skipped_for_one_reason_share_a_line() -> None:
    trouble = Trouble("TCP", "cannot reach it", "start it")
    run = replace(RUN, answer=None, dialled=None, trouble=trouble)
    page = list(lines(diagnose(Facts(MACHINE, run, None)), width=80, colours=False))
    at = next(i for i, line in enumerate(page) if "because tcp failed" in line)
    assert page[at].startswith("  -     ...")
    shared = " ".join(page[at:])
    assert all(word in shared for word in ("tls", "dial-back", "rate-down"))
    assert max(map(len, page)) <= 80


def test_colours_are_around_the_status_alone() -> None:
    machine = replace(MACHINE, has_memfd=False, files_hard=16)
    page = list(lines(diagnose(Facts(machine, None, None)), width=80, colours=True))
    assert any("\x1b[33mwarn  \x1b[0mmemfd" in line for line in page)
    assert any("\x1b[31mFAIL  \x1b[0mfiles" in line for line in page)
    assert any("\x1b[32mok    \x1b[0mprogram" in line for line in page)


def test_what_rounds_take_of_a_disk_stands_beside_what_they_write() -> None:
    def line(free_bytes: int, taken_bytes: int = 0) -> dict[str, Any]:
        home = replace(MACHINE.home, free_bytes=free_bytes, taken_bytes=taken_bytes)
        found: dict[str, Any] = told(replace(MACHINE, home=home))[1]["rounds-room"]
        return found

    enough = line(4_000_000_000)
    assert enough["status"] == "ok"
    assert "take 3.6 GB in the home; a round every 30 s writes 518 GB a day" in enough["what"]
    small = line(3_500_000_000)
    assert small["status"] == "warn"
    assert "3.5 GB are free" in small["what"]
    assert line(2_000_000_000, taken_bytes=1_600_000_000)["status"] == "ok"
    assert told(run=None)[1]["rounds-room"]["status"] == "skipped"
