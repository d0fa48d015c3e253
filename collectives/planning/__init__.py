"""Choose a collective for a network, by a model of what each would take; pure."""
