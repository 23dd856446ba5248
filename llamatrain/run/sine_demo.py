"""The options of `from-scratch` without data, for a tiny model of the built-in sine wave.

configs/sine.toml has the same options.
"""

SINE: dict[str, object] = {
    "embd": 32,
    "head": 4,
    "layer": 2,
    "ctx": 96,
    "vocab_size": "32",
    "iters": 1000,
    "lr": 3e-3,
    "eval_every": 0,
    "save_every": 0,
    "sample_every": 100,
}
