"""Checkpoints on disk: any safetensors reader opens them, and nothing that is not whole is used."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from harness.tinyrun import PARAMETERS, TinyRun
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

from atoll.collectives.digests import strong_digest
from atoll.collectives.errors import CheckpointError
from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.run_spec import MOMENTUM_CODECS, RunSpec
from atoll.peer.checkpoint.format import (
    HEADER_BYTES_MAX,
    MANIFEST_BYTES_MAX,
    UNIX_S_MAX,
    StateLayout,
    header_bytes,
    parse_manifest,
    render_manifest,
)
from atoll.peer.checkpoint.reader import (
    MANIFEST_FILE,
    STATE_FILE,
    candidates,
    load_checkpoint,
    open_latest,
    read_manifest,
)
from atoll.peer.checkpoint.writer import CheckpointWriter
from atoll.peer.net.identity import Home

RUN, SECRET = "demo", bytes(range(32))


class Made:
    """Two checkpoints of one run, of rounds 4 and 6, and what they were made of."""

    def __init__(self, folder: Path, momentum_codec: str) -> None:
        self.home = Home.open(folder / "home")
        self.run = TinyRun(self.home.peer_id, momentum_codec=momentum_codec)
        self.folder = folder / "checkpoints"
        self.folder.mkdir()
        self.writer = CheckpointWriter(self.folder, RUN, SECRET, self.home.peer_id, self.home.sign)
        self.older = self.write_at(4)
        self.newer = self.write_at(6)

    def write_at(self, round_number: int) -> Path:
        while self.run.state.round < round_number:
            self.run.commit()
        return self.writer.write(self.run.state, self.run.log, lambda: self.run.view, 5).path

    def rewrite(self, path: Path, **changes: object) -> None:
        """A manifest with other fields that its writer has signed."""
        manifest = replace(read_manifest(path), **changes)  # type: ignore[arg-type]
        (path / MANIFEST_FILE).write_bytes(render_manifest(manifest, SECRET, self.home.sign))

    def edit(self, path: Path, **changes: object) -> None:
        """A manifest with other fields, the signature as it was."""
        document = json.loads((path / MANIFEST_FILE).read_bytes()) | changes
        text = json.dumps(document, indent=1, sort_keys=True) + "\n"
        (path / MANIFEST_FILE).write_text(text)


@pytest.fixture(scope="module", params=["float32", "dynamic8"])
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Made]:
    made = Made(tmp_path_factory.mktemp("made"), request.param)
    yield made
    made.run.close()
    made.home.close()


@pytest.fixture
def copy(made: Made, tmp_path: Path) -> Path:
    """The newer checkpoint, to be damaged."""
    return Path(shutil.copytree(made.newer, tmp_path / made.newer.name))


def refusal(path: Path, *, run: str | None = RUN, secret: bytes | None = SECRET) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_latest(path, run=run, secret=secret).__enter__()  # reads every byte
    with pytest.raises(CheckpointError):
        load_checkpoint(path, run=run, secret=secret)
    return caught.value.what


# ---------------------------------------------------------------- what is right


def test_loading_gives_the_state_and_its_place_in_the_log(made: Made) -> None:
    loaded = load_checkpoint(made.newer, run=RUN, secret=SECRET)
    log, view = made.run.log, made.run.view
    head = log.head(6)
    assert head is not None
    assert (loaded.round, loaded.chain) == (6, head.chain)
    assert (loaded.lineage, loaded.view_number) == (view.lineage, view.number)
    assert (loaded.members, loaded.blob) == (view.peers, made.run.state.blob)
    assert loaded.state.round == 6
    assert loaded.state.digest == log.digest_after(6)
    assert (loaded.state.theta.tobytes(), loaded.state.momentum.tobytes()) == made.run.after[6]
    assert loaded.passed_over == ()
    loaded.state.close()


def test_any_reader_of_safetensors_opens_the_file(made: Made) -> None:
    tensors = load_file(made.newer / STATE_FILE)
    wholes = dict(zip(("theta", "momentum"), made.run.after[6], strict=True))
    if made.run.spec.momentum_codec != "float32":
        assert tensors.pop("momentum").tobytes() == wholes.pop("momentum")
    for part, whole in wholes.items():
        flat = np.frombuffer(whole, np.float32)
        for name, (lo, hi) in made.run.manifest.offsets.items():
            assert tensors[f"{part}.{name}"].tobytes() == flat[lo:hi].tobytes()
    assert {p.name: tensors[f"theta.{p.name}"].shape for p in PARAMETERS} == {
        p.name: p.shape for p in PARAMETERS
    }
    leaves = tensors.pop("leaves")
    assert [row.tobytes() for row in leaves] == list(made.run.state.leaves)
    assert len(tensors) == len(wholes) * len(PARAMETERS)
    with safe_open(made.newer / STATE_FILE, "numpy") as file:
        metadata = file.metadata()
    assert int(metadata["round"]) == 6
    assert bytes.fromhex(metadata["chain"]) == read_manifest(made.newer).chain


def test_the_latest_whole_one_of_a_folder_is_loaded(made: Made, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made.folder, tmp_path / "folder"))
    (folder / "notes.txt").write_text("not a checkpoint")
    assert [path.name for path in candidates(folder)] == [made.newer.name, made.older.name]
    newest = load_checkpoint(folder, run=RUN, secret=SECRET)
    assert newest.path.name == made.newer.name
    newest.state.close()
    flip(folder / made.newer.name / STATE_FILE, -40, 1)
    before = load_checkpoint(folder, run=RUN, secret=SECRET)
    assert (before.path.name, before.round) == (made.older.name, 4)
    assert len(before.passed_over) == 1
    assert made.newer.name in before.passed_over[0]
    assert (before.state.theta.tobytes(), before.state.momentum.tobytes()) == made.run.after[4]
    before.state.close()


X, Y, Z = b"X" * 32, b"Y" * 32, b"Z" * 32


@pytest.mark.parametrize(
    ("newer", "older", "round_number"),
    [
        ({"lineage": X}, {"lineage": Y, "ancestors": (Z, X)}, 4),
        ({"lineage": X, "unix_s": 9}, {"lineage": Y, "ancestors": (X,), "unix_s": 8}, 4),
        ({"lineage": X, "ancestors": (Y,), "unix_s": 8}, {"lineage": Y, "unix_s": 9}, 6),
        ({"lineage": X, "unix_s": 8}, {"lineage": Y, "unix_s": 9}, 4),
        ({"lineage": X, "unix_s": 9}, {"lineage": Y, "unix_s": 8}, 6),
        ({"lineage": X, "unix_s": 8}, {"lineage": X, "unix_s": 9}, 6),
        (  # a circle, which nobody writes: any order, but one
            {"lineage": X, "ancestors": (Y, X), "unix_s": 9},
            {"lineage": Y, "ancestors": (X,), "unix_s": 8},
            6,
        ),
    ],
)
def test_rounds_of_a_lineage_that_was_given_up_do_not_win(
    made: Made,
    tmp_path: Path,
    newer: dict[str, object],
    older: dict[str, object],
    round_number: int,
) -> None:
    folder = Path(shutil.copytree(made.folder, tmp_path / "folder"))
    made.rewrite(folder / made.newer.name, **newer)
    made.rewrite(folder / made.older.name, **older)
    loaded = load_checkpoint(folder, run=RUN, secret=SECRET)
    assert (loaded.round, loaded.passed_over) == (round_number, ())
    loaded.state.close()


def test_a_folder_without_a_whole_one_gives_every_reason(made: Made, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made.folder, tmp_path / "folder"))
    os.truncate(folder / made.newer.name / STATE_FILE, 1000)
    (folder / made.older.name / MANIFEST_FILE).unlink()
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(folder, run=RUN, secret=SECRET)
    assert "none of the 2 checkpoints" in caught.value.what
    assert "is cut short" in caught.value.what
    assert "has no manifest.json" in caught.value.what


def test_other_runs_in_the_folder_are_not_in_the_way(made: Made, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made.folder, tmp_path / "folder"))
    for number in range(70):
        (folder / f"other-{1000 + number:012d}-00000000").mkdir()
    loaded = load_checkpoint(folder, run=RUN, secret=SECRET)
    assert (loaded.round, loaded.passed_over) == (6, ())
    loaded.state.close()
    with pytest.raises(CheckpointError, match="belongs to run demo, not another"):
        load_checkpoint(made.newer, run="another", secret=SECRET)
    shutil.rmtree(folder / made.older.name)
    for path in candidates(folder, "other"):
        path.rmdir()
    with pytest.raises(CheckpointError, match="belongs to run demo, not another"):
        load_checkpoint(folder, run="another", secret=SECRET)


def test_the_path_may_be_the_working_folder(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(made.newer)
    loaded = load_checkpoint(".", run=RUN, secret=SECRET)
    assert loaded.path.name == made.newer.name
    loaded.state.close()


def test_without_the_secret_only_the_tag_goes_unchecked(made: Made, copy: Path) -> None:
    load_checkpoint(copy, run=RUN, secret=None).state.close()
    flip(copy / STATE_FILE, -1000, 1)
    refusal(copy, secret=None)


# ---------------------------------------------------------------- what is refused, and why


def flip(path: Path, offset: int, mask: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[offset] ^= mask
    path.write_bytes(raw)


@pytest.mark.parametrize("file", [STATE_FILE, MANIFEST_FILE])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_changed_byte_and_any_cut_is_refused(
    made: Made, file: str, data: st.DataObject
) -> None:
    folder = made.folder.parent / "damaged" / made.newer.name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(made.newer, folder)
    path = folder / file
    size = path.stat().st_size
    offset = data.draw(st.integers(0, size - 1))
    how = data.draw(st.sampled_from(["flip", "cut", "longer"]))
    if how == "flip":
        flip(path, offset, data.draw(st.integers(1, 255)))
    elif how == "cut":
        os.truncate(path, offset)
    else:
        path.write_bytes(path.read_bytes() + data.draw(st.binary(min_size=1, max_size=20)))
    assert refusal(folder, secret=data.draw(st.sampled_from([None, SECRET])))


def test_every_byte_of_a_manifest_counts(made: Made) -> None:
    raw = (made.newer / MANIFEST_FILE).read_bytes()
    assert parse_manifest(raw, "c", run=RUN, secret=SECRET).round == 6
    for offset in range(len(raw)):
        for mask in (1, 0x20):  # the second turns small letters into capitals
            damaged = bytearray(raw)
            damaged[offset] ^= mask
            with pytest.raises(CheckpointError):
                parse_manifest(bytes(damaged), "c")


def layout_of(made: Made, copy: Path) -> StateLayout:
    return StateLayout.of(made.run.spec, made.run.manifest, 6, read_manifest(copy).chain)


@pytest.mark.parametrize(
    ("element", "words"),
    [
        (0, r"chunk 0 \(blocks\.0\.weight\) is not what was written"),
        (8003, r"chunk 1 \(blocks\.0\.weight, blocks\.1\.bias, head\.weight\)"),
        (10_053, r"chunk 2 \(head\.weight, scale\)"),
    ],
)
@pytest.mark.parametrize("part", ["theta", "momentum"])
def test_damage_is_named_by_chunk_and_parameter(
    made: Made, copy: Path, part: str, element: int, words: str
) -> None:
    layout = layout_of(made, copy)
    chunk = element // layout.grid.chunk_elements
    at = layout.theta_at(element) if part == "theta" else layout.place(chunk).momentum_at + 1
    flip(copy / STATE_FILE, at, 0x80)
    assert re.search(words, refusal(copy))


def test_a_chunk_that_was_changed_with_its_digest_is_found_out(made: Made, copy: Path) -> None:
    layout = layout_of(made, copy)
    raw = bytearray((copy / STATE_FILE).read_bytes())
    theta_at, momentum_at, *sizes = layout.place(0)
    raw[theta_at] ^= 1
    chunk = raw[theta_at : theta_at + sizes[0]] + raw[momentum_at : momentum_at + sizes[1]]
    raw[layout.leaves_at : layout.leaves_at + 32] = strong_digest(chunk)
    (copy / STATE_FILE).write_bytes(raw)
    assert "the digests of its chunks are not those of its manifest" in refusal(copy)


def test_each_reason_has_its_own_sentence(made: Made, copy: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "has no manifest.json" in refusal(tmp_path / "empty")
    assert "cannot be read: No such file" in refusal(tmp_path / "nowhere" / "at-all")
    assert "belongs to run demo, not other" in refusal(copy, run="other")
    assert "did not know the secret" in refusal(copy, secret=b"x" * 32)
    made.edit(copy, unix_s=UNIX_S_MAX + 1)
    assert "written after the year 9999" in refusal(copy)
    made.edit(copy, unix_s=UNIX_S_MAX)
    assert "has a wrong signature" in refusal(copy)
    made.edit(copy, format_version=4)
    assert "has format 4; this version of atoll reads 3" in refusal(copy)
    made.edit(copy, format_version=1, format="tar")
    assert "is not a checkpoint" in refusal(copy)
    made.edit(copy, format="atoll-checkpoint", signature="")
    assert "is unsigned" in refusal(copy)


def test_a_manifest_that_its_writer_has_not_signed_is_refused(made: Made, copy: Path) -> None:
    made.edit(copy, round=7)
    assert "has a wrong signature" in refusal(copy)
    shutil.copy(made.newer / MANIFEST_FILE, copy)
    made.edit(copy, peer=(b"\1" * 32).hex())
    assert "has a wrong signature" in refusal(copy)


def test_files_that_do_not_belong_together_are_refused(made: Made, copy: Path) -> None:
    shutil.copy(made.older / STATE_FILE, copy)
    assert "the header of state.safetensors is not the one of this state" in refusal(copy)
    shutil.copy(made.newer / STATE_FILE, copy)
    shutil.copy(made.older / MANIFEST_FILE, copy)
    assert "the header of state.safetensors is not the one" in refusal(copy)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"file_bytes": 1 << 50}, "contradicts itself"),
        ({"chunks": 4}, "contradicts itself"),
        ({"root": b"r" * 32}, "contradicts itself"),
        ({"digest": b"d" * 32}, "contradicts itself"),
        ({"chain": b"c" * 32}, "the header of state.safetensors"),
        ({"blob": b"not a blob"}, "cannot be used here: run blob cannot be read"),
    ],
)
def test_a_signed_lie_is_found_out(
    made: Made, copy: Path, changes: dict[str, object], words: str
) -> None:
    made.rewrite(copy, **changes)
    assert words in refusal(copy)


def test_a_wrong_hash_of_the_file_is_found_by_verify(made: Made, copy: Path) -> None:
    made.rewrite(copy, file_sha256=b"h" * 32)
    with pytest.raises(CheckpointError, match="another SHA-256"):
        open_latest(copy).__enter__()


@pytest.mark.parametrize("length", [HEADER_BYTES_MAX + 1, (1 << 64) - 1, 0, 8])
def test_the_length_of_the_header_is_checked_before_it_is_read(copy: Path, length: int) -> None:
    with (copy / STATE_FILE).open("r+b") as file:
        file.write(length.to_bytes(8, "little"))
    assert f"claims a header of {length:,} bytes" in refusal(copy)


@pytest.mark.parametrize("text", [b"", b"[" * 100_000, b"9" * 10_000, b'{"format": 1}', b"\xff"])
def test_a_manifest_that_is_no_json_of_ours_is_refused(copy: Path, text: bytes) -> None:
    (copy / MANIFEST_FILE).write_bytes(text)
    assert "is not a checkpoint" in refusal(copy)


def test_a_manifest_is_not_read_when_it_is_too_long(copy: Path) -> None:
    os.truncate(copy / MANIFEST_FILE, MANIFEST_BYTES_MAX + 1)
    assert f"at most {MANIFEST_BYTES_MAX:,} are possible" in refusal(copy)


@pytest.mark.parametrize("name", [STATE_FILE, MANIFEST_FILE])
def test_a_pipe_in_place_of_a_file_does_not_block(copy: Path, name: str) -> None:
    (copy / name).unlink()
    os.mkfifo(copy / name)
    assert "is not a file" in refusal(copy)


def test_a_missing_state_file_is_named(copy: Path) -> None:
    (copy / STATE_FILE).unlink()
    assert "state.safetensors cannot be read: No such file" in refusal(copy)


# ---------------------------------------------------------------- the layout


def test_names_that_no_header_can_hold_are_refused() -> None:
    with pytest.raises(CheckpointError, match="two tensors that are called __metadata__"):
        header_bytes([("__metadata__", "float32", (1,), 4)], {})
    names = [("n" * 500 + str(n), "float32", (1,), 4) for n in range(40_000)]
    with pytest.raises(CheckpointError, match="a checkpoint's header has room for"):
        header_bytes(names, {})


@given(
    shapes=st.lists(st.lists(st.integers(0, 40), max_size=3), min_size=1, max_size=6),
    round_number=st.integers(1, 10**12 - 1),
    momentum_codec=st.sampled_from(MOMENTUM_CODECS),
)
@settings(max_examples=50, deadline=None)
def test_every_byte_of_the_file_has_one_place(
    shapes: list[list[int]], round_number: int, momentum_codec: str
) -> None:
    parameters = [Parameter(f"p{i}", tuple(shape)) for i, shape in enumerate(shapes)]
    parameters.append(Parameter("q", (5000,)))
    spec = RunSpec(sync_every=1, momentum_codec=momentum_codec)
    layout = StateLayout.of(spec, Manifest.of(parameters), round_number, bytes(32))
    assert len(layout.prefix) % 8 == 0
    assert len(layout.prefix) == len(StateLayout.of(spec, layout.manifest, 1, b"c" * 32).prefix)
    places = [layout.place(chunk) for chunk in range(layout.grid.count)]
    ranges = sorted(
        [(p.theta_at, p.theta_at + p.theta_bytes) for p in places]
        + [(p.momentum_at, p.momentum_at + p.momentum_bytes) for p in places]
        + [(0, len(layout.prefix)), (layout.leaves_at, layout.total_bytes)]
    )
    assert all(a[1] == b[0] for a, b in pairwise(ranges))
