"""Kinds of models, a few lines of forward each, in sizes that do not divide, under random plans."""
