"""Compute what one peer contributes to a round: the pseudo-gradient of its submission.

Where nobody needs its values, the trainer encodes it once, chunk by chunk, when it hands it over
(``RunSpec.encodes_submissions``): then neither it nor its daemon holds four bytes per parameter,
and another attempt at the round costs no arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.chunks import EncodedLayout, encoded_layout
from atoll.collectives.codecs import F32, U8, get_codec
from atoll.optim.manifest import Manifest
from atoll.optim.run_spec import RunSpec


def delta_source(
    spec: RunSpec, manifest: Manifest, theta: F32, submission: F32, fragment: int
) -> Callable[[int, F32], None]:
    """Return a function that fills in the pseudo-gradient Δ of one chunk of ``fragment``.

    Chunks are counted from the fragment's first; Δ is old minus new.

    ``theta`` and ``submission`` are float32[manifest.elements]: the run's parameters as they are
    when the round begins, and what was submitted, which is θ_m (Δ = cast(θ) - θ_m), or Δ itself.
    """
    first, _ = manifest.chunks_of(fragment, spec.fragments)
    grid, submits_deltas = manifest.grid, spec.submits == "deltas"

    def fill(chunk: int, out: F32) -> None:
        lo, hi = grid.bounds(first + chunk)
        if submits_deltas:
            np.copyto(out, submission[lo:hi])
        else:
            pseudo_gradient(theta[lo:hi], submission[lo:hi], out, manifest, lo, hi)

    return fill


# Writes the elements of a trainer's vector from ``lo`` on: ``write(out, lo)``, out float32[n].
Writer = Callable[[F32, int], None]


def submission_layout(spec: RunSpec, manifest: Manifest) -> EncodedLayout:
    """Return where each chunk of the vector lies in an encoded submission."""
    return encoded_layout(manifest.grid, get_codec(spec.codec))


def submission_floats(spec: RunSpec, manifest: Manifest) -> int:
    """Return the memory of a submission, counted in float32 values."""
    if not spec.encodes_submissions:
        return manifest.elements
    return -(-submission_layout(spec, manifest).total_bytes // 4)


def encode_submission(
    spec: RunSpec, manifest: Manifest, theta: F32, write: Writer, fragment: int, out: U8
) -> None:
    """Encode the pseudo-gradient of a fragment to its place in ``out``.

    ``theta``: float32[manifest.elements], the run's parameters; ``write`` gives what is submitted,
    which is θ_m (Δ = cast(θ) - θ_m), or Δ itself; ``out``: uint8 of ``submission_layout``. Raises
    CodecError for values that the codec cannot carry.
    """
    codec, layout, grid = get_codec(spec.codec), submission_layout(spec, manifest), manifest.grid
    written = np.empty(grid.chunk_elements, np.float32)
    differences = np.empty_like(written)
    for chunk in range(*manifest.chunks_of(fragment, spec.fragments)):
        lo, hi = grid.bounds(chunk)
        delta = submitted = written[: hi - lo]
        submitted.fill(0.0)  # nobody writes to padding
        write(submitted, lo)
        if spec.submits == "parameters":
            delta = differences[: hi - lo]
            pseudo_gradient(theta[lo:hi], submitted, delta, manifest, lo, hi)
        start, end = layout.slice(chunk)
        codec.encode(delta, out[start:end])


def pseudo_gradient(
    theta: NDArray[np.float32],
    submitted: NDArray[np.float32],
    out: NDArray[np.float32],
    manifest: Manifest,
    lo: int,
    hi: int,
) -> None:
    """Compute ``out = cast(θ) - θ_m`` for elements ``lo:hi``: old minus new, positive is descent.

    ``theta``, ``submitted`` and ``out`` are the slices ``[lo:hi]`` of θ (outer parameters), of the
    trainer's submission (its working parameters widened to float32) and of the result; ``out``
    overlaps neither. θ is first rounded to each segment's working dtype, so that a trainer that
    took no step gives exactly zero however coarse its parameters are.
    """
    for start, end, dtype in manifest.segments(lo, hi):
        part = slice(start - lo, end - lo)
        cast = theta[part]
        if dtype != "float32":
            round_to_working(cast, dtype, out[part])
            cast = out[part]
        np.subtract(cast, submitted[part], out=out[part])


def round_to_working(values: NDArray[np.float32], dtype: str, out: NDArray[np.float32]) -> None:
    """Round ``values`` as a working parameter of ``dtype`` does: ``out = float32(cast(values))``.

    ``values`` must be finite; arrays must not overlap. Rounds to nearest even, bit for bit as
    torch does. A float16 segment costs scratch of half the size of ``values``, the others none.
    """
    if dtype == "bfloat16":  # the upper half of a float32: round by integer arithmetic on the bits
        bits, rounded = values.view(np.uint32), out.view(np.uint32)
        np.right_shift(bits, np.uint32(16), out=rounded)
        np.bitwise_and(rounded, np.uint32(1), out=rounded)
        np.add(rounded, np.uint32(0x7FFF), out=rounded)
        np.add(rounded, bits, out=rounded)
        np.bitwise_and(rounded, np.uint32(0xFFFF0000), out=rounded)
    elif dtype == "float16":
        with np.errstate(over="ignore"):  # becomes Inf, as in torch; the codec then names it
            np.copyto(out, values.astype(np.float16))
    else:
        np.copyto(out, values)


def rounded_to_working(theta: NDArray[np.float32], manifest: Manifest) -> NDArray[np.float32]:
    """Return the run's parameters as those of working models are: float32[manifest.elements]."""
    rounded = np.empty_like(theta)
    for lo, hi, dtype in manifest.segments(0, manifest.elements):
        round_to_working(theta[lo:hi], dtype, rounded[lo:hi])
    return rounded
