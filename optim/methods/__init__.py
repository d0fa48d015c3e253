"""Train with local steps: each method is a class that takes the place of an outer optimizer."""
