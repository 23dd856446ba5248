"""Tokenizes text as llama.cpp does, and learns new vocabularies.

The engine is our own because no library gives llama.cpp's result: Hugging Face's `tokenizers` rejects bytes
that are not UTF-8, cuts words by another Unicode version, rejects merges that name no token, and is slower.
"""

from llamatrain.data.tokenizer.tokenizer import StreamDecoder, Tokenizer, load, to_bytes

__all__ = ["StreamDecoder", "Tokenizer", "load", "to_bytes"]
