"""Warm starts on disk: each is trained once and shared by all rows that begin from it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from atoll.peer.demo.text import Text

__all__ = ["made_with", "warm_start"]


def made_with(text: Text) -> str:
    """What decides on figures and is not in a row's name: the text, torch and the device."""
    digest = hashlib.sha256(text.train.data)
    digest.update(text.heldout.data)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return f"text {digest.hexdigest()[:12]}, torch {torch.__version__}, {device}"


def warm_start(
    cache: Path, made_from: Mapping[str, object], train: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """What ``train`` gives, or gave in an earlier call with an equal ``made_from``.

    Where two processes ask for one at once, the second waits for the first.
    """
    described = json.dumps(made_from, sort_keys=True)
    path = cache / f"{hashlib.sha256(described.encode()).hexdigest()[:16]}.pt"
    cache.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            part = path.with_suffix(".part")
            torch.save(train(), part)
            os.replace(part, path)  # so that nobody finds half a file
    where = "cuda" if torch.cuda.is_available() else "cpu"
    kept: dict[str, Any] = torch.load(path, map_location=where, weights_only=True)
    return kept
