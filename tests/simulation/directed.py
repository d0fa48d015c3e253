"""Seeds that begin as a directed test does, with delays of their own, and go on with faults.

    python -m simulation.directed 0..1000
    python -m simulation.directed --seed 17

What a directed test brings about takes the right faults in the right order: plain seeds hardly ever
come there. Here each scenario, and tests of tests/unit/peer/membership that steer a cluster to such
a place, are played while messages of each pair take a time of their own and data are slower or
faster; then somebody dies, stops or is cut off, and comes back. What the test itself expects need
not hold any more. What every seed checks has to: no invariant breaks, and nothing crashes.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from _pytest.mark.structures import ParameterSet
from harness import cluster as steered
from harness.cluster import Cluster

from simulation.arguments import play as play_seeds
from simulation.run import Outcome
from simulation.scenario import FOLDER as SCENARIOS
from simulation.scenario import play, split

__all__ = ["Case", "cases", "run_directed"]

TESTS = Path(__file__).parents[1] / "unit" / "peer" / "membership"
CHECKS = ("checks.py", "decisions.py", "statements.py", "bounded.py", "disks.py", "elections.py")
FAULTS_MAX = 4
# By module, as they come to what fewer than 20 of 5,000 other seeds do.
DIRECTED = {
    "archives": ("an_archive_finds_the_next_coordinator",),
    "bans": ("a_joiner_learns_it_with_its_first_view_and_the_banned_stays_outside",),
    "bootstrap": (
        "a_cradle_is_no_run_to_send_joiners_to",
        "a_founder_that_has_forgotten_its_vote_makes_another_lineage",
        "a_founder_that_hears_late_that_it_has_founded_the_run_stays_in",
        "a_stranger_or_an_archive_does_not_vote",
        "a_voter_without_a_checkpoint_votes_too",
        "all_founders_are_in_the_first_view",
        "where_a_founder_has_learnt_while_it_waited_is_history_too",
        "who_is_not_named_does_not_count_and_joins_later",
        "whoever_a_first_view_excludes_founds_again_if_that_is_lost",
    ),
    "calls": (
        "a_straggler_is_told_once_and_is_in_the_next_one",
        "an_attester_that_has_voted_is_not_asked_again",
        "who_missed_the_commit_hears_that_it_missed_the_round",
    ),
    "crossing_words": (
        "a_broken_edge_of_an_attempt_that_is_over_is_none_of_the_next",
        "a_founder_that_wants_to_leave_is_gone_when_it_hears_that_the_run_is_elsewhere",
        "a_founder_without_which_the_run_was_founded_joins_it",
        "a_run_that_one_founds_with_a_state_begins_there",
        "a_trainer_that_comes_between_two_attempts_with_another_call_is_not_in_the_second",
        "a_witness_that_owns_may_hear_of_the_result_before_its_own_work_is_reported",
        "a_witness_votes_for_an_attempt_of_which_it_has_missed_the_begin",
        "the_outcome_of_an_order_that_is_not_needed_any_more_changes_nothing",
        "who_founds_a_run_anew_has_no_view_to_tell_one_that_never_left_the_old_one",
        "who_hears_late_that_its_bytes_differ_keeps_the_result_that_it_has_said_to_hold",
        "who_is_asked_twice_to_leave_goes_no_later",
        "who_is_leaving_does_not_join_the_lineage_that_its_own_gives_way_to",
        "who_missed_a_ban_is_not_told_of_views_before_the_run_went_on_as_another",
    ),
    "durable_restarts": (
        "a_restored_image_loses_no_round",
        "a_step_of_which_a_witness_alone_knows_stops_everybody",
        "a_trainer_that_attaches_after_a_restart_finds_the_run_where_it_is",
        "all_lose_power_between_ready_and_the_first_commit",
        "operations_of_which_a_witness_alone_knows_stop_nobody",
        "operations_that_others_have_lost_are_taken_back_by_name",
        "who_was_stopped_while_the_base_is_waited_for_does_not_count_that_time",
    ),
    "eligibility": (
        "one_that_counts_calls_and_most_want_a_step_that_it_would_be_needed_for",
        "rounds_after_one_that_is_held_do_not_stay_open",
    ),
    "flaky_peers": ("a_new_coordinators_view_keeps_it",),
    "flight": (
        "each_fragment_has_its_own_submission",
        "missing_one_fragments_round_does_not_touch_the_others",
    ),
    "handover": ("a_handover_in_a_void_run",),
    "node_hostile": ("offers_and_votes_of_strangers_do_not_count_in_a_void_run",),
    "node_restarts": (
        "no_way_back_into_a_view_that_was_lost",
        "stalled_learner_is_dropped_and_comes_back_after_growing_pauses",
    ),
    "node_rounds": (
        "a_halted_run_takes_nobody_in",
        "a_peer_that_was_left_behind_is_asked_again_when_the_quorum_needs_it",
        "a_submission_of_an_older_epoch_reloads",
        "a_submission_that_crossed_the_commit_is_missed_at_once",
        "initialising_peer_that_dies_or_fails_makes_way_for_the_next",
        "no_majority_of_digests_halts",
    ),
    "packing": ("a_machine_answers_what_it_cannot_read_by_view_alone",),
    "phase": ("left_is_final",),
    "policies": (
        "a_forks_accept_that_arrives_late_blocks_nobody",
        "forks_of_forks_meet_too",
        "of_three_histories_one_is_left",
        "with_halt_the_end_of_one_lineage_lets_the_other_go_on",
    ),
    "rare_restarts": (
        "a_coordinator_with_a_slow_disk_leaves_once_its_vote_is_synced",
        "a_file_turns_out_bad_where_another_is_gone_already",
        "a_founder_that_dies_before_the_first_view_takes_its_place_again",
        "a_heartbeat_of_the_process_before_says_nothing_of_the_one_that_runs",
        "a_process_knows_whether_it_may_be_behind",
        "a_ready_counts_once_a_heartbeat_has_shown_its_process",
        "a_restarted_witness_has_no_say_in_which_state_is_right",
        "a_vote_for_an_attempt_that_is_over_is_synced_too_late_to_count",
        "a_vote_without_its_result_is_completed_from_another_copy",
        "a_wish_to_leave_ends_with_its_process",
        "a_witness_that_was_restarted_owns_nothing_of_the_attempt_before",
        "lost_operations_are_told_with_the_next_call_though_a_step_comes_before_it",
        "who_is_leaving_goes_when_its_ledger_fails",
        "who_reads_its_home_attests_no_operation_meanwhile",
        "who_wants_to_leave_goes_though_its_coordinator_was_restarted",
    ),
    "rare_rounds": (
        "a_better_placed_member_takes_over_only_once_it_has_the_state",
        "a_coordinator_without_a_specification_takes_the_terms_of_those_that_have_one",
        "a_gather_goes_on_with_the_objects_of_who_is_left",
        "a_joiner_that_falls_silent_while_its_view_is_voted_on_is_in_it_all_the_same",
        "a_joiner_that_was_dropped_for_its_silence_beats_in_vain",
        "a_plan_is_followed_if_its_data_go_between_members_with_links",
        "a_promise_of_one_that_has_died_costs_no_view",
        "a_ready_that_only_a_beat_tells_does_not_count_once_its_peer_has_promised_another",
        "a_retry_in_an_asynchronous_run_counts_the_trainers_that_compute",
        "a_round_that_was_ended_by_a_rival_is_waited_for_anew",
        "a_run_is_begun_by_another_when_the_first_dies_in_the_middle_of_an_attempt",
        "a_witness_that_can_only_dial_out_owns_what_it_gets_through_a_relay",
        "all_of_a_round_goes_through_the_relay_where_there_is_no_witness",
        "only_the_one_whose_parameters_init_gives_need_not_offer_them_again",
        "trainers_that_all_count_nothing_count_alike",
        "who_catches_up_has_no_say_in_which_state_is_right",
        "who_gets_a_later_round_after_its_promise_undoes_it",
        "who_is_in_doubt_does_not_take_over",
        "who_missed_the_first_parameters_begins_from_a_copy_of_them",
        "who_was_late_while_nobody_knew_how_long_a_phase_takes_is_in_again",
    ),
    "restarted_alone": (
        "it_goes_on_alone_when_it_has_looked_for_a_while",
        "rounds_that_one_remembers_survive_another_that_has_begun_anew",
        "the_tie_breaker_does_no_round_again_that_the_other_has_done_meanwhile",
    ),
    "rollback": (
        "a_holder_that_is_back_too_late_takes_what_is_left",
        "nobody_goes_back_alone_from_what_it_has_caught_up_with",
        "who_votes_to_go_back_downloads_no_later_rounds_any_more",
    ),
    "slow_peers": (
        "a_machine_that_goes_while_it_was_starved_is_out_within_ten_seconds",
        "who_is_late_says_so_once",
    ),
    "trainers": ("a_member_takes_no_part_in_a_round_of_too_few",),
    "unlinked_pairs": (
        "a_member_that_others_claim_to_reach_is_spared_for_a_while_only",
        "a_member_without_a_link_to_its_coordinator_is_not_voted_out",
        "a_witness_owns_nothing_where_owners_are_not_trusted",
        "a_witness_that_no_data_reach_is_owner_no_more",
        "a_witness_that_owns_dies_and_another_one_does",
        "an_audited_round_is_of_those_who_are_all_linked",
        "from_the_second_stall_on_the_coordinator_owns_all",
        "the_first_parameters_get_to_who_turns_out_to_have_no_link",
        "the_path_is_to_blame_where_a_relay_carries_it",
        "two_go_through_a_relay_and_three_let_the_witness_own",
        "who_has_links_to_too_few_asks_nobody",
    ),
    "witness": (
        "a_notice_moves_no_replica_and_no_older_attempt_is_attested",
        "a_witness_does_not_carry_a_round_of_which_only_one_copy_exists",
    ),
}
# Of these a third of the plays, or fewer, comes to what they are for: how often each counts.
OFTEN = {
    "a_witness_that_can_only_dial_out_owns_what_it_gets_through_a_relay": 3,
    "a_forks_accept_that_arrives_late_blocks_nobody": 8,
    "a_halted_run_takes_nobody_in": 4,
    "a_restored_image_loses_no_round": 4,
    "a_step_of_which_a_witness_alone_knows_stops_everybody": 4,
    "a_witness_that_owns_dies_and_another_one_does": 3,
    "forks_of_forks_meet_too": 5,
    "missing_one_fragments_round_does_not_touch_the_others": 6,
    "nobody_goes_back_alone_from_what_it_has_caught_up_with": 4,
    "operations_of_which_a_witness_alone_knows_stop_nobody": 3,
    "rounds_after_one_that_is_held_do_not_stay_open": 4,
    "the_path_is_to_blame_where_a_relay_carries_it": 6,
    "two_go_through_a_relay_and_three_let_the_witness_own": 6,
    "who_gets_a_later_round_after_its_promise_undoes_it": 2,
    "who_has_links_to_too_few_asks_nobody": 4,
    "who_votes_to_go_back_downloads_no_later_rounds_any_more": 2,
}
AFTER_S = 3.0  # longer than an election takes
HEALED_S = 4.0

Case = tuple[str, tuple[Callable[[], object], ...]]  # its name, and what plays it: one is drawn


# ---------------------------------------------------------------- what there is to play


@functools.cache
def cases() -> tuple[Case, ...]:
    """Return every scenario, and the directed tests with each of their parameters."""
    scenarios = [
        (f"scenario {path.stem}", (functools.partial(play, split(path.read_text("utf-8"))[0]),))
        for path in sorted(SCENARIOS.glob("*.txt"))
    ]
    return (*scenarios, *(case for name, tests in DIRECTED.items() for case in _of(name, tests)))


def _of(name: str, tests: tuple[str, ...]) -> Iterator[Case]:
    module = _imported(TESTS / f"test_{name}.py")
    for what in tests:
        test = getattr(module, f"test_{what}")
        plays = tuple(functools.partial(test, **row) for row in _rows(test))
        yield from [(f"{name}: {what}", plays)] * OFTEN.get(what, 1)


def _imported(path: Path) -> ModuleType:
    name = f"directed_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _rows(test: Callable[..., object]) -> Iterator[dict[str, Any]]:
    """Return the arguments of each call that pytest would make."""
    axes = []
    for mark in getattr(test, "pytestmark", ()):
        if mark.name == "parametrize":
            given, values = mark.args
            names = given.replace(",", " ").split() if isinstance(given, str) else given
            axes.append(
                [dict(zip(names, _row(value, len(names)), strict=True)) for value in values]
            )
    for rows in itertools.product(*axes):
        yield {name: value for row in rows for name, value in row.items()}


def _row(value: Any, count: int) -> Sequence[Any]:
    if isinstance(value, ParameterSet):
        return value.values
    return value if count > 1 else (value,)


# ---------------------------------------------------------------- playing it


class Perturbed:
    """Give the clusters of one seed other delays and speeds, and know which there are."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._factors: dict[tuple[bytes, bytes], float] = {}
        self.made: list[Cluster] = []
        self.slowest = dice.choice((1.0, 1.0, 5.0, 30.0))

    def begins(self, cluster: Cluster) -> None:
        self.made.append(cluster)
        cluster.chunk_s *= self._dice.choice((0.5, 1.0, 3.0))
        cluster.load_s *= self._dice.choice((0.5, 1.0, 3.0))

    def factor(self, source: bytes, target: bytes) -> float:
        """Return how many times as long messages take that way: they stay in their order."""
        way = source, target
        if way not in self._factors:
            self._factors[way] = self._dice.uniform(0.5, self.slowest)
        return self._factors[way]


def run_directed(seed: int) -> Outcome:
    """Play the case of this seed; a failure is what any seed may fail of."""
    name, plays = cases()[seed % len(cases())]
    dice = random.Random(f"directed {seed}")
    perturbed = steered.perturbed = Perturbed(dice)
    try:
        failure = _failure(dice.choice(plays))
        for cluster in perturbed.made:
            failure = failure or _failure(lambda c=cluster: _go_on(c, dice))
    finally:
        steered.perturbed = None
    events = sum(cluster.events for cluster in perturbed.made)
    return Outcome(seed, f"{failure} ({name})" if failure else "", name, events=events)


def _failure(act: Callable[[], object]) -> str:
    """Return what no test may come to; "" where all that fails is what this one expects."""
    try:
        act()
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        place = frames[-1]
        file = place.filename.rsplit("/", 1)[-1]
        is_check = isinstance(error, AssertionError) and file in CHECKS
        is_crash = "/peer/" in place.filename and "/tests/" not in place.filename
        if is_check or is_crash:
            return f"{type(error).__name__} in {file}:{place.name}: {error}"
    return ""


def _go_on(cluster: Cluster, dice: random.Random) -> None:
    """Let a few things happen to whoever is left, and end them all."""
    for _ in range(dice.randint(0, FAULTS_MAX)):
        living = [host.name for host in cluster.living()]
        dead = [host.name for host in cluster.hosts.values() if not host.alive]
        kind = dice.choice(("kill", "restart", "restart", "isolate", "pause", "detach"))
        if kind == "restart" and dead:
            cluster.restart(dice.choice(dead))
        elif kind != "restart" and len(living) > 1:
            name = dice.choice(living)
            getattr(cluster, kind)(name)
        cluster.run(dice.uniform(0.0, AFTER_S))
    cluster.heal()
    for host in list(cluster.hosts.values()):
        if not host.alive and dice.random() < 0.5:
            cluster.restart(host.name)
    cluster.run(HEALED_S)


def main(arguments: list[str] | None = None) -> int:
    of = f"{len(cases())} cases"
    return play_seeds(run_directed, __doc__, of, run_directed, arguments)


if __name__ == "__main__":
    sys.exit(main())
