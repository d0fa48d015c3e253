"""`make bench-convergence`: held-out loss against bytes sent, of every method on one text.

``methods`` is the table of what is compared: to add a method is to add an entry there. ``plan``
says which rows are to be run, ``row`` names one, ``training`` runs it, ``runner`` runs many,
``results`` keeps them, ``table`` and ``plot`` show them.
"""
