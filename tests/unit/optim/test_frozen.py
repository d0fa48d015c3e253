"""What is not trained is compared when a trainer attaches, and what is trained does not change."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.every_method import EVERY_METHOD
from harness.rank_processes import two_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from atoll.collectives.errors import ConfigError, IncompatibleRunError, RemoteProtocolError
from atoll.optim import Swarm
from atoll.optim import frozen as frozen_module
from atoll.optim.frozen import Frozen
from atoll.optim.manifest import FROZEN_LINES_MAX, FrozenTensor, Manifest, Parameter
from atoll.optim.run_spec import RunSpec, blob, check_same, parse_blob

SPEC = RunSpec(sync_every=2)
WEIGHT = Manifest.of([Parameter("w", (2, 3))])


class Adapted(nn.Module):
    """A frozen base, as ``kind`` keeps it, and a trained head."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        base = torch.randn(4, 4, generator=random) * 50
        self.base = nn.Parameter(base.to(dtype), requires_grad=False)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("cache", torch.zeros(1 + seed), persistent=False)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x @ self.base.float())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)


def attached(method: str, models: list[nn.Module], *frozen: str) -> None:
    """Each model attaches to one run, with what it says about frozen parameters."""

    def work(session: Any) -> None:
        model = models[session.number]
        how = {"frozen": frozen[session.number]} if frozen else {}
        EVERY_METHOD[method](model, optimizer_of(model), session, **how)

    Swarm(len(models)).run(work)


@pytest.mark.parametrize("method", EVERY_METHOD)
def test_another_base_is_refused_by_name_in_every_method(method: str) -> None:
    attached(method, [Adapted(0), Adapted(0)])
    with pytest.raises(IncompatibleRunError) as caught:
        attached(method, [Adapted(0), Adapted(1)])
    text = str(caught.value)
    assert "base: yours 4x4 float32 with values " in text
    assert "head" not in text
    assert "cache" not in text  # not persistent: its size differs
    assert 'frozen="warn"' in text


@pytest.mark.parametrize("method", EVERY_METHOD)
def test_who_means_it_is_warned_or_not(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    attached(method, [Adapted(0), Adapted(1)], "refuse", "warn")
    assert "base: yours 4x4 float32 with values " in capsys.readouterr().err
    attached(method, [Adapted(0), Adapted(1)], "refuse", "ignore")
    attached(method, [Adapted(0), Adapted(1)], "ignore", "refuse")  # there is nothing to compare
    assert "base" not in capsys.readouterr().err
    with pytest.raises(ConfigError, match="refuse, warn, ignore"):
        attached(method, [Adapted(0)], "maybe")


DTYPES = (torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.uint8)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_bases_of_any_dtype_are_compared(dtype: torch.dtype) -> None:
    attached("DiLoCo", [Adapted(0, dtype), Adapted(0, dtype)])
    with pytest.raises(IncompatibleRunError, match=f"base: yours 4x4 {str(dtype)[6:]} with values"):
        attached("DiLoCo", [Adapted(0, dtype), Adapted(1, dtype)])
    with pytest.raises(IncompatibleRunError, match="base: yours 4x4 float32"):
        attached("DiLoCo", [Adapted(0, dtype), Adapted(0)])


def test_a_quantized_tensor_is_what_its_parts_are() -> None:
    def model(scale: float) -> nn.Module:
        made = nn.Linear(2, 2, bias=False)
        both = TwoTensor(torch.ones(3, 3), torch.full((3, 3), scale))
        made.base = nn.Parameter(both, requires_grad=False)
        return made

    attached("DiLoCo", [model(1.0), model(1.0)])
    with pytest.raises(IncompatibleRunError, match="base: yours 3x3"):
        attached("DiLoCo", [model(1.0), model(2.0)])


def test_one_that_is_expanded_has_the_digest_of_its_values() -> None:
    def found(base: Tensor) -> Any:
        model = nn.Linear(2, 1)
        model.base = nn.Parameter(base, requires_grad=False)
        return Frozen(model).fingerprint("refuse")

    for shape in ((5,), (5, 1), (3, 5)):
        assert found(torch.ones(1).expand(shape)) == found(torch.ones(shape))


def test_tied_frozen_parameters_are_one() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False), nn.Linear(5, 1))
    model[1].weight = model[0].weight
    model[0].requires_grad_(False)
    found = Frozen(model).fingerprint("refuse")
    assert found is not None
    assert [tensor.name for tensor in found] == ["0.weight"]


def test_buffers_are_compared_by_name_shape_and_dtype_alone() -> None:
    one, other = Adapted(), Adapted()
    other.seen.fill_(7)
    attached("DiLoCo", [one, other])
    other.seen = torch.zeros(4)
    with pytest.raises(IncompatibleRunError, match="seen: yours buffer 4 float32, run buffer 3"):
        attached("ZerothOrder", [one, other])  # which never shares any


def test_values_that_are_not_here_are_an_error_of_ours() -> None:
    model = Adapted()
    model.base = nn.Parameter(torch.empty(4, 4, device="meta"), requires_grad=False)
    with pytest.raises(ConfigError, match=r"parameter base .* on meta\) cannot be read"):
        attached("DiLoCo", [model])


# ---------------------------------------------------------------- the digest


def test_the_digest_is_as_it_is_documented() -> None:
    """Peers of other versions must find the same."""
    small = torch.arange(10, dtype=torch.float32)
    expected = hashlib.sha256(small.numpy().tobytes()).hexdigest()[:16]
    assert digest_of(small) == digest_of(small.view(2, 5).t().contiguous().t()) == expected
    large = torch.randint(0, 256, (4 * 2**20 + 12345,), dtype=torch.uint8)
    last = large.numel() - 16384
    starts = [number * last // 255 for number in range(256)]
    assert starts[-1] == last
    blocks = b"".join(large.numpy()[start : start + 16384].tobytes() for start in starts)
    assert digest_of(large) == hashlib.sha256(blocks).hexdigest()[:16]
    for place in (0, -1):
        changed = large.clone()
        changed[place] += 1
        assert digest_of(changed) != digest_of(large)


def digest_of(tensor: Tensor) -> str:
    model = nn.Linear(1, 1)
    model.base = nn.Parameter(tensor, requires_grad=False)
    found = Frozen(model).fingerprint("refuse")
    assert found is not None
    return found[0].digest


def test_it_does_not_depend_on_sharding(tmp_path: Path) -> None:
    """Of FSDP2 over two processes; the whole is never kept."""
    first, second = two_ranks(tmp_path, "rank_model", "fingerprints")
    whole, sharded = first
    assert first == second
    assert whole == sharded
    assert [name for name, *_ in whole] == ["0.bias", "0.weight"]


# ---------------------------------------------------------------- on the wire

names = st.text(st.characters(codec="utf-8", categories=["L", "N", "P"]), min_size=1, max_size=20)
outlines = st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), max_size=20)
digests = st.sampled_from(["", "0123456789abcdef", "f" * 16])
tensors = st.dictionaries(names, st.tuples(outlines, digests), max_size=20)


@given(st.none() | tensors)
def test_a_blob_comes_back_as_it_was(found: dict[str, tuple[str, str]] | None) -> None:
    frozen = None
    if found is not None:
        frozen = tuple(FrozenTensor(name, *rest) for name, rest in sorted(found.items()))
    manifest = Manifest(WEIGHT.parameters, frozen)
    assert parse_blob(blob(SPEC, manifest)) == (SPEC, manifest)
    assert manifest.digest() == WEIGHT.digest()  # of what is trained


@given(st.text(max_size=40))
def test_what_anybody_sends_is_refused_or_understood(tail: str) -> None:
    text = f"{WEIGHT.to_wire()}\n\n{tail}"
    with suppress(RemoteProtocolError):
        assert Manifest.from_wire(text).to_wire() == text


def test_a_run_of_version_0_1_is_joined_without_a_look() -> None:
    """Its blob, which checkpoints have too, ends with the parameters."""
    old = parse_blob(blob(SPEC, WEIGHT))
    assert old[1].frozen is None
    mine = Manifest(WEIGHT.parameters, (FrozenTensor("base", "4x4 float32", "0" * 16),))
    assert check_same((SPEC, mine), old, "demo") == ""
    assert check_same(old, (SPEC, mine), "demo") == ""
    empty = Manifest(WEIGHT.parameters, ())
    with pytest.raises(IncompatibleRunError, match=r"base: yours 4x4 float32 .* run missing"):
        check_same((SPEC, mine), (SPEC, empty), "demo")


def test_many_tensors_are_told_by_module_and_fit_into_a_blob() -> None:
    """As of a mixture of experts with 58 layers of 256 experts."""

    def fingerprint(odd: int) -> tuple[FrozenTensor, ...]:
        found = [
            FrozenTensor(f"layers.{i // 256}.mlp.experts.{i % 256}.up.weight", "9x9", f"{i:016x}")
            for i in range(58 * 256)
        ]
        found[odd] = FrozenTensor(found[odd].name, "9x9", "f" * 16)
        return frozen_module._bounded(found)

    one, other = (Manifest(WEIGHT.parameters, fingerprint(odd)) for odd in (0, 300))
    assert len(one.frozen or ()) == 58 <= FROZEN_LINES_MAX
    assert parse_blob(blob(SPEC, one)) == (SPEC, one)
    lines = one.frozen_differences(other)
    assert [line.partition(":")[0] for line in lines] == [
        "layers.0.mlp.experts.*",
        "layers.1.mlp.experts.*",
    ]
    most = tuple(
        FrozenTensor(
            f"layers.{i:05}.{'self_attention' * 3}.weight",
            "4096x4096 bfloat16",
            f"{i * 2654435761 % 2**64:016x}",
        )
        for i in range(FROZEN_LINES_MAX)
    )
    assert len(blob(SPEC, Manifest(WEIGHT.parameters, most))) < 128 * 1024


# ---------------------------------------------------------------- while it trains


class Steps:
    """A model under a method that counts steps, alone."""

    def __init__(self, method: str, session: Any) -> None:
        self.model = Adapted()
        self.inner = optimizer_of(self.model)
        self.outer = EVERY_METHOD[method](self.model, self.inner, session)

    def step(self) -> None:
        self.model(torch.ones(3, 4)).square().mean().backward()
        if type(self.outer).__name__ == "ZerothOrder":
            self.outer.step(lambda: self.model(torch.ones(3, 4)).square().mean())
        elif type(self.outer).__name__ == "DeMo":
            self.outer.step()
        else:
            self.inner.step()


def unfreeze(model: Adapted) -> None:
    model.base.requires_grad_(True)


def freeze(model: Adapted) -> None:
    model.head.bias.requires_grad_(False)


def add(model: Adapted) -> None:
    model.head.extra = nn.Linear(4, 1)


def replace(model: Adapted) -> None:
    model.head.bias = nn.Parameter(torch.zeros(2))


def replace_a_module(model: Adapted) -> None:
    model.head = nn.Linear(4, 2)


def remove(model: Adapted) -> None:
    model.head.bias = None


CHANGES = {
    "now trained: base": unfreeze,
    "no longer trained: head.bias": freeze,
    "new: head.extra.bias, head.extra.weight": add,
    "replaced: head.bias": replace,
    "replaced: head.bias, head.weight": replace_a_module,
    "gone: head.bias": remove,
}


@pytest.mark.parametrize("method", EVERY_METHOD)
def test_what_changes_later_is_an_error_at_the_next_step(method: str) -> None:
    def work(session: Any) -> None:
        trained = Steps(method, session)
        trained.step()
        unfreeze(trained.model)
        with pytest.raises(ConfigError, match="now trained: base"):
            trained.step()

    Swarm(1).run(work)


@pytest.mark.parametrize("what", CHANGES)
def test_every_change_is_named(what: str) -> None:
    watched = Frozen(model := Adapted())
    watched.check()
    CHANGES[what](model)
    with pytest.raises(ConfigError) as caught:
        watched.check()
    assert f"({what})" in caught.value.what
    with pytest.raises(ConfigError):  # it does not get used to it
        watched.check()


def test_what_is_no_parameter_may_change() -> None:
    watched = Frozen(model := Adapted())
    model.head.act = nn.Identity()
    model.register_buffer("later", torch.zeros(1))
    watched.check()
    watched.check()
    model.head.act.weight = nn.Parameter(torch.zeros(1))
    with pytest.raises(ConfigError, match=r"new: head\.act\.weight"):
        watched.check()


def test_parameters_of_another_optimizer_may_be_frozen_for_its_step() -> None:
    """As Lightning's toggle_optimizer does; those of the optimizer that steps may not."""

    def work(session: Any) -> None:
        model = Adapted()
        weight, bias = model.head.weight, model.head.bias
        inners = [torch.optim.SGD([weight], lr=0.1), torch.optim.SGD([bias], lr=0.1)]
        EVERY_METHOD["DiLoCo"](model, inners, session)
        weight.requires_grad_(False)
        model(torch.ones(3, 4)).square().mean().backward()
        inners[1].step()
        weight.requires_grad_(True)
        bias.requires_grad_(False)
        with pytest.raises(ConfigError, match=r"no longer trained: head\.bias"):
            inners[1].step()

    Swarm(1).run(work)
