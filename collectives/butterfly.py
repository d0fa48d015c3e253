"""The butterfly: each owner receives everyone's part of its chunks, and sends all the result.

Theory of operation
===================

Of every chunk that participant ``o`` owns, each contributor ``s`` (weight > 0) sends its encoded
part to ``o``. The owner adds the decoded parts in participant order, encodes the sum once, and
sends the same bytes to all others. So there are two quantizations whatever the number of peers,
and everyone ends with the same bytes. An owner treats its own part like all others: encoded, sent
to itself, decoded.

``Butterfly`` is the schedule of ONE participant: a state machine without locks, clocks or I/O. The
engine asks it what to send, what it may take in and what to add next.

Rule 1.  A stream ``s -> o`` carries one frame at a time, and contributions in ascending order of
         chunk. A gap is an error, a repetition is dropped.
Rule 2.  Results that are final go before contributions: whoever waits for them can finish sooner.
Rule 3.  Let the *base* be the first own chunk that is not final. The contribution to the i-th own
         chunk is taken in when ``i < base + window``, and held (the stream pauses) until then.
Rule 4.  A result is never held.
Rule 5.  A chunk that NOBODY owns is kept from an earlier attempt: no frame carries it, it becomes
         final from outside, and nothing else waits for it.
Rule 6.  Contributions leave for all owners at the same pace: the i-th for one of them not before
         the (i - spread)-th for every other, unless its stream broke. On slow links the streams of
         a peer differ in speed, and a chunk needs everyone's part: without this rule most parts
         are sent by half of the round, few chunks are final, and an attempt that breaks loses much.
Rule 7.  If no shard is longer than a few windows, the i-th contribution for an owner leaves when
         its (i - lead)-th result is here, and the lead is within the window: for the same reason.
         What rule 3 holds would be lost in the buffers of the stream.

**Memory.** By rule 3 an owner has at most ``window`` contributions of each source and ``window``
sums at a time, however much faster some sources are than others. Rule 1 adds one frame per source.

**No deadlock.** Only two things wait: a contribution outside the window, and a sender with nothing
to send. Take an owner whose base is b, and a source s whose part of b has not arrived. Nothing
before it on the stream is held: the results are not (rule 4), and the contributions before it are
to chunks before b (rule 1), which are inside the window. Take the owner whose base has the lowest
index i of all. Every other owner has the parts before its own base, which are at least i, so rule 6
does not stop s, nor does rule 7: if it is in force, nothing is ever held, and all results before b
arrive. So the sender of s has a contribution to send, which depends on nothing else, and the part
of b arrives from every source, b becomes final, and the window moves. By induction all own chunks
of every owner become final, so all results are sent, and none is held. This holds for every window
and spread of at least 1, and for streams without any buffer. (A lead beyond the window could close
a circle: a result waits behind a contribution that is held.)
"""

from __future__ import annotations

from typing import Final

from atoll.collectives.errors import LocalProtocolError, RemoteProtocolError
from atoll.collectives.plan import NOBODY, ReducePlan
from atoll.collectives.schedule import Admission, Idle, Kind, Send

__all__ = [
    "LEAD_CHUNKS_MIN",
    "LEAD_PART",
    "SPREAD_CHUNKS",
    "WINDOW_BYTES_MAX",
    "WINDOW_CHUNKS",
    "Butterfly",
    "window_chunks",
]

# One chunk that is being added, one that is arriving, and two for the difference in speed between
# sources. More would only let fast sources run further ahead of the slowest, which sets the pace.
WINDOW_CHUNKS: Final = 4
# One chunk in the buffers of a stream, and one for a sender that comes late to its turn.
SPREAD_CHUNKS: Final = 2
# Ahead of an owner's results: two chunks keep its stream busy, and with a quarter of its chunks a
# round does not take more than four or five round trips on long links.
LEAD_CHUNKS_MIN: Final = 2
LEAD_PART: Final = 4
# What the windows of all sources may hold together. With the buffers of the senders it keeps a
# reduction near the 64 MiB that a daemon may take beside its state.
WINDOW_BYTES_MAX: Final = 32 * 2**20


def window_chunks(sources: int, chunk_bytes: int) -> int:
    """How many chunks a source may be ahead: fewer where there are many sources."""
    return max(1, min(WINDOW_CHUNKS, WINDOW_BYTES_MAX // max(1, sources * chunk_bytes)))


class Butterfly:
    """The schedule of participant ``me``; the theory is at the top of this file."""

    def __init__(self, plan: ReducePlan, me: int, window: int = WINDOW_CHUNKS) -> None:
        participants = range(len(plan.participants))
        self._plan = plan
        self._me = me
        self._window = window
        self._contributors = tuple(p for p in participants if plan.weights[p] > 0)
        self._chunks_of: tuple[list[int], ...] = tuple([] for _ in participants)
        for chunk, owner in enumerate(plan.owners):
            if owner != NOBODY:
                self._chunks_of[owner].append(chunk)
        self._own = self._chunks_of[me]
        lead = max(LEAD_CHUNKS_MIN, max(map(len, self._chunks_of)) // LEAD_PART)
        self._lead = lead if lead <= window else len(plan.owners)
        self._own_index = {chunk: index for index, chunk in enumerate(self._own)}
        # sending
        self._contribs_sent = [0 for _ in participants]
        self._results_sent = [0 for _ in participants]
        self._broken = {me}  # destinations that rule 6 does not wait for
        self._results: list[int] = []  # own chunks in the order in which they became final
        # receiving: by rule 1 a count says which contributions of a source are here
        self._contribs_arrived = [0 for _ in participants]
        self._arriving = [False for _ in participants]
        # adding
        self._base = 0  # index into self._own
        self._folds_done = [0 for _ in self._own]
        self._folding: set[int] = set()
        self._final = [False for _ in plan.owners]
        self._final_count = 0

    @property
    def done(self) -> bool:
        return self._final_count == len(self._final)

    def next_send(self, dest: int) -> Send | Idle:
        if dest != self._me and self._results_sent[dest] < len(self._results):
            self._results_sent[dest] += 1
            return Send(Kind.RESULT, self._results[self._results_sent[dest] - 1])
        wanted, sent = self._chunks_of[dest], self._contribs_sent[dest]
        if self._plan.weights[self._me] > 0 and sent < len(wanted):
            if dest != self._me and sent >= self._slowest() + SPREAD_CHUNKS:
                return Idle.PACED
            ahead = dest != self._me and sent >= self._lead
            if ahead and not self._final[wanted[sent - self._lead]]:
                return Idle.WAIT
            self._contribs_sent[dest] += 1
            return Send(Kind.CONTRIB, wanted[sent])
        if dest == self._me or len(self._results) == len(self._own):
            return Idle.DONE
        return Idle.WAIT

    def _slowest(self) -> int:
        """How many contributions the owner has got that has got fewest; one that has all is out."""
        counts = zip(self._contribs_sent, self._chunks_of, strict=True)
        behind = (
            sent
            for dest, (sent, wanted) in enumerate(counts)
            if sent < len(wanted) and dest not in self._broken
        )
        return min(behind, default=len(self._final))

    def broken(self, dest: int) -> None:
        self._broken.add(dest)

    def admit(self, src: int, kind: int, chunk: int) -> Admission:
        if not 0 <= src < len(self._chunks_of):
            raise RemoteProtocolError(f"a data frame from {src}, who takes no part in this attempt")
        if not 0 <= chunk < len(self._final):
            raise self._refusal(src, f"chunk {chunk} of {len(self._final)}")
        if kind == Kind.CONTRIB:
            admission = self._judge_contribution(src, chunk)
        elif kind == Kind.RESULT:
            admission = self._judge_result(src, chunk)
        else:
            raise self._refusal(src, f"a data frame of unknown kind {kind}")
        if admission is Admission.ACCEPT:
            if self._arriving[src]:
                raise self._refusal(src, f"chunk {chunk} while another frame of it arrives")
            self._arriving[src] = True
        return admission

    def _judge_contribution(self, src: int, chunk: int) -> Admission:
        if chunk not in self._own_index:
            raise self._refusal(src, f"a contribution to chunk {chunk}, which is not owned here")
        if not self._plan.weights[src] > 0:
            raise self._refusal(src, f"a contribution to chunk {chunk}, but its weight is 0")
        index, expected = self._own_index[chunk], self._contribs_arrived[src]
        if index > expected:
            raise self._refusal(src, f"chunk {chunk} before chunk {self._own[expected]}")
        if index < expected:
            return Admission.DROP
        return Admission.ACCEPT if index < self._base + self._window else Admission.HOLD

    def _judge_result(self, src: int, chunk: int) -> Admission:
        if self._plan.owners[chunk] != src or src == self._me:
            raise self._refusal(src, f"a result of chunk {chunk}, which it does not own")
        return Admission.DROP if self._final[chunk] else Admission.ACCEPT

    def arrived(self, src: int, chunk: int) -> None:
        if not self._arriving[src]:
            raise LocalProtocolError(f"contribution to chunk {chunk} arrived, but was not admitted")
        self._arriving[src] = False
        self._contribs_arrived[src] += 1

    def next_fold(self, chunk: int) -> int | None:
        index = self._own_index[chunk]
        done = self._folds_done[index]
        if chunk in self._folding or done == len(self._contributors):
            return None
        src = self._contributors[done]
        if self._contribs_arrived[src] <= index:
            return None
        self._folding.add(chunk)
        return src

    def folded(self, chunk: int) -> bool:
        self._folding.remove(chunk)
        index = self._own_index[chunk]
        self._folds_done[index] += 1
        return self._folds_done[index] == len(self._contributors)

    def final(self, chunk: int) -> None:
        if self._final[chunk]:
            raise LocalProtocolError(f"chunk {chunk} became final twice")
        self._final[chunk] = True
        self._final_count += 1
        if chunk not in self._own_index:
            if self._plan.owners[chunk] != NOBODY:
                self._arriving[self._plan.owners[chunk]] = False
        else:
            self._results.append(chunk)
            while self._base < len(self._own) and self._final[self._own[self._base]]:
                self._base += 1

    def missing(self) -> frozenset[int]:
        """Sources that have not sent their part of the base; if there are none, owners of results.

        While a source is late, the owners are late because of it: naming them would blame everyone.
        """
        late: set[int] = set()
        if self._base < len(self._own):
            late = {s for s in self._contributors if self._contribs_arrived[s] <= self._base}
        if not late - {self._me}:
            late = {
                owner
                for owner, final in zip(self._plan.owners, self._final, strict=True)
                if not final
            }
        return frozenset(late - {self._me, NOBODY})

    def _refusal(self, src: int, what: str) -> RemoteProtocolError:
        return RemoteProtocolError(
            f"peer {self._plan.name(src)} sent {what}",
            fix="run the same version of atoll on all peers",
        )
