"""``outer.save`` and ``outer.load``: whole, compared before anything changes, never half there."""

from __future__ import annotations

import json
import math
import os
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler as lrs
from torch.testing._internal.distributed.fake_pg import FakeStore

from atoll.collectives.errors import CheckpointError, ConfigError
from atoll.optim import DiLoCo, LocalSGD, Swarm
from atoll.optim.model_io import ModelVector
from atoll.optim.run_spec import RunSpec
from atoll.optim.saved_values import apart, together
from atoll.optim.saving import Trainer, load, save
from atoll.optim.swarm import SwarmSession


def model(width: int = 3, seed: int = 0) -> nn.Module:
    random = torch.Generator().manual_seed(seed)
    made = nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=random))
    return made


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def step(net: nn.Module, inner: torch.optim.Optimizer, number: int) -> None:
    random = torch.Generator().manual_seed(number)
    net(torch.randn(4, 2, generator=random)).square().mean().backward()
    inner.step()
    inner.zero_grad()


def alone(work: Callable[[SwarmSession], Any]) -> Any:
    (found,) = Swarm(1).run(work)
    return found


def saved_in(folder: Path, session: SwarmSession, steps: int = 3) -> DiLoCo:
    """It goes on in the swarm of this session."""
    net = model()
    inner = adamw(net)
    outer = DiLoCo(net, inner, 4, session)
    for number in range(steps):
        step(net, inner, number)
    outer.save(folder)
    return outer


def state_of(net: nn.Module, inner: torch.optim.Optimizer) -> str:
    return repr([net.state_dict(), inner.state_dict()])


def test_any_safetensors_reader_opens_the_files(tmp_path: Path) -> None:
    def work(session: SwarmSession) -> None:
        saved_in(tmp_path, session)
        (there,) = tmp_path.iterdir()
        found = safetensors.torch.load_file(there / "model.safetensors")
        assert set(found) == {
            *(f"parameter {n}.{kind}" for n in range(3) for kind in ("weight", "bias")),
            *(f"buffer 1.{n}" for n in ("num_batches_tracked", "running_mean", "running_var")),
        }
        own = safetensors.torch.load_file(there / "rank-0.safetensors")
        assert own["inner.0.state.0.exp_avg"].shape == (3, 2)
        assert own["inner.0.state.0.step"] == 3
        assert oct(there.stat().st_mode & 0o777) == "0o700"

    alone(work)


def test_nothing_is_there_at_the_first_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(session: SwarmSession) -> None:
        net = model()
        with DiLoCo(net, adamw(net), 4, session) as outer:
            assert not outer.load(tmp_path / "new")

    alone(work)
    assert "nothing is saved in" in capsys.readouterr().err


def groups_reversed(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(net.parameters())[::-1], lr=0.01)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.01)


OTHERS: dict[str, tuple[Callable[[], nn.Module], Any, Any, str]] = {
    "another width": (
        lambda: model(5),
        adamw,
        DiLoCo,
        r"parameter 0\.bias: saved \(3,\) float32, here \(5,\) float32",
    ),
    "another dtype": (
        lambda: model().double(),
        adamw,
        DiLoCo,
        r"parameter 0\.weight: saved \(3, 2\) float32, here \(3, 2\) float64",
    ),
    "one parameter less": (
        lambda: nn.Sequential(*list(model())[:2]),
        adamw,
        DiLoCo,
        r"parameter 2\.weight: saved \(1, 3\) float32, here none",
    ),
    "another order": (
        model,
        groups_reversed,
        DiLoCo,
        r"hold other parameters: 2\.bias here and 0\.weight saved",
    ),
    "another optimizer": (model, sgd, DiLoCo, r"are \['SGD'\], saved were \['AdamW'\]"),
    "another method": (model, adamw, LocalSGD, "saved by a DiLoCo, this is a LocalSGD"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_what_does_not_fit_is_named_before_anything_changes(what: str, tmp_path: Path) -> None:
    make, make_inner, method, said = OTHERS[what]
    alone(lambda session: saved_in(tmp_path, session))

    def work(session: SwarmSession) -> None:
        net = make()
        inner = make_inner(net)
        outer = method(net, inner, 4, session)
        before = state_of(net, inner)
        with pytest.raises(ConfigError, match=said):
            outer.load(tmp_path)
        assert state_of(net, inner) == before

    alone(work)


def test_other_numbers_are_listed(tmp_path: Path) -> None:
    alone(lambda session: saved_in(tmp_path, session))

    def work(session: SwarmSession) -> None:
        net = model()
        outer = DiLoCo(net, adamw(net), 8, session, codec="int4", min_trainers=1)
        with pytest.raises(ConfigError) as caught:
            outer.load(tmp_path)
        assert "sync_every: saved 4, here 8" in caught.value.what
        assert "codec: saved int8, here int4" in caught.value.what

    alone(work)


@pytest.mark.parametrize("name", ["model.safetensors", "rank-0.safetensors", "rank-0.json"])
@pytest.mark.parametrize("where", [0.0, 0.5, 1.0], ids=["begin", "middle", "end"])
def test_damage_is_noticed(name: str, where: float, tmp_path: Path) -> None:
    alone(lambda session: saved_in(tmp_path, session))
    (there,) = tmp_path.iterdir()
    data = bytearray((there / name).read_bytes())
    at = int(where * (len(data) - 1))
    data[at : at + 1] = b"" if name.endswith("json") else bytes([data[at] ^ 1])
    (there / name).write_bytes(data)

    def work(session: SwarmSession) -> None:
        net = model()
        inner = adamw(net)
        outer = DiLoCo(net, inner, 4, session)
        before = state_of(net, inner)
        try:
            outer.load(tmp_path)
        except (CheckpointError, ConfigError):
            assert state_of(net, inner) == before
        else:  # a description without a letter of some text
            assert name == "rank-0.json"

    alone(work)


def test_a_save_that_fails_leaves_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    def work(session: SwarmSession) -> None:
        outer = saved_in(tmp_path, session)
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            with pytest.raises(CheckpointError, match="No space left"):
                outer.save(tmp_path)
        names = sorted(path.name for path in tmp_path.iterdir())
        assert names == [".saving", "save-000001"]
        assert outer.load(tmp_path)
        outer.save(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["save-000002"]

    alone(work)


def test_moments_keep_their_own_dtype(tmp_path: Path) -> None:
    """torch rounds them to that of the parameter."""

    def work(session: SwarmSession) -> None:
        net = nn.Linear(4, 4).bfloat16()
        inner = torch.optim.AdamW(net.parameters(), lr=0.01)
        net(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        inner.step()
        wide = torch.randn(4, 4)
        inner.state[net.weight]["exp_avg"] = wide
        outer = DiLoCo(net, inner, 4, session)
        outer.save(tmp_path)
        inner.state.clear()
        assert outer.load(tmp_path)
        assert torch.equal(inner.state[net.weight]["exp_avg"], wide)
        assert inner.state[net.weight]["exp_avg_sq"].dtype is torch.bfloat16

    alone(work)


def test_shards_are_saved_and_loaded_after_an_evaluation_too(tmp_path: Path) -> None:
    """A forward pass without a backward pass leaves whole copies in the model."""
    from torch.distributed.fsdp import fully_shard  # takes a second

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        net = fully_shard(nn.Linear(4, 6), mesh=mesh)
        method: Any = SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)
        parts = ModelVector(net), (adamw(net),), RunSpec(sync_every=4), object(), {}
        trainer = Trainer(method, *parts)
        own = {name: p.to_local().detach().clone() for name, p in net.named_parameters()}

        def evaluate() -> None:
            with torch.no_grad():
                net(torch.zeros(1, 4))
            assert not hasattr(net.weight, "to_local")

        evaluate()
        there = save(trainer, tmp_path)
        saved = safetensors.torch.load_file(there / "model-0.safetensors")
        assert {name: saved[f"parameter {name}"].tolist() for name in own} == {
            name: rows.tolist() for name, rows in own.items()
        }
        evaluate()
        assert load(trainer, tmp_path) == there
        assert all(torch.equal(p.to_local(), own[name]) for name, p in net.named_parameters())
    finally:
        dist.destroy_process_group()


def test_other_objects_go_along(tmp_path: Path) -> None:
    def made(net: nn.Module) -> tuple[torch.optim.Optimizer, Any, Any]:
        inner = adamw(net)
        steps = torch.optim.lr_scheduler.MultiStepLR(inner, [2, 5])
        return inner, steps, torch.amp.GradScaler("cpu")

    def work(session: SwarmSession) -> None:
        net = model()
        inner, steps, scaler = made(net)
        outer = DiLoCo(net, inner, 4, session)
        for number in range(3):
            step(net, inner, number)
            steps.step()
        scaler.load_state_dict(scaler.state_dict() | {"scale": 8.0})
        outer.save(tmp_path, steps=steps, scaler=scaler)
        again = model(seed=1)
        other, fresh, scaler = made(again)
        outer = DiLoCo(again, other, 4, session)
        with pytest.raises(ConfigError, match=r"saved with \['scaler', 'steps'\]"):
            outer.load(tmp_path, steps=fresh)
        assert outer.load(tmp_path, steps=fresh, scaler=scaler)
        assert fresh.last_epoch == 3
        assert scaler.get_scale() == 8.0
        fresh.step()
        steps.step()
        assert fresh.state_dict() == steps.state_dict()

        class Odd:
            def state_dict(self) -> dict[str, Any]:
                return {"what": object()}

            def load_state_dict(self, state_dict: dict[str, Any]) -> None:
                raise AssertionError

        with pytest.raises(ConfigError, match=r"more\.odd\.what is a object"):
            outer.save(tmp_path, odd=Odd())

    alone(work)


class Loader:
    """Hold the state of a loader of data, in kinds of its own."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {
            "order": np.arange(5)[::-1],
            "weights": np.array([[0.5, np.nan]], np.float32).T,
            "flag": np.array(True),
            "nothing": np.zeros((0, 3)),
            "seen": Counter({3: 1, "a": 2}),
            "sorted": OrderedDict(b=1, a=np.ones(2)),
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


def test_arrays_and_dictionaries_come_back_as_what_they_were(tmp_path: Path) -> None:
    def work(session: SwarmSession) -> None:
        net = model()
        outer = DiLoCo(net, adamw(net), 4, session)
        outer.save(tmp_path, loader=Loader())
        loaded, expected = Loader(), Loader().state
        outer.load(tmp_path, loader=loaded)
        assert same(loaded.state, expected)
        loaded.state["order"][0] = 7  # it can be written, and is no view of the file
        for odd, said in (
            (defaultdict(int), "a defaultdict"),
            (np.array(["a"]), "a numpy array of <U1"),
            (np.array([object()]), "a numpy array of object"),
        ):
            loaded.state = {"odd": odd}
            with pytest.raises(ConfigError, match=rf"more\.loader\.odd is {said}"):
                outer.save(tmp_path, loader=loaded)

    alone(work)


class Counting(torch.optim.AdamW):
    """Keep a number of its own beside the moments of parameters."""

    def step(self, closure: Any = None) -> Any:
        self.state["global_step"] = self.state.get("global_step", 0) + 1  # type: ignore[index]
        self.state["rates"] = {"first": torch.ones(1)}  # type: ignore[index]
        return super().step(closure)


def test_optimizers_may_keep_values_beside_those_of_parameters(tmp_path: Path) -> None:
    def work(session: SwarmSession) -> None:
        net = model().double()
        inner = Counting(net.parameters(), lr=0.01)
        outer = DiLoCo(net, inner, 4, session)
        for _ in range(3):
            net(torch.ones(2, 2, dtype=torch.float64)).square().mean().backward()
            inner.step()
        moment = inner.state[net[0].weight]["exp_avg"].clone()
        outer.save(tmp_path)
        inner.state.clear()
        assert outer.load(tmp_path)
        assert inner.state["global_step"] == 3  # type: ignore[index]
        assert torch.equal(inner.state[net[0].weight]["exp_avg"], moment)

    alone(work)


def test_a_buffer_that_no_file_takes_is_said_when_the_method_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(session: SwarmSession) -> None:
        net = model()
        net.register_buffer("scale", torch.ones(2).to(torch.float8_e4m3fn))
        net.register_buffer("cache", torch.ones(2).to(torch.float8_e4m3fn), persistent=False)
        outer = DiLoCo(net, adamw(net), 4, session)
        assert "files do not take 1 buffer of the model, scale" in capsys.readouterr().err
        with pytest.raises(ConfigError, match="buffer scale is of float8_e4m3fn"):
            outer.save(tmp_path)

    alone(work)


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], lrs.LRScheduler]] = {
    "cosine": lambda inner: lrs.CosineAnnealingLR(inner, 60),
    "exponential": lambda inner: lrs.ExponentialLR(inner, 0.9),
    "lambda": lambda inner: lrs.LambdaLR(inner, lambda step: 0.9**step),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_learning_rate_that_follows_is_not_that_of_the_file(name: str, tmp_path: Path) -> None:
    def work(session: SwarmSession) -> None:
        def made() -> tuple[DiLoCo, Callable[[int], float]]:
            net = model()
            inner = adamw(net)
            schedule = SCHEDULES[name](inner)
            outer = DiLoCo(net, inner, 4, session)
            outer.follow(schedule)

            def taken(steps: int) -> float:
                for number in range(steps):
                    step(net, inner, number)
                    schedule.step()
                return float(inner.param_groups[0]["lr"])

            return outer, taken

        outer, taken = made()
        taken(6)
        outer.save(tmp_path)
        there = taken(14)
        outer.close()
        again, taken_again = made()
        assert again.load(tmp_path)
        assert again.global_step == 20
        assert taken_again(0) == there
        assert taken_again(8) == taken(8)

    alone(work)


def test_it_is_called_between_two_steps(tmp_path: Path) -> None:
    def work(session: SwarmSession) -> None:
        net = model()
        outer = DiLoCo(net, adamw(net), 4, session)
        for call in (outer.save, outer.load):
            with outer.outer_parameters(), pytest.raises(ConfigError, match="inside outer_param"):
                call(tmp_path)

    alone(work)


def test_it_says_how_it_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the run has gone on its parameters count, and the moments of the file."""

    def work(session: SwarmSession) -> None:
        outer = saved_in(tmp_path, session)
        net, inner = outer._vector.model, outer._inners[0]
        moment = inner.state[next(net.parameters())]["exp_avg"].clone()
        assert outer.load(tmp_path)
        assert "is at step 3: the run is where it was" in capsys.readouterr().err
        for number in range(3, 9):
            step(net, inner, number)
        assert outer.load(tmp_path)
        assert "is at step 8: the run is at round 3 by now" in capsys.readouterr().err
        assert torch.equal(inner.state[next(net.parameters())]["exp_avg"], moment)
        with outer.outer_parameters():
            theirs = [p.clone() for p in net.parameters()]
        assert all(map(torch.equal, theirs, net.parameters()))

    alone(work)


def test_only_what_is_trained_is_saved(tmp_path: Path) -> None:
    def work(session: SwarmSession) -> None:
        net = model()
        net[0].weight.requires_grad = False
        outer = DiLoCo(net, adamw(net), 4, session)
        there = outer.save(tmp_path)
        assert "parameter 0.weight" not in safetensors.torch.load_file(there / "model.safetensors")
        assert outer.load(tmp_path)

    alone(work)


TENSORS = st.sampled_from(
    [
        torch.tensor([float("nan"), -0.0, 1e-45]),
        torch.zeros(0, 3),
        torch.tensor(True),
        torch.arange(4)[::2],
        torch.ones(2, dtype=torch.bfloat16),
        np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::-1],
        Counter({"a": 2, 3: 1}),
        OrderedDict(b=1, a=2),
    ]
)
STATES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | TENSORS,
    lambda inside: (
        st.lists(inside, max_size=3)
        | st.tuples(inside, inside)
        | st.dictionaries(st.integers() | st.text(alphabet="abc.", min_size=1), inside, max_size=3)
    ),
    max_leaves=12,
)


@given(STATES)
@settings(max_examples=200, deadline=None)
def test_any_state_comes_back_as_it_was(state: Any) -> None:
    tensors: dict[str, Any] = {}
    text = json.dumps(apart(state, "state", tensors), allow_nan=False)
    assert same(together(json.loads(text), tensors), state)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        bits = [one.contiguous().reshape(-1).view(torch.uint8) for one in (a, b) if one.numel()]
        return a.dtype == b.dtype and a.shape == b.shape and (not bits or torch.equal(*bits))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.mark.parametrize(
    "odd",
    [
        {"pickle": "abc"},
        {"map": [[[1], 2]]},
        {"map": 3},
        {"tensor": "none"},
        {"array": "none"},
        {"counter": [[[1], 2]]},
        {"a": 1, "b": 2},
        {},
        {"float": "x"},
    ],
)
def test_what_was_not_written_here_is_refused(odd: Any) -> None:
    with pytest.raises(CheckpointError):
        together(odd, {})
    deep: Any = 1
    for _ in range(40):
        deep = [deep]
    with pytest.raises(CheckpointError, match="levels"):
        together(deep, {})
