"""Reads flags of llama.cpp's train-text-from-scratch, finetune and export-lora, and of other trainers.

A table maps a flag to its replacement: an option; an option and its value, if the flag takes none; an option
and the start of its value; an argument, in capitals; or nothing, if it has no meaning here. Flags that depend
on several others are translated in `translate.py`. All other flags of these programs have the same name here.
"""

import re
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from llamatrain.config import flag_hints
from llamatrain.config.flag_hints import BASE, DATA, GENERATORS, SHAPES, TRAINERS, TUNERS
from llamatrain.errors import UsageError

TRAINING = {
    "--train-data": DATA,
    "-s": "--seed",
    "-c": "--ctx",
    "-t": "--threads",
    "-b": "--batch",
    "--use-flash": "--flash",
    "--use-checkpointing": "--remat block",
    "--no-checkpointing": "--remat none",
    "--opt-past": "--stop-window",
    "--opt-delta": "--stop-delta",
    "--opt-max-no-improvement": "--max-no-improvement",
    "--adam-alpha": "--lr",
    "--adam-decay": "--weight-decay",
    "--adam-decay-min-ndim": "--decay-min-ndim",
    "--adam-beta1": "--beta1",
    "--adam-beta2": "--beta2",
    "--adam-gclip": "--clip",
    "--adam-epsf": "--stop-rel",
    "-ngl": "",
    "--n-gpu-layers": "",
}
RANKS = {
    "--rank-att-norm": "--lora-rank-of attn_norm=",
    "--rank-ffn-norm": "--lora-rank-of ffn_norm=",
    "--rank-out-norm": "--lora-rank-of output_norm=",
    "--rank-tok-embd": "--lora-rank-of token_embd=",
    "--rank-out": "--lora-rank-of output=",
    "--rank-wq": "--lora-rank-of attn_q=",
    "--rank-wk": "--lora-rank-of attn_k=",
    "--rank-wv": "--lora-rank-of attn_v=",
    "--rank-wo": "--lora-rank-of attn_output=",
    "--rank-ffn-gate": "--lora-rank-of ffn_gate=",
    "--rank-ffn-down": "--lora-rank-of ffn_down=",
    "--rank-ffn-up": "--lora-rank-of ffn_up=",
}
EXPORT = {
    "-m": BASE,
    "--model-base": BASE,
    "--model-out": "--out",
    "-l": "--lora",
    "-s": "--lora-scaled",
    "-t": "--threads",
}
TABLES = {
    "from-scratch": {**TRAINERS, **SHAPES, **TRAINING, "--vocab-model": "--vocab-from"},
    "finetune": {**TRAINERS, **TUNERS, **TRAINING, **RANKS, "--model-base": BASE},
    "export-lora": EXPORT,
    "generate": GENERATORS,
}
COMPOUND = {  # and whether it takes a value; their help shows one for the last two, which they did not take
    "--adam-iter": True,
    "--adam-min-alpha": True,
    "--cos-decay-steps": True,
    "--cos-decay-restart": True,
    "--cos-decay-min": True,
    "--enable-restart": False,
    "--disable-restart": False,
}
SWITCHES = ("--use-flash", "--use-checkpointing", "--no-checkpointing", *flag_hints.ALONE)
UNCHANGED = (  # here as there, where they could be said with `_` for `-`
    *(
        "--only-write-model",
        "--only-write-lora",
        "--model-out",
        "--lora-out",
        "--checkpoint-in",
        "--checkpoint-out",
    ),
    *(
        "--pattern-fn-it",
        "--fn-latest",
        "--save-every",
        "--grad-acc",
        "--sample-start",
        "--include-sample-start",
    ),
    *("--overlapping-samples", "--fill-with-next-samples", "--separate-with-eos", "--separate-with-bos"),
    *(
        "--no-separate-with-eos",
        "--no-separate-with-bos",
        "--sample-random-offsets",
        "--force-reshuffle",
        "--no-flash",
    ),
    *("--norm-rms-eps", "--rope-freq-base", "--rope-freq-scale", "--lora-alpha", "--lora-r", "--lora-scaled"),
)
OFF_VALUES = {  # theirs were off below 0, too: what says so here
    **{
        option: ["0"]
        for option in ("--save-every", "--stop-window", "--max-no-improvement", "--stop-delta", "--stop-rel")
    },
    "--epochs": [],
}

SCALED = re.compile(r"(.+):([-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?)")  # llama.cpp's present form: FILE:SCALE


@dataclass
class LegacyCommandLine:
    """A command line in today's words."""

    words: list[str] = field(default_factory=list)
    # arguments that were given by an option
    arguments: dict[str, list[str]] = field(default_factory=lambda: {BASE: [], DATA: []})
    others: list[str] = field(default_factory=list)  # arguments that were given as such
    rest: list[str] = field(default_factory=list)  # after `--`
    # the flag and the value that each option was given by
    values: dict[str, tuple[str, str]] = field(default_factory=dict)
    compound: dict[str, str] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)  # present names by former ones
    notes: list[str] = field(default_factory=list)
    changed: bool = False  # even if there is no note

    def value(self, option: str) -> str | None:
        """Return the value of an option, or None."""
        return self.values[option][1] if option in self.values else None

    def record(self, option: str, value: str, by: str) -> None:
        """Record the value of an option; raise if two names of it give different values."""
        other, before = self.values.get(option, (by, value))
        if other != by and not is_equal(before, value):
            raise UsageError(
                f"{other} {before} and {by} {value} are the same option with different values; leave "
                "one of them out",
                code="conflicting-options",
            )
        self.values[option] = by, value

    @property
    def words_today(self) -> list[str]:
        """The words of the command line."""
        behind = [*self.rest, *self.arguments[DATA]]
        return [*self.arguments[BASE], *self.words, *(["--", *behind] if behind else [])]


def is_equal(one: str, other: str) -> bool:
    """Return True if two texts are the same, also as numbers."""
    with suppress(ValueError):
        return float(one) == float(other)
    return one == other


def parse_command_line(
    words: Sequence[str], table: Mapping[str, str], params: Sequence[Any]
) -> LegacyCommandLine:
    """Replace flags that have a direct replacement, and collect the others."""
    options = [param for param in params if param.param_type_name == "option"]
    takes = {
        name: 0 if param.is_flag else param.nargs
        for param in options
        for name in (*param.opts, *param.secondary_opts)
    }
    single = {param.opts[0] for param in options if not param.multiple and not param.is_flag}
    line = LegacyCommandLine()
    for name, values, word in split_options(words, table, takes):
        line.changed |= name != word.partition("=")[0]
        if name == "--":
            line.rest += values
        elif not name:
            line.words.append(word)
            line.others.append(word)
        elif name in COMPOUND:
            line.compound |= {name: values[0] if values else ""}
        else:
            rename_option(line, name, values, table.get(name, name), single)
    return line


def rename_option(
    line: LegacyCommandLine, name: str, values: list[str], now: str, single: Collection[str]
) -> None:
    """Add an option under its present name."""
    option, _, value = now.partition(" ")
    if not option:
        line.notes.append(f"{name} has no effect here: all work is done by the processor")
        return
    if option != name:
        line.renamed[name] = now.removesuffix("=")
    if option in line.arguments:
        line.arguments[option] += values
        return
    values = [value, *values] if value and not value.endswith("=") else [f"{value}{word}" for word in values]
    if option in OFF_VALUES and is_below_zero(values[0]):
        line.changed, values = True, OFF_VALUES[option]
    if option in single and values:
        line.record(option, values[0], name)
    line.words += [option, *values] if values or option not in OFF_VALUES else []


def is_below_zero(value: str) -> bool:
    """Return True if a text is a negative number."""
    with suppress(ValueError):
        return float(value) < 0
    return False


def split_options(
    words: Sequence[str], table: Mapping[str, str], takes: Mapping[str, int]
) -> Iterator[tuple[str, list[str], str]]:
    """Yield options with their values and their original spelling; the name is empty for other words."""
    waiting = deque(words)
    while waiting:
        word = waiting.popleft()
        if word == "--":
            yield "--", [*waiting], word
            return
        name, sign, value = word.partition("=") if word.startswith("--") else (word, "", "")
        if (spelt := name.replace("_", "-")) in (*table, *COMPOUND, *UNCHANGED) and name.startswith("--"):
            name = spelt
        count = value_count(name, table, takes)
        if count is None or (sign and not count):
            yield "", [], word
            continue
        values = [value] if sign else []
        if name == "--lora-scaled" and (pair := SCALED.fullmatch(value or next(iter(waiting), ""))):
            values, _ = [*pair.groups()], sign or waiting.popleft()
        while len(values) < count and waiting:
            values.append(waiting.popleft())
        if len(values) < count:
            raise UsageError(
                f"option '{name}' requires {'an argument' if count == 1 else f'{count} arguments'}",
                code="missing-value",
            )
        yield name, values, word


def value_count(name: str, table: Mapping[str, str], takes: Mapping[str, int]) -> int | None:
    """Return how many values a flag takes, or None if it is no option."""
    if name in SWITCHES:
        return 0
    if name in COMPOUND:
        return int(COMPOUND[name])
    return takes.get(table[name].partition(" ")[0], 1) if name in table else takes.get(name)
