"""Group relative policy optimization: a model learns from rewards of the answers that it generates."""
