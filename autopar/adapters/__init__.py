"""Other people's training loops over a plan: Hugging Face's Trainer and Lightning.

A loop sees one process that has the whole batch, as its script was written for; the model's passes alone are shared
among the ranks. Nothing is imported here: each framework is imported with its own module.
"""
