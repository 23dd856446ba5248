"""The shapes of models that are measured.

Imports nothing, because the Python of a peer may have none of llamatrain's dependencies.
"""

SHAPES = {  # embd, layer, head, head-kv, ff, vocab, ctx
    "1.1b": (2048, 22, 32, 4, 5632, 32000, 2048),
    "7b": (4096, 32, 32, 32, 11008, 32000, 4096),
    "small": (256, 4, 8, 8, 768, 32000, 64),
}
