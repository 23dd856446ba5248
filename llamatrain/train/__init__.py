"""The training loop, the graphs of a step, and the programs that run them."""
