"""Generates texts for many prompts together, on all processes."""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llamatrain.commands.generate import TextModel
from llamatrain.sample.options import SamplingOptions

if TYPE_CHECKING:
    from llamatrain.sample.batch import BatchDecoder, Completion, Request
    from llamatrain.sample.text import TextBuilder

SLOTS = (16, 8, 4, 1)  # how many texts are generated together
FEWEST = 4  # with fewer, numbers round differently (see `sample.batch`)


@dataclass(frozen=True)
class GeneratedText:
    """A text that continues a prompt."""

    text: str
    stop_reason: str  # "end", "stop" (a stop text), "n" (enough tokens) or "ctx" (the context is full)


def generate_many(
    model: TextModel,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingOptions | Sequence[SamplingOptions],
    parallel: int | None = None,
    title: str = "texts",
) -> list[GeneratedText]:
    """Return the text after each prompt, with options for all prompts or for each of them (collective).

    A prompt's text does not depend on the others (see `sample.batch`). `parallel`: how many are generated together.
    """
    from llamatrain.distributed.comm import get_comm
    from llamatrain.platform.terminal import progress_bar
    from llamatrain.sample.batch import Request

    comm, count = get_comm(), len(prompts)
    each = [sampling] * count if isinstance(sampling, SamplingOptions) else sampling
    requests = [Request(tokens, with_seed(options)) for tokens, options in zip(prompts, each, strict=True)]
    first, last = (count * rank // comm.size for rank in (comm.rank, comm.rank + 1))
    texts = dict[int, GeneratedText]()
    with progress_bar(title, total=count, unit=" texts") as progress:
        for index, text in generate_texts(model, requests[first:last], parallel):
            texts[first + index] = text
            progress.update(comm.size)
    merged = {index: text for part in comm.all_gather(texts) for index, text in part.items()}
    return [merged[index] for index in range(count)]


def with_seed(options: SamplingOptions) -> SamplingOptions:
    """Return options with a random seed if they have none."""
    return replace(options, seed=secrets.randbits(32)) if options.seed < 0 else options


def generate_texts(
    model: TextModel, requests: "Sequence[Request]", parallel: int | None = None
) -> Iterator[tuple[int, GeneratedText]]:
    """Yield the index and the text of each request, in the order in which they finish."""
    from llamatrain.io.mapped_file import check_files, mapped_files, verify_unchanged
    from llamatrain.sample.batch import complete
    from llamatrain.sample.text import TextBuilder

    if not requests:
        return
    builders = [TextBuilder(model.text_pieces(), request.options.stop) for request in requests]
    pieces: list[list[str]] = [[] for _ in requests]

    def stops(index: int, token: int) -> bool:
        pieces[index].append(builders[index].feed(token))
        return builders[index].is_complete

    files = mapped_files(model.arrays.values())
    decoder = create_batch_decoder(model, parallel or choose_slots(model, len(requests)))
    with verify_unchanged(files):
        for done in complete(decoder, requests, model.ends, stops):
            check_files(files)
            yield done.index, finish_text(done, builders[done.index], pieces[done.index])


def finish_text(done: "Completion", builder: "TextBuilder", pieces: Sequence[str]) -> GeneratedText:
    """Return a text with its last piece."""
    text = "".join([*pieces, *builder.flush()])
    return GeneratedText(text, "stop" if builder.is_complete else done.stop_reason)


def choose_slots(model: TextModel, count: int) -> int:
    """Return how many of `count` texts are generated together: as many as there is memory for, with 16 at most.

    The texts of a mixture of experts depend on this number by rounding, so it does not depend on `count`.
    """
    from llamatrain.model.experts import has_experts

    wanted = SLOTS[0] if has_experts(model.h) else min(max(count, FEWEST), SLOTS[0])
    most = min(slots for slots in SLOTS if slots >= wanted)
    return next((slots for slots in SLOTS if slots <= most and has_room(model, slots)), 1)


def has_room(model: TextModel, slots: int) -> bool:
    """Return True if there is memory for a number of slots."""
    from llamatrain.engine.device import create_device
    from llamatrain.platform.memory import available_bytes
    from llamatrain.sample.batch import BatchDecoder

    limit = create_device(model.device, model.threads).memory_limit() or available_bytes()
    cost = BatchDecoder.plan(model.h, model.ctx, slots, model.threads, model.device, model.weights)
    return limit is None or cost.total <= limit


def create_batch_decoder(model: TextModel, slots: int) -> "BatchDecoder":
    """Return a decoder; raise an error if there is not enough memory for it."""
    from llamatrain.engine.device import create_device
    from llamatrain.model.load import check_memory
    from llamatrain.sample.batch import BatchDecoder

    if create_device(model.device, model.threads).memory_limit() is None:
        cost = BatchDecoder.plan(model.h, model.ctx, slots, model.threads, model.device, model.weights)
        check_memory(model.gguf, cost.total, "a smaller --parallel or --ctx")
    return BatchDecoder(
        model.h,
        model.memory,
        ctx=model.ctx,
        slots=slots,
        threads=model.threads,
        kernels=model.device,
        weights=model.weights,
    )
