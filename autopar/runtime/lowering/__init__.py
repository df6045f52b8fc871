"""Operators that need more than their own ATen call once a mesh axis splits what they reduce or look up."""
