"""Computes the embeddings of texts, as llama-server does."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from llamatrain.adapters.options import AdapterOptions
from llamatrain.commands.opened_model import DEFAULT_CTX, open_model
from llamatrain.config.common import BATCH, CTX, DEVICE, THREADS, DeviceName
from llamatrain.config.options import Option, Options, build
from llamatrain.contrastive.options import PoolingOptions

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class EmbedOptions(Options, panel="Embeddings"):
    """Options of embedding texts."""

    ctx: Annotated[int | None, CTX] = None
    batch: Annotated[int, BATCH] = 4
    threads: Annotated[int | None, THREADS] = None
    device: Annotated[DeviceName, DEVICE] = "cpu"
    precision: Annotated[Literal["f32", "bf16"], Option("Number type of matrix products.")] = "f32"


EMBED_OPTIONS = (EmbedOptions, AdapterOptions, PoolingOptions)


def embed_texts(path: Path, texts: Sequence[str], given: Mapping[str, Any]) -> "np.ndarray":
    """Return an embedding of length 1 for each text: (texts, width). `given` are options of EMBED_OPTIONS by name."""
    import numpy as np

    from llamatrain.contrastive.batches import add_places, whole_text
    from llamatrain.contrastive.settings import Contrastive
    from llamatrain.data.batches import collate_rows, row_lengths, rows_by_length
    from llamatrain.data.encode import Encoder
    from llamatrain.data.options import DataOptions
    from llamatrain.io.mapped_file import mapped_files, verify_unchanged

    options, pooling = build(EmbedOptions, given), build(PoolingOptions, given)
    model = open_model(
        path, build(AdapterOptions, given), options.threads, options.device, predicts_text=False
    )
    tokenizer, ctx = model.tokenizer, options.ctx or min(DEFAULT_CTX, model.h.ctx)
    encoder = Encoder(tokenizer, DataOptions(), ctx, "texts")
    segments = [
        whole_text(encoder.encode_whole(text).tokens, ctx, encoder.bos, tokenizer.eos) for text in texts
    ]
    lengths = row_lengths(ctx, DataOptions(), full=False, plain=False)
    settings = Contrastive(
        pooling=pooling.choose_pooling(model.h, model.gguf.metadata.raw_values),
        temperature=1.0,
        sizes=(model.h.embd,),
        texts=1,
        rows=options.batch,
    )
    programs = model.make_programs(
        lengths, options.batch, options.precision, has_untrained_tokens=False, contrastive=settings
    )
    found = np.empty((len(texts), model.h.embd), np.float32)
    with verify_unchanged(mapped_files(model.arrays.values())):
        for numbers, rows, length in rows_by_length(segments, options.batch, lengths):
            batch = add_places(collate_rows(rows, length, 0), rows, 1)
            found[numbers] = programs.embed(batch)[: len(numbers), 0]
    return found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), np.float32(1e-30))
