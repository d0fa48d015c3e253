"""Make direct connections between two peers of which neither can be dialled."""
