"""Read text to train on: a folder of UTF-8 files as two byte arrays, the same on every peer.

By default it is the Python standard library's own source, which every machine that runs this has.
"""

from __future__ import annotations

import codecs
import os
import sysconfig
import zlib
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.errors import DataError

TEXT_BYTES_MAX = 16 * 1024 * 1024  # enough for any demo, and read in well under a second
TEXT_BYTES_MIN = 16 * 1024  # both parts then have 256 bytes at least: a few windows
HELDOUT_EVERY = 16  # one file in so many is held out
NOT_LIBRARY = frozenset(
    {"dist-packages", "idle_test", "site-packages", "test", "tests"}
)  # in the default


@dataclass(frozen=True)
class Text:
    """Hold the bytes of training files and of held-out files, each end to end (uint8)."""

    train: NDArray[np.uint8]
    heldout: NDArray[np.uint8]


def load_text(folder: Path | None = None, log: Callable[[str], None] = print) -> Text:
    """Read the first 16 MiB of a folder's text, in order of path; hidden files are passed over.

    Which files are held out depends on their path below ``folder`` alone, so peers with the same
    folder hold out the same text. A file that is not UTF-8 text is skipped with one line to
    ``log``; DataError if the folder is missing or has too little text.
    """
    root = folder if folder is not None else Path(sysconfig.get_paths()["stdlib"])
    if not root.is_dir():
        raise DataError(f"no folder {root}", fix="give --data a folder of UTF-8 text files")
    train, heldout = bytearray(), bytearray()
    names = _names(root, ".py", NOT_LIBRARY) if folder is None else _names(root, "", frozenset())
    for name in names:
        room = TEXT_BYTES_MAX - len(train) - len(heldout)
        if room <= 0:
            log(f"text: {root} has more than {TEXT_BYTES_MAX >> 20} MiB; the rest is left out")
            break
        data = _read(root / name, room, log)
        # crc32, because Python's own hash of a string differs from process to process
        (train if zlib.crc32(name.encode()) % HELDOUT_EVERY else heldout).extend(data)
    total = len(train) + len(heldout)
    if total < TEXT_BYTES_MIN:
        raise DataError(
            f"{root} has {total} bytes of UTF-8 text; at least {TEXT_BYTES_MIN} are wanted",
            fix="give --data a folder of UTF-8 text files",
        )
    if min(len(train), len(heldout)) * HELDOUT_EVERY * 4 < total:
        both = train + heldout  # few or very unequal files: hold out the end of the text instead
        cut = total - total // HELDOUT_EVERY
        train, heldout = both[:cut], both[cut:]
    return Text(np.frombuffer(train, np.uint8), np.frombuffer(heldout, np.uint8))


def _names(root: Path, suffix: str, skipped: Set[str]) -> list[str]:
    """Return sorted paths of visible regular files below ``root``, with ``/`` between parts."""
    found = []
    for parent, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in skipped and not f.startswith(".")]
        found += [
            (Path(parent) / f).relative_to(root).as_posix()
            for f in files
            if f.endswith(suffix) and not f.startswith(".") and (Path(parent) / f).is_file()
        ]
    return sorted(found)


def _read(path: Path, limit: int, log: Callable[[str], None]) -> bytes:
    """Return at most ``limit`` bytes of a text file, or nothing (and log why) if it is no text."""
    try:
        with path.open("rb") as file:
            data = file.read(limit)
        # Incremental, so that a character cut in two by the limit is no error.
        text = codecs.getincrementaldecoder("utf-8")().decode(data)
    except (OSError, UnicodeDecodeError) as error:
        log(f"text: skipped {path}: {error}")
        return b""
    if "\0" in text:
        log(f"text: skipped {path}: it has NUL bytes, so it is not text")
        return b""
    return data
