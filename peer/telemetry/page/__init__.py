"""Show a run to people in a browser: what is read from the event file, served, and drawn."""
