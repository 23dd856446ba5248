"""GGUF files: reader, writer, metadata values, tensor types and quantization."""
