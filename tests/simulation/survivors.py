"""Mutations that survive, each with the reason.

``EQUIVALENT``: they change nothing that anybody could see. ``HOSTILE``: they matter where somebody
sends what no honest peer does; unit tests find them, and ``make mutate`` counts them as not caught.
By their words (``Mutation.words``), so that they are found again when lines move. A survivor that
is not here is a hole in the simulator: an invariant or a scenario is missing.
"""

from __future__ import annotations

__all__ = ["EQUIVALENT", "HOSTILE"]

EQUIVALENT = {
    "messages dropped part: self.lives and len(self.lives) != len(self.participants)"
    " -> len(self.lives) != len(self.participants)": (
        "a coordinator always names lives; a BEGIN without any is made by unit tests only"
    ),
    "member dropped part: not begin.lives or begin.lives[begin.participants.index(self.me)]"
    " == self.life -> begin.lives[begin.participants.index(self.me)] == self.life": (
        "as above: there is no BEGIN without lives"
    ),
    "view swapped arguments: new_lineage(view.lineage, mark) -> new_lineage(mark, view.lineage)": (
        "an identity is a hash of both; in any order it is as unique, and nobody computes it twice"
    ),
    "roster dropped condition: if self.view.member(peer) is not None -> True": (
        "a set of the refused is only looked up for members; the condition keeps the set small"
    ),
    "election comparison: here.now_s - restarted_s < timing.fork_restarted_s"
    " -> here.now_s - restarted_s <= timing.fork_restarted_s": (
        "differs in one moment of a clock of floats, 25 ms before the next look"
    ),
    "failure_detector dropped condition: if self.hears_all(now_s) -> False": (
        "a short cut: nobody is suspected, and no kernel is looked at, whose silence is half of the"
        " failure limit at most"
    ),
    "node dropped part: beat.resigned and self._is_coordinator(source) and (self.election is not"
    " None) -> self._is_coordinator(source) and self.election is not None": (
        "a coordinator sends heartbeats when it has resigned only; one that has become a candidate"
        " sends them to itself, and looks for no coordinator any more"
    ),
}

HOSTILE = {
    "kept_chunks comparison: holders >= members -> holders > members": (
        "no coordinator names a holder beyond the view; test_attempt_cleanup.py does, and finds"
        " this"
    ),
    "node dropped part: wrong or wrong_owners(begin, view, own.terms)"
    " -> wrong_owners(begin, view, own.terms)": (
        "no coordinator begins a round with wrong weights; one that does is refused in"
        " test_probation.py, which finds this"
    ),
    "election dropped condition: if accept.ballot != self._refused -> True": (
        "nobody proposes what is refused; of a proposal that is repeated the refusal would be noted"
        " each time, which test_bans.py finds"
    ),
    "view dropped part: self.policy not in POLICIES or self.on_lost not in ON_LOST"
    " -> self.on_lost not in ON_LOST": (
        "no founder has other policies: the command line knows those alone; test_message_limits.py"
        " makes some, and finds this"
    ),
}
