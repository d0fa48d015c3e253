from __future__ import annotations

import json
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.collectives.codecs import RULES, Gathered, get_codec, mean_codec
from atoll.collectives.errors import ConfigError, IncompatibleRunError, RemoteProtocolError
from atoll.optim.footprint import host_bytes, log_bytes, log_cap_bytes
from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.run_spec import (
    ASYNCHRONOUS,
    METHODS,
    PROBATION_MAX,
    STEPPED,
    VALIDATORS_MAX,
    RunSpec,
    blob,
    check_same,
    parse_blob,
)

SPEC = RunSpec(sync_every=30, codec="float32")
MANIFEST = Manifest.of([Parameter("w", (3, 4), "bfloat16"), Parameter("v", (5,))])

FRAGMENTED = Manifest.of([Parameter("w", (10, 4096))])  # ten chunks

specs = st.integers(1, 64).flatmap(
    lambda fragments: st.builds(
        RunSpec,
        sync_every=st.integers(1, 10_000),
        outer_lr=st.floats(0.01, 10.0),
        outer_momentum=st.floats(0, 0.999),
        codec=st.sampled_from(["float32", "int8"]),
        round_deadline_s=st.floats(0.1, 3600.0),
        fragments=st.just(fragments),
        rounds_in_flight=st.integers(1, min(4, fragments)),
    )
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
        ("outer_delay", 0),
        ("outer_delay", 1025),
        ("outer_delay", 2.0),
        ("codec", "int7"),
        ("codec", "randk"),  # it draws at random what it leaves out
        ("codec", "topk"),  # it needs error feedback
        ("codec", None),
        ("round_deadline_s", 0.0),
        ("round_deadline_s", 1e9),
        ("fragments", 0),
        ("fragments", 65),
        ("fragments", 2.0),
        ("rounds_in_flight", 0),
        ("rounds_in_flight", 2),
        ("gossip", -0.1),
        ("check_every", -1),
        ("gossip", 4.1),
        ("gossip", float("nan")),
        ("group", 0),
        ("group", 33),
        ("group", 2.0),
        ("aggregate", "median"),
        ("aggregate", ""),
        ("probation", -1),
        ("probation", PROBATION_MAX + 1),
        ("probation", 1.0),
        ("error_feedback", -0.1),
        ("error_feedback", 1.1),
        ("error_feedback", float("nan")),
    ],
)
def test_a_bad_field_is_named(field, value):
    good = {"sync_every": 30}
    with pytest.raises(ConfigError, match=field):
        RunSpec(**{**good, field: value})
    with pytest.raises(RemoteProtocolError, match=field):
        RunSpec.from_wire({**good, field: value})


@pytest.mark.parametrize("method", METHODS)
def test_only_rounds_of_all_peers_can_have_newcomers(method):
    numbers = {"sync_every": 30, "submits": "deltas", "method": method}
    if method in STEPPED and method not in ASYNCHRONOUS:
        assert RunSpec(**numbers, probation=PROBATION_MAX).probation == PROBATION_MAX
    else:
        with pytest.raises(ConfigError, match=f"probation must be 0 in a run of {method}"):
            RunSpec(**numbers, probation=1)


@pytest.mark.parametrize(
    ("codec", "aggregate", "error_feedback", "lacks"),
    [
        ("topk", "senders", 0.0, "error_feedback"),
        ("sign", "all", 0.0, "error_feedback"),
        ("int2", "mean", 0.0, "error_feedback"),
        ("topk", "mean", 0.95, 'aggregate="senders"'),  # see AVERAGED_ERROR_MAX
        ("int8_sr", "senders", 0.95, "rounds in which nobody encodes"),
        ("randk", "all", 0.0, "error feedback that knows its keys"),
    ],
)
def test_what_a_lossy_codec_lacks_is_named(codec, aggregate, error_feedback, lacks):
    with pytest.raises(ConfigError, match=f"codec '{codec}' needs {lacks}"):
        RunSpec(sync_every=1, codec=codec, aggregate=aggregate, error_feedback=error_feedback)


@pytest.mark.parametrize(
    "others",
    [
        {"audit": True},
        {"audit": True, "validators": 1, "segment_steps": 1},
        {"method": "noloco"},
        {"method": "gradient_average"},
        {"method": "async_diloco", "submits": "deltas"},
    ],
)
def test_feedback_is_where_a_daemon_keeps_it_and_nobody_verifies_what_it_sends(others):
    assert RunSpec(sync_every=1, codec="int4", **others).error_feedback == 0
    with pytest.raises(ConfigError, match=r"error_feedback must be 0 (with audits|in \w+)"):
        RunSpec(sync_every=1, codec="int4", error_feedback=0.5, **others)


@pytest.mark.parametrize(
    ("codec", "aggregate", "error_feedback"),
    [
        ("topk", "senders", 0.95),
        ("sign", "all", 1.0),
        ("int4", "mean", 0.9),
        ("int2", "mean", 1.0),
        ("sign", "trimmed(f=1)", 0.9),
        ("int8", "senders", 0.0),
        ("float32", "all", 0.0),
    ],
)
def test_results_are_encoded_as_the_aggregate_says(codec, aggregate, error_feedback):
    spec = RunSpec(sync_every=1, codec=codec, aggregate=aggregate, error_feedback=error_feedback)
    assert RunSpec.from_wire(spec.to_wire()) == spec
    assert not RunSpec(sync_every=1, codec="int4").needs_butterfly
    parts = get_codec(codec)
    for weights in ([1.0], [1.0, 0.0, 2.5]):
        result = spec.result_codec(weights)
        assert result.part_codec is parts
        assert spec.needs_butterfly
        if aggregate not in RULES and codec == "int4":
            assert result is parts
        elif aggregate not in RULES:  # nobody keeps what is left out of the mean
            assert result == mean_codec(codec)
            assert result.part_codec is parts
            assert result.encoded_bytes(1000) == get_codec("int4").encoded_bytes(1000)
        else:
            assert result == Gathered(parts, tuple(weights), aggregate)


@pytest.mark.parametrize("rule", [{"outer": "sgd"}, {"outer": "heavy_ball"}, {"outer_clip": 1.0}])
def test_only_plain_nesterov_is_delayed(rule):
    assert RunSpec(sync_every=1, outer_delay=1024).outer_delay == 1024
    assert RunSpec(sync_every=1, outer_delay=1, **rule).outer_delay == 1
    with pytest.raises(ConfigError, match="outer_delay is 2"):
        RunSpec(sync_every=1, outer_delay=2, **rule)


@pytest.mark.parametrize(("field", "value"), [("submits", "parameters"), ("fragments", 2)])
def test_asynchronous_runs_submit_whole_pseudo_gradients(field, value):
    good = {"method": "async_diloco", "sync_every": 1, "submits": "deltas"}
    assert RunSpec(**good).is_asynchronous
    assert not RunSpec(sync_every=1, submits="deltas").is_asynchronous
    with pytest.raises(ConfigError, match=field):
        RunSpec(**{**good, field: value})


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


@pytest.mark.parametrize(("fragments", "rounds"), [(64, 5), (3, 4)])
def test_rounds_in_flight_are_of_different_fragments(fragments, rounds):
    with pytest.raises(ConfigError, match="rounds_in_flight"):
        RunSpec(sync_every=1, fragments=fragments, rounds_in_flight=rounds)


@given(specs)
def test_blob_round_trip(spec):
    manifest = Manifest.of([Parameter("w", (64, 4096))])
    assert parse_blob(blob(spec, manifest)) == (spec, manifest)


def test_a_model_needs_a_chunk_for_each_fragment():
    most = RunSpec(sync_every=1, fragments=10)
    assert parse_blob(blob(most, FRAGMENTED)) == (most, FRAGMENTED)
    more = RunSpec(sync_every=1, fragments=11)
    with pytest.raises(ConfigError, match="fragments to at most 10"):
        blob(more, FRAGMENTED)
    text = f"{json.dumps(more.to_wire())}\n{FRAGMENTED.to_wire()}"
    with pytest.raises(RemoteProtocolError, match="10 chunks"):
        parse_blob(packed(text.encode()))


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


@pytest.mark.parametrize(
    ("codec", "result", "submission"), [("float32", 4 * 17, 4 * 17), ("int8", 17 + 4, 24)]
)
def test_host_bytes_of_a_small_model(codec, result, submission):
    """State and submission (whole float32s), a result, and a spare beside a log of 2048 rounds."""
    spec = RunSpec(sync_every=1, codec=codec)
    held = 8 * 17 + submission + result
    assert host_bytes(spec, MANIFEST) == held
    assert host_bytes(spec, MANIFEST, keeps_rounds=False) == held + 2049 * result


def test_host_bytes_of_a_large_model():
    """A log in memory holds two rounds, though they are more than its cap."""
    n = 1 << 30
    manifest = Manifest.of([Parameter("w", (n,))])
    result = n + n // 64
    assert log_bytes(RunSpec(sync_every=1), manifest) == 2 * result
    assert host_bytes(RunSpec(sync_every=1), manifest) == 8 * n + 2 * result
    spec = RunSpec(sync_every=1, fragments=4, rounds_in_flight=2)
    assert host_bytes(spec, manifest) == 8 * n + result + 2 * (result // 4)


def test_host_bytes_of_gathered_rounds_hold_for_any_number_of_peers():
    """Error feedback takes 4 bytes; results at most what float32 takes, but for short chunks."""
    n = 1 << 24
    manifest = Manifest.of([Parameter("w", (n,))])
    spec = RunSpec(sync_every=1, codec="topk", aggregate="senders", error_feedback=0.95)
    assert host_bytes(spec, manifest) == 16 * n + 4 * n
    for peers in (1, 3, 128, 129, 1024):
        assert spec.result_codec((1.0,) * peers).encoded_bytes(n) <= 4 * n


@pytest.mark.parametrize(
    ("elements", "cap"),
    [(1, 1 << 20), (1 << 20, 32 << 20), (1 << 23, 256 << 20), (1 << 30, 256 << 20)],
)
def test_the_cap_of_the_log_is_four_states_within_limits(elements, cap):
    assert log_cap_bytes(Manifest.of([Parameter("w", (elements,))])) == cap


def test_the_log_may_be_pinned_to_twice_its_cap():
    manifest = Manifest.of([Parameter("w", (1 << 20,))])
    assert log_bytes(RunSpec(sync_every=1), manifest) == 64 << 20


def test_validators_need_an_audit_and_local_steps_of_all() -> None:
    for method in ("diloco", "local_sgd"):
        spec = RunSpec(method=method, sync_every=5, audit=True, validators=2, segment_steps=3)
        assert spec.validators == 2
        with pytest.raises(ConfigError, match="segment_steps must be a positive number"):
            RunSpec(method=method, sync_every=5, audit=True, validators=2)
        with pytest.raises(ConfigError, match="validators must be 0 to 0; only an audited run"):
            RunSpec(method=method, sync_every=5, validators=1)
    with pytest.raises(ConfigError, match="validators"):
        RunSpec(method="streaming_diloco", sync_every=5, audit=True, validators=1)
    with pytest.raises(ConfigError, match="validators"):
        RunSpec(sync_every=5, audit=True, validators=VALIDATORS_MAX + 1)
