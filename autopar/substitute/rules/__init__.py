"""The substitution rules: the language of their terms and guards, and the file that holds them (`load_rules`).

What makes and proves them is rulemaking/, beside autopar: planning reads the file.
"""
