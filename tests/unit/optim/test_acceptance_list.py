"""Which test shows which of the 14 acceptance tests of the algorithms, all of them in one table;
and the bits of rounds (14).

Numbers: section 13 of the reference on algorithms.
"""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.run_spec import RunSpec
from atoll.optim.swarm_state import SwarmState, SwarmSubmission

TESTS = Path(__file__).parents[2]

TABLE: dict[int, dict[str, tuple[str, ...]]] = {
    1: {
        "one peer, outer SGD(1, 0): plain training; exactly in float64": (
            "test_1_one_peer_and_plain_outer_sgd_is_plain_training",
            "test_1_in_float64",
            "test_1_one_peer_with_outer_sgd_is_plain_training",  # a real daemon
            "test_one_worker_with_a_mean_is_plain_training",
        ),
    },
    2: {
        "H=1, inner and outer SGD: data-parallel SGD": (
            "test_2_one_step_rounds_of_sgd_are_data_parallel_sgd",
            "test_2_in_float64",
            "test_2_every_step_with_sgd_is_data_parallel_sgd",  # real daemons
        ),
        "not with Adam, nor with Nesterov": ("test_2_does_not_hold_for_adam_or_outer_momentum",),
    },
    3: {
        "constant pseudo-gradients: torch's Nesterov": ("test_equals_torch_sgd_nesterov",),
        "the first step is lr (1 + mu)": ("test_first_step_is_lr_times_one_plus_mu",),
    },
    4: {
        "Streaming with one fragment and no delay: DiLoCo, bit for bit": (
            "test_4_one_fragment_without_delay_is_diloco_bit_for_bit",
        ),
        "any number of fragments: DiLoCo of each": ("test_4_it_is_algorithm_2",),
        "alpha 1: alone": ("test_4_alpha_of_one_is_everybody_alone",),
        "alpha 0: the run's; H steps apart": (
            "test_4_alpha_of_zero_takes_the_runs_fragment_and_each_comes_every_h_steps",
        ),
    },
    5: {
        "eager updates of one peer: DiLoCo": ("test_5_eager_updates_of_one_peer_are_diloco",),
        "CO2 without penalty and clip: heavy ball, one round late": (
            "test_5_it_is_heavy_ball_diloco_one_round_late",
        ),
    },
    6: {
        "NoLoCo, one group of equals: heavy-ball DiLoCo, for any gamma": (
            "test_6_one_group_of_equals_is_heavy_ball_diloco_whatever_gamma_is",
            "test_6_a_group_of_all_is_heavy_ball_diloco",
        ),
        "groups of one without gamma: independent heavy balls": (
            "test_6_alone_and_without_gamma_it_is_heavy_ball",
            "test_6_groups_of_one_are_independent_heavy_balls",
        ),
        "the mean of all does not depend on gamma": (
            "test_6_the_mean_of_all_replicas_does_not_depend_on_gamma",
            "test_6_the_mean_of_all_does_not_depend_on_gossip_nor_on_the_codec",
        ),
        "it descends; with the sign of equation 2 it does not": (
            "test_6_it_descends_and_the_sign_of_the_paper_s_equation_2_does_not",
        ),
        "stable up to 2 (1 - alpha^2)": (
            "test_6_the_bound_is_where_the_disagreement_stops_to_shrink",
            "test_6_so_it_is_in_a_simulation_of_many_replicas",
            "test_6_what_the_paper_allows_may_diverge",
        ),
    },
    7: {
        "SparseLoCo, everything sent, beta 0: outer SGD": (
            "test_7_sending_everything_without_feedback_is_outer_sgd",
        ),
        "what is sent and what is kept is what came in, exactly": (
            "test_what_was_sent_plus_what_is_kept_is_what_came_in",
            "test_7_nothing_is_lost_over_rounds",
        ),
        "12-bit and 2-bit numbers there and back": (
            "test_twelve_bits_there_and_back",
            "test_bytes_follow_the_definition",
        ),
        "identical peers: both rules are one": (
            "test_7_of_identical_peers_both_rules_are_one",
            "test_of_identical_parts_both_rules_give_the_part",
        ),
    },
    8: {
        "the inverse of the cosine transform": (
            "test_8_the_inverse_of_the_transform_is_what_was_there",
        ),
        "DeMo, everything sent, beta 0: sign descent": (
            "test_8_everything_sent_and_nothing_kept_is_sign_descent",
        ),
    },
    9: {
        "QSR: the values of the paper": ("test_9_the_values_of_the_paper",),
        "constant in the warm-up": ("test_9_warm_up_has_the_steps_of_the_peak",),
        "never changes in the middle of a round": ("test_9_steps_change_only_between_rounds",),
        "the last round is cut": ("test_9_the_last_round_is_cut_short_and_none_is_empty",),
    },
    10: {
        "a replay of the log gives the hash": (
            "test_10_a_replay_of_the_log_reproduces_the_hash",
            "test_10_a_joiner_with_the_first_parameters_replays_the_log",
        ),
        "the order of arrival changes nothing": ("test_10_the_order_of_arrival_changes_nothing",),
    },
    11: {
        "N deltas of one theta, delayed: one step of synchronous Nesterov, exactly": (
            "test_11_arrivals_of_one_theta_are_one_synchronous_step",
            "test_11_is_exact_where_numbers_are",
            "test_11_of_peers_that_come_one_after_the_other_the_first_steps_are_one_of_diloco",
        ),
    },
    12: {
        "RDA of one: the identity": ("test_12_one_learner_is_the_identity",),
        "two orthogonal ones of norm 2: norm 2": (
            "test_12_two_orthogonal_ones_of_norm_two_have_norm_two",
        ),
        "opposite ones: the average": ("test_12_of_opposite_ones_it_is_the_average",),
    },
    13: {
        "k of M dropped: the mean over the others": (
            "test_13_dropping_k_of_m_is_the_mean_over_the_others",
        ),
        "a late packet of a round that is over": ("test_what_is_over_is_dropped_at_once",),
        "who is dropped keeps its parameters": (
            "test_13_a_missed_peer_keeps_its_parameters_bit_for_bit",
        ),
    },
    14: {
        "bits of each codec in a round": ("test_14_bits_of_a_parameter_in_a_round",),
        "14 k / C of what is sparse": ("test_14_bytes_are_those_of_theory",),
        "of steps of DeMo and ZerothOrder": ("test_14_bytes_of_a_step",),
        "on data streams": ("test_bytes_on_the_streams_are_what_theory_says",),
    },
}


def test_each_is_shown_by_tests_that_are_there() -> None:
    written = {
        node.name
        for path in TESTS.rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    assert set(TABLE) == set(range(1, 15))
    for number, claims in TABLE.items():
        for claim, names in claims.items():
            assert names, f"{number}: nothing shows: {claim}"
            assert not set(names) - written, f"{number}: {claim}"


@pytest.mark.parametrize(
    ("codec", "bits", "block"),
    [
        ("bfloat16", 16, 0),
        ("float16", 16, 0),
        ("int8", 8, 256),
        ("int4", 4, 64),
        ("fp4_e3m0", 4, 64),
        ("fp4_e2m1", 4, 32),
    ],
)
def test_14_bits_of_a_parameter_in_a_round(codec: str, bits: int, block: int) -> None:
    """Within 2 %: a value, and its part of a scale of 32 bits (8 bits of fp4_e2m1, by its
    definition)."""
    elements, peers = 1 << 20, 3
    spec = RunSpec(sync_every=1, codec=codec)
    state = SwarmState(spec, Manifest.of([Parameter("w", (elements,))]), lambda flat: flat.fill(0))
    ones = np.ones(elements, np.float32)
    part_bytes, result_bytes = state.commit([SwarmSubmission(n, ones, 1.0) for n in range(peers)])
    scale = (8 if codec == "fp4_e2m1" else 32) / block if block else 0.0
    assert 8 * part_bytes / elements == pytest.approx(bits + scale, rel=0.02)
    assert result_bytes == part_bytes
