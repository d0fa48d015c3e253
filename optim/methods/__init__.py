"""Train with local steps between rounds: the methods, and the two bases that most of them have."""
