"""Hand vectors from trainer to trainer, one to one.

They are published under a name and a number, and fetched by whoever wants them. No group decides
anything here; nobody waits but who asks.
"""
