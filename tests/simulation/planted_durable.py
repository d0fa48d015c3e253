"""Faults of what a peer writes down and remembers, to be planted as those of planted.py are.

``seed`` is one of simulation/durable.py that finds the fault; the others have a directed test.
"""

from __future__ import annotations

from simulation.planted import UNIT, Mutant

__all__ = ["DURABLE"]

TEST = UNIT + "durable_restarts.py::test_"
RECORDS = UNIT + "durable_records.py::test_"

DURABLE: tuple[Mutant, ...] = (
    Mutant(
        "promise not synced",
        "consensus",
        "self._emit(Persist(promise_record, synced=True))",
        "self._emit(Persist(promise_record, synced=False))",
        seed=0,
    ),
    Mutant(
        "accept not synced",
        "consensus",
        "self._emit(Persist(self.accepted, synced=True))",
        "self._emit(Persist(self.accepted, synced=False))",
        seed=0,
    ),
    Mutant(
        "PROMISE leaves before its record is synced",
        "durable_records",
        "    Promise: (PromiseRecord, AcceptedRecord),\n",
        "",
        seed=0,
    ),
    Mutant(
        "ACCEPTED leaves before its record is synced",
        "durable_records",
        "    Accepted: (AcceptedRecord,),\n",
        "",
        seed=0,
    ),
    Mutant(
        "READY before R is durable",
        "member",
        "durable=not (self._outbox.is_on and synced)",
        "durable=True",
        test=TEST + "a_report_names_no_ready_that_is_not_on_the_disk",
    ),
    Mutant(
        "READY in a beat before it is durable",
        "heartbeats",
        "            own.pending,\n",
        "            False,\n",
        test=TEST + "a_vote_counts_once_it_is_on_the_disk",
    ),
    Mutant(
        "READY in a report before it is durable",
        "member",
        "for _, held in sorted(self.held.items()) if held.durable]",
        "for _, held in sorted(self.held.items())]",
        test=TEST + "a_report_names_no_ready_that_is_not_on_the_disk",
    ),
    Mutant(
        "a slow disk holds the commit up",
        "attempt",
        "        known = self.ready.get(self.me) == root or self.me in self.view.witnesses\n",
        "        known = self.me in agreeing or self.me in self.view.witnesses\n",
        test=TEST + "one_slow_disk_delays_nobody",
    ),
    Mutant(
        "frozen forgotten",
        "durable_records",
        "max(self.promised, record.ballot), True",
        "max(self.promised, record.ballot), False",
        test=RECORDS + "a_promise_freezes_also_after_a_restart",
    ),
    Mutant(
        "the promise is forgotten",
        "election",
        "acceptor.promised, acceptor.frozen = recovered.promised, recovered.frozen",
        "acceptor.frozen = recovered.frozen",
        test=TEST + "a_promise_and_a_vote_outlive_the_process",
    ),
    Mutant(
        "the vote is forgotten",
        "election",
        "        acceptor.accepted = recovered.accepted\n",
        "",
        test=TEST + "a_promise_and_a_vote_outlive_the_process",
    ),
    Mutant(
        "compaction drops the promise",
        "durable_records",
        "        if ledger.frozen:\n",
        "        if False:\n",
        test=RECORDS + "compaction_keeps_promises_votes_and_rounds_that_no_checkpoint_has",
    ),
    Mutant(
        "compaction drops a round that no checkpoint has",
        "durable_records",
        "if since < step.end[0] <= until and ledger.is_committed(step)",
        "if since + 1 < step.end[0] <= until and ledger.is_committed(step)",
        test=RECORDS + "compaction_keeps_promises_votes_and_rounds_that_no_checkpoint_has",
    ),
    Mutant(
        "replay applies a READY round",
        "durable_records",
        "                self.heads[record.run.round, record.after] = record\n",
        "                self.heads[record.run.round, record.after] = record\n"
        "                self._commit(record.run.round, record.after)\n",
        test=UNIT
        + "durable_records.py::test_what_is_ready_and_not_committed_is_held_and_not_applied",
    ),
    Mutant(
        "INSTALL does not void READY",
        "durable_records",
        "        self._anew()\n        self.ready.clear()\n        if view.number == 0:\n",
        "        self._anew()\n        if view.number == 0:\n",
        test=RECORDS + "a_view_voids_what_does_not_lead_to_its_base",
    ),
    Mutant(
        "READY of view v counted in v+1",
        "durable_records",
        "                if self._is_of_view(record.lineage, record.view):\n"
        "                    self.ready",
        "                if True:\n                    self.ready",
        test=RECORDS + "a_ready_of_another_view_does_not_count",
    ),
    Mutant(
        "two values at one ballot",
        "consensus",
        "        if known is not None and known.vote.ballot == accept.ballot:\n"
        "            return  # a proposer",
        "        if False:\n            return  # a proposer",
        test=TEST + "a_second_value_at_one_ballot_is_refused",
    ),
    Mutant(
        "a ballot does not name the life",
        "election",
        "Ballot(self._highest_ballot, here.me.peer, here.life)",
        "Ballot(self._highest_ballot, here.me.peer)",
        test=TEST + "ballots_of_two_lives_differ",
    ),
    Mutant(
        "attempt number reused after a restart",
        "node",
        "        self.election.recover(recovered, resigned=here.resigned)\n",
        "        self.election.recover(recovered, resigned=False)\n"
        "        if here.resigned:\n"
        "            self._go(Trigger.LED)\n"
        "            self._lead(view, None, None, {})\n",
        test=TEST + "a_restarted_coordinator_resigns",
    ),
    Mutant(
        "a coordinator's view is not synced before its orders",
        "node",
        "here.emit(ev.Persist(ViewRecord(decided, proof), synced=leads))",
        "here.emit(ev.Persist(ViewRecord(decided, proof), synced=False))",
        test=TEST + "a_coordinator_says_nothing_before_its_view_is_on_its_disk",
    ),
    Mutant(
        "restarted participant answers the repeated BEGIN",
        "member",
        "        return not begin.lives or begin.lives[",
        "        return True or begin.lives[",
        test=TEST + "a_later_life_takes_no_part_in_an_attempt_that_names_another",
    ),
    Mutant(
        "a restart does not end an attempt",
        "attempt",
        "if peer not in usable or peer in self.restarted]",
        "if peer not in usable]",
        test=TEST + "a_fast_restart_ends_the_attempt_as_a_death_would",
    ),
    Mutant(
        "a restarted coordinator is waited for",
        "election",
        "        self.resigned = True\n"
        "        self._answered_s[self.view.coordinator] = self._here.now_s\n",
        "        pass\n",
        test=TEST + "a_restarted_coordinator_resigns",
    ),
    Mutant(
        "position not checked",
        "amnesia",
        "if any(each.peer == peer and _contradicts(each, *rest) for each in told)",
        "if False",
        test=TEST + "a_restored_image_loses_no_round",
    ),
    Mutant(
        "amnesiac counted because the one who remembers is not the candidate",
        "election",
        "began=began, remembered=told)",
        "began=began)",
        test=TEST + "a_restored_image_loses_no_round",
    ),
    Mutant(
        "a forgetful member is heard by the coordinator",
        "node",
        "            if here.positions.shows_loss(source, beat.inc, beat.life, beat.began):\n",
        "            if False:\n",
        test=TEST + "who_comes_back_with_an_older_home_is_no_voter",
    ),
    Mutant(
        "JOIN before the incarnation is synced",
        "durable_records",
        "    Join: (IncarnationRecord,),\n",
        "",
        test=TEST + "nobody_joins_under_a_number_that_its_disk_may_forget",
    ),
    Mutant(
        "fork right after an own restart",
        "election",
        "here.now_s - restarted_s < timing.fork_restarted_s:\n            return False",
        "here.now_s - restarted_s < timing.fork_restarted_s:\n            pass",
        test=TEST + "who_was_restarted_does_not_go_on_alone",
    ),
    Mutant(
        "a failed ledger still votes",
        "node",
        "        self._here.outbox.fail()\n        self._forgot(",
        "        self._here.outbox.fail()\n        str(",
        test=TEST + "who_cannot_write_comes_back_as_somebody_new",
    ),
    Mutant(
        "R that is missing is reported as held",
        "consensus",
        "for run in report.runs if run.round not in report.missing}",
        "for run in report.runs}",
        test=RECORDS + "a_result_that_is_missing_is_not_held",
    ),
    Mutant(
        "operations that others have lost are fetched",
        "member",
        "        elif not self.unsynced and self._take_back(*base, restarted):\n"
        "            return\n",
        "",
        test=TEST + "operations_that_others_have_lost_are_taken_back_by_name",
    ),
    Mutant(
        "copy rule counts votes replicas",
        "attempt",
        "        return len(self.kept.intersection(voted)) >= min(2, len(can))\n",
        "        return len(voted) >= min(2, len(can))\n",
        test=UNIT + "attempt.py::test_who_keeps_votes_only_is_no_copy",
    ),
    Mutant(
        "anybody says how long a ledger was",
        "amnesia",
        "        if is_news and self._genuine(told):\n",
        "        if is_news:\n",
        test=TEST + "nobody_loses_its_vote_by_what_others_claim_to_remember",
    ),
    Mutant(
        "a READY without its result halts the run",
        "consensus",
        "        if not possible and not held:\n",
        "        if False:\n",
        test=UNIT + "consensus.py::"
        "test_a_round_that_was_not_committed_and_that_nobody_holds_is_not_lost",
    ),
)
