"""How fast, how far and how lossy the links to the others are, and who is told."""
