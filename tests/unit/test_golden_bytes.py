"""Bytes on the wire, in files and under signatures are what they were: whoever changes one sees it.

`make golden-rewrite` writes them anew, where a change was meant.
"""

from __future__ import annotations

import dataclasses

import pytest
from harness import golden_bytes, golden_text, samples
from harness.golden_bytes import FRAMES

from atoll.collectives.schedule.schedule import FrameKind
from atoll.optim.run_spec import UNSAID, RunSpec, blob, parse_blob
from atoll.peer.authority.grants import Credential, Grant, Revocations
from atoll.peer.checkpoint.format import parse_manifest
from atoll.peer.net.invite import Invite
from atoll.peer.net.wire import decode, encode, registered
from atoll.peer.streams.frames import unpack_header
from atoll.peer.streams.transfers import TransferKind
from atoll.peer.verify.evidence import parse_evidence

CASES = [(name, variant) for name in samples.names() for variant in samples.VARIANTS]


def kept(file: str, name: str, variant: str) -> str:
    """Return the digits of one line of a golden file."""
    (value,) = [
        line.split(" ", 2)[2]
        for line in golden_text.lines_of(file)
        if line.split(" ")[:2] == [name, variant]
    ]
    return value


def test_bytes_on_the_wire_are_as_written() -> None:
    differs = golden_text.wrong("wire.txt", golden_bytes.wire_lines())
    assert not differs, differs


def test_what_is_signed_is_as_written() -> None:
    differs = golden_text.wrong("signed.txt", golden_bytes.signed_lines())
    assert not differs, differs


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_every_message_comes_back_as_it_was(name: str, variant: str) -> None:
    sample = samples.sample(name, variant)
    assert type(sample) is registered()[name]
    assert decode(encode(sample)) == sample


@pytest.mark.parametrize("name", samples.names())
def test_a_full_sample_has_every_optional_field_and_a_bare_one_none(name: str) -> None:
    bare, full = (samples.sample(name, variant) for variant in samples.VARIANTS)
    for field in dataclasses.fields(full):
        if not samples.is_required(field):
            made = field.default_factory
            default = field.default if made is dataclasses.MISSING else made()
            assert getattr(bare, field.name) == default, f"{name}.{field.name}"
            assert getattr(full, field.name) != default, f"{name}.{field.name}"


def test_there_is_a_hand_made_sample_of_nothing_that_is_gone() -> None:
    assert {*samples.FITTING} <= {*samples.names()}


def test_every_kind_of_data_frame_is_there() -> None:
    assert len({*map(int, FRAMES.values())}) == len(FRAMES)
    assert {*map(int, FRAMES.values())} >= {*map(int, FrameKind), *map(int, TransferKind)}
    for name, kind in FRAMES.items():
        header = unpack_header(bytes.fromhex(kept("wire.txt", "data-header", name)))
        assert header.kind == kind


def test_what_is_written_can_be_read() -> None:
    """Files and lines that people keep: read from the golden file, not as they are made now."""
    for run in golden_bytes.runs().values():
        assert parse_blob(blob(*run)) == run
    for variant in samples.VARIANTS:
        evidence = bytes.fromhex(kept("wire.txt", "evidence-file", variant))
        assert parse_evidence(evidence) == samples.sample("Evidence", variant)
    raw = bytes.fromhex(kept("wire.txt", "checkpoint-manifest", "full"))
    assert parse_manifest(raw, "it", secret=golden_bytes.SECRET) == golden_bytes.checkpoint()
    for variant in ("plain", "authority"):
        text = kept("wire.txt", "invite", variant)
        assert str(Invite.parse(text)) == text
    authority = golden_bytes.public(1)
    for variant in ("pass", "token"):
        data = bytes.fromhex(kept("signed.txt", "grant", variant))
        assert Grant.parse(data, authority).encode() == data
        held = bytes.fromhex(kept("signed.txt", "credential", variant))
        assert Credential.parse(held, authority, golden_bytes.RUN).encode() == held
    latest = Revocations.parse(
        bytes.fromhex(kept("signed.txt", "revocations", "second")), authority
    )
    assert (latest.number, len(latest.ids)) == (2, 3)


def test_some_specification_has_every_field() -> None:
    bare, *others = (spec.to_wire() for spec, _ in golden_bytes.runs().values())
    assert bare.keys() == {field.name for field in dataclasses.fields(RunSpec)} - UNSAID.keys()
    assert all(any(name in other for other in others) for name in UNSAID)
    same = {name for name in bare if all(bare[name] == other[name] for other in others)}
    assert not same, same


def test_a_byte_that_changes_is_shown() -> None:
    """With its line, and what to do."""
    lines = [*golden_bytes.wire_lines()]
    assert golden_text.wrong("wire.txt", lines) == ""
    lines[3] = lines[3][:-1] + ("0" if lines[3][-1] != "0" else "1")
    shown = golden_text.wrong("wire.txt", lines)
    assert f"-{golden_text.lines_of('wire.txt')[3]}"[:300] in shown
    assert "make golden-rewrite" in shown
    assert golden_text.wrong("wire.txt", lines[:-1])
