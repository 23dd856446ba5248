"""Translates flags of llama.cpp's programs that depend on several others, or on the run.

Their `--cos-decay-steps` counts from the first step, including the warm-up, unless the cosine is restarted;
its lowest point is `--adam-min-alpha`, plus the share `--cos-decay-min` of what is above. `--adam-iter`
counts the steps of one call of the program, `--iters` those of all.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from llamatrain.config.flag_hints import BASE, DATA
from llamatrain.errors import LlamatrainError, UsageError
from llamatrain.legacy.flags import TABLES, LegacyCommandLine, parse_command_line

# the defaults of llama.cpp's programs
WARMUP = "100"
DECAY_STEPS = "1000"
RESTART = "1.1"
LOWEST = "0.1"
RATE = "0.001"
ONE_ARGUMENT = ("export-lora", "generate")
# the weights that get an adapter by default
LINEAR = "attn_q,attn_k,attn_v,attn_output,ffn_gate,ffn_up,ffn_down"


def translate_command_line(
    command: str, words: Sequence[str], params: Sequence[Any]
) -> tuple[list[str], list[str]]:
    """Return a command line in today's words, and notes about what was replaced."""
    if command not in TABLES:
        return [*words], []
    line = parse_command_line(words, TABLES[command], params)
    check_arguments(line, command)
    if command not in ONE_ARGUMENT:
        for translate in (translate_iterations, translate_restarts, translate_decay, translate_targets):
            translate(line)
        translate_minimum(line, command)
    if line.renamed:
        line.notes.insert(
            0, f"other names here: {', '.join(f'{old} is {new}' for old, new in line.renamed.items())}"
        )
    return (line.words_today, line.notes) if line.notes or line.changed else ([*words], [])


def add_option(line: LegacyCommandLine, by: str, *pairs: tuple[str, str], why: str = "") -> None:
    """Add options that replace a flag, with a note."""
    for option, value in pairs:
        line.record(option, value, by)
        line.words += [option, value]
    line.notes.append(
        f"{by} {line.compound[by]}".rstrip() + f" is {' '.join(' '.join(pair) for pair in pairs)} here{why}"
    )


def translate_iterations(line: LegacyCommandLine) -> None:
    """Translate --adam-iter, which does not count the steps before a resume."""
    if (iters := line.compound.get("--adam-iter")) is None:
        return
    before = steps_done(line.value("--resume") or line.value("--checkpoint-in"))
    if not before or not iters.isdecimal():
        line.record("--iters", iters, "--adam-iter")
        line.words += ["--iters", iters]
        line.renamed["--adam-iter"] = "--iters"
        return
    add_option(
        line, "--adam-iter", ("--iters", str(before + int(iters))), why=f", since {before} steps are done"
    )


def steps_done(place: str | None) -> int:
    """Return the steps that a checkpoint has done."""
    from llamatrain.checkpoints.filenames import checkpoints_newest_first
    from llamatrain.gguf.reader import open_gguf

    with suppress(OSError, LlamatrainError):
        for path in (
            checkpoints_newest_first(Path(place)) if place and Path(place).is_dir() else [Path(place or "")]
        ):
            with suppress(OSError, LlamatrainError):
                return open_gguf(path).get_value("training.iteration_count", int, 0)
    return 0


def translate_restarts(line: LegacyCommandLine) -> None:
    """Translate --enable-restart and --cos-decay-restart."""
    growth = line.compound.get("--cos-decay-restart")
    chosen = [name for name in line.compound if name in ("--enable-restart", "--disable-restart")]
    if chosen and chosen[-1] == "--enable-restart":
        line.compound.setdefault("--cos-decay-steps", DECAY_STEPS)
        add_option(line, "--enable-restart", ("--restart-growth", growth or RESTART))
        return
    if chosen:
        line.renamed[chosen[-1]] = "--restart-growth 0"
        line.words += ["--restart-growth", "0"]
    if growth is not None:
        line.notes.append("--cos-decay-restart has no effect without --enable-restart")


def translate_decay(line: LegacyCommandLine) -> None:
    """Translate --cos-decay-steps."""
    steps = line.compound.get("--cos-decay-steps")
    if steps is None:
        return
    warmup = line.value("--warmup")
    added = [("--warmup", WARMUP)] if warmup is None else []
    warmup = warmup or WARMUP
    if line.value("--restart-growth") is None and steps.isdecimal() and warmup.isdecimal():
        steps, why = str(max(1, int(steps) - int(warmup))), ": it counted from the first step on"
    else:
        why = ""
    add_option(line, "--cos-decay-steps", ("--decay-steps", steps), *added, why=why)


def translate_minimum(line: LegacyCommandLine, command: str) -> None:
    """Translate --adam-min-alpha and --cos-decay-min."""
    by = next((name for name in ("--adam-min-alpha", "--cos-decay-min") if name in line.compound), None)
    if by is None:
        return
    if line.value("--config") and not line.value("--lr"):
        raise UsageError(
            f"{by} depends on the learning rate in the --config file; give --lr-min instead",
            code="conflicting-options",
        )
    given = line.value("--lr")
    added = list[tuple[str, str]]()
    if given is None and command == "finetune":  # whose own default rate depends on the model
        added = [("--lr", RATE)]
    numbers = (
        given or RATE,
        line.compound.get("--adam-min-alpha", "0"),
        line.compound.get("--cos-decay-min", LOWEST),
    )
    try:
        rate, least, share = map(float, numbers)
    except ValueError:
        raise UsageError(f"{by} must be a number (got {line.compound[by]})", code="invalid-option") from None
    add_option(
        line,
        by,
        ("--lr-min", f"{least + share * (rate - least):.6g}"),
        *added,
        why=": where its cosine ended",
    )


def translate_targets(line: LegacyCommandLine) -> None:
    """Add adapters for weights that are given a rank; llama.cpp's finetune adapted all weights."""
    named = [
        now.removeprefix("--lora-rank-of ")
        for now in line.renamed.values()
        if now.startswith("--lora-rank-of ")
    ]
    if more := [name for name in named if name not in LINEAR.split(",")]:
        linear = [] if "--target" in line.words else [LINEAR]
        line.words += ["--target", ",".join([*linear, *more])]
        line.notes.append(
            f"the rank of {', '.join(more)} adds an adapter: --target {','.join([*linear, *more])}"
        )


def check_arguments(line: LegacyCommandLine, command: str) -> None:
    """Compare models and data given as options with those given as arguments."""
    from llamatrain.run.request import is_model

    named, data = line.arguments[BASE], line.arguments[DATA]
    standing = [word for word in (*line.others, *line.rest) if word == "-" or not word.startswith("-")]
    first = (
        standing[:1]
        if command in ONE_ARGUMENT or (command == "finetune" and standing and is_model(standing[0]))
        else []
    )
    bases = [*named, *first]
    if len({*bases}) > 1:
        raise UsageError(
            f"two models given: {bases[0]} and {bases[1]}; leave one of them out", code="two-models"
        )
    others = standing[1:] if first or (command == "finetune" and not named) else standing
    if data and (strange := [name for name in others if name not in data]):
        raise UsageError(
            f"--train-data {data[0]} and {strange[0]} both name the data; leave one of them out",
            code="conflicting-options",
        )
    line.arguments |= {BASE: [] if first else named[:1], DATA: [name for name in data if name not in others]}
