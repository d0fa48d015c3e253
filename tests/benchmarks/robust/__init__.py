"""`make bench-robust`: what each attack costs a run with each rule of aggregation.

Rows, results and their processes are those of the convergence benchmark. ``plan`` says which rows
there are, ``training`` runs one, ``figures`` says what an attack costs and whether the bars are
met, ``table`` shows it. The attacks are in tests/attacks/.
"""
