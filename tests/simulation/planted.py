"""The protocol faults of the mutation gate (mutants.py), each a change of a few words."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CHEAP", "MUTANTS", "Mutant"]

UNIT = "unit/peer/membership/test_"


@dataclass(frozen=True)
class Mutant:
    name: str
    module: str  # of atoll.peer.membership
    before: str
    after: str
    test: str = ""  # file::name below tests/, if seeds are not to be relied on
    seed: int | None = None  # of runs with durable homes (durable.py) that finds it


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "commit before quorum",
        "attempt",
        "        synced = [p for p in self.view.replicas if p in alive and p not in unsynced]\n",
        "        return root\n        synced: list[bytes] = []\n",
    ),
    Mutant(
        "commit with one copy",
        "attempt",
        "< min(2, len(able)):",
        "< 1:",
        test="simulation/test_directed.py::test_a_round_is_not_committed_with_one_copy",
    ),
    Mutant(
        "a crowd that leaves waits for the round",
        "coordinator",
        "or not self.admission.can_finish(staying):",
        "or self.me in self.admission.leaving:",
        test=UNIT + "leaving_together.py::test_most_of_seven_leave_and_the_rest_go_on",
    ),
    Mutant(
        "a new view forgets who leaves",
        "admission",
        "self.leaving = before.leaving & lives",
        "pass",
        test=UNIT + "leaving_together.py::test_a_crowd_goes_with_two_views",
    ),
    Mutant(
        "minimum base",
        "consensus",
        "= max(committed_of(report) for",
        "= min(committed_of(report) for",
    ),
    Mutant(
        "base of the oldest attempt",
        "consensus",
        "last = max((run.attempt for run in found), default=0)",
        "last = min((run.attempt for run in found), default=0)",
        test=UNIT + "consensus.py::test_base_is_the_highest_that_may_have_been_committed",
    ),
    Mutant(
        "base without READY",
        "consensus",
        "        for run in report.runs:\n",
        "        for run in ():\n",
    ),
    Mutant(
        "either of two results",
        "consensus",
        "if is_quorum(view, peers | silent)]",
        "if False]",
        test=UNIT + "consensus.py::test_a_base_is_what_can_have_been_committed",
    ),
    Mutant(
        "called back to found",
        "bootstrap",
        "if mine is None and self._put_off is not None:",
        "if False:",
        test=UNIT + "bootstrap.py::test_nobody_is_called_back_to_found_a_run_that_lives",
    ),
    Mutant("ignore accepted value", "consensus", "if voted and not fork:", "if False:"),
    Mutant(
        "an election drops who answers late",
        "consensus",
        "lost = {*self.view.peers} if promisers_only else {*self._electorate.departed()}",
        "lost = {*self.view.peers}",
    ),
    Mutant(
        "silence of one with a link counts",
        "election",
        " - here.linked - {",
        " - {",
        test=UNIT + "keeping_members.py::test_who_does_not_answer_a_deaf_candidate_is_not_silent",
    ),
    Mutant(
        "an old incarnation stays",
        "election",
        "return ended | self.outlived | silent",
        "return ended | silent",
        test=UNIT + "keeping_members.py::test_who_is_back_as_a_new_incarnation_does_not_stay",
    ),
    Mutant("half quorum", "view", "return 2 * present > len", "return 2 * present >= len"),
    Mutant("third quorum", "view", "return 2 * present > len", "return 3 * present >= len"),
    Mutant(
        "double count",
        "member",
        "elif self.submissions.pop(run.fragment, None) is not None:",
        "elif self.submissions.get(run.fragment) is not None:",
    ),
    Mutant(
        "replicas vote for what others hold",
        "member",
        "if holds or late or (known",
        "if late or (known",
        test="simulation/test_directed.py::test_a_replica_does_not_vote_for_what_others_hold",
    ),
    Mutant("no freeze on promise", "consensus", "        self.frozen = True\n", ""),
    Mutant("promise to a lower ballot", "consensus", "if ballot < self.promised:", "if False:"),
    Mutant(
        "accept below the promise", "consensus", "if accept.ballot < self.promised:", "if False:"
    ),
    Mutant(
        "ACCEPTED unicast",
        "consensus",
        "for peer in self.view.peers:\n            self._emit(Send(peer, signed))",
        "for peer in (accept.ballot.peer,):\n            self._emit(Send(peer, signed))",
        test="simulation/test_directed.py::test_a_view_known_only_to_its_dead_proposer_survives",
    ),
    Mutant(
        "coordinator outside S",
        "attempt",
        "wanting = outside + (",
        "wanting = [p for p in outside if p != self.me] + (",
    ),
    Mutant(
        "sticky off",
        "election",
        "return not gone and self._detector.trusts(self.view.coordinator, here.now_s)",
        "return False",
        test="simulation/test_directed.py::test_one_deaf_member_does_not_end_a_view",
    ),
    Mutant(
        "no CheckQuorum",
        "coordinator",
        "if not is_quorum(self.view, alive):\n            self._without",
        "if False:\n            self._without",
        test="simulation/test_directed.py::test_a_coordinator_without_a_quorum_begins_nothing",
    ),
    Mutant("weights forgotten", "participation", "tuple(known[peer] for", "tuple(1.0 for"),
    Mutant(
        "attempt numbers stay",
        "coordinator",
        "        self._attempts += 1\n",
        "        self._attempts = 1\n",
    ),
    Mutant(
        "apply whatever is held",
        "member",
        "whole = len(path) == round_number - self.round and reached == chain",
        "whole = len(path) == round_number - self.round",
    ),
    Mutant(
        "READY taken back",
        "member",
        "if not self.is_replica or self.round + 1 in self.held:",
        "if not self.is_replica:",
        test="simulation/test_directed.py::test_a_doubted_member_keeps_what_it_is_ready_for",
    ),
    Mutant(
        "enters without the state",
        "admission",
        "return position == own.previous and beat.digest_round == beat.round > 0",
        "return True",
        test="simulation/test_directed.py::test_a_joiner_far_behind_does_not_enter",
    ),
    Mutant(
        "two incarnations",
        "view_change",
        "named = mine is not None and mine.inc == here.me.inc",
        "named = mine is not None",
        test=UNIT + "node_restarts.py::test_a_view_of_an_earlier_life_is_not_entered",
    ),
    Mutant(
        "begins after proposing",
        "coordinator",
        "lone_ok=False)\n            return",
        "lone_ok=False)",
    ),
    Mutant(
        "any result will do",
        "attempt",
        "or len(roots) > 1:",
        "or False:",
        test=UNIT + "node_rounds.py::test_one_wrong_result_excludes_its_holder",
    ),
    Mutant(
        "digests are not compared",
        "coordinator",
        "digests = roster.digests(own.round)",
        "digests: dict[bytes, bytes] = {}",
    ),
    Mutant(
        "kept chunks of any origin",
        "attempt",
        "origin = before.get(chunk, 0)",
        "origin = 0",
        test=UNIT + "attempt_cleanup.py::test_a_chunk_that_was_kept_before_keeps_its_origin",
    ),
    Mutant(
        "a fork keeps its lineage", "view", "lineage=lineage, ancestors=ancestors", "ancestors=()"
    ),
    Mutant(
        "who is behind wins",
        "forks",
        "if (meet.round, meet.lineage) <= (",
        "if (meet.round, meet.lineage) >= (",
        test=UNIT + "policies.py::test_the_slower_fork_gives_way",
    ),
    Mutant(
        "any policy forks",
        "view",
        'return policy == "any" or (policy == "auto" and len(self.members) == 2)',
        "return bool(policy)",
    ),
    Mutant(
        "auto forks as any",
        "view",
        '(policy == "auto" and len(self.members) == 2)',
        'policy == "auto"',
    ),
    Mutant(
        "rolls back unasked",
        "consensus",
        'if back is None or self.view.rules.on_lost == "halt":',
        "if back is None:",
        test="unit/peer/membership/test_consensus.py::test_a_disputed_base_counts_as_lost_in_the_end",
    ),
    Mutant(
        "goes back in secret",
        "consensus",
        "            rollback=lost,\n",
        "            rollback=False,\n",
    ),
    Mutant(
        "gives way when it should halt",
        "forks",
        '            return ""  # see ``rival``\n',
        "            pass\n",
    ),
    Mutant(
        "goes on beside a rival",
        "forks",
        'if view.rules.on_fork == "halt":  # members too',
        "if False:  # members too",
    ),
    Mutant(
        "a witness waits for what is lost",
        "admission",
        "if own.is_replica or own.round == 0:",
        "if True:",
        test="simulation/test_directed.py::test_a_witness_that_leads_does_not_wait_for_ever",
    ),
    Mutant("newcomers weigh", "participation", "0.0 if peer in self._newcomers else 1.0", "1.0"),
    Mutant("joiners count at once", "probation", "0 if founds or is_back else probation", "0"),
    Mutant(
        "who counts is forgotten",
        "probation",
        "absent += [Absent(peer, base) for peer in gone]",
        "pass",
        test=UNIT + "probation.py::test_who_counts_and_is_back_soon_counts_again",
    ),
    Mutant(
        "min_trainers is ignored after a death",
        "participation",
        "if not self.has_trainers(number, here, alive):",
        "if False:",
    ),
    Mutant(
        "rounds of too few trainers begin",
        "participation",
        "if not self.terms.asynchronous and not self.has_trainers(number, here, present):",
        "if False:",
        test=UNIT + "trainers.py::test_a_hung_trainer_is_waited_for_by_name",
    ),
    Mutant(
        "rounds of too few trainers are believed",
        "participation",
        "if here < count else",
        "if False else",
        test=UNIT + "trainers.py::test_a_member_takes_no_part_in_a_round_of_too_few",
    ),
    Mutant(
        "what was asked for is forgotten",
        "admission",
        "min_trainers=self._min_trainers",
        "min_trainers=0",
        test=UNIT + "trainers.py::test_any_member_may_ask_and_all_views_keep_it",
    ),
    Mutant(
        "other rules are believed",
        "view",
        'return "" if kept == before.rules else',
        'return "" if True else',
        test=UNIT + "trainers.py::test_nobody_votes_for_other_rules",
    ),
    Mutant(
        "ties go to the smallest id",
        "operations",
        "key=lambda peer: (since(peer), peer)",
        "key=lambda peer: peer",
        test=UNIT + "operations.py::test_who_has_been_there_longer_wins_a_tie",
    ),
    Mutant(
        "every view is believed",
        "election",
        "        if wrong:\n",
        "        if False:\n",
        test=UNIT + "probation.py::test_no_view_comes_about_in_which_a_newcomer_counts_too_early",
    ),
    Mutant(
        "every weight is believed",
        "node",
        "        if wrong:\n",
        "        if False:\n",
        test=UNIT + "probation.py::test_members_take_no_part_in_such_a_round_and_say_so",
    ),
    Mutant(
        "later rounds stay open",
        "coordinator",
        "{*self.attempts, *self.cleanups} if n >= number)",
        "{*self.attempts, *self.cleanups} if n == number)",
        test=UNIT + "eligibility.py::test_rounds_after_one_that_is_held_do_not_stay_open",
    ),
    Mutant(
        "operations keep chunks",
        "participation",
        "return kind in OPERATIONS or (kind == STEP and",
        "return (kind == STEP and",
        test=UNIT + "calls.py::test_a_death_in_a_reduction_leaves_nothing_of_the_dead",
    ),
    Mutant(
        "a robust round keeps what one peer has",
        "participation",
        "(kind == STEP and bool(self.terms.rule or self.terms.audited))",
        "False",
        test=UNIT + "eligibility.py::test_under_a_rule_or_an_audit_a_retry_keeps_nothing",
    ),
    Mutant(
        "the slow count as dead",
        "failure_detector",
        "return now_s - self._machines.answered_s(peer) <= self._timing.failure_s",
        "return False",
        test=UNIT + "slow_peers.py::test_a_starved_process_costs_no_attempt_and_no_view",
    ),
    Mutant(
        "limits do not know lag",
        "failure_detector",
        "return min(max(self._timing.failure_s, gaps_s, lag_s), LIMIT_MAX_S)",
        "return self._timing.failure_s",
        test=UNIT + "slow_peers.py::test_who_is_usually_late_is_waited_for_longer",
    ),
    Mutant(
        "any object will do",
        "roster",
        "            and self.has_given(peer)\n",
        "",
        test=UNIT + "calls.py::test_an_old_object_is_not_taken_for_a_new_one",
    ),
    Mutant(
        "left out in silence",
        "member",
        "            self._untold = begin.round\n",
        "            self._untold = 0\n",
        test=UNIT + "calls.py::test_a_straggler_is_told_once_and_is_in_the_next_one",
    ),
    Mutant(
        "a new view forgets bans",
        "admission",
        "banned=(*self.view.banned, *bans),",
        "banned=bans,",
    ),
    Mutant(
        "bans before anybody else believes",
        "bans",
        "return is_quorum(view, believers & {*alive}) and (convinces or voters == believers)",
        "return True",
    ),
    Mutant(
        "words of some are enough",
        "bans",
        "(convinces or voters == believers)",
        "True",
        test=UNIT + "bans.py::test_a_ban_is_due_when_the_votes_are_sure",
    ),
    Mutant(
        "evidence about strangers convinces all",
        "bans",
        "ban.stands_alone and view.member(ban.peer) is not None",
        "ban.stands_alone",
        test=UNIT + "bans.py::test_a_ban_of_a_stranger_waits_for_all_who_live",
    ),
    Mutant(
        "votes for any ban",
        "bans",
        "            if ban.peer not in self._bans:\n",
        "            if not ban.evidence:\n",
        test=UNIT + "bans.py::test_nobody_votes_for_a_ban_that_it_does_not_believe",
    ),
    Mutant(
        "a pair without a link is a broken edge",
        "attempt",
        "named = {*miss.peers} - self.links.unlinked(source, participants)",
        "named = {*miss.peers}",
        test=UNIT + "attempt.py::test_a_pair_without_a_link_is_no_broken_edge",
    ),
    Mutant(
        "any holder will do",
        "attempt",
        "near = [holder for holder in holders if links.are_linked(holder, peer)]",
        "near = holders",
        test=UNIT + "attempt.py::test_who_copies_the_result_is_sent_to_a_holder_it_has_a_link_to",
    ),
    Mutant(
        "chunks are kept that some cannot copy",
        "attempt",
        "return [] if far else named",
        "return named",
        test=UNIT + "attempt_cleanup.py::test_of_holders_those_are_named_that_all_can_copy_from",
    ),
    Mutant(
        "one end says that there is no link",
        "link_graph",
        "if peer in lacking.get(other, ())",
        "if True",
        test=UNIT + "link_graph.py::test_a_pair_is_apart_when_both_say_so",
    ),
    Mutant(
        "anybody owns",
        "coordinator",
        "may and links.reaches(peer, chosen) for",
        "may for",
        test=UNIT + "unlinked_pairs.py::test_two_outbound_of_four_own_nothing_and_exchange_nothing",
    ),
    Mutant(
        "who cannot hear the coordinator is voted out",
        "admission",
        "self._roster.removable(now_s).difference(spared)",
        "self._roster.removable(now_s)",
        test=UNIT
        + "unlinked_pairs.py::test_a_member_without_a_link_to_its_coordinator_is_not_voted_out",
    ),
    Mutant(
        "hopeless candidates ask",
        "consensus",
        "alone = self.proposal is None and self._electorate.is_hopeless()",
        "alone = False",
        test=UNIT + "unlinked_pairs.py::test_who_has_links_to_too_few_asks_nobody",
    ),
    Mutant(
        "a coordinator without a quorum keeps its voters",
        "election",
        "            or self._lacks_quorum\n",
        "",
        test=UNIT + "node_deaths.py::test_a_coordinator_without_a_quorum_does_not_keep_its_voters",
    ),
    Mutant(
        "paths that carry nothing are used",
        "coordinator",
        "not cleanup.is_stall or begin.kind not in (STEP, REDUCE)",
        "True",
        test=UNIT + "link_graph.py::test_a_bridge_that_coordinates_loses_nobody",
    ),
    Mutant(
        "all are apart where all are slow",
        "link_graph",
        "return pairs if {*able} - at_an_end else set()",
        "return pairs",
        test=UNIT + "link_graph.py::test_paths_are_broken_where_both_ends_wait_for_each_other",
    ),
    Mutant(
        "who waits for the late is late",
        "attempt",
        "cover(unexplained(self._missing))",
        "cover(self._missing)",
        test=UNIT + "attempt_cleanup.py::test_who_waits_for_those_who_wait_goes_on",
    ),
)

# Those that few seeds find: the suite plants them every time.
CHEAP = (
    "double count",
    "minimum base",
    "third quorum",
    "half quorum",
    "any policy forks",
)
