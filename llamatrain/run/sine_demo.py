"""The options of `from-scratch` without data: a tiny model of the built-in sine wave (as in
configs/sine.toml).
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
