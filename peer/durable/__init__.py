"""Keep on disk what a peer has promised, and the rounds it has said READY for."""

# What a peer remembers over restarts: votes and rounds, votes alone, or nothing.
ROUNDS, VOTES, OFF = DURABLE = ("rounds", "votes", "off")
LEDGER = "ledger"  # the name of its file in the home
# ... and of the folders of R, and of the checkpoints that stand for rounds.
ROUNDS_FOLDER = "rounds"
CHECKPOINT_FOLDER = "checkpoint"
CHECKPOINTS_KEPT = 2
# For so many a home is to have room: those since the older of two checkpoints, ten rounds apart.
ROUNDS_KEPT = 20
