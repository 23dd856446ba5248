"""Merges whole models: the formulas, and the tensors of the new file."""
