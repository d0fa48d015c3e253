"""Connections between peers: who is at the other end, and control messages."""
