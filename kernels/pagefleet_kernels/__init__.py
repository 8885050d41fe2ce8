"""Compiled kernels, one module for each device that has some. This file imports nothing."""

ISAS = ("scalar", "avx2", "avx512", "avx512bf16")  # what the CPU's are compiled for, the best last
