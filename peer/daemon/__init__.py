"""Run the peer daemon: one event loop that connects the membership machine to the world."""
