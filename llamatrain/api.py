"""The Python API: the commands as functions that return records and print nothing.

Options are keywords, named as on the command line (`--val-split 0.1` is `val_split=0.1`); options that can be
repeated take a list. Their types for type checkers are in `api_options.py`, which `scripts/api_options.py`
writes; `help` shows them too. All failures raise `LlamatrainError`. In the main thread Ctrl-C saves a run
that has started and becomes a `KeyboardInterrupt`; no other signal is touched, and the process is never
ended.
"""

import math
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

from llamatrain.adapters.options import AdapterOptions, ControlOptions
from llamatrain.commands.chat import ChatOptions, Conversation
from llamatrain.commands.control_vector import ControlVector, ControlVectorOptions, make_control_vector
from llamatrain.commands.embed import EMBED_OPTIONS, embed_texts
from llamatrain.commands.evaluate import EVALUATE_OPTIONS, evaluate_model
from llamatrain.commands.evaluation import Evaluation, Retrieval
from llamatrain.commands.export import export
from llamatrain.commands.extract_lora import Extracted, ExtractOptions
from llamatrain.commands.extract_lora import extract_lora as extract_adapter
from llamatrain.commands.generate import LoadOptions, TextModel
from llamatrain.commands.generate_many import GeneratedText, generate_many
from llamatrain.commands.imatrix import IMATRIX_OPTIONS, Imatrix, make_imatrix
from llamatrain.commands.import_model import Imported, ImportOptions
from llamatrain.commands.import_model import import_model as run_import
from llamatrain.commands.logit_diff import Comparison
from llamatrain.commands.merge_adapters import ExportOptions, Merged
from llamatrain.commands.merge_models import MergeOptions, merge_models
from llamatrain.commands.plan import RunPlan, plan_request
from llamatrain.commands.preview import PreviewOptions, PreviewRow, preview_rows
from llamatrain.commands.prompts import GivenPrompt, encode_given
from llamatrain.commands.push import Pushed, PushOptions
from llamatrain.commands.push import push as push_result
from llamatrain.commands.rerank import RERANK_OPTIONS, rank_texts
from llamatrain.commands.sweep import open_config, run_sweep, start_sweep
from llamatrain.commands.sweep_grid import SweepOptions, list_values, specs_of
from llamatrain.commands.sweep_result import SweepResult, result_of
from llamatrain.commands.sweep_state import read_sweep
from llamatrain.compiler.cache import code_cache
from llamatrain.config.flag_hints import suggest_option
from llamatrain.config.messages import quote, shorten, shorten_line, suggest
from llamatrain.config.options import (
    OptionError,
    Options,
    OptionSpec,
    build,
    option_specs,
    replace_flags,
    with_present_names,
)
from llamatrain.config.signatures import document_options
from llamatrain.data.options import DataOptions
from llamatrain.data.supplied_rows import RowSource
from llamatrain.data.tokenizer import to_bytes
from llamatrain.distributed.comm import is_printing_rank
from llamatrain.errors import FileError, LlamatrainError, UsageError, words_of
from llamatrain.platform.escape import make_printable
from llamatrain.platform.notebook import in_notebook
from llamatrain.platform.terminal import is_verbose, show_log
from llamatrain.preference.options import PreferenceDataOptions
from llamatrain.report.format import format_loss
from llamatrain.report.listener import Listener, add_listener
from llamatrain.report.metrics import read_lines
from llamatrain.run.hooks import RunHooks, create_hooks
from llamatrain.run.in_memory_rows import Data, Place, check_path, rows_for_call, rows_for_run
from llamatrain.run.options import RunFolderOptions
from llamatrain.run.request import (
    FINETUNE_DEFAULTS,
    FINETUNE_OPTIONS,
    FROM_SCRATCH_OPTIONS,
    RunRequest,
    request_finetune,
    request_from_scratch,
)
from llamatrain.run.signals import CallerInterrupts
from llamatrain.run.summary import RunResult
from llamatrain.run.train import train
from llamatrain.sample.options import SamplingOptions

if TYPE_CHECKING:
    from typing import Unpack

    import numpy as np

    from llamatrain.api_options import (
        ChatOptionsGiven,
        ControlVectorOptionsGiven,
        EmbedOptionsGiven,
        EvaluateOptionsGiven,
        ExportLoraOptions,
        ExtractOptionsGiven,
        FinetuneOptions,
        FromScratchOptions,
        ImatrixOptionsGiven,
        ImportOptionsGiven,
        LoadOptionsGiven,
        MergeOptionsGiven,
        PreviewOptionsGiven,
        PushOptionsGiven,
        RerankOptionsGiven,
        SamplingOptionsGiven,
    )

__all__ = [
    "ChatSession",
    "Comparison",
    "ControlVector",
    "Evaluation",
    "Extracted",
    "GeneratedText",
    "Imatrix",
    "Imported",
    "LlamatrainError",
    "LoadedModel",
    "Merged",
    "PreviewRow",
    "Pushed",
    "Retrieval",
    "Run",
    "RunPlan",
    "SweepResult",
    "UsageError",
    "chat",
    "control_vector",
    "embed",
    "evaluate",
    "export_lora",
    "extract_lora",
    "finetune",
    "from_scratch",
    "imatrix",
    "import_model",
    "load",
    "merge",
    "plan",
    "preview",
    "push",
    "rerank",
    "sweep",
]


OnStep = Callable[[dict[str, Any]], object]  # gets the metrics of a step; True stops the run
RateOfStep = Callable[[int], float]


@dataclass(frozen=True, kw_only=True)
class Run:
    """The result of a training run."""

    folder: Path
    result: Path  # model.gguf or adapter.gguf
    losses: list[float]  # one per step, with those before a resume; NaN: not recorded
    validations: list[tuple[int, float]]  # steps and losses
    margins: list[tuple[int, float]]  # steps and reward margins, with preference training
    rewards: list[tuple[int, float]]  # steps and mean rewards of their generated answers
    retained: list[tuple[int, float]]  # steps and losses of the data that should not be forgotten
    steps: int
    best: Path | None  # the model or adapter with the lowest validation loss
    finished: bool  # False: steps are left, which `resume=run.folder` runs
    reason: str  # why the run stopped
    notes: tuple[str, ...]
    perplexity: float | None  # of the last validation; None where answers or texts are compared

    def _repr_html_(self) -> str:
        """Return the run for a notebook: what it made, and its curves."""
        from llamatrain.report.notebook import run_html

        loss = self.losses[-1] if self.losses else math.nan
        facts = [
            ("result", str(self.result)),
            ("steps", f"{self.steps:,}{'' if self.finished else f' ({self.reason})'}"),
            ("loss", format_loss(loss)),
        ]
        facts += [("validation", format_loss(self.validations[-1][1]))] if self.validations else []
        facts += [("perplexity", f"{self.perplexity:,.2f}")] if self.perplexity is not None else []
        facts += [("best", str(self.best))] if self.best else []
        return run_html(self.folder, facts)


# ---- the commands ----------------------------------------------------------


@document_options(RunFolderOptions, *FROM_SCRATCH_OPTIONS)
def from_scratch(
    *data: Data,
    show: bool = False,
    progress: Listener | None = None,
    on_step: OnStep | None = None,
    lr_schedule: RateOfStep | None = None,
    rows: RowSource | None = None,
    **options: "Unpack[FromScratchOptions]",
) -> Run:
    """Train a new model on data, or on the built-in sine wave without any.

    Data are paths of files, folders or globs, lists of them, or lists of rows, each a dict like a JSON line.

    show: print what the command prints, to standard error.
    progress: a function that is called with each line of metrics.jsonl as a dict; an error that it raises
        ends the run.
    on_step: a function that is called with the metrics of each step as a dict. If it returns True, the run
        saves a checkpoint and ends, and can be resumed; an error that it raises ends the run.
    lr_schedule: a function of the step, which counts from 1, that returns its learning rate, in place of the
        options of the rate. A resumed run needs it again.
    rows: token ids to train on, in place of data: a function of the row's number, which counts from 0, or an
        iterable of lists of ids. A list is repeated; an iterator must be long enough, and begins again with
        row 0 for a resumed run, which needs `rows` again. A row has from 2 ids to one more than the context.
    """
    with (
        translate_errors(show),
        run_hooks(progress, on_step, lr_schedule, rows) as hooks,
        rows_for_run("from-scratch", data, {**options}) as (files, overrides),
    ):
        values = check_options(overrides, RunFolderOptions, *FROM_SCRATCH_OPTIONS)
        return run_request(request_from_scratch(files, values, hooks))


@document_options(RunFolderOptions, *FINETUNE_OPTIONS, defaults=FINETUNE_DEFAULTS)
def finetune(
    base: Place | None = None,
    *data: Data,
    show: bool = False,
    progress: Listener | None = None,
    on_step: OnStep | None = None,
    lr_schedule: RateOfStep | None = None,
    rows: RowSource | None = None,
    **options: "Unpack[FinetuneOptions]",
) -> Run:
    """Train a LoRA adapter for a GGUF model on data; with `full=True`, train the model itself.

    `data`, `show`, `progress`, `on_step`, `lr_schedule` and `rows` are those of `from_scratch`.

    base: the model's file; None to resume a run that knows it.
    """
    with (
        translate_errors(show),
        run_hooks(progress, on_step, lr_schedule, rows) as hooks,
        rows_for_run("finetune", data, {**options}) as (files, overrides),
    ):
        model = None if base is None else str(path_of(base))
        values = check_options(overrides, RunFolderOptions, *FINETUNE_OPTIONS)
        return run_request(request_finetune(model, files, values, hooks))


@document_options(SweepOptions, without=("json",))
def sweep(config: Place | None = None, *data: Place, show: bool = False, **options: Any) -> SweepResult:
    """Train the run of a config file with several values of its options, and return the runs, the best first.

    The other options are those of `from_scratch` or `finetune`; a list has the values to try. The data, and a
    base before them, may be given after the config.

    show: print what the command prints, to standard error.
    """
    with translate_errors(show):
        own = {name: options.pop(name) for name in option_specs(SweepOptions) if name in options}
        given = build(SweepOptions, check_options(own, SweepOptions))
        if given.resume is not None:
            if config is not None or data or options:
                raise UsageError(
                    "resume= goes on with the sweep as it is; leave out the rest", code="unused-option"
                )
            folder, state = given.resume, read_sweep(given.resume)
        else:
            if config is None:
                raise UsageError("config is missing; name a config file", code="missing-config")
            opened = open_config(path_of(config), [check_path(each) for each in data])
            folder, state = start_sweep(opened, list_values(options, specs_of(opened.command)), given)
        run_sweep(folder, state, CallerInterrupts)
        return result_of(folder, state)


@document_options(ExportOptions, AdapterOptions, without=("out",))
def export_lora(
    base: Place, *, out: Place | None = None, show: bool = False, **options: "Unpack[ExportLoraOptions]"
) -> Merged:
    """Merge adapters into a model, or convert the model to another `type`, and write the result to `out`.

    Adapters are given as `lora` and `lora_scaled`. With `only_adapter` they are written as one adapter, with
    `peft` into a folder in PEFT's format.
    """
    with translate_errors(show):
        values = check_options({**options, "out": out}, ExportOptions, AdapterOptions)
        merged = export(path_of(base), build(ExportOptions, values), build(AdapterOptions, values))
        return replace(merged, notes=in_keywords_all(merged.notes))


@document_options(ControlVectorOptions, without=("out",))
def control_vector(
    model: Place,
    positive: Place,
    negative: Place,
    *,
    out: Place,
    show: bool = False,
    **options: "Unpack[ControlVectorOptionsGiven]",
) -> ControlVector:
    """Write a control vector that leads a model from the texts of one file to those of another.

    Both files have one text in each line; lines of the same number are a pair.
    """
    with translate_errors(show):
        values = check_options({**options, "out": out}, ControlVectorOptions)
        files = path_of(model), path_of(positive), path_of(negative)
        return make_control_vector(*files, build(ControlVectorOptions, values))


@document_options(ExtractOptions, without=("out",))
def extract_lora(
    base: Place, tuned: Place, *, out: Place, show: bool = False, **options: "Unpack[ExtractOptionsGiven]"
) -> Extracted:
    """Write an adapter for a base of what a tuned model has learned: the difference of both, in low rank."""
    with translate_errors(show):
        values = check_options({**options, "out": out}, ExtractOptions)
        extracted = extract_adapter(path_of(base), path_of(tuned), build(ExtractOptions, values))
        return replace(extracted, notes=in_keywords_all(extracted.notes))


@document_options(ImportOptions)
def import_model(folder: Place, show: bool = False, **options: "Unpack[ImportOptionsGiven]") -> Imported:
    """Convert a folder with a model of transformers to a GGUF file."""
    with translate_errors(show):
        values = check_options(options, ImportOptions)
        return run_import(path_of(folder), build(ImportOptions, values))


@document_options(MergeOptions, without=("out",))
def merge(*models: Place, out: Place, show: bool = False, **options: "Unpack[MergeOptionsGiven]") -> Merged:
    """Merge whole models into one, and write it to `out`: GGUF files of one architecture and shape."""
    with translate_errors(show):
        values = check_options({**options, "out": out}, MergeOptions)
        merged = merge_models([path_of(model) for model in models], build(MergeOptions, values))
        return replace(merged, notes=in_keywords_all(merged.notes))


@document_options(PushOptions)
def push(run: Place, repository: str, *, show: bool = False, **options: "Unpack[PushOptionsGiven]") -> Pushed:
    """Upload the result of a run, its folder or a GGUF file, to a repository `hf:OWNER/NAME` on Hugging Face."""
    with translate_errors(show):
        values = check_options(options, PushOptions)
        pushed = push_result(path_of(run), str(repository), build(PushOptions, values))
        return replace(pushed, notes=in_keywords_all(pushed.notes))


@document_options(*EVALUATE_OPTIONS)
def evaluate(
    model: Place, *data: Data, show: bool = False, **options: "Unpack[EvaluateOptionsGiven]"
) -> Evaluation:
    """Compute loss, perplexity and bits per byte of a model on data: paths, lists of them, or lists of rows.

    With objective="contrastive" or "rerank" the result is a Retrieval, which has recall, MRR and NDCG.
    """
    with translate_errors(show), rows_for_call(data) as files:
        return evaluate_model(path_of(model), files, check_options(options, *EVALUATE_OPTIONS))


@document_options(*IMATRIX_OPTIONS, without=("out",))
def imatrix(
    model: Place, *data: Data, out: Place, show: bool = False, **options: "Unpack[ImatrixOptionsGiven]"
) -> Imatrix:
    """Measure on data how much each column of a model's weights matters, and write llama.cpp's importance matrix.

    Data are paths, lists of them, or lists of rows.
    """
    with translate_errors(show), rows_for_call(data) as files:
        values = check_options({**options, "out": out}, *IMATRIX_OPTIONS)
        return make_imatrix(path_of(model), files, values)


@document_options(*EMBED_OPTIONS)
def embed(model: Place, texts: Sequence[str], **options: "Unpack[EmbedOptionsGiven]") -> "np.ndarray":
    """Return an embedding of length 1 for each text, as an array (texts, width)."""
    with translate_errors():
        return embed_texts(path_of(model), list_texts(texts), check_options(options, *EMBED_OPTIONS))


@document_options(*RERANK_OPTIONS)
def rerank(
    model: Place, query: str, texts: Sequence[str], **options: "Unpack[RerankOptionsGiven]"
) -> "np.ndarray":
    """Return the probability that each text answers a query, as an array (texts)."""
    with translate_errors():
        if not (isinstance(query, str) and query):
            raise UsageError(
                f"query must be a text that is not empty (got {quote(query)})", code="invalid-text"
            )
        values = check_options(options, *RERANK_OPTIONS)
        return rank_texts(path_of(model), query, list_texts(texts), values)


def list_texts(texts: Iterable[str]) -> list[str]:
    """Return texts as a list, or raise if they are anything else."""
    listed = [texts] if isinstance(texts, str) or not isinstance(texts, Iterable) else [*texts]
    if isinstance(texts, str) or not all(isinstance(text, str) and text for text in listed):
        raise UsageError("texts must be a list of texts that are not empty", code="invalid-text")
    return listed


@overload
def plan(
    command: Literal["from-scratch"],
    *data: Data,
    measure: bool = False,
    **options: "Unpack[FromScratchOptions]",
) -> RunPlan: ...


@overload
def plan(
    command: Literal["finetune"], *data: Data, measure: bool = False, **options: "Unpack[FinetuneOptions]"
) -> RunPlan: ...


def plan(command: str, *data: Data, measure: bool = False, **options: Any) -> RunPlan:
    """Plan memory and time of `from_scratch(*data, ...)` or `finetune(base, *data, ...)`, without training.

    command: "from-scratch" or "finetune"; for the latter the data begins with the base.
    measure: measure this machine's speed now, instead of using a measurement of the last day.
    """
    with translate_errors():
        if command not in ("from-scratch", "finetune"):
            raise UsageError(
                f"command must be from-scratch or finetune (got {quote(command)})", code="unknown-command"
            )
        base = path_of(data[0]) if command == "finetune" and data else None
        with rows_for_call(data[1:] if base else data) as files:
            if command == "finetune":
                return plan_request(
                    request_finetune(
                        str(base) if base else None,
                        files,
                        check_options(options, RunFolderOptions, *FINETUNE_OPTIONS),
                    ),
                    measure,
                )
            return plan_request(
                request_from_scratch(files, check_options(options, RunFolderOptions, *FROM_SCRATCH_OPTIONS)),
                measure,
            )


@document_options(PreviewOptions, PreferenceDataOptions, DataOptions, without=("model",))
def preview(*data: Data, model: Place, **options: "Unpack[PreviewOptionsGiven]") -> list[PreviewRow]:
    """Return the first rows of data as they would be trained with a model: tokens, text, and what is trained."""
    with translate_errors(), rows_for_call(data) as files:
        values = check_options(
            {**options, "model": model}, PreviewOptions, PreferenceDataOptions, DataOptions
        )
        return preview_rows(
            files,
            build(PreviewOptions, values),
            build(DataOptions, values),
            build(PreferenceDataOptions, values),
        )


@document_options(LoadOptions, AdapterOptions, ControlOptions)
def load(path: Place, **options: "Unpack[LoadOptionsGiven]") -> "LoadedModel":
    """Open a model, to generate texts with it or to chat."""
    with translate_errors():
        values = check_options(options, LoadOptions, AdapterOptions, ControlOptions)
        parts = build(LoadOptions, values), build(AdapterOptions, values), build(ControlOptions, values)
        return LoadedModel(TextModel(path_of(path), *parts))


class LoadedModel:
    """A model that is open for generating texts."""

    def __init__(self, model: TextModel) -> None:
        self._model, self._last = model, list[str]()

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about the last text."""
        return in_keywords_all(self._last)

    @document_options(SamplingOptions)
    def generate(self, prompt: str | bytes = "", **sampling: "Unpack[SamplingOptionsGiven]") -> str:
        """Return the text that continues a prompt. `temperature` is another name of `temp`."""
        return "".join(self.stream(prompt, **sampling))

    @document_options(SamplingOptions)
    def stream(self, prompt: str | bytes = "", **sampling: "Unpack[SamplingOptionsGiven]") -> Iterator[str]:
        """Yield the text that continues a prompt, piece by piece."""
        with translate_errors():
            if not isinstance(prompt, str | bytes):
                raise UsageError(
                    f"the prompt must be a text or bytes (got {quote(prompt)})", code="invalid-prompt"
                )
            options = build(SamplingOptions, check_options(sampling, SamplingOptions))
            text = self._model.continue_text(
                prompt if isinstance(prompt, bytes) else to_bytes(prompt), options
            )
            self._last = text.notes
        return pieces(text)

    @document_options(SamplingOptions)
    def generate_many(
        self,
        prompts: Sequence[GivenPrompt],
        *,
        parallel: int | None = None,
        **sampling: "Unpack[SamplingOptionsGiven]",
    ) -> list[GeneratedText]:
        """Return the text that continues each prompt, in their order. All are generated together, which is faster.

        prompts: texts, or rows such as {"prompt": ...} and {"messages": [...]}, as in files for `finetune`.
        parallel: how many are generated at a time; None: 16, or fewer for few prompts or little memory.
        """
        with translate_errors():
            if parallel is not None and (type(parallel) is not int or parallel < 1):
                raise UsageError(
                    f"parallel must be a whole number of at least 1 (got {quote(parallel)})",
                    code="invalid-option",
                )
            options = build(SamplingOptions, check_options(sampling, SamplingOptions))
            tokens = [prompt.tokens for prompt in encode_given(self._model, prompts)]
            return generate_many(self._model, tokens, options, parallel)

    @document_options(SamplingOptions)
    def chat(
        self,
        *,
        system: str = "",
        chat_template: Place | None = None,
        think: bool | None = None,
        **sampling: "Unpack[SamplingOptionsGiven]",
    ) -> "ChatSession":
        """Start a chat that uses the model's chat template.

        system: the system prompt.
        chat_template: a file with another template, or the name of a built-in one.
        think: switch thinking on or off; None: as llama-server does.
        """
        with translate_errors():
            given = {"system": system, "chat_template": chat_template, "think": think}
            values = check_options(given, ChatOptions)
            options = build(SamplingOptions, check_options(sampling, SamplingOptions))
            return ChatSession(
                Conversation(self._model, build(ChatOptions, {**values, "chat": True}), options)
            )


class ChatSession:
    """A conversation with a model.

    It ends with `close`, with a `with` block, or when it is garbage collected.
    """

    def __init__(self, talk: Conversation) -> None:
        self._talk, self.close = talk, weakref.finalize(self, talk.close)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes about the chat so far."""
        return in_keywords_all(self._talk.notes)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages so far, each with role and content."""
        return [dict(message) for message in self._talk.messages]

    def say(self, words: str) -> str:
        """Return the answer to a message."""
        return "".join(self.stream(words))

    def stream(self, words: str) -> Iterator[str]:
        """Yield the answer to a message, piece by piece.

        If it is not read to its end, the part that was read counts.
        """
        if not isinstance(words, str):
            raise UsageError(f"a message must be a text (got {quote(words)})", code="invalid-prompt")
        return pieces(piece.text for piece in self._talk.say(words) if not piece.thought)

    def __enter__(self) -> "ChatSession":
        return self

    def __exit__(self, *how: object) -> None:
        self.close()


def chat(
    path: Place,
    *,
    system: str = "",
    chat_template: Place | None = None,
    think: bool | None = None,
    **options: "Unpack[ChatOptionsGiven]",
) -> ChatSession:
    """Open a model and start a chat: `load(path, ...).chat(...)`, with the options of both."""
    overrides = dict[str, Any](options)
    with translate_errors():
        check_options(overrides, LoadOptions, AdapterOptions, ControlOptions, SamplingOptions)
    loading = {*option_specs(LoadOptions), *option_specs(AdapterOptions), *option_specs(ControlOptions)}
    model = load(path, **{name: overrides.pop(name) for name in [*overrides] if name in loading})
    return model.chat(system=system, chat_template=chat_template, think=think, **overrides)


def pieces(text: Iterable[str]) -> Iterator[str]:
    """Yield pieces of text; errors are raised as the API raises them."""
    with translate_errors():
        yield from text


# ---- what comes in ---------------------------------------------------------


def path_of(place: Any) -> Path:
    """Return a path, after checking that it is one."""
    return Path(check_path(place))


def check_options(options: Mapping[str, Any], *classes: type[Options]) -> dict[str, Any]:
    """Return the options that are not None, each checked and in its declared type."""
    known = {name: spec for cls in classes for name, spec in option_specs(cls).items()}
    options = with_present_names(options, *classes)
    if "temperature" in options and "temp" in known:
        if "temp" in options:
            raise UsageError(
                "temp and temperature are the same option; leave one of them out", code="conflicting-options"
            )
        options = {"temp" if name == "temperature" else name: value for name, value in options.items()}
    for name in options:
        if name not in known:
            raise UsageError(
                f"no such option {shorten(name)}{suggest_option(f'--{name}') or suggest(name, known)}",
                code="unknown-option",
            )
    return {
        name: known[name].check(to_plain(value, known[name]))
        for name, value in options.items()
        if value is not None
    }


def to_plain(value: Any, option: OptionSpec) -> Any:
    """Convert NumPy numbers, paths, and single values of options that can be repeated."""
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if option.kind is str and isinstance(value, list | tuple):  # such as files to validate with
        value = [os.fspath(item) if isinstance(item, os.PathLike) else item for item in value]
    if isinstance(value, os.PathLike):
        value = os.fspath(value) if option.kind is str else Path(value)
    single = int | float if option.kind in (int, float) else str | Path
    return [value] if option.repeated and isinstance(value, single) else value


@contextmanager
def run_hooks(
    progress: Listener | None,
    on_step: OnStep | None,
    lr_schedule: RateOfStep | None,
    rows: RowSource | None,
) -> Iterator[RunHooks]:
    """Yield the hooks of a run; functions that get its metrics do so until the block ends."""
    hooks = create_hooks(on_step, lr_schedule, rows)
    with add_listener(progress), add_listener(hooks.on_step):
        yield hooks


# ---- what goes out ---------------------------------------------------------


def run_request(request: RunRequest) -> Run:
    """Train, and return the result as the API reports it."""
    with show_in_notebook(request):
        finished = train(request, CallerInterrupts())
    return Run(
        folder=finished.folder,
        result=finished.result,
        **read_metrics(finished)._asdict(),
        steps=finished.steps,
        best=finished.best,
        finished=finished.stop.finished,
        reason=finished.stop.reason,
        notes=in_keywords_all(finished.notes),
    )


@contextmanager
def show_in_notebook(request: RunRequest) -> Iterator[None]:
    """Draw the progress of a run below its cell, if the run is shown and this is a notebook."""
    if not (is_verbose() and in_notebook()):
        yield
        return
    from llamatrain.report.notebook import NotebookProgress

    area = NotebookProgress(request.config.command, request.config.train.iters, time.monotonic())
    with add_listener(lambda line: area.add(line, time.monotonic())):
        yield


Points = list[tuple[int, float]]  # steps and values


class RunMetrics(NamedTuple):
    """The numbers of a run's metrics.jsonl."""

    losses: list[float]
    validations: Points
    margins: Points
    rewards: Points
    retained: Points
    perplexity: float | None


def read_metrics(finished: RunResult) -> RunMetrics:
    """Return the numbers of a run's metrics.jsonl."""
    losses, path = [math.nan] * finished.steps, finished.folder / "metrics.jsonl"
    validations, margins, rewards, retained, perplexity = Points(), Points(), Points(), Points(), None
    for _, line in read_lines(path) if path.exists() else ():
        match line:
            case {"step": int(step), "loss": int() | float() as loss, **more} if 0 < step <= finished.steps:
                losses[step - 1] = float(loss)
                if isinstance(reward := more.get("reward"), int | float):
                    rewards.append((step, float(reward)))
            case {"step": int(step), "retain_loss": int() | float() as loss}:
                retained.append((step, float(loss)))
            case {"step": int(step), "val_loss": int() | float() as loss, **more}:
                validations.append((step, float(loss)))
                if isinstance(margin := more.get("val_margin"), int | float):
                    margins.append((step, float(margin)))
                perplexity = None if "val_answers" in more else math.exp(min(loss, 700))
    return RunMetrics(losses, validations, margins, rewards, retained, perplexity)


@contextmanager
def translate_errors(show: bool = False) -> Iterator[None]:
    """Turn errors that a user may meet into `LlamatrainError`, with options named as keywords."""
    try:
        with show_log() if show and is_printing_rank() else nullcontext():
            yield
            code_cache.report()
    except LlamatrainError as error:
        error.args = (
            shorten_line(
                in_keywords(error.format(keyword) if isinstance(error, OptionError) else str(error))
            ),
        )
        raise
    except OSError as error:
        raise FileError(shorten_line(in_keywords(words_of(error))), code="system-error") from error
    except MemoryError as error:
        raise LlamatrainError(in_keywords(words_of(error)), code="out-of-memory") from error


def keyword(name: str) -> str:
    """Return an option as a keyword argument."""
    return f"{name.removeprefix('no_')}=False" if name.startswith("no_") else name


def in_keywords(message: str) -> str:
    """Return a message with keywords in place of flags, and without control characters."""
    return make_printable(replace_flags(message, keyword), "utf-8")


def in_keywords_all(notes: Sequence[str]) -> tuple[str, ...]:
    """Return notes with keywords in place of flags."""
    return tuple(map(in_keywords, notes))
