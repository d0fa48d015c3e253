"""Install a clone that has no symbolic links (`core.symlinks=false`)."""

from __future__ import annotations

import os
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
    assert others == examples | lab | page | {"atoll/py.typed"}
    site = tmp_path / "site"
    subprocess.run([*PIP, "install", *PIP_OPTIONS, "--target", str(site), str(wheel)], check=True)
    assert used_from(site, tmp_path) == [
        str(site / "atoll" / "__init__.py"),
        "atoll.optim.methods.diloco",
        str(site / "atoll" / "peer" / "daemon" / "daemon.py"),
    ]
