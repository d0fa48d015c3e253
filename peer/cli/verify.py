"""Carry out ``atoll verify FILE``: check evidence against a peer, without the network."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from atoll.collectives.errors import EvidenceError


def add_verify_verb(verbs: Any) -> None:
    verify = verbs.add_parser(
        "verify", help="check evidence against a banned peer, see docs/audit.md"
    )
    verify.add_argument("file", type=Path, metavar="FILE", help="from HOME/evidence of any member")
    verify.add_argument("--json", action="store_true", help="for scripts")
    verify.set_defaults(command=_verify)


def _verify(parsed: argparse.Namespace) -> int:
    """Print what the evidence in a file proves. Raise EvidenceError if it proves nothing."""
    from atoll.peer.membership.view import short
    from atoll.peer.verify.evidence import EVIDENCE_BYTES_MAX, parse_evidence, verify_evidence

    if parsed.file.stat().st_size > EVIDENCE_BYTES_MAX:
        raise EvidenceError(f"{parsed.file} is too long to be evidence")
    evidence = parse_evidence(parsed.file.read_bytes())
    finding, terms = verify_evidence(evidence), evidence.terms
    if parsed.json:
        print(
            json.dumps(
                {
                    "kind": finding.kind,
                    "banned": [peer.hex() for peer in finding.banned],
                    "text": finding.text,
                    "stands_alone": finding.stands_alone,
                    "digest": evidence.digest.hex(),
                    "lineage": terms.lineage.hex(),
                    "round": terms.round,
                    "participants": [peer.hex() for peer in terms.participants],
                }
            )
        )
        return 0
    print(f"proven: {finding.text}")
    for peer in finding.banned:
        print(f"  banned       {short(peer)}  {peer.hex()}")
    print(
        f"  evidence     {evidence.digest.hex()} ({finding.kind}, {len(evidence.encoded):,} bytes)"
    )
    print(
        f"  round        {terms.round} of lineage {terms.lineage.hex()[:16]},"
        f" attempt {terms.attempt}"
    )
    print(f"  aggregation  {terms.rule} of {sum(terms.counted)} parts in {terms.codec}")
    if not finding.stands_alone:
        print(
            "  It rests on the word of these peers: look whether they were members of the run"
            " (`atoll status` on one that you trust)."
        )
        for peer in terms.participants:
            print(f"    {short(peer)}  {peer.hex()}")
    return 0
