"""Hold the peer: identity, links, membership, rounds, replicated state, daemon and its client.

Nothing that the daemon imports needs torch.
"""
