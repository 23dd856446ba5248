"""Text to tokens, as llama.cpp does it, and new vocabularies.

The engine is our own because no library gives llama.cpp's result: Hugging Face's `tokenizers` reads no bytes that are not
UTF-8, cuts words by another Unicode version, and refuses merges that name no token; and it is slower.
"""

from llamatrain.data.tokenizer.tokenizer import StreamDecoder, Tokenizer, load, to_bytes

__all__ = ["StreamDecoder", "Tokenizer", "load", "to_bytes"]
