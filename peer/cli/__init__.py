"""Hold the command line: ``atoll`` and its commands."""
