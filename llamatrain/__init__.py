"""llamatrain trains llama models where the llama.cpp world keeps them: in GGUF files."""

__version__ = "0.1.0"
