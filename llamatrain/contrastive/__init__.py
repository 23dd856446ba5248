"""Training of embeddings: texts that belong together get similar vectors, and other texts different ones."""
