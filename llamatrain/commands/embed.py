"""Computes the embeddings of texts, as llama-server does."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from llamatrain.adapters.options import AdapterOptions
from llamatrain.commands.evaluate import DEFAULT_CTX, EvaluateOptions, load_tokenizer, make_programs
from llamatrain.contrastive.options import PoolingOptions

if TYPE_CHECKING:
    import numpy as np

    from llamatrain.data.batches import Batch, Segment


def embed_texts(
    model: Path, texts: Sequence[str], options: EvaluateOptions, lora: AdapterOptions, pooling: PoolingOptions
) -> "np.ndarray":
    """Return an embedding of length 1 for each text: (texts, width)."""
    import numpy as np

    from llamatrain.adapters.load_adapted import load_with_adapters
    from llamatrain.contrastive.batches import whole_text
    from llamatrain.contrastive.settings import Contrastive
    from llamatrain.data.batches import row_lengths
    from llamatrain.data.encode import Encoder
    from llamatrain.data.options import DataOptions
    from llamatrain.distributed.cores import count_cores
    from llamatrain.engine.device import create_device, resolve_device
    from llamatrain.gguf.reader import open_gguf
    from llamatrain.io.mapped_file import mapped_files, verify_unchanged
    from llamatrain.train.graphs import StepSpec

    gguf, threads, device = open_gguf(model), options.threads or count_cores(), resolve_device(options.device)
    h, weights, arrays = load_with_adapters(
        gguf, lora, threads, create_device(device).can_decode, predicts_text=False
    )
    tokenizer, ctx = load_tokenizer(gguf, h.vocab), options.ctx or min(DEFAULT_CTX, h.ctx)
    encoder = Encoder(tokenizer, DataOptions(), ctx, "texts")
    segments = [
        whole_text(encoder.encode_whole(text).tokens, ctx, encoder.bos, tokenizer.eos) for text in texts
    ]
    settings = Contrastive(
        pooling=pooling.choose_pooling(h, gguf.metadata.raw_values),
        temperature=1.0,
        sizes=(h.embd,),
        texts=1,
        rows=options.batch,
    )
    lengths = row_lengths(ctx, DataOptions(), full=False, plain=False)
    spec = StepSpec(
        h=h,
        weights=weights,
        trainable={},
        batch=options.batch,
        rope_length=ctx,
        precision=options.precision,
        threads=threads,
        kernels=device,
        contrastive=settings,
    )
    programs, found = make_programs(gguf, spec, arrays, lengths), np.empty((len(texts), h.embd), np.float32)
    with verify_unchanged(mapped_files(arrays.values())):
        for numbers, batch in batches_by_length(segments, options.batch, lengths):
            found[numbers] = programs.embed(batch)[: len(numbers), 0]
    return found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), np.float32(1e-30))


def batches_by_length(
    segments: "Sequence[Segment]", rows: int, lengths: Sequence[int]
) -> "Iterator[tuple[list[int], Batch]]":
    """Yield texts of similar lengths together: their numbers, and a batch of rows with one text each."""
    from llamatrain.contrastive.batches import add_places
    from llamatrain.data.batches import collate_rows

    order = sorted(range(len(segments)), key=lambda number: len(segments[number].tokens))
    for first in range(0, len(order), rows):
        numbers = order[first : first + rows]
        batch_rows = [[segments[number]] for number in numbers] + [[] for _ in range(rows - len(numbers))]
        longest = len(segments[numbers[-1]].tokens)
        length = next(length for length in lengths if length >= longest)
        yield numbers, add_places(collate_rows(batch_rows, length, 0), batch_rows, 1)
