"""The state on disk: written in the background, verified before use."""
