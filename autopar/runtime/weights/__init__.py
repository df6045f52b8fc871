"""Weights in Hugging Face's files, of which a rank reads and writes its slices; and a model's own first values."""
