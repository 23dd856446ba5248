"""LoRA adapters: reading, writing and merging them."""
