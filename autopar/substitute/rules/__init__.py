"""The substitution rules: their language, what they are made of, their proofs, and the file that holds them.

terms and algebra (what operators are) → stated rules and those that `generate` finds → `verify` (axioms, z3, random
instances, gradients) → rules.json → `load_rules` (schema, digests, checks)
"""
