"""Converts folders of transformers (config.json, safetensors, a tokenizer) into GGUF files."""
