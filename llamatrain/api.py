"""The door for Python: what the commands do, by the same options, as functions that give records and print nothing.

Options are keywords, named as on the command line (`--val-split 0.1` is `val_split=0.1`); what may be repeated there is a list
here. All that fails raises `LlamatrainError`. In the main thread Ctrl-C saves a run that has begun and becomes a
`KeyboardInterrupt`; no other signal is touched, and the process is never ended.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llamatrain.adapters.options import LoraOptions
from llamatrain.config.options import Checked, Declared, OptionError, build, declared, respelt
from llamatrain.config.values import can_be_named
from llamatrain.config.words import cut, nearest, readable, worded
from llamatrain.data.options import DataOptions
from llamatrain.data.tokenizer import to_bytes
from llamatrain.errors import FileError, LlamatrainError, UsageError, words_of
from llamatrain.machine.code import code
from llamatrain.machine.printable import printable
from llamatrain.machine.terminal import shown
from llamatrain.machine.world import is_told_here
from llamatrain.recipe.evaluation import EvaluateOptions, Evaluation, evaluated
from llamatrain.recipe.exporting import exported
from llamatrain.recipe.generation import Continuation, LoadOptions, TextModel
from llamatrain.recipe.interrupts import CallerInterrupts
from llamatrain.recipe.merging import Comparison, ExportOptions, Merged
from llamatrain.recipe.options import PlaceOptions
from llamatrain.recipe.preference import PreferenceOptions
from llamatrain.recipe.request import NEW, TUNING, Request, new_model, tuning
from llamatrain.recipe.run import Finished, train
from llamatrain.report.metrics import lines_of
from llamatrain.sample.options import SamplingOptions

__all__ = [
    "Comparison",
    "Evaluation",
    "LlamatrainError",
    "LoadedModel",
    "Merged",
    "Run",
    "UsageError",
    "evaluate",
    "export_lora",
    "finetune",
    "from_scratch",
    "load",
]

Place = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run as it ended."""

    folder: Path
    result: Path  # model.gguf or adapter.gguf
    losses: list[float]  # of each step in order, those before a resume included; NaN: nobody knows it any more
    validations: list[tuple[int, float]]  # steps and losses
    margins: list[tuple[int, float]]  # the same of rewards, where answers are compared
    steps: int
    best: Path | None  # what came of it at the validation of the lowest loss
    finished: bool  # False: there are more to go, which `resume=run.folder` takes
    reason: str
    notes: tuple[str, ...]

    @property
    def perplexity(self) -> float | None:
        """Of the last validation, unless it compared answers."""
        return math.exp(min(self.validations[-1][1], 700)) if self.validations and not self.margins else None


# ---- the commands ----------------------------------------------------------


def from_scratch(*data: Place, show: bool = False, **options: Any) -> Run:
    """Train a new llama on files of text; without any, on the built-in sine wave."""
    with door(show):
        return run_of(new_model(paths(data), values_of(options, PlaceOptions, *NEW)))


def finetune(base: Place | None = None, *data: Place, show: bool = False, **options: Any) -> Run:
    """Train an adapter for a GGUF model on files of text; with `full=True`, the model itself."""
    with door(show):
        model = None if base is None else str(path_of(base))
        return run_of(tuning(model, paths(data), values_of(options, PlaceOptions, *TUNING)))


def export_lora(base: Place, *, out: Place | None = None, show: bool = False, **options: Any) -> Merged:
    """Merge adapters, named by `lora` and `lora_scaled`, into a model: the file `out` is a model like any other. With
    `only_adapter` they are written as one adapter, with `peft` into a folder of PEFT's."""
    with door(show):
        values = values_of({**options, "out": out}, ExportOptions, LoraOptions)
        made = exported(path_of(base), build(ExportOptions, values), build(LoraOptions, values))
        return replace(made, notes=in_keywords_all(made.notes))


def evaluate(model: Place, *data: Place, show: bool = False, **options: Any) -> Evaluation:
    """Loss, perplexity and bits per byte of a model on files of text."""
    with door(show):
        if not data:
            raise UsageError("no data: name files (text, JSON, CSV, Parquet), folders or globs")
        values = values_of(options, EvaluateOptions, LoraOptions, PreferenceOptions, DataOptions)
        parts = build(LoraOptions, values), build(DataOptions, values), build(PreferenceOptions, values)
        return evaluated(path_of(model), paths(data), build(EvaluateOptions, values), *parts, values)


def load(path: Place, **options: Any) -> "LoadedModel":
    """A model to generate text with, once opened: with the adapters `lora` and `lora_scaled`, in a context of `ctx` tokens, by
    so many `threads`."""
    with door():
        values = values_of(options, LoadOptions, LoraOptions)
        return LoadedModel(TextModel(path_of(path), build(LoadOptions, values), build(LoraOptions, values)))


class LoadedModel:
    """Generates any number of texts."""

    def __init__(self, model: TextModel) -> None:
        self._model, self._last = model, list[str]()

    @property
    def notes(self) -> tuple[str, ...]:
        """Of the last text that was begun."""
        return in_keywords_all(self._last)

    def generate(self, prompt: str | bytes = "", **sampling: Any) -> str:
        """The text that goes on from a prompt, by the options of `llamatrain generate`: n, temp, top_k, seed, stop and so on."""
        return "".join(self.stream(prompt, **sampling))

    def stream(self, prompt: str | bytes = "", **sampling: Any) -> Iterator[str]:
        """The same piece by piece, as it is drawn."""
        with door():
            if not isinstance(prompt, str | bytes):
                raise UsageError(f"{worded(prompt)} is no prompt: it takes a text, or bytes")
            options = build(SamplingOptions, values_of(sampling, SamplingOptions))
            text = self._model.text(prompt if isinstance(prompt, bytes) else to_bytes(prompt), options)
            self._last = text.notes
        return pieces(text)


def pieces(text: Continuation) -> Iterator[str]:
    with door():
        yield from text


# ---- what comes in ---------------------------------------------------------


def paths(places: Sequence[Place]) -> list[str]:
    for place in places:
        if not isinstance(place, str | os.PathLike):
            raise UsageError(f"{worded(place)} is no path: files are named one by one, options by keyword")
        if not can_be_named(os.fspath(place)):
            raise UsageError(f"{worded(os.fspath(place))} is no path: no file can be called so")
    return [os.fspath(place) for place in places]


def path_of(place: Place) -> Path:
    return Path(paths([place])[0])


def values_of(options: Mapping[str, Any], *classes: type[Checked]) -> dict[str, Any]:
    """What was said by keyword, each checked as it is declared; None says nothing."""
    known = {name: each for cls in classes for name, each in declared(cls).items()}
    for name in options:
        if name not in known:
            raise UsageError(f"there is no option {cut(name)}{nearest(name, known)}")
    return {name: known[name].checked(plainly(value, known[name])) for name, value in options.items() if value is not None}


def plainly(value: Any, option: Declared) -> Any:
    """Numbers of numpy as Python's, any path as pathlib's, and one value of what may be repeated as a list of it."""
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, os.PathLike):
        value = Path(value)
    return [value] if option.repeated and isinstance(value, str | Path) else value


# ---- what goes out ---------------------------------------------------------


def run_of(request: Request) -> Run:
    finished = train(request, CallerInterrupts())
    losses, validations, margins = figures(finished)
    return Run(
        folder=finished.folder,
        result=finished.result,
        losses=losses,
        validations=validations,
        margins=margins,
        steps=finished.steps,
        best=finished.best,
        finished=finished.outcome.finished,
        reason=finished.outcome.reason,
        notes=in_keywords_all(finished.notes),
    )


def figures(finished: Finished) -> tuple[list[float], list[tuple[int, float]], list[tuple[int, float]]]:
    """Losses, validations and their margins, as the run's folder has them."""
    losses, path = [math.nan] * finished.steps, finished.folder / "metrics.jsonl"
    validations, margins = list[tuple[int, float]](), list[tuple[int, float]]()
    for _, line in lines_of(path) if path.exists() else ():
        match line:
            case {"step": int(step), "loss": int() | float() as loss} if 0 < step <= finished.steps:
                losses[step - 1] = float(loss)
            case {"step": int(step), "val_loss": int() | float() as loss, **more}:
                validations.append((step, float(loss)))
                margins += [(step, float(more["val_margin"]))] if isinstance(more.get("val_margin"), int | float) else []
    return losses, validations, margins


@contextmanager
def door(show: bool = False) -> Iterator[None]:
    """Errors that a user may meet are of one family here, and speak of keywords."""
    try:
        with shown() if show and is_told_here() else nullcontext():
            yield
            code.report()
    except LlamatrainError as error:
        error.args = (readable(in_keywords(error.words(keyword) if isinstance(error, OptionError) else str(error))),)
        raise
    except OSError as error:
        raise FileError(readable(in_keywords(words_of(error)))) from error
    except MemoryError as error:
        raise LlamatrainError(in_keywords(words_of(error))) from error


def keyword(name: str) -> str:
    return f"{name.removeprefix('no_')}=False" if name.startswith("no_") else name


def in_keywords(message: str) -> str:
    """Without flags; and without what would steer a terminal that it comes to."""
    return printable(respelt(message, keyword), "utf-8")


def in_keywords_all(notes: Sequence[str]) -> tuple[str, ...]:
    return tuple(map(in_keywords, notes))
