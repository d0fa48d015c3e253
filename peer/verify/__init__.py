"""Verify aggregates before they are committed, and ban whoever can be shown to have lied.

These are audited rounds (BTARD, Gorbunov et al. 2022, with the differences that docs/audit.md
lists). Participants sign statements (statement.py) about an attempt whose terms all have agreed on
(terms.py). One ``AttemptAudit`` per attempt keeps them (inbox.py), computes and compares numbers
(checks.py), opens parts that are in doubt (disclosure.py) and makes evidence, which anybody can
verify (evidence.py). ``AuditManager`` runs these audits in a daemon. Local steps that others take
again are in validation.py, and what comes of evidence in ban_record.py and ban_list.py.

A daemon loads this package when its run turns out to need it (peer/daemon/optional.py).
"""
