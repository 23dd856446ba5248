"""Makes the model of a run: its hyperparameters and its vocabulary."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from llamatrain.config.options import format_flag, option_specs
from llamatrain.data.options import DataOptions
from llamatrain.data.tokenizer import Tokenizer, new_vocab
from llamatrain.data.tokenizer import load as load_tokenizer
from llamatrain.data.tokenizer.vocabulary import has_no_text
from llamatrain.distributed.once import run_on_rank_zero
from llamatrain.errors import FileError, UsageError
from llamatrain.gguf.reader import Gguf, Metadata, open_gguf
from llamatrain.gguf.values import Value, string, u32
from llamatrain.model import hyperparameters, rope
from llamatrain.model.hyperparameters import ALL_F32, Hyperparameters, tokenizer_metadata
from llamatrain.model.options import BYTES, CTX, ModelOptions, name_by_option
from llamatrain.planner.limits import read_within
from llamatrain.run.config import RunConfig
from llamatrain.run.hooks import ROWS, stored_hooks
from llamatrain.run.inputs import RunInputs
from llamatrain.run.lora_options import LoraOptions

# prefixes of keys that are left out of a new model file
FILE_KEYS = ("split.", "training.", "optimizer.", "general.quantization_version")
NEW_MODEL = tuple(name for name, spec in option_specs(ModelOptions).items() if spec.option.new_model)
FINETUNE_CTX = 512  # the largest default of --ctx


@dataclass(frozen=True, kw_only=True)
class RunModel:
    """The model that a run trains."""

    h: Hyperparameters
    metadata: dict[str, Value]  # of the model file
    tokenizer: Tokenizer | None  # None: its tokens stand for no text
    row_length: int  # tokens in a row
    extra_tensors: dict[str, np.ndarray] = field(default_factory=dict)  # tensors that are no weights

    def with_template(self, options: DataOptions, files: Sequence[str] = ()) -> "RunModel":
        """Return the model with the chat template that it is trained with.

        That is the one of the options, or for a new model the one that its data needs.
        """
        if self.tokenizer is None or not (options.chat_template or files):
            return self
        from llamatrain.data.chat.default import choose_template
        from llamatrain.data.find_files import find_sources

        template = choose_template(
            find_sources(files, options.mapping, raw=options.raw) if files else [], options, self.tokenizer
        )
        if template is None:
            return self
        self.tokenizer.chat_template, self.tokenizer.tool_template = template, None
        other = {
            key: value for key, value in self.metadata.items() if key != "tokenizer.chat_template.tool_use"
        }
        return replace(self, metadata={**other, "tokenizer.chat_template": string(template)})


def make_model(config: RunConfig, inputs: RunInputs, changed: Collection[str], read: bool = True) -> RunModel:
    """Read the model of a file, or make a new one. Without `read`, no text is read to learn a vocabulary."""
    if not inputs.base:
        return new_model(config, read).with_template(config.data, config.files if read else ())
    model = model_from_file(inputs.base, config, inputs, changed)
    point = inputs.resume_point
    if (
        point
        and inputs.is_resume
        and model.tokenizer
        and not config.files
        and ROWS not in stored_hooks(point)
    ):
        raise FileError(
            f"{point.path}: the stored options are damaged: they name no data",
            code="damaged-options",
        )
    return model.with_template(config.data)


def model_from_file(base: Gguf, config: RunConfig, inputs: RunInputs, changed: Collection[str]) -> RunModel:
    """Read the model of a base or a checkpoint, with the options that override its metadata."""
    if config.command == "finetune":
        model = read_model(base, config.tune.ctx, FINETUNE_CTX, not config.preference.is_contrastive)
        h = override_rope(model.h, config.tune)
        return replace(
            model, h=h, metadata=model.metadata if h == model.h else update_metadata(model.metadata, h)
        )
    stored = inputs.checkpoint.metadata if inputs.checkpoint else {}
    if not inputs.is_resume:
        base, vocabulary = add_vocabulary(base, config.model.vocab_from)
        check_size_options(base, {*changed} - {"vocab_from"} if vocabulary else changed)
        stored = stored | vocabulary if stored else {}
    model = read_model(base, config.model.ctx, CTX)
    return replace(model, metadata=stored) if stored else model


def add_vocabulary(base: Gguf, path: Path | None) -> tuple[Gguf, dict[str, Value]]:
    """Add the vocabulary of another file to a checkpoint that has none. Return both."""
    if "tokenizer.ggml.model" in base.metadata:
        return base, {}
    if path is None:
        raise UsageError(
            f"{base.path} has no vocabulary; name a file that has one with {format_flag('vocab_from')}",
            code="no-vocabulary",
        )
    vocabulary = tokenizer_metadata(open_gguf(path).metadata.raw_values)
    return replace(base, metadata=Metadata(base.metadata.raw_values | vocabulary)), vocabulary


def check_teacher_vocab(model: RunModel, teacher: Gguf) -> None:
    """Raise if the teacher's vocabulary differs from the model's."""
    key, teacher_tokens = "tokenizer.ggml.tokens", hyperparameters.read_text_model(teacher).vocab
    tokens = [
        metadata[key].raw if key in metadata else None
        for metadata in (model.metadata, teacher.metadata.raw_values)
    ]
    if tokens[0] is None or tokens[0] != tokens[1] or teacher_tokens < model.h.vocab:
        counts = f"{teacher_tokens:,} tokens, the model has {model.h.vocab:,}"
        raise UsageError(
            f"{teacher.path}: a teacher must have the vocabulary of the model (got {counts})",
            code="teacher-vocabulary",
        )


def check_size_options(base: Gguf, changed: Collection[str]) -> None:
    """Raise if an option describes a new model although one is loaded."""
    for name in NEW_MODEL:
        if name in changed:
            raise UsageError(
                f"{format_flag(name)} has no effect on the model in {base.path}; leave it out",
                code="unused-option",
            )


def override_rope(h: Hyperparameters, options: LoraOptions) -> Hyperparameters:
    """Return hyperparameters with the rope and epsilon of the options."""
    rope_config = h.rope
    with name_by_option():
        if options.rope_freq_base is not None:
            rope_config = replace(rope_config, base=options.rope_freq_base)
        if options.rope_freq_scale is not None:
            factor = 1 / options.rope_freq_scale
            rope_config = replace(rope_config, kind="linear" if factor != 1 else "none", factor=factor)
        return replace(
            h, rope=rope_config, rms_eps=h.rms_eps if options.norm_rms_eps is None else options.norm_rms_eps
        )


def update_metadata(metadata: Mapping[str, Value], h: Hyperparameters) -> dict[str, Value]:
    """Return a file's metadata with the rope and epsilon of other hyperparameters."""
    others = {
        key: value for key, value in metadata.items() if not key.startswith(f"{h.architecture.name}.rope.")
    }
    return others | {key: value for key, value in h.metadata("").items() if not key.startswith("general.")}


def new_model(config: RunConfig, read: bool) -> RunModel:
    """Make a new model by the options. Without `read`, its vocabulary has the largest possible size."""
    vocabulary, tokenizer, size = new_vocabulary(config, read)
    h = config.model.hyperparameters(size)
    return RunModel(
        h=h,
        metadata=h.metadata("llamatrain") | vocabulary,
        tokenizer=tokenizer,
        row_length=h.ctx,
        extra_tensors=rope_factors(h),
    )


def read_model(gguf: Gguf, ctx: int | None, default_ctx: int, predicts_text: bool = True) -> RunModel:
    """Read the model of a file, which must be one that predicts text if that is needed.

    Without `ctx`, rows have the default length or the model's, whichever is shorter.
    """
    h = hyperparameters.read_hyperparameters(gguf)
    if predicts_text:
        hyperparameters.check_predicts_text(h, gguf.path)
    metadata = {
        key: value for key, value in gguf.metadata.raw_values.items() if not key.startswith(FILE_KEYS)
    }
    metadata["general.file_type"] = u32(ALL_F32)
    tokenizer = None if has_no_text(gguf.metadata) else load_tokenizer(gguf.metadata, gguf.path)
    if tokenizer and len(tokenizer) > h.vocab:
        raise UsageError(
            f"{gguf.path}: the vocabulary has {len(tokenizer)} tokens, but there are {h.vocab} embeddings",
            code="damaged-model",
        )
    return RunModel(
        h=h,
        metadata=metadata,
        tokenizer=tokenizer,
        row_length=ctx or min(default_ctx, h.ctx),
        extra_tensors=rope_factors(h),
    )


def rope_factors(h: Hyperparameters) -> dict[str, np.ndarray]:
    """Return the tensors of the rotation's factors, by their names in files."""
    return {rope.TENSORS[name]: array for name, array in h.rope.tensors.items()}


def new_vocabulary(config: RunConfig, read: bool) -> tuple[dict[str, Value], Tokenizer | None, int]:
    """Return the metadata of a new vocabulary, its tokenizer, and its number of tokens."""
    options = config.model
    if options.vocab_from:
        gguf = open_gguf(options.vocab_from)
        tokenizer = load_tokenizer(gguf.metadata, options.vocab_from)
        return tokenizer_metadata(gguf.metadata.raw_values), tokenizer, len(tokenizer)
    is_bytes = options.vocab_size == BYTES
    size = 0 if is_bytes else int(options.vocab_size)
    if not config.files and not is_bytes:
        return new_vocab.textless_vocabulary(size), None, size
    vocabulary = new_vocab.bytes_vocabulary() if is_bytes or not read else learn_vocabulary(config, size)
    tokenizer = load_tokenizer(Metadata(vocabulary))
    return vocabulary, tokenizer, len(tokenizer) if is_bytes or read else size


def learn_vocabulary(config: RunConfig, size: int) -> dict[str, Value]:
    """Learn a vocabulary from the training text."""
    from llamatrain.data.find_files import find_sources
    from llamatrain.data.tokenizer import learn_process
    from llamatrain.data.vocabulary_text import read_texts

    def merges() -> list[tuple[str, str]]:
        sources = find_sources(config.files, config.data.mapping, raw=config.data.raw)
        return learn_process.learn_merges(read_within(config.train.memory, read_texts(sources)), size)

    return new_vocab.build_metadata(run_on_rank_zero(merges))
