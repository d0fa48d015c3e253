from __future__ import annotations

import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.errors import ConfigError, IncompatibleRunError, RemoteProtocolError
from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.spec import RunSpec, blob, check_same, host_bytes, parse_blob

SPEC = RunSpec(sync_every=30, codec="float32")
MANIFEST = Manifest.of([Parameter("w", (3, 4), "bfloat16"), Parameter("v", (5,))])

specs = st.builds(
    RunSpec,
    sync_every=st.integers(1, 10_000),
    outer_lr=st.floats(0.01, 10.0),
    outer_momentum=st.floats(0, 0.999),
    codec=st.sampled_from(["float32", "int8"]),
    round_deadline_s=st.floats(0.1, 3600.0),
)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("method", "gossip"),
        ("method", 3),
        ("sync_every", 0),
        ("sync_every", -1),
        ("sync_every", True),
        ("sync_every", 30.0),
        ("outer_lr", 0),
        ("outer_lr", float("nan")),
        ("outer_lr", float("inf")),
        ("outer_lr", "0.7"),
        ("outer_momentum", 1.0),
        ("outer_momentum", -0.1),
        ("codec", "int7"),
        ("codec", None),
        ("round_deadline_s", 0.0),
        ("round_deadline_s", 1e9),
    ],
)
def test_a_bad_field_is_named(field, value):
    good = {"sync_every": 30}
    with pytest.raises(ConfigError, match=field):
        RunSpec(**{**good, field: value})
    with pytest.raises(RemoteProtocolError, match=field):
        RunSpec.from_wire({**good, field: value})


def test_an_int_for_a_float_means_that_float():
    spec = RunSpec(sync_every=1, outer_lr=1, outer_momentum=0)
    assert spec == RunSpec(sync_every=1, outer_lr=1.0, outer_momentum=0.0)
    assert type(spec.to_wire()["outer_lr"]) is float


@given(specs)
def test_wire_round_trip(spec):
    assert RunSpec.from_wire(spec.to_wire()) == spec


@pytest.mark.parametrize("values", [None, [], {}, {"sync_every": 3, "new": 1}, {1: 2}])
def test_wire_refuses_missing_and_unknown_fields(values):
    with pytest.raises(RemoteProtocolError):
        RunSpec.from_wire(values)


def test_differences_show_both_values():
    assert RunSpec(sync_every=400).differences(RunSpec(sync_every=500, outer_lr=0.4)) == [
        "sync_every: yours 400, run 500",
        "outer_lr: yours 0.7, run 0.4",
    ]


def test_check_same_lists_every_difference_and_the_fix():
    check_same((SPEC, MANIFEST), (SPEC, MANIFEST), "demo")
    other = Manifest.of([Parameter("w", (3, 4))])
    with pytest.raises(IncompatibleRunError) as caught:
        check_same((RunSpec(sync_every=31), other), (SPEC, MANIFEST), "demo")
    text = str(caught.value)
    assert "run demo" in text
    assert "sync_every: yours 31, run 30" in text
    assert "codec: yours int8, run float32" in text
    assert "v: yours missing, run 5 float32" in text
    assert "w: yours 3x4 float32, run 3x4 bfloat16" in text
    assert "fix:" in text


@given(specs)
def test_blob_round_trip(spec):
    assert parse_blob(blob(spec, MANIFEST)) == (spec, MANIFEST)


def test_blob_of_a_large_model_fits():
    manifest = Manifest.of(
        Parameter(f"model.layers.{i}.mlp.experts.{j}.down_proj.weight", (768, 2048), "bfloat16")
        for i in range(94)
        for j in range(128)
    )
    assert len(blob(SPEC, manifest)) < 128 * 1024
    assert parse_blob(blob(SPEC, manifest))[1] == manifest


def packed(text: bytes) -> bytes:
    return zlib.compress(text)


HEAD = json.dumps(SPEC.to_wire()).encode()
GOOD = blob(SPEC, MANIFEST)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        GOOD[:-1],
        GOOD + b"x",
        packed(b""),
        packed(b"\xff\n"),
        packed(HEAD),
        packed(b"{\nw\tfloat32\t3"),
        packed(b"[" * 4000 + b"\nw\tfloat32\t3"),
        packed(b" " * 5000 + HEAD + b"\nw\tfloat32\t3"),
        packed(b'{"sync_every": NaN}\nw\tfloat32\t3'),
        packed(b'{"sync_every": ' + b"9" * 4050 + b"}\nw\tfloat32\t3"),
        packed(b'{"sync_every": 3, "outer_lr": ' + b"9" * 1000 + b"}\nw\tfloat32\t3"),
        packed(bytes(100 * 1024 * 1024)),  # a bomb: 100 KiB that unpack to 100 MiB
        bytes(512 * 1024 + 1),
    ],
    ids=range(15),
)
def test_malformed_blob_is_refused(data):
    with pytest.raises(RemoteProtocolError):
        parse_blob(data)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(data):
    with pytest.raises(RemoteProtocolError):
        parse_blob(data)
    with pytest.raises(RemoteProtocolError):
        parse_blob(packed(data))


def test_host_bytes():
    assert host_bytes(SPEC, MANIFEST) == 24 * 17
    assert host_bytes(RunSpec(sync_every=1), MANIFEST) == 20 * 17 + 17 + 4
