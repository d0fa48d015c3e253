"""Write the state to disk in the background, and verify it before use."""
