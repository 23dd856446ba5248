"""Options as they are declared: one checker for the command line, files, checkpoints and Python."""

import math
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from llamatrain.adapters.options import AdapterOptions
from llamatrain.config.options import OptionError, Options, build, from_plain, option_specs, plain
from llamatrain.config.toml import BaseArgument, DataArgument, config_text, read_config
from llamatrain.config.units import Duration, Size
from llamatrain.data.options import DataOptions
from llamatrain.errors import FileError, UsageError
from llamatrain.graph.remat_policy import POLICY_NAMES
from llamatrain.model.options import ModelOptions
from llamatrain.run.extra_output_options import ExtraOutputOptions
from llamatrain.run.lora_options import LoraOptions
from llamatrain.run.options import RunFolderOptions, RunOptions, TrainOptions
from llamatrain.sample.options import SamplingOptions

CLASSES = (
    ModelOptions,
    LoraOptions,
    AdapterOptions,
    DataOptions,
    TrainOptions,
    RunOptions,
    RunFolderOptions,
    ExtraOutputOptions,
    SamplingOptions,
)
HUGE = 10**5000

WRONG: list[tuple[type[Options], dict[str, Any], str]] = [
    (TrainOptions, {"batch": 0}, "must be 1 to 65536 (got 0)"),
    (TrainOptions, {"batch": 1 << 31}, "must be 1 to 65536 (got 2147483648)"),
    (TrainOptions, {"batch": HUGE}, "must be 1 to 65536 (got a number of more than 40 digits)"),
    (TrainOptions, {"batch": 1.0}, "must be a whole number (got 1)"),
    (TrainOptions, {"batch": True}, "must be a whole number (got True)"),
    (TrainOptions, {"batch": None}, "must be a whole number (got None)"),
    (TrainOptions, {"batch": "8"}, "must be a whole number (got '8')"),
    (TrainOptions, {"lr": math.nan}, "must be a number (got nan)"),
    (TrainOptions, {"lr": math.inf}, "must be a number (got inf)"),
    (TrainOptions, {"lr": "x" * 100_000}, f"must be a number (got '{'x' * 40}'...)"),
    (TrainOptions, {"beta1": 1}, "must be 0 or more and less than 1, such as 0.9 (got 1)"),
    (TrainOptions, {"eps": 0.0}, "must be more than 0, such as 1e-8 (got 0)"),
    (TrainOptions, {"restart_growth": 0.5}, "must be 1 or more, or 0 (got 0.5)"),
    (TrainOptions, {"flash": 1}, "must be true or false (got 1)"),
    (TrainOptions, {"memory": True}, "must be a size, such as 6GB (got True)"),
    (TrainOptions, {"optimizer": ["sgd"]}, "must be adamuon, adamw, lbfgs, muon or sgd (got 'sgd')"),
    (
        TrainOptions,
        {"remat": "all"},
        "must be none, light, block, optimal, auto, a number of blocks, or a list such as block:3,wide:2 (got 'all')",
    ),
    (ModelOptions, {"norm_rms_eps": 1.0}, "must be more than 0 and less than 1, such as 1e-5 (got 1)"),
    (
        ModelOptions,
        {"vocab_size": "many"},
        "must be a number of tokens, such as 4096, or the word bytes (got 'many')",
    ),
    (LoraOptions, {"ctx": 1 << 21}, "must be 1 to 1048576 (got 2097152)"),
    (
        LoraOptions,
        {"lora_rank_of": ("attn_q=16", "attn_k")},
        "must be a weight and a rank, such as attn_q=16 (got 'attn_k')",
    ),
    (LoraOptions, {"target": "attn_q"}, "must be a list (got 'attn_q')"),
    (
        AdapterOptions,
        {"lora_scaled": (("a", 1e9),)},
        "must be a file and a number such as 0.5 (got a 1e+09)",
    ),
    (AdapterOptions, {"lora_scaled": (("a",),)}, "must be a file and a number such as 0.5 (got 'a')"),
    (
        SamplingOptions,
        {"stop": ("",)},
        r"must be what ends the generated text, such as '\n\n' (got '')",
    ),
    (RunFolderOptions, {"out": "a\0b"}, r"must be a path (got 'a\x00b')"),
]


@pytest.mark.parametrize(("cls", "values", "told"), WRONG)
def test_what_cannot_be_is_told_by_the_name_that_it_has_there(
    cls: type[Options], values: dict[str, Any], told: str, tmp_path: Path
) -> None:
    ((name, value),) = values.items()
    key = name.replace("_", "-")
    for made in (lambda: cls(**values), lambda: build(cls, values)):
        with pytest.raises(OptionError) as error:
            made()
        assert str(error.value) == f"--{key} {told}"
    with pytest.raises(UsageError) as refused:
        from_plain(cls, values, "some.gguf")
    assert str(refused.value) == f"some.gguf: {name} {told}"
    if value not in (None, HUGE):
        toml = tmp_path / "c.toml"
        toml.write_text(tomli_w.dumps({key: value}))
        with pytest.raises(UsageError) as refused:
            read_config(toml, cls)
        assert str(refused.value) == f"{toml}: {key} {told}"


TOGETHER: list[tuple[type[Options], dict[str, Any], str]] = [
    (DataOptions, {"val": ("a",), "val_split": 0.1}, "--val and --val-split exclude each other"),
    (
        DataOptions,
        {"pack": True, "fill_with_next_samples": True},
        "--pack and --fill-with-next-samples exclude each other",
    ),
    (
        DataOptions,
        {"overlapping_samples": True, "sample_start": "a", "val_split": 0.1},
        "--val-split cannot separate samples that overlap",
    ),
    (
        ModelOptions,
        {"vocab_size": "9", "vocab_from": "a"},
        "--vocab-size and --vocab-from exclude each other",
    ),
    (ModelOptions, {"embd": 100}, "8 heads do not divide a width of 100 (--head, --embd)"),
    (ModelOptions, {"embd": 8}, "a head of 8 / 8 = 1 elements must be even"),
    (
        RunFolderOptions,
        {"resume": "a", "overwrite": True},
        "--resume and --overwrite exclude each other",
    ),
    (
        RunFolderOptions,
        {"resume": "a", "config": "b"},
        "--resume and --config exclude each other",
    ),
    (
        RunFolderOptions,
        {"resume": "a", "checkpoint_in": "b"},
        "--resume and --checkpoint-in exclude each other: both",
    ),
    (TrainOptions, {"lr_min": 1.0}, "--lr-min must not exceed --lr 0.001 (got 1)"),
    (
        TrainOptions,
        {"flash": False, "loss": "squared-error"},
        "--no-flash and --loss squared-error exclude each other",
    ),
    (
        TrainOptions,
        {"restart_growth": 2.0, "schedule": "linear"},
        "--restart-growth needs --schedule cosine (got linear)",
    ),
]


@pytest.mark.parametrize(("cls", "values", "told"), TOGETHER)
def test_what_cannot_be_together(cls: type[Options], values: dict[str, Any], told: str) -> None:
    with pytest.raises(OptionError) as error:
        build(cls, values)
    assert str(error.value).startswith(told)
    with pytest.raises(UsageError) as refused:
        from_plain(cls, values, "some.gguf")
    assert str(refused.value).startswith("some.gguf: ") and "--" not in str(refused.value)


def test_values_become_what_their_fields_are() -> None:
    train = build(TrainOptions, {"lr": 1, "memory": "6GB", "iters": None, "another's": 3})
    assert (type(train.lr), train.memory, train.batch) == (float, Size(6_000_000_000), 8)
    assert build(RunOptions, {"max_time": "2h"}).max_time == Duration(7200)
    assert build(AdapterOptions, {"lora": ["a"], "lora_scaled": [["b", 2]]}) == AdapterOptions(
        (Path("a"),), ((Path("b"), 2.0),)
    )
    assert build(ModelOptions, {"vocab_size": 300, "vocab_from": None}).vocab_size == "300"
    assert replace(train, batch=3).batch == 3
    with pytest.raises(OptionError, match=r"--batch must be .* \(got 0\)"):
        replace(train, batch=0)


@pytest.mark.parametrize("cls", CLASSES)
def test_every_option_is_declared_whole(cls: type[Options]) -> None:
    """With a sentence and a panel; its default is one that can be, and is what is kept and read again."""
    made = build(cls, {})
    for each in option_specs(cls).values():
        assert each.option.sentence.endswith(".") and each.panel != "Options"
        assert each.unit or each.kind is bool
        assert each.check(each.default) == each.default
        assert each.accepted and len(each.accepted) < 100
    assert from_plain(cls, plain(made), "") == made
    assert {*plain(made)} == {*option_specs(cls)}


def test_what_is_computed_again_is_told_of() -> None:
    takes = option_specs(TrainOptions)["remat"].accepted
    assert all(policy in takes for policy in POLICY_NAMES)


def test_a_file_of_options_is_read_as_it_was_written(tmp_path: Path) -> None:
    train = TrainOptions(lr=1e-5, memory=Size.parse("2GB"), remat="3")
    data = DataOptions(val=("a b", 'quo"te\\', "line\nbreak", "\x7fü"), shuffle=False)
    lora = AdapterOptions(lora_scaled=((Path("a"), 0.5), (Path("b"), 1.0)))
    text = config_text(
        "two\nlines", ("x.txt", "-"), (train, data, lora), {"stop_window", "stop_delta"}, base="b.gguf"
    )
    assert text.startswith('# two\n# lines\nbase = "b.gguf"\ndata = [') and "stop-window" not in text
    assert tomllib.loads(text)["lr"] == 1e-5
    (tmp_path / "c.toml").write_text(text, "utf-8")
    found = read_config(tmp_path / "c.toml", TrainOptions, DataOptions, AdapterOptions, BaseArgument)
    assert (found.pop("base"), found.pop("data")) == ("b.gguf", ("x.txt", "-"))
    assert (build(TrainOptions, found), build(DataOptions, found), build(AdapterOptions, found)) == (
        train,
        data,
        lora,
    )


@pytest.mark.parametrize(
    ("text", "error", "told"),
    [
        ("batchs = 3", UsageError, "unknown option 'batchs'; did you mean batch?"),
        ("lr-mim = 3", UsageError, "unknown option 'lr-mim'; did you mean lr-min?"),
        ("x" * 90_000 + " = 3", UsageError, f"unknown option '{'x' * 40}'..."),
        ("batch = [", UsageError, "invalid TOML: "),
        ("", FileError, "No such file or directory"),
    ],
)
def test_a_file_that_is_wrong(text: str, error: type[Exception], told: str, tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    if text:
        path.write_text(text)
    with pytest.raises(error) as refused:
        read_config(path, TrainOptions)
    assert str(refused.value).startswith(f"{path}: ") and told in str(refused.value)


def test_a_file_says_nothing_that_its_command_does_not_take(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('base = "b.gguf"')
    with pytest.raises(UsageError, match="unknown option 'base'"):
        read_config(path, TrainOptions, DataArgument)
    assert read_config(path, TrainOptions, BaseArgument) == {"base": "b.gguf"}
