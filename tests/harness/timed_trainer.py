"""A trainer of a real method whose steps take a given time, to see how long it computes.

Arguments: home, method ("diloco" or "streaming_diloco"), parameters, local steps of a round,
seconds of a step. The forward and backward pass are a sleep, as on an accelerator; their gradients
are not zero. The inner step, on the host's cores, counts as computing too, and what the method's
hook does after it does not. Prints one JSON line per step.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from torch import nn

import atoll
from atoll.collectives.errors import AtollError
from atoll.optim import DiLoCo, StreamingDiLoCo
from atoll.optim.method import Method

BLOCKS = 12  # four fragments of three, and one of the embedding
EMBEDDING_SHARE = 0.1
ROW = 256


class Model(nn.Module):
    """Of about so many parameters."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        rows = max(1, int((1 - EMBEDDING_SHARE) * parameters / BLOCKS / ROW))
        self.embedding = nn.Embedding(max(1, int(EMBEDDING_SHARE * parameters / ROW)), ROW)
        self.blocks = nn.ModuleList(nn.Linear(ROW, rows, bias=False) for _ in range(BLOCKS))


def main() -> int:
    home, method = sys.argv[1:3]
    parameters, sync_every, step_s = int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model(parameters)
    gradients = [torch.randn_like(p) for p in model.parameters()]
    inner = torch.optim.SGD(model.parameters(), lr=1e-4)
    computed_s = begun_s = 0.0

    def computed(*_: Any) -> None:
        nonlocal computed_s
        computed_s += time.monotonic() - begun_s

    inner.register_step_post_hook(computed)  # before the method's own, so it runs before it
    session = atoll.connect(home)
    make = StreamingDiLoCo if method == "streaming_diloco" else DiLoCo
    outer: Method = make(model, inner, sync_every, session)
    while True:
        begun_s = time.monotonic()
        time.sleep(step_s)
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            p.grad = gradient
        inner.step()
        line = {**outer.metrics(), "computed_s": computed_s, "now_s": time.monotonic()}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except AtollError as error:
        print(json.dumps({"error": error.code, "what": error.what}), flush=True)
        sys.exit(error.exit_code)
