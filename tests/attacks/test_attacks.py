"""What each attack sends, by itself: its formula, and what it does to a mean."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from atoll.collectives.robust import get_rule
from atoll.collectives.robust.coordinate import Rows
from attacks.base import Seen, unit
from attacks.catalogue import ATTACKS
from attacks.crude import Direction, FreeRider, Gaussian, NotFinite, Scaling, SignFlip, Spike
from attacks.hidden import ALittleIsEnough, Drift, InnerProduct, LabelFlip, Mimic, Stale, z_max
from attacks.labels import flipped

PEERS, F, D = 10, 3, 400


def seen_of(seed: int = 0, spread: float = 0.5, d: int = D) -> Seen:
    """Honest pseudo-gradients around a common one, which has ones and minus ones."""
    random = np.random.default_rng(seed)
    common = np.where(np.arange(d) % 2, 1.0, -1.0)
    rows = (common + spread * random.standard_normal((PEERS, d))).astype(np.float32)
    return Seen(honest=rows[F:], own=rows[:F], random=random, places=(0, 1, 2))


def along(vector: Rows, seen: Seen) -> float:
    """How far in the honest direction, as a share of the honest mean's length."""
    return float(vector @ seen.mean / (seen.mean @ seen.mean))


@pytest.mark.parametrize("name", ATTACKS)
def test_every_attack_sends_float32_of_its_own(name: str) -> None:
    seen = seen_of()
    before = seen.honest.copy(), seen.own.copy()
    attack = ATTACKS[name]()
    attack.watch(seen)
    sent = attack.send(seen)
    assert (sent.shape, sent.dtype) == (seen.own.shape, np.float32)
    assert not np.shares_memory(sent, seen.honest)
    assert not np.shares_memory(sent, seen.own)
    assert np.array_equal(before[0], seen.honest)
    assert np.array_equal(before[1], seen.own)
    assert np.isfinite(sent).all() == (name not in ("nan", "infinity"))


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_the_same_for_the_same_seed(name: str) -> None:
    def run() -> list[Rows]:
        attack, random = ATTACKS[name](), np.random.default_rng(7)
        rounds = [replace(seen_of(seed), random=random) for seed in range(4)]
        attack.watch(rounds[0])
        return [attack.send(each) for each in rounds[1:]]

    assert np.array_equal(np.stack(run()), np.stack(run()), equal_nan=True)


# ---------------------------------------------------------------- crude ones


@pytest.mark.parametrize("times", [1.0, 10.0, 1000.0])
def test_a_sign_flip_shortens_the_mean_or_turns_it(times: float) -> None:
    seen = seen_of()
    moved = seen.aggregated(SignFlip(times).send(seen))
    expected = (PEERS - F - F * times) / PEERS
    assert along(moved, seen) == pytest.approx(expected, rel=1e-4)


def test_scaling_lengthens_the_mean() -> None:
    seen = seen_of()
    assert np.array_equal(Scaling(100.0).send(seen), np.float32(100.0) * seen.own)
    assert along(seen.aggregated(Scaling(100.0).send(seen)), seen) > 25


def test_a_free_rider_takes_its_share_away() -> None:
    seen = seen_of()
    moved = seen.aggregated(FreeRider().send(seen))
    assert np.allclose(moved, (PEERS - F) / PEERS * seen.mean, atol=1e-6)


def test_gaussian_noise_has_the_scale_of_what_is_honest() -> None:
    for scale in (1e-4, 1.0):
        seen = seen_of()
        seen = replace(seen, honest=np.float32(scale) * seen.honest)
        sent = Gaussian(10.0).send(seen)
        usual = float(np.sqrt(np.mean(seen.honest**2)))
        assert float(sent.std()) == pytest.approx(10 * usual, rel=0.1)
        assert abs(np.corrcoef(sent)[0, 1]) < 0.2  # each its own


def test_a_random_direction_stays_the_same_and_outweighs_all() -> None:
    attack, first, second = Direction(1000.0), seen_of(0), seen_of(1)
    sent = attack.send(first), attack.send(second)
    assert float(unit(sent[0][0]) @ unit(sent[1][2])) == pytest.approx(1.0, abs=1e-5)
    usual = float(np.linalg.norm(first.honest, axis=1).mean())
    assert float(np.linalg.norm(sent[0][1])) == pytest.approx(1000 * usual, rel=1e-4)
    moved = unit(first.aggregated(sent[0]))
    assert abs(float(moved @ unit(first.mean))) < 0.2


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_number_that_is_not_finite_is_all_that_a_mean_needs(value: float) -> None:
    seen = seen_of()
    sent = NotFinite(value).send(seen)
    assert (np.isfinite(sent).sum(axis=1) == D - 1).all()
    assert not np.isfinite(seen.aggregated(sent)).all()


def test_a_spike_is_in_one_coordinate_and_as_long_as_it_says() -> None:
    seen = seen_of()
    sent = Spike(1000.0).send(seen)
    (at,) = {*np.flatnonzero((sent != seen.own).any(axis=0))}
    length = 1000 * float(np.linalg.norm(seen.mean))
    assert np.allclose(sent[:, at], -length * np.sign(seen.mean[at]), rtol=1e-5)
    assert abs(seen.mean[at]) == np.abs(seen.mean).max()


def test_a_spike_in_a_shard_leaves_the_others_alone() -> None:
    seen = seen_of()
    sent = Spike(1000.0, whole_shard=True).send(seen)
    moved = np.flatnonzero((sent != seen.own).all(axis=0))
    assert moved.size == D // PEERS
    assert moved[0] % moved.size == 0
    assert moved[-1] - moved[0] == moved.size - 1
    shard = slice(moved[0], moved[-1] + 1)
    assert float(unit(sent[0, shard]) @ unit(seen.mean[shard])) == pytest.approx(-1, abs=1e-5)
    length = float(np.linalg.norm(sent[0, shard]))
    assert length == pytest.approx(1000 * float(np.linalg.norm(seen.mean)), rel=1e-4)


# ---------------------------------------------------------------- hidden ones


@pytest.mark.parametrize(("peers", "f", "z"), [(16, 3, 0.097), (16, 7, 0.765), (50, 12, 0.336)])
def test_z_max(peers: int, f: int, z: float) -> None:
    assert z_max(peers, f) == pytest.approx(z, abs=5e-4)


def test_a_little_is_enough_is_a_little() -> None:
    seen = seen_of()
    for z, attack in ((z_max(PEERS, F), ALittleIsEnough()), (1.5, ALittleIsEnough(1.5))):
        off = (seen.mean - attack.send(seen)[0]) / seen.deviation
        assert np.allclose(off, z, atol=1e-3)
    away = np.linalg.norm(ALittleIsEnough().send(seen)[0] - seen.mean)
    assert away < np.linalg.norm(seen.honest - seen.mean, axis=1).min()


@pytest.mark.parametrize(("eps", "turns"), [(0.1, False), (0.5, False), (2.0, False), (3.0, True)])
def test_inner_products_turn_the_mean_where_eps_is_large_enough(eps: float, turns: bool) -> None:
    seen = seen_of()
    moved = seen.aggregated(InnerProduct(eps).send(seen))
    assert (along(moved, seen) < 0) == turns
    assert turns == (eps > (PEERS - F) / F)


def test_mimics_repeat_the_one_that_goes_farthest_where_they_differ() -> None:
    apart = unit(np.random.default_rng(5).standard_normal(D))
    sizes = np.array([1.0, -2.0, 0.5, 4.0, -1.0, -3.0, 0.5])

    def seen(seed: int) -> Seen:
        usual = seen_of(seed, spread=0.05)
        rows = usual.honest + np.outer(10 * sizes, apart).astype(np.float32)
        return replace(usual, honest=rows)

    attack = Mimic()
    for seed in range(5):
        attack.watch(seen(seed))
    for seed in (5, 6):
        now = seen(seed)
        assert (attack.send(now) == now.honest[3]).all()
    assert attack.chosen == 3


def test_a_mimic_without_warm_up_chooses_at_once() -> None:
    attack, seen = Mimic(), seen_of()
    assert (attack.send(seen) == seen.honest[attack.chosen]).all()


def test_labels_are_mirrored() -> None:
    labels = torch.arange(256)
    assert torch.equal(flipped(labels, 256), 255 - labels)
    assert torch.equal(flipped(flipped(labels, 256), 256), labels)
    attack, seen = LabelFlip(), seen_of()
    assert attack.flips_labels
    assert np.array_equal(attack.send(seen), seen.own)
    assert sum(make().flips_labels for make in ATTACKS.values()) == 1


def test_stale_is_what_was_honest_some_rounds_ago() -> None:
    attack, rounds = Stale(2), [seen_of(seed) for seed in range(6)]
    attack.watch(rounds[0])
    assert np.array_equal(attack.send(rounds[1]), rounds[0].own)  # the oldest that there is
    for now in range(2, 6):
        assert np.array_equal(attack.send(rounds[now]), rounds[now - 2].own)


def test_a_drift_is_small_in_a_round_and_adds_up() -> None:
    attack, rounds = Drift(0.5), [seen_of(seed) for seed in range(50)]
    attack.watch(rounds[0])
    total, honest = np.zeros(D), np.zeros(D)
    for seen in rounds[1:]:
        bias = attack.send(seen) - seen.own
        usual = float(np.linalg.norm(seen.honest - seen.mean, axis=1).mean())
        assert float(np.linalg.norm(bias[0])) < 0.7 * usual
        total += bias.mean(axis=0)
        honest += seen.own.mean(axis=0) - seen.mean
    assert np.linalg.norm(total) > 5 * np.linalg.norm(honest)
    assert float(unit(total) @ -unit(rounds[0].mean)) == pytest.approx(1.0, abs=1e-3)


# ---------------------------------------------------------------- what a rule makes of them


@pytest.mark.parametrize("rule", ["trimmed(f=3)", "nnm+trimmed(f=3)", "gm(f=3)"])
@pytest.mark.parametrize("name", sorted(ATTACKS.keys() - {"nan", "infinity"}))
def test_a_rule_stays_near_what_is_honest(name: str, rule: str) -> None:
    """Nearer than three times the honest peers' own distance from their mean; the bound of the
    trimmed mean, kappa = 6 rho (1 + rho) with rho = 3/4, allows 2.8 times."""
    attack = ATTACKS[name]()
    attack.watch(seen_of(1))
    seen = replace(seen_of(), rule=get_rule(rule))
    away = float(np.linalg.norm(seen.aggregated(attack.send(seen)) - seen.mean))
    assert away < 3 * float(np.linalg.norm(seen.honest - seen.mean, axis=1).mean())


def test_places_do_not_matter_to_a_rule_without_ties() -> None:
    seen = replace(seen_of(), rule=get_rule("nnm+trimmed(f=3)"))
    sent = SignFlip(10.0).send(seen)
    last = replace(seen, places=())
    assert np.allclose(seen.aggregated(sent), last.aggregated(sent), atol=1e-6)
