"""Install a wheel: from a clone without symbolic links (`core.symlinks=false`), for aarch64."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from harness.rooms import MODULES, ROOT

pytestmark = pytest.mark.slow  # it compiles the kernels

PAGE = {".html", ".css", ".js", ".svg"}
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
# What the headers' own macros and inline functions take.
PRIVATE_AND_STABLE = {"_Py_NoneStruct", "_Py_TrueStruct", "_Py_FalseStruct", "_Py_Dealloc"}
PIP_OPTIONS = ["--no-deps", "--no-build-isolation"]
USE = """
import atoll, atoll._kernels, atoll.peer.daemon.daemon
from importlib import resources
print(atoll.__file__, atoll.DiLoCo.__module__, atoll.peer.daemon.daemon.__file__, sep="\\n")
assert (resources.files("atoll.examples") / "train_lm.py").is_file()
"""


def clone_without_links(folder: Path) -> Path:
    """Copy what git has; a link becomes a file with its target in it, as git does there."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, names.decode().split("\0")):
        source, copy = ROOT / name, folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            copy.write_text(os.readlink(source), "utf-8")
        elif source.exists():
            shutil.copyfile(source, copy)
    return folder


def used_from(path: Path, cwd: Path) -> list[str]:
    # -P: not the folder in which the tests run; and not the editable installation of the tests.
    start = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'ditable' not in str(f)]\n"
    environment = {**os.environ, "PYTHONPATH": str(path)}
    command = [sys.executable, "-P", "-c", start + USE]
    printed = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=True
    )
    return printed.stdout.split()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="an unpacked archive has no list of files")
def test_a_clone_without_symbolic_links_installs_the_same_files(tmp_path: Path) -> None:
    clone = clone_without_links(tmp_path / "clone")
    assert not (clone / "atoll" / "peer").is_dir()
    subprocess.run([*PIP, "wheel", *PIP_OPTIONS, "-w", str(tmp_path), str(clone)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith(f"-cp311-abi3-linux_{os.uname().machine}.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if "dist-info" not in name}
    modules = {
        name.replace(".", "/") + ("/__init__.py" if path.name == "__init__.py" else ".py")
        for name, path in MODULES.items()
    }
    assert modules <= packed
    others = {name for name in packed - modules if not name.startswith("atoll/_kernels")}
    examples = {f"atoll/examples/{path.name}" for path in (ROOT / "examples").glob("*.py")}
    lab = {f"atoll/peer/lab/{name}" for name in ("forward.c", "forward.h", "spaces.c")}
    folder = ROOT / "peer" / "telemetry" / "page"
    page = {f"atoll/peer/telemetry/page/{p.name}" for p in folder.iterdir() if p.suffix in PAGE}
    assert others == examples | lab | page | {"atoll/py.typed", "atoll/peer/plan/losses.json"}
    site = tmp_path / "site"
    subprocess.run([*PIP, "install", *PIP_OPTIONS, "--target", str(site), str(wheel)], check=True)
    assert used_from(site, tmp_path) == [
        str(site / "atoll" / "__init__.py"),
        "atoll.optim.methods.diloco",
        str(site / "atoll" / "peer" / "daemon" / "daemon.py"),
    ]
    stable_abi_alone(site / "atoll" / "_kernels.abi3.so")
    commands_and_examples(site, tmp_path)
    has_types(site, tmp_path)


def stable_abi_alone(library: Path) -> None:
    """`make wheel` asks abi3audit for all names; those with an underscore are the usual leak."""
    listing = ["nm", "--dynamic", "--undefined-only", str(library)]
    printed = subprocess.run(listing, capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1] for line in printed.splitlines()}
    assert {name for name in names if name.startswith("_Py")} <= PRIVATE_AND_STABLE
    assert "PyObject_GetBuffer" in names


def commands_and_examples(site: Path, cwd: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(site)}
    atoll = [sys.executable, str(site / "bin" / "atoll")]
    for command in (["--version"], ["run", "--help"], ["example", "lm"], ["config", "up"]):
        printed = subprocess.run(
            [*atoll, *command], cwd=cwd, env=environment, capture_output=True, check=True
        ).stdout
        assert printed
        if command[0] == "example":
            assert printed == (ROOT / "examples" / "train_lm.py").read_bytes()


def has_types(site: Path, cwd: Path) -> None:
    """A type checker takes them from the installed package: a wrong call is an error."""
    (cwd / "user.py").write_text("import atoll\n\natoll.connect(home=3)\n")
    python = cwd / "python"  # whose packages are the wheel's; mypy asks it where they are
    python.write_text(f'#!/bin/sh\nexec env PYTHONPATH="{site}" "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    check = [sys.executable, "-m", "mypy", "--python-executable", str(python), "user.py"]
    found = subprocess.run(check, cwd=cwd, capture_output=True, text=True, check=False)
    assert 'Argument "home" to "connect" has incompatible type "int"' in found.stdout, found


# ---------------------------------------------------------------- aarch64

CROSS, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"
# A Python for arm64, unpacked and not installed; and what atoll needs of PyPI to be imported.
DEBIAN = "libc6 python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libssl3 zlib1g"
DEBIAN += " libexpat1 libffi8 libbz2-1.0 liblzma5 libuuid1 libgcc-s1 libstdc++6 libcrypt1"
WHEELS = (
    *("numpy", "msgpack", "pyzmq", "cryptography", "cffi", "prometheus_client"),
    *("blake3", "xxhash"),
)


@pytest.mark.skipif(
    not all(map(shutil.which, (CROSS, EMULATOR, "apt-get", "dpkg-deb"))),
    reason=f"needs {CROSS} and {EMULATOR} (Debian: gcc-aarch64-linux-gnu, qemu-user-static)",
)
def test_kernels_for_aarch64_give_the_bits_of_this_machine(tmp_path: Path) -> None:
    cross = {
        **os.environ,
        "CC": CROSS,
        "LDSHARED": f"{CROSS} -shared -s",
        "_PYTHON_HOST_PLATFORM": "linux-aarch64",
    }
    subprocess.run(
        [*PIP, "wheel", *PIP_OPTIONS, "-w", str(tmp_path), "."], cwd=ROOT, env=cross, check=True
    )
    (wheel,) = tmp_path.glob("atoll-*-cp311-abi3-linux_aarch64.whl")
    python = foreign_python(tmp_path / "debian")
    site = foreign_site(tmp_path / "site", wheel)
    digests = str(ROOT / "tests" / "harness" / "kernel_digests.py")
    theirs = printed_by([*python, "-P", digests], PYTHONPATH=str(site))
    ours = printed_by([sys.executable, digests], PYTHONPATH=str(ROOT))
    assert "aarch64" in printed_by([*python, "-c", "import platform; print(platform.machine())"])
    found = by_kernel(theirs + ours)
    assert len(found) == 23
    assert {len(digests) for digests in found.values()} == {1}, found
    assert {line.split()[1] for line in theirs.splitlines()} == {"base", "numpy"}


def by_kernel(lines: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, _, digest in map(str.split, lines.splitlines()):
        found.setdefault(name, set()).add(digest)
    return found


def printed_by(command: list[str], **environment: str) -> str:
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def foreign_python(folder: Path) -> list[str]:
    """Unpack Debian's Python for arm64 into a folder; return how it is called, in the emulator.

    apt's lists of arm64 stay in that folder: nothing of this system changes.
    """
    root = folder / "root"
    for name in ("state/lists/partial", "cache/archives/partial", "root"):
        (folder / name).mkdir(parents=True)
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "Dir::State": str(folder / "state"),
        "Dir::State::status": "/dev/null",
        "Dir::Cache": str(folder / "cache"),
    }
    apt = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]
    fetch = [[*apt, "update"], [*apt, "download", *DEBIAN.split()]]
    for command in fetch:
        if subprocess.run(command, cwd=folder, check=False).returncode:
            pytest.skip("Debian's packages for arm64 cannot be fetched here")
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", str(package), str(root)], check=True)
    return [EMULATOR, "-L", str(root), str(root / "usr" / "bin" / "python3.11")]


def foreign_site(site: Path, wheel: Path) -> Path:
    """Install the wheel and what it needs for aarch64, in the versions of the other tests."""
    pinned = re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    needs = [f"{name}=={version}" for name, version in pinned if name in WHEELS]
    assert len(needs) == len(WHEELS)
    kinds = ("linux", "manylinux2014", "manylinux_2_17", "manylinux_2_28")
    target = ["--only-binary=:all:", "--python-version", "3.11", "--target", str(site)]
    target += [f"--platform={kind}_aarch64" for kind in kinds]
    install = [*PIP, "install", "--no-deps", *target, *needs, str(wheel)]
    subprocess.run(install, check=True)
    return site
