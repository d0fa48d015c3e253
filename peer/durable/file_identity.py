"""Tell a file from a copy of it, by what a file system gives to each file that it makes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

MACHINE_BYTES = 16


@dataclass(frozen=True, slots=True)
class FileIdentity:
    """Name a file. What is not known is 0, or empty.

    ``machine`` is a digest of the machine's id, MACHINE_BYTES long.
    """

    inode: int
    born_ns: int
    filesystem: int
    machine: bytes

    def difference(self, made: FileIdentity) -> str:
        """Return in words how this differs from the file that was ``made``; empty if it does not.

        What is not known on one side is not compared. The file system's id counts only where there
        is no birth time: XFS gives the number of the device, which another boot may change.
        """
        if self.machine and made.machine and self.machine != made.machine:
            return "it was made on another machine"
        if self.inode != made.inode:
            return f"it was made as inode {made.inode} and is inode {self.inode}"
        if self.born_ns and made.born_ns:
            return "" if self.born_ns == made.born_ns else "it was made at another time"
        return "" if self.filesystem == made.filesystem else "it was made on another file system"
