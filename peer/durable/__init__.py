"""Keep on disk what a peer has promised, and the rounds it has said READY for."""

# What a peer remembers over restarts: votes and rounds, votes alone, or nothing.
ROUNDS, VOTES, OFF = DURABLE = ("rounds", "votes", "off")
LEDGER = "ledger"  # the name of its file in the home
