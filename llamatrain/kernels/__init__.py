"""Kernels: the reference definitions in numpy, and the compiled kernels for the CPU."""
