"""The requests of the page as functions that know nothing of HTTP."""

import re
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import llamatrain
from llamatrain.commands.merge_adapters import ExportOptions
from llamatrain.commands.preview import (
    PreviewOptions,
    avoid_compiling,
    count_tokens,
    first_rows,
    open_rows,
    sample_kinds,
    split_runs,
    split_samples,
)
from llamatrain.config.options import OptionError, build, option_specs, replace_flags
from llamatrain.data.options import DataOptions
from llamatrain.errors import UsageError, words_of
from llamatrain.preference.options import PreferenceDataOptions
from llamatrain.run.request import request_finetune, request_from_scratch
from llamatrain.ui.chat import Talks, read_turn
from llamatrain.ui.fields import FOLDER_OPTIONS, describe_fields, read_values, specs_of, to_words
from llamatrain.ui.files import list_folder
from llamatrain.ui.runs import Runs
from llamatrain.ui.worker import Worker

Given = dict[str, Any]  # the JSON object of a request
PREVIEW_CLASSES = (PreviewOptions, DataOptions, PreferenceDataOptions)


class App:
    """The state behind the page: the folder, its runs, open models, and the thread that works."""

    def __init__(self, root: Path) -> None:
        self.root, self.runs, self.worker, self.talks = root, Runs(root), Worker(), Talks()

    # ---- a new run ---------------------------------------------------------

    def list_files(self, folder: str) -> Given:
        """Return what a folder contains."""
        return {"root": str(self.root.resolve()), **list_folder(self.root, folder)}

    def list_fields(self, command: str) -> Given:
        """Return the options of a command, and the types that a model can be exported in."""
        return {
            "fields": describe_fields(command),
            "types": list(option_specs(ExportOptions)["type"].choices),
        }

    def preview(self, given: Given) -> Given:
        """Return the first rows of the data, as `llamatrain preview` shows them."""
        command, base, data, typed = read_run(given)
        model = text_of(given, "tokens_of") or base
        if not model:
            raise UsageError(
                "tokens_of: a new model has no tokens yet; choose a model whose tokens are shown",
                code="missing-option",
            )
        if not data:
            raise UsageError("data: choose the data first", code="missing-argument")
        return self.worker.call(lambda: preview_rows(model, data, read_known(command, typed)))

    def plan(self, given: Given) -> Given:
        """Return the plan of a run, as `llamatrain plan` computes it."""
        command, base, data, typed = read_run(given)
        values = read_values(command, typed)
        sources = [base, *data] if base else data

        def make_plan() -> Given:
            made = llamatrain.plan(command, *sources, **values)  # type: ignore[call-overload]
            return {**asdict(made), "fits": made.fits}

        return self.worker.call(make_plan)

    def start(self, given: Given) -> Given:
        """Start a run, after checking its options."""
        command, base, data, typed = read_run(given)
        values = read_values(command, typed)
        if command == "finetune":
            request_finetune(base or None, data, values)
        else:
            request_from_scratch(data, values)
        words = [*to_words(command, typed), "--", *([base] if base else []), *data]
        out, overwrite = str(values.get("out", "")), values.get("overwrite", False)
        return {"folder": self.runs.start(command, words, out, overwrite)}

    # ---- runs --------------------------------------------------------------

    def resume(self, given: Given) -> Given:
        """Resume a run, perhaps with more steps."""
        iters = text_of(given, "iters").strip()
        if iters:
            read_values("from-scratch", {"iters": iters})
        return {"folder": self.runs.resume(text_of(given, "folder"), iters)}

    def stop(self, given: Given) -> Given:
        """Stop a run."""
        self.runs.stop(text_of(given, "folder"))
        return {}

    def chat(self, given: Given) -> Iterator[Given]:
        """Yield the answers of two models, piece by piece."""
        turn = read_turn(given)
        return self.worker.stream(lambda: self.talks.say(turn))

    def export(self, given: Given) -> Given:
        """Merge an adapter into its base, or convert a model to another type."""
        model, lora, out = (text_of(given, name) for name in ("model", "lora", "out"))
        for name, value in (("model", model), ("out", out)):
            if not value:
                raise UsageError(f"{name}: a path is missing", code="missing-option")
        options: dict[str, Any] = {
            "out": out,
            "type": text_of(given, "type") or "auto",
            "overwrite": given.get("overwrite") is True,
            "lora": [lora] if lora else [],
        }
        merged = self.worker.call(lambda: llamatrain.export_lora(model, **options))
        return {"path": str(merged.path), "bytes": merged.bytes, "notes": merged.notes}


# ---- reading requests ------------------------------------------------------


def text_of(given: Given, name: str) -> str:
    """Return a text of a request, or raise UsageError if it is something else."""
    value = given.get(name, "")
    if not isinstance(value, str) or "\0" in value:
        raise UsageError(f"{name} must be a text", code="invalid-option")
    return value


def read_run(given: Given) -> tuple[str, str, list[str], dict[str, Any]]:
    """Return command, base, data and typed options of a request."""
    command, base, data = text_of(given, "command"), text_of(given, "base"), text_of(given, "data")
    typed = given.get("options", {})
    specs_of(command)
    if not isinstance(typed, dict):
        raise UsageError("options must be an object", code="invalid-option")
    sources = [line.strip() for line in data.splitlines() if line.strip()]
    if "-" in sources:
        raise UsageError("data: standard input cannot be read here; give a file", code="invalid-option")
    if command == "finetune" and not base.strip() and not typed.get("config"):
        raise UsageError("base: choose the model to fine-tune", code="missing-argument")
    return command, base.strip() if command == "finetune" else "", sources, typed


def read_known(command: str, typed: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the options that `preview` knows."""
    known = {name for cls in PREVIEW_CLASSES for name in option_specs(cls)} - {*FOLDER_OPTIONS}
    return {name: value for name, value in read_values(command, typed).items() if name in known}


def format_error(error: Exception) -> str:
    """Return the message of an error, with options named as the fields are."""
    return error.format(str) if isinstance(error, OptionError) else replace_flags(words_of(error), str)


def find_field(message: str, given: Given) -> str:
    """Return the name of the field that an error is about, or an empty text."""
    command, base = given.get("command"), given.get("base")
    if word := re.match(r"[a-z][a-z0-9_]*", message):
        names = {"base", "data", "tokens_of", "out", "model", "prompt", "iters", "type"}
        if word[0] in names or (command in ("finetune", "from-scratch") and word[0] in specs_of(command)):
            return word[0]
    if isinstance(base, str) and base and message.startswith(base):
        return "base"
    data = given.get("data")
    lines = data.splitlines() if isinstance(data, str) else []
    return "data" if any(line.strip() and message.startswith(line.strip()) for line in lines) else ""


# ---- the rows --------------------------------------------------------------


def preview_rows(model: str, data: list[str], values: dict[str, Any]) -> Given:
    """Return the first rows with the parts that are trained, and the counts of the data."""
    values = {**values, "model": Path(model)}
    options, data_options = build(PreviewOptions, values), build(DataOptions, values)
    with avoid_compiling(data, data_options):
        opened = open_rows(data, options, data_options, build(PreferenceDataOptions, values))
        rows = []
        for batch, number in first_rows(opened.rows, options, once=True):
            samples = list(split_samples(batch, number))
            used, trained = count_tokens(samples)
            kinds = sample_kinds(batch, number)
            parts = [
                {"kind": next(kinds, ""), "runs": split_runs(sample, opened.tokenizer)} for sample in samples
            ]
            row = {
                "used": used,
                "length": len(batch.tokens[number]),
                "trained": trained,
                "samples": parts,
            }
            rows.append(row)
        summary = [*opened.warnings, *opened.summary(options.batch)]
    return {"rows": rows, "summary": [replace_flags(line, str) for line in summary]}
