"""What a run works on: the model's numbers, its vocabulary, and rows of tokens."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from llamatrain.config.options import flag_of
from llamatrain.data.options import DataOptions
from llamatrain.data.sine import Sine
from llamatrain.data.tokenizer import Tokenizer, new_vocabulary
from llamatrain.data.tokenizer import load as load_tokenizer
from llamatrain.data.tokenizer.vocabulary import KEY, WITHOUT_TEXT
from llamatrain.errors import UsageError
from llamatrain.files.reader import Gguf, Metadata, open_gguf
from llamatrain.files.values import Value, u32
from llamatrain.model import hyperparameters
from llamatrain.model.hyperparameters import ALL_F32, Hyperparameters, vocabulary_of
from llamatrain.model.options import BYTES, ModelOptions
from llamatrain.train.loop import Rows

OF_A_FILE = ("split.", "training.", "optimizer.", "general.quantization_version")  # keys that a new model file has not
OWN_SIZE = ("size", "embd", "head", "head_kv", "layer", "ff", "vocab_size", "vocab_from", "rope_freq_base", "rope_freq_scale",
            "norm_rms_eps", "tie_embeddings")  # fmt: skip


class Countable(Rows, Protocol):
    @property
    def lengths(self) -> tuple[int, ...]: ...

    def count(self, epochs: int) -> int: ...


@dataclass(frozen=True)
class Vocabulary:
    metadata: dict[str, Value]
    size: int
    tokenizer: Tokenizer | None  # None: its tokens stand for no text


@dataclass(frozen=True)
class Material:
    h: Hyperparameters
    metadata: dict[str, Value]  # of the model file
    vocabulary: Vocabulary
    rows: Countable
    validation: Countable | None
    described: str
    untrained: dict[str, np.ndarray] = field(default_factory=dict)  # tensors of the model that are no weights

    @property
    def sine(self) -> Sine | None:
        return self.rows if isinstance(self.rows, Sine) else None


# ---- the model -------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    h: Hyperparameters
    metadata: dict[str, Value]
    vocabulary: Vocabulary
    row: int  # tokens in a row
    untrained: dict[str, np.ndarray]


def new_model(files: Sequence[str], options: ModelOptions, read: bool) -> Model:
    """By the options. Unread, the text gives as many tokens as may be."""
    vocabulary = new_vocabulary_of(files, options, read)
    h = options.hyperparameters(vocabulary.size)
    return Model(h, h.metadata("llamatrain") | vocabulary.metadata, vocabulary, h.ctx, {})


def model_of(gguf: Gguf, options: ModelOptions, given: Collection[str], usual: int) -> Model:
    """The one in a file; without --ctx rows have the `usual` length, or the model's."""
    for name in OWN_SIZE:
        if name in given:
            raise UsageError(f"{flag_of(name)} has no effect on the model in {gguf.path}, which is as it is; leave it out")
    h = hyperparameters.read(gguf)
    metadata = {key: value for key, value in gguf.metadata.typed.items() if not key.startswith(OF_A_FILE)}
    metadata["general.file_type"] = u32(ALL_F32)
    without = gguf.metadata.get(f"{KEY}model") in WITHOUT_TEXT
    tokenizer = None if without else load_tokenizer(gguf.metadata, gguf.path)
    if tokenizer and len(tokenizer) > h.vocab:
        raise UsageError(f"{gguf.path}: its vocabulary has {len(tokenizer)} tokens, its embeddings {h.vocab}")
    factors = {} if h.rope.factors is None else {"rope_freqs.weight": h.rope.factors}
    row = options.ctx or min(usual, h.ctx)
    return Model(h, metadata, Vocabulary(vocabulary_of(metadata), h.vocab, tokenizer), row, factors)


def new_vocabulary_of(files: Sequence[str], options: ModelOptions, read: bool) -> Vocabulary:
    if options.vocab_from:
        return vocabulary_from(options.vocab_from)
    if not files:
        size = 0 if options.vocab_size == BYTES else int(options.vocab_size)
        if not 3 <= size <= 1024:
            raise UsageError(f"--vocab-size {options.vocab_size}: the sine wave takes 3 to 1024 (a begin token, and levels)")
        return Vocabulary(new_vocabulary.without_text(size), size, None)
    if options.vocab_size == BYTES or not read:
        made = new_vocabulary.bytes_only()
    else:
        made = learned(files, int(options.vocab_size))
    tokenizer = load_tokenizer(Metadata(made))
    unread = not read and options.vocab_size != BYTES
    return Vocabulary(made, int(options.vocab_size) if unread else len(tokenizer), tokenizer)


def vocabulary_from(path: Path) -> Vocabulary:
    gguf = open_gguf(path)
    tokenizer = load_tokenizer(gguf.metadata, path)
    return Vocabulary(vocabulary_of(gguf.metadata.typed), len(tokenizer), tokenizer)


def learned(files: Sequence[str], size: int) -> dict[str, Value]:
    from llamatrain.data.sources import find_sources
    from llamatrain.data.texts import texts_of

    return new_vocabulary.learned(texts_of(find_sources(files)), size)


# ---- the rows --------------------------------------------------------------


def material_of(files: Sequence[str], model: Model, data: DataOptions, seed: int) -> Material:
    """With the data opened: tokenized, counted, split."""
    if not files:
        return sine_of(model, seed)
    from llamatrain.data.corpus import named, open_corpus
    from llamatrain.data.rows import Rows as TextRows

    tokenizer = model.vocabulary.tokenizer
    if tokenizer is None:
        raise UsageError("the model's tokens stand for no text, so it cannot be trained on any")
    corpus, kept = open_corpus(files, tokenizer, data, model.row, seed)
    rows = TextRows(corpus, data, seed, tokenizer.eos, tokenizer.bos)
    validation = TextRows(kept, data, seed, tokenizer.eos, tokenizer.bos) if kept else None
    told = [f"{len(corpus):,} samples, {corpus.tokens:,} tokens"]
    told += [f"{len(kept):,} samples to validate with"] if kept else []
    for places, what in ((corpus.cut, "cut"), (corpus.skipped, "skipped")):
        told += [f"{len(places)} {what} ({named(places)})"] if places else []
    return Material(model.h, model.metadata, model.vocabulary, rows, validation, "; ".join(told), model.untrained)


def sine_of(model: Model, seed: int) -> Material:
    if model.vocabulary.tokenizer is not None:
        raise UsageError("no data: name files (.txt, .md, .jsonl), folders, globs, or - for standard input")
    rows = Sine(model.h.vocab, model.row, seed)
    told = f"the built-in sine wave in {model.h.vocab - 1} levels"
    return Material(model.h, model.metadata, model.vocabulary, rows, None, told, model.untrained)
