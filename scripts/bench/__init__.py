"""Benchmarks of kernels, training steps and whole runs, in turns with PyTorch and PEFT."""
