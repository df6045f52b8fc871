"""Predicted beside measured training iterations of GPUs: see `__main__`."""
