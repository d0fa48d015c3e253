"""Keep what a daemon sends and receives to what its operator allows."""
