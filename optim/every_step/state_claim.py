"""Hold what trainers say of themselves before one of them becomes the donor of its state."""

from __future__ import annotations

import json
from dataclasses import dataclass

from atoll.collectives.errors import RemoteProtocolError
from atoll.optim.run_spec import RunSpec


@dataclass(frozen=True, slots=True)
class StateClaim:
    """Hold what a trainer says of itself before a donor is chosen."""

    name: str
    is_new: bool
    steps: int
    spec: RunSpec
    digest: str  # the digest of its manifest

    def to_wire(self) -> bytes:
        return json.dumps([self.is_new, self.steps, self.spec.to_wire(), self.digest]).encode()

    @classmethod
    def from_wire(cls, name: str, data: bytes) -> StateClaim:
        """Read what the trainer ``name`` says; RemoteProtocolError if it cannot be read."""
        try:
            is_new, steps, spec, digest = json.loads(data)
            if [type(is_new), type(steps), type(digest)] != [bool, int, str] or steps < 0:
                raise ValueError("values of other types")
            return cls(name, is_new, steps, RunSpec.from_wire(spec), digest)
        except (ValueError, TypeError, RecursionError) as error:
            raise RemoteProtocolError(
                f"what {name} says of its state cannot be read: {str(error)[:200]}",
                fix="run the same version of atoll on all peers",
            ) from error
