"""Keep on disk what a peer has promised, and the rounds it has said READY for."""
