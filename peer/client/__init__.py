"""Connect a trainer or a command line to the daemon on its machine."""
