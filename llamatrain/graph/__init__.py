"""The symbolic graph: tensors, ops, gradients and rewrites."""
