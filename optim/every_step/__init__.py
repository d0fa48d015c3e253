"""Exchange something at every step: gradients, momenta or single numbers."""
