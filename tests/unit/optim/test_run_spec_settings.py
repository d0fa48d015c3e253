"""Specifications quote the settings of a trainer, whatever their classes are called."""

from __future__ import annotations

import pytest

from atoll.optim import DGC, QSDP, QSR, ErrorFeedback, LayerBits, LGreCo, PowerSGD, TernGrad
from atoll.optim.compressors.base import Compressor, Dense
from atoll.optim.experimental import EF21, EControl

SETTINGS = {
    "Dense()": Dense(),
    "PowerSGD(rank=2, start=1000, min_rate=2.0, choice=None)": PowerSGD(rank=2),
    "PowerSGD(rank=1, start=3, min_rate=2.0, choice=LGreCo(every=5, alpha=1.0))": PowerSGD(
        start=3, choice=LGreCo(every=5)
    ),
    "DGC(density=0.001, momentum=0.9, nesterov=False, clip=0.0, warm_up=0, dense=('head',))": DGC(
        dense=("head",)
    ),
    "EF21(codec='topk', eta=0.5)": EF21(smoothness=3.0, eta=0.5),
    "EControl(codec='topk', eta=0.01)": EControl(),
    "ErrorFeedback(dense=(), codec='topk', decay=1.0)": ErrorFeedback(),
    "LayerBits(codecs=('int2', 'int4', 'int8'), uniform='int4',"
    " choice=LGreCo(every=100, alpha=1.0), dense=())": LayerBits(),
    "TernGrad(dense=())": TernGrad(),
    "QSDP(dense=(), bits=4)": QSDP(bits=4),
    "QSR(a=0.1, peak_lr=0.1, base=4, warmup_steps=0, most=500, total_steps=0)": QSR(
        a=0.1, peak_lr=0.1
    ),
}


@pytest.mark.parametrize("text", SETTINGS)
def test_peers_compare_this_text(text: str) -> None:
    assert str(SETTINGS[text]) == text


def test_a_class_may_be_renamed_and_not_its_text() -> None:
    renamed = type("Renamed", (Dense,), {})
    assert str(renamed()) == "Dense()"


def test_every_compressor_says_what_it_is_called() -> None:
    def all_below(kind: type) -> set[type]:
        return {kind}.union(*map(all_below, kind.__subclasses__()))

    made = {k for k in all_below(Compressor) if k.__module__.startswith("atoll.")}
    named = {k for k in made if not k.__abstractmethods__}  # type: ignore[attr-defined]
    assert len(named) >= 8
    assert all("wire" in vars(kind) for kind in named), named
    assert len({kind.wire for kind in named}) == len(named)  # type: ignore[attr-defined]
