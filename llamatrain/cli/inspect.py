"""`llamatrain inspect`: shows the contents of a model, adapter, checkpoint or vocabulary."""

import json
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llamatrain.cli.typer_app import ReadOnlyCommand, make_app, parse_path, with_options
from llamatrain.config.common import JSON
from llamatrain.config.options import Options, build
from llamatrain.errors import LlamatrainError
from llamatrain.platform.escape import make_printable

if TYPE_CHECKING:
    from rich.console import Console

    from llamatrain.adapters.listing import ListedTensor, Listing
    from llamatrain.gguf.reader import Gguf

Rows = list[tuple[str, str]]
WIDTH = 100  # if the output is not a terminal
MAX_TEXT = 40  # characters of a text shown
MAX_NAMES = 8  # names that are shown of those that are not used
RUN_PREFIXES = ("training.", "optimizer.")


command = make_app()


@dataclass(frozen=True)
class InspectOptions(Options):
    """Options of `inspect`."""

    json: Annotated[
        bool, replace(JSON, sentence="Print one JSON object: kind, architecture, metadata, tensors.")
    ] = False


@command.command(cls=ReadOnlyCommand)
@with_options(InspectOptions)
def inspect(
    file: Annotated[Path, typer.Argument(metavar="FILE", parser=parse_path)], **overrides: Any
) -> None:
    """Show what is in a GGUF file: a model, an adapter, a checkpoint or a vocabulary; or in an adapter of another form."""
    from llamatrain.adapters.listing import list_adapter
    from llamatrain.config.remote_names import remote_name
    from llamatrain.gguf.reader import open_gguf
    from llamatrain.sources.names import locate_model

    as_json = build(InspectOptions, overrides).json
    name, file = remote_name(file), locate_model(file)
    if listing := list_adapter(file):
        print(json.dumps(listing_to_json(listing))) if as_json else draw_listing(file, listing)
    else:
        gguf = open_gguf(file)
        print(json.dumps(gguf_to_json(gguf))) if as_json else draw_gguf(gguf)
        if name and name.startswith("ollama:") and not as_json:
            draw_ollama_texts(name)


# ---- for programs ----------------------------------------------------------


def gguf_to_json(gguf: "Gguf") -> dict[str, Any]:
    """Return the contents of a GGUF file as JSON values."""
    return {
        "kind": gguf.kind,
        "architecture": gguf.metadata.get_text("general.architecture"),
        "metadata": {key: to_plain(value) for key, value in gguf.metadata.items()},
        "tensors": list(map(tensor_to_json, list_tensors(gguf))),
    }


def listing_to_json(listing: "Listing") -> dict[str, Any]:
    """Return the contents of another adapter file as JSON values."""
    tensors = list(map(tensor_to_json, listing.tensors))
    return {
        "kind": "adapter",
        "architecture": None,
        "metadata": {"format": listing.format, **listing.metadata},
        "tensors": tensors,
    }


def tensor_to_json(tensor: "ListedTensor") -> dict[str, Any]:
    """Return a tensor's description as JSON values."""
    return {"name": tensor.name, "type": tensor.type, "shape": list(tensor.shape), "bytes": tensor.nbytes}


def list_tensors(gguf: "Gguf") -> "list[ListedTensor]":
    """Return the tensors of a GGUF file."""
    from llamatrain.adapters.listing import ListedTensor

    return [
        ListedTensor(tensor.name, tensor.type.name, tensor.shape, tensor.nbytes)
        for tensor in gguf.tensors.values()
    ]


def to_plain(value: Any) -> Any:
    """Return a value for JSON, which has no infinity and no NaN: these become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bool | int | str):
        return value
    return [to_plain(item) for item in (value if isinstance(value, list) else value.tolist())]


# ---- for people ------------------------------------------------------------


def draw_gguf(gguf: "Gguf") -> None:
    """Print the contents of a GGUF file."""
    console = make_console()
    model = f"{gguf.metadata.get_text('general.architecture')}."
    known = (model, "tokenizer.", *RUN_PREFIXES)
    keys = {prefix: [key for key in gguf.metadata if key.startswith(prefix)] for prefix in known}
    general = [key for key in gguf.metadata if not key.startswith(known)]
    print_table(
        console,
        str(gguf.path),
        [("kind", gguf.kind), *metadata_rows(gguf, general, "general."), *rank_rows(gguf)],
    )
    print_table(console, "hyperparameters", metadata_rows(gguf, keys[model], model))
    print_table(console, "not used here", list(unused_rows(gguf)))
    print_table(console, "vocabulary", vocabulary_rows(gguf, keys["tokenizer."]))
    print_table(
        console,
        "training state",
        [row for prefix in RUN_PREFIXES for row in metadata_rows(gguf, keys[prefix], "training.")],
    )
    print_tensors(console, list_tensors(gguf))


def draw_ollama_texts(name: str) -> None:
    """Print the texts that Ollama stores with a model, which are not used here."""
    from llamatrain.sources.ollama import read_model

    model = read_model(name)
    texts = ((kind, model.read_text(kind).strip()) for kind in ("template", "params", "system"))
    print_table(
        make_console(), f"{model.name}, not used here", [(kind, text) for kind, text in texts if text]
    )


def unused_rows(gguf: "Gguf") -> Iterator[tuple[str, str]]:
    """Yield the keys and tensors of a model that are not used, or why the model cannot be used."""
    from llamatrain.model.hyperparameters import read_hyperparameters, unused_keys, unused_tensors

    if gguf.kind != "model":
        return
    try:
        h = read_hyperparameters(gguf)
    except LlamatrainError as error:
        yield "all of it", str(error).removeprefix(f"{gguf.path}: ")
        return
    for label, names in (("keys", unused_keys(gguf, h)), ("tensors", unused_tensors(gguf, h))):
        if names:
            more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
            yield label, ", ".join(names[:MAX_NAMES]) + more


def draw_listing(path: Path, listing: "Listing") -> None:
    """Print the contents of another adapter file."""
    console = make_console()
    values = {name: value for name, value in listing.metadata.items() if value not in (None, [], {})}
    rows = [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in values.items()]
    shortened = [
        (name, text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}... ({len(text):,} characters)")
        for name, text in rows
    ]
    print_table(console, str(path), [("kind", "adapter"), ("format", listing.format), *shortened])
    print_tensors(console, listing.tensors)


def make_console() -> "Console":
    """Return a console, with a fixed width if the output is not a terminal."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)


def rank_rows(gguf: "Gguf") -> Rows:
    """Return the ranks of an adapter, which its metadata does not state."""
    ranks = {tensor.shape[-1] for name, tensor in gguf.tensors.items() if name.endswith(".lora_b")}
    return [("rank", ", ".join(map(str, sorted(ranks))))] if gguf.kind == "adapter" and ranks else []


def metadata_rows(gguf: "Gguf", keys: Iterable[str], prefix: str) -> Rows:
    """Return rows for metadata keys, without their prefix."""
    return [(key.removeprefix(prefix), format_value(gguf, key)) for key in keys]


def format_value(gguf: "Gguf", key: str) -> str:
    """Format a value: long texts are shortened, arrays show their length, floats have the fewest digits."""
    import numpy as np

    from llamatrain.gguf.values import Kind

    value, kind = gguf.metadata[key], gguf.metadata.raw_values[key].kind
    if kind is Kind.ARRAY:
        return f"{len(value):,} values"
    if kind is Kind.STRING and len(value) > MAX_TEXT:
        return f"{value[:MAX_TEXT]}... ({len(value):,} characters)"
    return str(np.float32(value)) if kind is Kind.FLOAT32 else str(value)


def vocabulary_rows(gguf: "Gguf", keys: list[str]) -> Rows:
    """Return the tokenizer's values; token numbers are followed by their text."""
    rows = metadata_rows(gguf, keys, "tokenizer.ggml.")
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        return rows

    def with_text(name: str, value: str) -> str:
        if not name.endswith("_token_id") or not value.isdecimal():
            return value
        return f"{value}  {tokens[int(value)]}" if int(value) < len(tokens) else f"{value}  (no such token)"

    return [(name, with_text(name, value)) for name, value in rows]


def print_table(console: "Console", title: str, rows: Rows) -> None:
    """Print a table with a heading, if it has rows."""
    if rows:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, show_header=False, padding=(0, 1, 0, 2))
        table.add_column(max_width=44, overflow="fold")
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(*(Text(make_printable(text, console.encoding)) for text in (name, value)))
        print_heading(console, title)
        console.print(table)


def print_tensors(console: "Console", tensors: Iterable["ListedTensor"]) -> None:
    """Print count, parameters and bytes of tensors by type; an optimizer's vectors are listed separately."""
    from rich.table import Table

    groups: dict[str, list[ListedTensor]] = {}
    for tensor in tensors:
        optimizer = tensor.name.startswith(RUN_PREFIXES)
        groups.setdefault("optimizer" if optimizer else tensor.type, []).append(tensor)
    if not groups:
        return
    table = Table(box=None, padding=(0, 1, 0, 2), show_footer=True, header_style="dim", footer_style="bold")
    parameters = {
        kind: 0 if kind == "optimizer" else sum(math.prod(t.shape) for t in group)
        for kind, group in groups.items()
    }
    sizes = {kind: sum(tensor.nbytes for tensor in group) for kind, group in groups.items()}
    columns = [
        ("tensors", {kind: len(group) for kind, group in groups.items()}),
        ("parameters", parameters),
        ("bytes", sizes),
    ]
    table.add_column("type", "total")
    for name, column in columns:
        table.add_column(name, f"{sum(column.values()):,}", justify="right")
    for kind in sorted(groups, key=lambda kind: -sizes[kind]):
        table.add_row(kind, *(f"{column[kind]:,}" if column[kind] else "" for _, column in columns))
    print_heading(console, "tensors")
    console.print(table)


def print_heading(console: "Console", title: str) -> None:
    """Print a heading."""
    from rich.text import Text

    console.print(Text.assemble("\n", (make_printable(title, console.encoding), "bold")))
