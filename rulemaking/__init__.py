"""Makes and proves the substitution rules that autopar ships; works on a checkout, and no plan needs it.

algebra (what operators are) → stated rules and those that `generate` finds → `verify` (axioms, z3, random instances,
gradients) → autopar/substitute/rules/rules.json, which `checking` holds against its schema, its digests and instances

    python -m rulemaking.verify                                              # every rule: proved or tested, and by what
    python -m rulemaking.generate -o autopar/substitute/rules/rules.json     # the rules anew
"""
