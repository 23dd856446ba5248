"""Text generation: decoding with a cache, sampling, streaming."""
