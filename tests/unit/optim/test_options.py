"""Options that methods have in common: all of them are there, with one default, and no others."""

from __future__ import annotations

import inspect
import pydoc

import pytest

import atoll.optim
from atoll.optim import options
from atoll.optim.experimental import CO2

METHODS = (
    *("AsyncDiLoCo", "DeMo", "DiLoCo", "GradientAverage", "LocalSGD", "NoLoCo"),
    *("Population", "SparseLoCo", "StreamingDiLoCo", "ZerothOrder"),
)
CLASSES = (CO2, *(getattr(atoll.optim, name) for name in METHODS))
KINDS = (
    *(options.RunOptions, options.BufferOptions, options.SpeedOptions, options.TrustOptions),
    *(options.AllRoundOptions, options.ReplayOptions),
)


@pytest.mark.parametrize("method", CLASSES)
def test_any_other_keyword_is_a_type_error_that_names_it(method: type) -> None:
    text = rf"{method.__name__}\.__init__\(\) got an unexpected keyword argument 'min_trainer'"
    with pytest.raises(TypeError, match=text):
        method(None, None, None, None, min_trainer=2)


@pytest.mark.parametrize("method", CLASSES)
def test_people_see_every_option_with_its_default(method: type) -> None:
    found = inspect.signature(method).parameters
    assert "options" not in found
    for option in options.RunOptions.__annotations__:
        assert found[option].kind is inspect.Parameter.KEYWORD_ONLY
        assert found[option].default == options.DEFAULTS[option]  # type: ignore[literal-required]
    text = pydoc.render_doc(method)
    assert "min_trainers" in text
    assert "atoll.optim.options" in text  # where they are described
    assert "no round or step begins with fewer trainers" in text  # ... and here


def test_each_option_has_a_default_and_is_described_once() -> None:
    assert options.ReplayOptions.__annotations__.keys() == options.DEFAULTS.keys()
    texts = "\n".join(kind.__doc__ or "" for kind in KINDS)
    for option in options.DEFAULTS:
        assert f"``{option}``" in texts


def test_a_method_has_those_of_its_kind_alone() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'round_s'"):
        atoll.optim.StreamingDiLoCo(None, None, 5, None, round_s=1.0)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'audit'"):
        atoll.optim.AsyncDiLoCo(None, None, 5, None, outer_delay=2, audit=True)  # type: ignore[call-arg]
