"""Chooses a placement for every tensor on one submesh (Alpa's intra-operator pass)."""
