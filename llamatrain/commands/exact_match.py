"""Generates answers greedily, and counts those that equal the expected ones."""

import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from llamatrain.commands.opened_model import OpenedModel
from llamatrain.config.options import COUNT, Option, Options, needs

if TYPE_CHECKING:
    from llamatrain.commands.generate import TextModel
    from llamatrain.data.answer_records import ExpectedAnswer
    from llamatrain.data.options import DataOptions

HAS_FILES = (needs("exact_match"),)
PUNCTUATION = str.maketrans("", "", string.punctuation)
MAX_CTX = 4096  # at most, where it is not given


@dataclass(frozen=True)
class ExactMatchOptions(Options, panel="Generated answers"):
    """Options of generated answers, and of their comparison with the expected ones."""

    exact_match: Annotated[
        tuple[Path, ...],
        Option(
            "Prompts with answers, or chats, as JSON lines: generate answers, and count those that equal the expected "
            "ones; may be repeated.",
            unit="FILE",
        ),
    ] = ()
    answer_tokens: Annotated[
        int,
        Option("Tokens of an answer, at most.", unit="TOKENS", least=1, most=COUNT, when=HAS_FILES),
    ] = 256
    answer_stop: Annotated[
        tuple[str, ...],
        Option(
            "End an answer before this text; may be repeated.",
            unit="TEXT",
            accepts=bool,
            takes=r"what ends an answer, such as '\n'",
            when=HAS_FILES,
        ),
    ] = ()
    answer_pattern: Annotated[
        str,
        Option(
            "Compare what this regular expression finds first, or its first group, such as '#### (-?[0-9]+)'.",
            unit="PATTERN",
            when=HAS_FILES,
        ),
    ] = ""
    ignore_case: Annotated[bool, Option("Compare answers without regard to case.", when=HAS_FILES)] = False
    ignore_punctuation: Annotated[
        bool, Option("Compare answers without their punctuation.", when=HAS_FILES)
    ] = False

    def normalize(self, text: str) -> str:
        """Return the part of a text that is compared."""
        text = text.lower() if self.ignore_case else text
        return (text.translate(PUNCTUATION) if self.ignore_punctuation else text).strip()


@dataclass(frozen=True, kw_only=True)
class GeneratedAnswer:
    """An answer of a model, with the expected one, and what a pattern found in it."""

    prompt: str
    expected: str
    generated: str
    found: str | None  # None: the pattern found nothing
    matches: bool


@dataclass(frozen=True, kw_only=True)
class MatchScore:
    """The share of the answers of a file that equal the expected ones, with its standard error."""

    file: str
    questions: int
    exact_match: float
    exact_match_error: float | None  # None: it takes two answers
    answers: tuple[GeneratedAnswer, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the values by name, without the answers."""
        return {name: value for name, value in vars(self).items() if name != "answers"}


def check_pattern(options: ExactMatchOptions) -> None:
    """Raise if the pattern is invalid."""
    from llamatrain.commands.answer_pattern import extract_answers

    if options.answer_pattern:
        extract_answers(options.answer_pattern, [])


def read_prompts(
    models: Sequence[OpenedModel],
    options: ExactMatchOptions,
    data_options: "DataOptions",
    ctx: int | None,
    limit: int | None,
) -> "dict[Path, list[ExpectedAnswer]]":
    """Return the prompts with their expected answers, by file."""
    from llamatrain.data.answer_records import read_expected
    from llamatrain.data.find_files import find_sources

    room, tokenizer = answer_ctx(models, ctx), models[0].tokenizer
    return {
        path: read_expected(
            find_sources([str(path)], data_options.mapping, "judge"), tokenizer, data_options, room, limit
        )
        for path in options.exact_match
    }


def answer_ctx(models: Sequence[OpenedModel], ctx: int | None) -> int:
    """Return the tokens that a prompt and its answer may have."""
    return ctx or min(MAX_CTX, *(model.h.ctx for model in models))


def score_answers(
    models: Sequence[OpenedModel],
    files: "Mapping[Path, Sequence[ExpectedAnswer]]",
    options: ExactMatchOptions,
    ctx: int | None,
) -> list[list[MatchScore]]:
    """Return the scores of each model on each file."""
    from llamatrain.commands.generate import LoadOptions, TextModel

    scores = list[list[MatchScore]]()
    for model in models:
        loading = LoadOptions(ctx=answer_ctx(models, ctx), threads=model.threads, device=model.device)  # type: ignore[arg-type]
        text_model = TextModel(Path(model.gguf.path), loading, model.lora)
        scores.append(
            [score_file(path.name, expected, text_model, options) for path, expected in files.items()]
        )
    return scores


def score_file(
    name: str, expected: "Sequence[ExpectedAnswer]", model: "TextModel", options: ExactMatchOptions
) -> MatchScore:
    """Generate the answers of a file, and compare them. Ranks share the prompts."""
    from llamatrain.train.evaluate import share_error

    texts = generate_answers(name, expected, model, options)
    answers = tuple(compare_answers(expected, texts, options))
    share = sum(answer.matches for answer in answers) / len(answers)
    return MatchScore(
        file=name,
        questions=len(answers),
        exact_match=share,
        exact_match_error=share_error(share, len(answers)),
        answers=answers,
    )


def generate_answers(
    name: str, expected: "Sequence[ExpectedAnswer]", model: "TextModel", options: ExactMatchOptions
) -> list[str]:
    """Return the likeliest text after each prompt, token by token, without the thoughts before it."""
    from llamatrain.commands.generate_many import generate_many
    from llamatrain.data.records import strip_text
    from llamatrain.sample.options import SamplingOptions

    sampling = SamplingOptions(temp=0, n=options.answer_tokens, seed=0, stop=options.answer_stop)
    prompts = [one.tokens for one in expected]
    answers = generate_many(model, prompts, sampling, title=f"answers of {name}")
    return [strip_text(answer.text) for answer in answers]


def compare_answers(
    expected: "Sequence[ExpectedAnswer]", texts: Sequence[str], options: ExactMatchOptions
) -> Iterator[GeneratedAnswer]:
    """Yield answers with the result of their comparison.

    An expected answer in which the pattern finds nothing is compared as a whole; a generated one does not match.
    """
    from llamatrain.commands.answer_pattern import extract_answers

    wanted, found = [one.answer for one in expected], list[str | None](texts)
    if options.answer_pattern:
        matches = extract_answers(options.answer_pattern, [*wanted, *texts])
        found = matches[len(wanted) :]
        wanted = [
            answer if match is None else match
            for answer, match in zip(wanted, matches[: len(wanted)], strict=True)
        ]
    for one, answer, text, match in zip(expected, wanted, texts, found, strict=True):
        yield GeneratedAnswer(
            prompt=one.prompt,
            expected=one.answer,
            generated=text,
            found=match,
            matches=match is not None and options.normalize(match) == options.normalize(answer),
        )
