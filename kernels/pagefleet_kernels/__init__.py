"""Kernels by operator. Empty for now: every op is served by its reference in plain torch."""
