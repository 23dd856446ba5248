"""Reads which values of which options a sweep tries, and plans its rounds."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from llamatrain.config.common import JSON
from llamatrain.config.messages import quote, suggest
from llamatrain.config.options import Option, Options, OptionSpec, format_flag, option_specs
from llamatrain.errors import UsageError
from llamatrain.run.request import FINETUNE_OPTIONS, FROM_SCRATCH_OPTIONS

MOST_RUNS = 10_000  # more are a mistake in the lists


@dataclass(frozen=True)
class SweepOptions(Options, panel="The sweep"):
    """Options of `sweep`."""

    out: Annotated[Path | None, Option("Folder to write; default: runs/sweep-1, -2, ...", unit="DIR")] = None
    resume: Annotated[
        Path | None,
        Option(
            "Go on with the sweep in this folder.", unit="DIR", excludes=(("out", "it stays in its folder"),)
        ),
    ] = None
    halving: Annotated[
        int,
        Option(
            "Continue the best 1/N of the runs after each round; 1: train all runs to the end.",
            unit="N",
            least=1,
            most=100,
        ),
    ] = 3
    rounds: Annotated[
        int | None,
        Option(
            "Number of rounds; each has N times the steps of the one before. Default: as many as leave one run.",
            least=1,
            most=20,
        ),
    ] = None
    sample: Annotated[
        int | None, Option("Try only this many of the combinations, chosen at random.", unit="RUNS", least=1)
    ] = None
    sample_seed: Annotated[int, Option("Seed of that choice.", least=0)] = 0
    json: Annotated[bool, JSON] = False


def specs_of(command: str) -> dict[str, OptionSpec]:
    """Return the options of a command by name."""
    classes = FINETUNE_OPTIONS if command == "finetune" else FROM_SCRATCH_OPTIONS
    return {name: spec for cls in classes for name, spec in option_specs(cls).items()}


def split_arguments(words: Sequence[str], specs: Mapping[str, OptionSpec]) -> dict[str, list[str]]:
    """Return the values of each option on a command line: `--lr 1e-4,3e-4` has two."""
    found: dict[str, list[str]] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            advice = "a sweep takes long flags" if word.startswith("-") else "name data before the options"
            raise UsageError(f"unexpected argument {quote(word)}; {advice}", code="extra-argument")
        flag, equals, value = word.partition("=")
        name, negated = find_option(flag, specs)
        if negated and equals:
            raise UsageError(f"{flag} takes no value (got {quote(word)})", code="unexpected-value")
        if specs[name].kind is bool:
            lists = not negated and not equals and rest and set(rest[0].split(",")) <= {"on", "off"}
            values = rest.pop(0) if lists else value if equals else "off" if negated else "on"
        elif equals:
            values = value
        elif rest:
            values = rest.pop(0)
        else:
            raise UsageError(f"{flag} needs a value, or several: {flag} A,B", code="missing-value")
        found[name] = [*found.get(name, []), *split_values(values, specs[name])]
        check_list(found[name], specs[name])
    return found


def list_values(given: Mapping[str, Any], specs: Mapping[str, OptionSpec]) -> dict[str, list[str]]:
    """Return the values of each option as texts, from lists or single values of a Python program."""
    found = {}
    for name, value in given.items():
        if name not in specs:
            raise UsageError(f"no such option {quote(name)}{suggest(name, specs)}", code="unknown-option")
        values = [*value] if isinstance(value, list | tuple) else [value]
        texts = ["on" if each is True else "off" if each is False else str(each) for each in values]
        check_list(texts, specs[name])
        found[name] = texts
    return found


def find_option(flag: str, specs: Mapping[str, OptionSpec]) -> tuple[str, bool]:
    """Return the name of an option, and whether the flag says no."""
    name = flag.removeprefix("--").replace("-", "_")
    for each, negated in ((name, False), (f"{name}_", False), (name.removeprefix("no_"), True)):
        if each in specs and (not negated or specs[each].kind is bool):
            return each, negated
    raise UsageError(f"no such option: {flag}{suggest(flag, map(format_flag, specs))}", code="unknown-option")


def split_values(text: str, spec: OptionSpec) -> list[str]:
    """Return the values of a list: between semicolons if there are any, otherwise between commas."""
    values = [part.strip() for part in text.split(";" if ";" in text else ",")]
    check_list(values, spec)
    return values


def check_list(values: Sequence[str], spec: OptionSpec) -> None:
    """Raise unless all values of an option differ and none is empty."""
    if not values or "" in values or len(set(values)) < len(values):
        problem = "a value twice" if values and "" not in values else "an empty value"
        raise UsageError(
            f"{format_flag(spec.name)} has {problem} (got {quote(','.join(values))})", code="invalid-list"
        )


def parse_value(text: str, spec: OptionSpec) -> Any:
    """Return a value as the option has it."""
    if spec.kind is bool:
        if text not in ("on", "off"):
            raise UsageError(
                f"{format_flag(spec.name)} takes on and off in a sweep (got {quote(text)})",
                code="invalid-list",
            )
        return text == "on"
    return spec.parse([text] if spec.repeated else text)


def combinations(lists: Mapping[str, Sequence[str]], options: SweepOptions) -> list[dict[str, str]]:
    """Return the values of each run: every combination, or a sample of them in their order."""
    count = math.prod(len(values) for values in lists.values())
    if count > MOST_RUNS:
        raise UsageError(
            f"these lists have {count:,} combinations; at most {MOST_RUNS:,} can be tried",
            code="too-many-runs",
        )
    every = [dict(zip(lists, values, strict=True)) for values in product(*lists.values())]
    if options.sample is None or options.sample >= count:
        return every
    chosen = random.Random(options.sample_seed).sample(range(count), options.sample)
    return [every[number] for number in sorted(chosen)]


def round_steps(iters: int, trials: int, options: SweepOptions) -> list[int]:
    """Return the steps at which the rounds end; the last ends with the run."""
    if options.halving == 1 and options.rounds is not None:
        raise UsageError("--rounds has no effect with --halving 1; leave it out", code="unused-option")
    if options.halving == 1:
        return [iters]
    count = options.rounds or 1 + math.ceil(math.log(trials) / math.log(options.halving) - 1e-9)
    ends = {max(1, round(iters / options.halving**number)) for number in range(count)}
    return sorted(ends)
