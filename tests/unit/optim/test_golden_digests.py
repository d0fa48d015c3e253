"""Arithmetic is what it was, to the bit: whoever changes it sees which method and which codec.

`make golden-rewrite` writes the digests anew, where a change was meant.
"""

from __future__ import annotations

import pytest
from harness import golden_digests, golden_text
from harness.golden_digests import METHODS

from atoll.collectives.codecs import CODECS

pytestmark = pytest.mark.usefixtures("one_thread")
KNOWN = [line.split() for line in golden_text.lines_of("digests.txt")]


@pytest.mark.parametrize("method", METHODS)
def test_what_rounds_leave_behind_is_as_written(method: str) -> None:
    """With each codec; and what could not be run then cannot now."""
    known = {codec: digest for name, codec, digest in KNOWN if name == method}
    found = {codec: golden_digests.digest_of(method, codec) for codec in CODECS}
    assert {codec: digest for codec, digest in found.items() if digest} == known


def test_every_method_is_there_and_no_two_end_alike() -> None:
    assert {method for method, _, _ in KNOWN} == {*METHODS}
    # Where a codec loses nothing, SparseLoCo has nothing to feed back, and steps as LocalSGD does.
    digests = [digest for name, codec, digest in KNOWN if (name, codec) != ALIKE]
    assert len({*digests}) == len(digests)


ALIKE = ("sparse_loco", "float32")
