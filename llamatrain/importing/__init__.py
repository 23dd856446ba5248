"""Converts folders of transformers (config.json, safetensors, a tokenizer) into GGUF files.

`EXTENSIONS` names what this package adds to packages below it; see `llamatrain/extensions.py`.
"""

EXTENSIONS = {"model_folders": "cache:cached_import"}
