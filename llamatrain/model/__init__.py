"""The model: architectures, hyperparameters, weights, LoRA, and the graphs for training and decoding."""
