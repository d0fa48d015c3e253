from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch

from atoll.collectives.errors import DataError
from atoll.optim import ByteTransformer, TextBatches, heldout_loss
from atoll.peer.demo import text as text_module
from atoll.peer.demo.text import Text, load_text

LINE = b"the quick brown fox jumps over the lazy dog\n"
HELDOUT = {53, 56, 59, 62}


def fill(folder, files=64, lines=30):
    for i in range(files):
        path = folder / f"part{i % 3}" / f"{i:03}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"%03d " % i + LINE * lines)


def numbers(data) -> set[int]:
    """Which files the bytes are from: each begins with its number."""
    return {int(part[-4:]) for part in data.tobytes().split(b" the quick")[:-1]}


def test_the_default_is_the_standard_library_without_tests():
    lines: list[str] = []
    text = load_text(log=lines.append)
    assert len(text.train) > 4_000_000
    assert 0.01 < len(text.heldout) / len(text.train) < 0.2
    assert b"import os" in text.train.tobytes()
    again = load_text(log=lines.append)
    assert np.array_equal(text.heldout, again.heldout)


def test_split_is_by_file_and_the_same_wherever_the_folder_lies(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b" / "deeper"
    for folder in (a, b):
        folder.mkdir(parents=True)
        fill(folder)
    first, second = load_text(a), load_text(b)
    assert np.array_equal(first.train, second.train)
    assert np.array_equal(first.heldout, second.heldout)
    train, heldout = numbers(first.train), numbers(first.heldout)
    assert heldout == HELDOUT  # written down, so that it cannot depend on the process or machine
    assert train == set(range(64)) - HELDOUT


def test_few_files_hold_out_the_end(tmp_path):
    (tmp_path / "one.txt").write_bytes(bytes(range(32, 96)) * 1000)
    text = load_text(tmp_path)
    assert (len(text.train), len(text.heldout)) == (60_000, 4_000)


def test_what_is_not_text_is_skipped_with_a_line(tmp_path):
    fill(tmp_path)
    clean = load_text(tmp_path, log=pytest.fail)
    (tmp_path / "image.png").write_bytes(b"\x89PNG" + bytes(range(256)))
    (tmp_path / "zeros").write_bytes(bytes(1000))
    (tmp_path / ".hidden").write_bytes(b"\xff")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "object").write_bytes(b"\xff")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    lines: list[str] = []
    text = load_text(tmp_path, log=lines.append)
    assert np.array_equal(text.train, clean.train)
    assert [("image.png" in line, "zeros" in line) for line in lines] == [
        (True, False),
        (False, True),
    ]


def test_the_cap_may_cut_a_character(tmp_path, monkeypatch):
    monkeypatch.setattr(text_module, "TEXT_BYTES_MAX", 20_001)
    (tmp_path / "a.txt").write_bytes("é".encode() * 20_000)
    (tmp_path / "b.txt").write_bytes(LINE)
    lines: list[str] = []
    text = load_text(tmp_path, log=lines.append)
    assert len(text.train) + len(text.heldout) == 20_001
    assert len(lines) == 1
    assert "left out" in lines[0]


@pytest.mark.parametrize("name", ["empty", "missing", "file"])
def test_no_text_is_a_clear_error(tmp_path, name):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_bytes(LINE)
    with pytest.raises(DataError, match=name) as caught:
        load_text(tmp_path / name)
    assert "--data" in str(caught.value)


@pytest.fixture
def text() -> Text:
    return Text(np.frombuffer(LINE * 400, np.uint8), np.frombuffer(LINE * 40, np.uint8))


def test_batches_are_windows_of_the_text_and_depend_on_the_seed(text):
    batches = TextBatches(text, context=16, batch=4, seed=1)
    now, later = batches.next()
    assert now.shape == later.shape == (4, 16)
    assert now.dtype == torch.int64
    assert torch.equal(now[:, 1:], later[:, :-1])
    assert all(bytes(row.tolist()) in LINE * 3 for row in now)
    same, other = (TextBatches(text, context=16, batch=4, seed=s).next()[0] for s in (1, 2))
    assert torch.equal(now, same)
    assert not torch.equal(now, other)


def test_a_context_longer_than_the_text_is_refused(text):
    with pytest.raises(DataError):
        TextBatches(text, context=len(text.train))
    with pytest.raises(DataError):
        heldout_loss(ByteTransformer(width=8, depth=1, heads=1, context=2000), text)
    TextBatches(text, context=len(text.train) - 1).next()


def test_model_is_causal_tied_and_starts_near_uniform(text):
    model = ByteTransformer(width=32, depth=2, heads=2, context=24)
    assert model.head.weight is model.embedding.weight
    bytes_BT = torch.randint(0, 256, (2, 24))
    changed = bytes_BT.clone()
    changed[:, 12] = (changed[:, 12] + 1) % 256
    same = torch.isclose(model(bytes_BT), model(changed), atol=1e-6).all(-1)
    assert same[:, :12].all()
    assert not same[:, 12:].any()
    assert model(bytes_BT[:, :5]).shape == (2, 5, 256)
    assert abs(heldout_loss(model, text) - math.log(256)) < 0.5


def test_training_lowers_the_heldout_loss(text):
    model = ByteTransformer(width=32, depth=1, heads=2, context=16)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = TextBatches(text, context=16, batch=8)
    before = heldout_loss(model, text)
    assert heldout_loss(model, text) == before
    for _ in range(60):
        model.loss(*batches.next()).backward()
        inner.step()
        inner.zero_grad()
    assert heldout_loss(model, text) < before / 2
