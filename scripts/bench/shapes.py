"""The shapes of models that are measured.

Imports nothing, because the Python of a peer may have none of llamatrain's dependencies.
"""

SHAPES = {  # embd, layer, head, head-kv, ff, vocab, ctx
    "1.1b": (2048, 22, 32, 4, 5632, 32000, 2048),
    "7b": (4096, 32, 32, 32, 11008, 32000, 4096),
    "small": (256, 4, 8, 8, 768, 32000, 64),
    "qwen35-0.8b": (1024, 24, 8, 2, 3584, 248320, 32768),
    "3b-experts": (1024, 20, 16, 4, 6144, 32000, 4096),
    "3b-active": (1024, 20, 16, 4, 6144, 32000, 4096),
    "3b-total": (1024, 20, 16, 4, 49152, 32000, 4096),
}
EXPERTS = {"3b-experts": (64, 8, 768)}  # experts, experts that a token uses, and the width of each
# architecture, size of a head, rotated elements of a head, and tied embeddings of shapes that are no llamas
FAMILIES = {
    "qwen35-0.8b": ("qwen35", 256, 64, True),
    "3b-experts": ("qwen3moe", 64, 64, False),
    "3b-active": ("qwen3", 64, 64, False),
    "3b-total": ("qwen3", 64, 64, False),
}
