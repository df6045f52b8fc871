"""Strategy-selection problems and their solver: one strategy a node, least cost, within memory at every time.

The problem is that of Google's IOPDDL benchmark, and a public instance loads unchanged. Nothing here knows of graphs,
meshes or placements. `problem.py` says what is asked, `evaluator.py` prices an answer, `solver.py` finds one.
"""
