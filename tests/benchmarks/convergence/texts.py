"""The texts that a row may be of: code, and Debian's manual pages, which are not code."""

from __future__ import annotations

import gzip
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

from atoll.peer.demo.text import TEXT_BYTES_MAX, Text, load_text

__all__ = ["MANUAL", "TEXTS", "text_of"]

MANUAL = Path("/usr/share/man")  # apt install manpages manpages-dev
TEXTS = ("library", "manual")


def text_of(name: str, log: Callable[[str], None] = print) -> Text:
    """Return Python's own library, or the manual pages of this machine, 16 MiB of either at most.

    Raise DataError where there is too little.
    """
    if name == "library":
        return load_text(log=log)
    with tempfile.TemporaryDirectory() as folder:
        unpack_manual(Path(folder))
        return load_text(Path(folder), log=log)


def unpack_manual(folder: Path) -> None:
    """Write the first 16 MiB of the pages in English that can be read, in order of their names."""
    left = TEXT_BYTES_MAX
    for page in sorted(MANUAL.glob("man*/*.gz")):
        if page.is_symlink():
            continue  # the same page by another name: one of them might be held out
        try:
            text = gzip.decompress(page.read_bytes())
        except (OSError, EOFError, zlib.error):
            continue
        if (left := left - len(text)) < 0:
            return
        (folder / page.stem).write_bytes(text)
