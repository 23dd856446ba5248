"""llama.cpp itself, to compare with: `xllamacpp` has its server."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import pytest

from llamatrain.gguf.values import Value
from tests.helpers.tiny_gguf import WIDTH, llama_metadata, llama_tensors, write_arrays


def model_with(vocabulary: Mapping[str, Value], path: Path) -> Path:
    """A tiny model with this vocabulary, for servers that take no vocabulary alone."""
    metadata = {key: value for key, value in llama_metadata().items() if not key.startswith("tokenizer.")}
    metadata |= {
        key: value for key, value in vocabulary.items() if key.startswith(("tokenizer.", "general.name"))
    }
    tensors = llama_tensors()
    size = len(metadata["tokenizer.ggml.tokens"].decode())
    del metadata["llama.vocab_size"], tensors["output.weight"]
    tensors["token_embd.weight"] = np.zeros((size, WIDTH), np.float32)
    return write_arrays(path, metadata, tensors)


class Served:
    def __init__(self, address: str) -> None:
        self.address = address

    def post(self, what: str, **content: Any) -> Any:
        request = Request(
            f"{self.address}/{what}", json.dumps(content).encode(), {"Content-Type": "application/json"}
        )
        with urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def tokenize(self, text: str, *, special: bool, ends: bool = False) -> list[int]:
        return self.post("tokenize", content=text, parse_special=special, add_special=ends)["tokens"]


@contextmanager
def served(
    model: Path,
    ctx_shift: bool = False,
    adapter: Path | None = None,
    ctx: int = 64,
    pooling: str | None = None,
) -> Iterator[Served]:
    """By xllamacpp, with caches in float32, and without flash attention, which works in half floats there.

    With `pooling`, such as mean, it gives embeddings.
    """
    xllamacpp = pytest.importorskip("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.hostnames, params.port = ["127.0.0.1"], 0
    params.n_ctx, params.warmup, params.verbosity, params.ctx_shift = ctx, False, 0, ctx_shift
    params.cpuparams.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    if pooling:
        kinds = xllamacpp.llama_pooling_type
        params.embedding, params.pooling_type = True, getattr(kinds, f"LLAMA_POOLING_TYPE_{pooling.upper()}")
    if adapter:
        info = xllamacpp.CommonAdapterLoraInfo()
        info.path, info.scale = os.fspath(adapter), 1.0
        params.lora_adapters = [info]
    server = xllamacpp.Server(params)
    yield Served(server.listening_address)
    del server
