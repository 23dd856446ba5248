"""Reads many prompts: from a file, or from a program."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamatrain.commands.generate import TextModel
from llamatrain.config.messages import quote
from llamatrain.config.read_limited import read_limited
from llamatrain.errors import DataError, UsageError

if TYPE_CHECKING:
    from llamatrain.data.prompt_records import Prompt
    from llamatrain.data.tokenizer import Tokenizer

MAX_FILE = 1 << 28  # most bytes of a file of lines

GivenPrompt = str | bytes | Mapping[str, Any]  # a text to continue, or a row with a prompt or a chat


def read_rows(model: TextModel, path: Path, columns: str = "") -> "list[Prompt]":
    """Return the prompts of a file of rows, in the form in which training would have them."""
    from llamatrain.data.find_files import find_sources
    from llamatrain.data.options import DataOptions
    from llamatrain.data.prompt_records import read_prompts

    options = DataOptions(columns=columns)
    sources = find_sources([str(path)], options.mapping, "judge")
    for source in sources:
        if source.kind == "text":
            raise DataError(
                f"{source.name}: prompts must be JSON lines or a table, not text; --each-line reads each line as a prompt",
                code="not-json",
            )
    return read_prompts(sources, need_tokenizer(model), options, model.ctx)


def read_lines(model: TextModel, path: Path) -> "list[Prompt]":
    """Return the lines of a file that are not empty as prompts to continue."""
    lines = read_limited(path, MAX_FILE, "a file of prompts").split(b"\n")
    found = [
        encode_text(model, line.removesuffix(b"\r"), f"{path}:{number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not found:
        raise DataError(f"{path}: the file has no prompts; give it a line for each", code="no-prompt")
    return found


def encode_given(model: TextModel, prompts: Sequence[GivenPrompt]) -> "list[Prompt]":
    """Return the prompts that a program gives."""
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Sequence):
        raise UsageError(
            f"prompts must be a list of texts or rows (got {quote(prompts)})", code="invalid-prompt"
        )
    return list(encode_each(model, prompts))


def encode_each(model: TextModel, prompts: Sequence[GivenPrompt]) -> "Iterator[Prompt]":
    """Yield texts and rows as prompts."""
    from llamatrain.data.answer_records import check_length
    from llamatrain.data.encode import Encoder
    from llamatrain.data.options import DataOptions
    from llamatrain.data.prompt_records import read_prompt
    from llamatrain.data.tokenizer import to_bytes

    options, has_rows = DataOptions(), any(isinstance(prompt, Mapping) for prompt in prompts)
    encoder = Encoder(need_tokenizer(model), options, model.ctx) if has_rows else None
    with closing(encoder) if encoder else nullcontext():
        for number, prompt in enumerate(prompts, 1):
            place = f"prompt {number}"
            if isinstance(prompt, Mapping) and encoder:
                row = read_prompt(to_json(prompt, place), place, options, encoder)
                check_length(row.tokens, model.ctx, f"{place}: the")
                yield row
            elif isinstance(prompt, str | bytes):
                yield encode_text(model, prompt if isinstance(prompt, bytes) else to_bytes(prompt), place)
            else:
                raise UsageError(
                    f"{place} must be a text, bytes or a row (got {quote(prompt)})", code="invalid-prompt"
                )


def to_json(row: Mapping[str, Any], place: str) -> bytes:
    """Return a row as JSON."""
    try:
        return json.dumps(dict(row)).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{place} cannot be written as JSON: {error}", code="invalid-prompt") from None


def encode_text(model: TextModel, text: bytes, place: str) -> "Prompt":
    """Return a text to continue as a prompt."""
    from llamatrain.data.prompt_records import Prompt

    return Prompt(text.decode("utf-8", "replace"), model.encode(text, f"{place}: the prompt"), {}, place)


def need_tokenizer(model: TextModel) -> "Tokenizer":
    """Return the tokenizer of a model, or raise if its tokens are not text."""
    if model.tokenizer is None:
        raise UsageError(
            f"{model.gguf.path}: the model has no text vocabulary; give each prompt as a line of token numbers",
            code="no-vocabulary",
        )
    return model.tokenizer
