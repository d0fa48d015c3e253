"""Building the forwarder, and what is said where there can be no lab."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from atoll.collectives.errors import ConfigError
from atoll.peer.lab import forwarder, spaces

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, forwarder.COMPILERS)), reason="needs a C compiler"
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(forwarder, "CACHE", tmp_path / "cache")
    return tmp_path / "cache"


@needs_compiler
def test_it_is_compiled_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binary = forwarder.build()
    assert binary.parent == cache
    assert os.access(binary, os.X_OK)
    assert [path.name for path in cache.iterdir()] == [binary.name], "nothing else is left"
    monkeypatch.setattr(forwarder, "COMPILERS", ())
    assert forwarder.build() == binary


@needs_compiler
def test_the_source_has_no_warnings(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strict = (*forwarder.FLAGS, "-Wall", "-Wextra", "-Werror")
    monkeypatch.setattr(forwarder, "FLAGS", strict)
    forwarder.build()


@needs_compiler
def test_a_folder_that_others_can_write_is_not_used(cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o777)
    assert forwarder.build().parent != cache
    assert not list(cache.iterdir())


@needs_compiler
def test_a_compiler_that_fails_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarder, "FLAGS", ("-include", "not-there.h"))
    with pytest.raises(ConfigError, match=r"cannot compile .*not-there\.h"):
        forwarder.build()
    assert not list(cache.iterdir())


@pytest.mark.usefixtures("cache")
def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forwarder, "COMPILERS", ("no-such-compiler",))
    with pytest.raises(ConfigError, match="needs a C compiler") as caught:
        forwarder.build()
    assert "gcc" in caught.value.fix


# ---------------------------------------------------------------- where a lab can be


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="needs root"):
        spaces.check_possible()


def test_without_tun_devices_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(spaces, "TUN", tmp_path / "tun")
    with pytest.raises(ConfigError, match="which this machine does not have"):
        spaces.check_possible()


def test_only_what_dead_labs_left_behind_is_removed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(spaces, "NAMESPACES", tmp_path)
    dead = 1 << 30  # no process has so high an id
    kept = [f"atoll-lab-{os.getpid()}-0-h0", f"atoll-{dead}-0-h0", "atoll-lab", "else"]
    for name in (*kept, f"atoll-lab-{dead}-0-h0", f"atoll-lab-{dead}-12-h63"):
        (tmp_path / name).touch()
    spaces.sweep()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


def test_names_are_of_this_process_and_of_one_lab() -> None:
    first, second = spaces.new_prefix(), spaces.new_prefix()
    assert first != second
    assert spaces.space_name(first, 3) == f"{first}-h3"
    assert f"-{os.getpid()}-" in first
