"""Test that what is left out comes later, and that a failed exchange changes nothing."""

from __future__ import annotations

import numpy as np
import pytest
from harness.gradients import averages, manifest_of

from atoll.collectives.codecs import F32, get_codec
from atoll.collectives.errors import ConfigError, RemoteProtocolError
from atoll.optim import ErrorFeedback
from atoll.optim.every_step.exchange import Exchanged, Given

SIZE = 128
ONE = manifest_of((8, 16))
WITH_A_VECTOR = manifest_of((8, 16), (5,))


def normal(n: int, s: int, size: int = SIZE) -> F32:
    return np.random.default_rng((n, s)).standard_normal(size).astype(np.float32)


@pytest.mark.parametrize("codec", ["topk", "sign", "int2"])
def test_what_was_sent_and_what_is_kept_is_what_came_in(codec: str) -> None:
    workers = [ErrorFeedback(codec=codec) for _ in range(3)]
    found = averages(lambda n: workers[n], ONE, normal, range(20), 3)
    assert all(a.tobytes() == b.tobytes() == c.tobytes() for a, b, c in zip(*found, strict=True))
    came = np.mean([[normal(n, s) for s in range(20)] for n in range(3)], axis=0).sum(0)
    kept = np.mean([worker.kept()["residual"] for worker in workers], axis=0)
    assert np.abs(kept).max() > 0
    np.testing.assert_allclose(np.sum(found[0], axis=0) + kept, came, atol=1e-4)


def test_the_decay_forgets() -> None:
    alone = ErrorFeedback(codec="sign", decay=0.0)
    (found,) = averages(lambda n: alone, ONE, normal, range(3), 1)
    codec, expected = get_codec("sign"), np.empty(SIZE, np.float32)
    data = np.empty(codec.encoded_bytes(SIZE), np.uint8)
    codec.encode(normal(0, 2), data)
    codec.decode(data, expected)
    assert found[2].tobytes() == expected.tobytes()


def test_vectors_travel_as_they_are() -> None:
    found = averages(
        lambda n: ErrorFeedback(), WITH_A_VECTOR, lambda n, s: normal(n, s, SIZE + 5), [0], 2
    )
    exact = np.mean([normal(n, 0, SIZE + 5) for n in range(2)], axis=0)
    np.testing.assert_allclose(found[0][0][SIZE:], exact[SIZE:], atol=1e-6)


class Lonely:
    """Exchange with nobody else, and break at the end if it is to."""

    counts, name = True, "a"

    def __init__(self, breaks: bool = False, data: bytes | None = None) -> None:
        self.breaks, self.data = breaks, data

    def gather(self, data: bytes) -> list[Given]:
        return [Given("a", data if self.data is None else self.data, counts=True)]

    def total(self, values: F32, codec: str = "float32") -> Exchanged:
        if self.breaks:
            raise ConnectionError("the exchange has broken")
        return Exchanged(values.copy(), 1)


def test_a_step_that_breaks_keeps_what_it_had() -> None:
    worker = ErrorFeedback()
    worker.begin(ONE, "float32", "a")
    worker.average(normal(0, 0), 0, Lonely())
    before = worker.kept()["residual"].copy()
    with pytest.raises(ConnectionError):
        worker.average(normal(0, 1), 1, Lonely(breaks=True))
    assert worker.kept()["residual"].tobytes() == before.tobytes()


def test_malformed_bytes_name_whoever_gave_them() -> None:
    worker = ErrorFeedback()
    worker.begin(ONE, "float32", "a")
    with pytest.raises(RemoteProtocolError, match="what a gave"):
        worker.average(normal(0, 0), 0, Lonely(data=b"short"))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"codec": "ternary"}, "contractive"),
        ({"codec": "nothing"}, "a codec that there is"),
        ({"decay": 1.5}, "decay"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        ErrorFeedback(**options)  # type: ignore[arg-type]
