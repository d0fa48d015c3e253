"""Connect peers: prove who is at the other end, and carry control messages."""
