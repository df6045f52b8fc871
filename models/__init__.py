"""Plain PyTorch models to plan for: each module has a Config, build(config) and example_inputs(config).

They know nothing of parallelism and never import autopar. Every `forward` takes one global batch, labels
included, and returns the scalar loss; `example_inputs` returns such a batch, keyed by argument name.
"""
