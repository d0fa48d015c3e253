"""Record what happens in a run and how long it takes, at every peer the same: events and rows."""
