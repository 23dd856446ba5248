"""Generates several answers to each prompt, and keeps the one with the highest reward, as rows for training."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llamatrain.commands.generate import TextModel
from llamatrain.errors import UsageError
from llamatrain.rewards.options import RewardOptions
from llamatrain.sample.options import LARGEST_SEED, SamplingOptions

if TYPE_CHECKING:
    from llamatrain.data.prompt_records import Prompt

Row = dict[str, Any]


def best_answers(
    model: TextModel,
    prompts: "Sequence[Prompt]",
    sampling: SamplingOptions,
    count: int,
    rewards: RewardOptions,
    columns: Mapping[str, str],
    parallel: int | None = None,
) -> list[Row]:
    """Return a row with the best of `count` answers to each prompt; of equal ones the first (collective).

    Processes share the generation. The first one scores, and returns the rows; the others return none.
    """
    from llamatrain.commands.generate_many import generate_many
    from llamatrain.distributed.comm import is_printing_rank
    from llamatrain.rewards.processes import Answer
    from llamatrain.rewards.scorer import Scorer

    if count > 1 and sampling.temp == 0:
        raise UsageError(
            f"{count} answers with --temp 0 are all the same; choose a higher temperature",
            code="unused-option",
        )
    with Scorer(rewards) if is_printing_rank() else nullcontext() as scorer:
        if scorer:
            scorer.start()
        tokens = [prompt.tokens for prompt in prompts for _ in range(count)]
        each = [*samples_of(sampling, count)] * len(prompts)
        texts = [text.text for text in generate_many(model, tokens, each, parallel, "answers")]
        if not scorer:
            return []
        asked = [prompt for prompt in prompts for _ in range(count)]
        scores = scorer.score(
            [
                Answer(prompt.text, text, prompt.row, prompt.place)
                for prompt, text in zip(asked, texts, strict=True)
            ]
        )
    best = (
        max(range(first, first + count), key=lambda index: scores[index])
        for first in range(0, len(texts), count)
    )
    return [
        make_row(prompt, texts[index], columns) | {"reward": scores[index]}
        for prompt, index in zip(prompts, best, strict=True)
    ]


def samples_of(sampling: SamplingOptions, count: int) -> Iterator[SamplingOptions]:
    """Yield the options of each answer to a prompt: a given seed and those that follow it."""
    for number in range(count):
        seed = sampling.seed if sampling.seed < 0 else (sampling.seed + number) % (LARGEST_SEED + 1)
        yield replace(sampling, seed=seed)


def make_row(prompt: "Prompt", text: str, columns: Mapping[str, str]) -> Row:
    """Return a prompt with its answer as a row that finetune reads."""
    from llamatrain.data.column_names import ANSWERS, rename_keys
    from llamatrain.data.prompt_records import parse_prompt
    from llamatrain.data.records import ChatRecord

    if not prompt.row:
        return {"prompt": prompt.text, "answer": text}
    row = rename_keys(dict(prompt.row), columns, prompt.place)
    record = parse_prompt(row, prompt.place)
    if isinstance(record, ChatRecord):
        tools = {"tools": record.tools} if record.tools else {}
        return {"messages": [*record.messages, {"role": "assistant", "content": text}], **tools}
    others = {key: value for key, value in row.items() if key not in (*ANSWERS, "text")}
    return others | {"answer": text}
