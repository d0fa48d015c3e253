"""Let an authority, a key kept offline, say who may come into a run, and who no longer may.

The run secret still stands before everything (certs.py): without it nothing that a stranger sends
is parsed. Behind it each peer shows in its hello what the authority has granted (grants.py), and
every member judges that by itself (ledger.py). What members learn, who came with which token and
who is revoked, they tell to everybody that they have a link to (policy.py).

A daemon loads this package if its run has an authority (peer/daemon/optional.py).
"""
