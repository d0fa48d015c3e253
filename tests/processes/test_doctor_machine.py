"""`atoll doctor` without an invite: each line about this machine, where it is well and where not.

What this machine has is taken away in namespaces; each line is looked at with the command's exit
code and in its --json.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from harness.doctors import examine, instead_of, networked, on_a_disk, torch_that
from harness.processes import DAEMON, fleet

from atoll.peer.doctor.table import CHECKS, MACHINE

UNFIT = 3
GPU = """
class cuda:
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    get_device_properties = staticmethod(
        lambda i: type("P", (), {"name": "Big GPU", "total_memory": 8 << 30})
    )
"""


def test_a_machine_alone_is_looked_at_and_left_as_it_was(tmp_path: Path) -> None:
    found = examine(tmp_path)
    assert found.code == 0, found.document
    assert (found.document["schema"], found.document["fit"]) == (1, True)
    assert (found.document["run"], found.document["address"]) == (None, None)
    ids = [check["id"] for check in found.document["checks"]]
    assert ids == [check.id for check in CHECKS if check.group == MACHINE]
    for check in found.document["checks"]:
        assert set(check) == {"id", "group", "status", "value", "what", "fix"}
        assert bool(check["fix"]) == (check["status"] in ("warn", "fail")), check
    assert not (tmp_path / "home").exists()


def test_people_get_lines_that_fit_their_terminal(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemAvailable:  1000 kB\n")
    prefix = instead_of("/proc/meminfo", tmp_path / "meminfo")
    home = f"/tmp/h{os.getpid()}"  # words are not broken, and tmp_path is a long one
    arguments = ["doctor", "--home", home, "--params", "7B"]
    command = [*prefix, sys.executable, *DAEMON, *arguments]
    torch = torch_that(tmp_path, GPU)
    environment = os.environ | {"COLUMNS": "80", "PYTHONPATH": torch}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == UNFIT
    lines = done.stdout.splitlines()
    assert max(len(line) for line in lines) <= 80
    assert lines[0] == MACHINE
    assert sum("FAIL" in line for line in lines) == 1
    assert "\x1b" not in done.stdout, "no colours in a file"
    assert "ATOLL-E14 this machine cannot train: see memory above" in done.stderr


# ---------------------------------------------------------------- folders


def test_a_disk_without_room_for_a_home(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    home = str(tmp_path / "disk" / "home")
    prefix = on_a_disk(tmp_path / "disk", "size=64k")
    found = examine(tmp_path, "--home", home, prefix=prefix)
    assert (found.code, found.with_status("fail")) == (UNFIT, ["home-room"])
    assert 0 < found["home-room"]["value"] <= 64 << 10
    assert "--home" in found["home-room"]["fix"]


def test_a_disk_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    home = str(tmp_path / "disk" / "home")
    prefix = on_a_disk(tmp_path / "disk", "ro")
    found = examine(tmp_path, "--home", home, prefix=prefix)
    assert (found.code, found.with_status("fail")) == (UNFIT, ["home"])
    assert "read-only" in found["home"]["what"]


def test_a_home_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = examine(tmp_path, "--home", str(tmp_path / "file" / "home"))
    assert (found.code, found["home"]["status"]) == (UNFIT, "fail")


def test_a_home_whose_key_others_can_read(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    (home / "identity.key").write_bytes(bytes(32))
    (home / "identity.key").chmod(0o644)
    found = examine(tmp_path)
    assert (found.code, found.with_status("fail")) == (UNFIT, ["home"])
    assert "chmod 600" in found["home"]["fix"]


def test_checkpoints_that_fit_and_that_do_not(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    prefix = on_a_disk(tmp_path / "disk", "size=20m")
    where = ("--checkpoint", str(tmp_path / "disk" / "kept"))
    for parameters, status, word in (
        ("500k", "ok", "one takes 4 MB"),
        ("1M", "warn", "2 of 3"),
        ("100M", "warn", "none"),
    ):
        found = examine(tmp_path, *where, "--params", parameters, prefix=prefix)
        line = found["checkpoint-room"]
        assert (found.code, line["status"]) == (0, status), line
        assert word in line["what"]
        assert line["value"] <= 20 << 20
    assert examine(tmp_path)["checkpoint-room"]["status"] == "skipped"


# ---------------------------------------------------------------- limits, port, memory


def test_few_descriptors(tmp_path: Path) -> None:
    few = examine(tmp_path, prefix=["prlimit", "--nofile=48:48"])
    assert (few.code, few.with_status("fail"), few["files"]["value"]) == (UNFIT, ["files"], 48)
    some = examine(tmp_path, prefix=["prlimit", "--nofile=256:256"])
    assert (some.code, some["files"]["status"]) == (0, "warn")


def test_a_port_that_another_program_has(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        where = f"127.0.0.1:{other.getsockname()[1]}"
        found = examine(tmp_path, "--listen", where)
    assert (found.code, found.with_status("fail")) == (UNFIT, ["listen"])
    assert found["listen"]["value"] == where
    assert "--listen" in found["listen"]["fix"]


def test_a_home_whose_daemon_runs(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        peer = run.up("a")
        found = examine(tmp_path, "--home", str(peer.home), "--listen", f"127.0.0.1:{peer.port}")
        assert found.code == 0, found.document
        assert "running daemon" in found["home"]["what"]
        assert found["listen"]["status"] == "ok"


def test_too_little_memory_for_a_model(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 4000000 kB\nMemAvailable:    2000000 kB\n")
    prefix = instead_of("/proc/meminfo", tmp_path / "meminfo")
    large = examine(tmp_path, "--params", "1B", prefix=prefix)
    assert (large.code, large.with_status("fail")) == (UNFIT, ["memory"])
    assert large["memory"]["value"] == 2_000_000 * 1024
    tight = examine(tmp_path, "--params", "100M", prefix=prefix)
    assert (tight.code, tight["memory"]["status"]) == (0, "warn"), "the CPU trains, too"
    on_gpu = examine(tmp_path, "--params", "100M", prefix=prefix, torch=torch_that(tmp_path, GPU))
    assert (on_gpu.code, on_gpu["memory"]["status"]) == (0, "ok")


def test_the_gpu_that_torch_sees(tmp_path: Path) -> None:
    torch = torch_that(tmp_path, GPU)
    found = examine(tmp_path, torch=torch)["gpu"]
    assert (found["status"], found["value"]) == ("ok", ["Big GPU"])
    found = examine(tmp_path, "--params", "1B", torch=torch)["gpu"]
    assert found["status"] == "warn", "8 GiB, and 16 bytes for a parameter"


def test_a_torch_that_does_not_load(tmp_path: Path) -> None:
    torch = torch_that(tmp_path, "raise ImportError('libcudart.so.13 is not there')")
    found = examine(tmp_path, torch=torch)
    assert (found.code, found.with_status("fail")) == (UNFIT, ["gpu"])
    assert "libcudart.so.13" in found["gpu"]["what"]


def test_the_real_torch_answers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    found = examine(tmp_path, torch="real")["gpu"]
    assert found["status"] in ("ok", "warn")
    assert len(found["value"]) == torch.cuda.device_count()
    assert torch.__version__ in found["what"]


# ---------------------------------------------------------------- processor, kernel, addresses


def test_a_processor_without_aes(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags\t\t: fpu sse2 avx\n")
    found = examine(tmp_path, prefix=instead_of("/proc/cpuinfo", tmp_path / "cpuinfo"))
    assert (found.code, found["aes"]["status"], found["aes"]["value"]) == (0, "warn", False)


def test_codecs_that_run_in_numpy(tmp_path: Path) -> None:
    found = examine(tmp_path, ATOLL_KERNELS="numpy")
    assert (found.code, found["kernels"]["status"]) == (0, "warn")
    assert found["kernels"]["value"] == "numpy"


@pytest.mark.parametrize(
    ("address", "status", "kind"),
    [
        ("192.168.7.2/24", "warn", "private"),
        ("100.64.7.2/10", "warn", "carrier"),
        ("198.51.100.7/24", "ok", "a global IPv4 address"),
        ("2a00:1450::7/64", "ok", "a global IPv6 address"),
    ],
)
def test_kinds_of_addresses(tmp_path: Path, address: str, status: str, kind: str) -> None:
    found = examine(tmp_path, prefix=networked(address))
    line = found["address"]
    assert (found.code, line["status"], line["value"]["kind"]) == (0, status, kind)
    assert line["value"]["address"] == address.partition("/")[0]


def test_a_machine_without_a_route(tmp_path: Path) -> None:
    found = examine(tmp_path, prefix=networked())
    assert (found.code, found["address"]["status"]) == (0, "warn")
    assert found["address"]["value"] == {"address": ""}


def test_numbers_of_parameters_that_are_none(tmp_path: Path) -> None:
    command = [sys.executable, *DAEMON, "doctor", "--params"]
    for text in ("many", "-1", "0", "1e9", "1.2.3B", "9999999B"):
        assert subprocess.run([*command, text], capture_output=True).returncode == 2, text
    done = subprocess.run([*command, "1M", "x", "--json"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "ATOLL-E10" in done.stderr
    assert not done.stdout or json.loads(done.stdout)
