"""Training data: from files to batches of tokens.

`find_files` and `readers/` read files, `records` and `chat/` make documents of rows, `encode` turns documents
into tokens (kept in `token_cache`), `dataset` numbers the samples, and `batches` packs them into arrays.
"""
