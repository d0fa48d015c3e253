"""The data plane: a round's bytes, from submissions to the state that they change."""
