"""Operators that run on a part of an axis alone, beside others."""
