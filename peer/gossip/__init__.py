"""Vectors that trainers hand to each other, one to one: published under a name and a number, and
fetched by whoever wants them. No group decides anything here; nobody waits but who asks."""
