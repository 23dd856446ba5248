"""`from-scratch --minutes`: what it chooses for a time, and that a run with it is one like any other."""

import filecmp
import itertools
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import llamatrain
from llamatrain.planner import loss_law
from llamatrain.planner.cost import nominal_cost, plan_cost
from llamatrain.planner.memory import MemoryPlan
from llamatrain.planner.speeds import OpSpeeds
from llamatrain.planner.time import TimeForecast
from llamatrain.run import choose_model, time_budget
from llamatrain.run.request import RunRequest, request_from_scratch
from llamatrain.run.summary import RunResult
from llamatrain.train.config import DONE, PAUSED, StopReason
from tests.helpers.cli import Argument, ran, run, text_file
from tests.helpers.errors import raises
from tests.helpers.mpi_programs import needs_mpi
from tests.helpers.mpi_programs import ran as ran_on_ranks

SMALL: tuple[Argument, ...] = (
    "--embd",
    32,
    "--head",
    2,
    "--layer",
    1,
    "--vocab-size",
    "bytes",
    "--ctx",
    16,
    "--batch",
    4,
)
SHORT: tuple[Argument, ...] = ("--minutes", 0.02, *SMALL)
MEGABYTE = 10**6


@pytest.fixture
def nominal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forecasts by the nominal cost, in which no clock takes part."""

    def forecast(plan: MemoryPlan, batches: int, steps: int | None) -> TimeForecast:
        tokens = batches * plan.splits * plan.spec.batch * plan.spec.rope_length
        return TimeForecast(
            step_seconds=plan_cost(plan, batches, nominal_cost),
            tokens=tokens,
            steps=steps,
            speeds=OpSpeeds({}, 0),
        )

    monkeypatch.setattr(choose_model, "forecast_time", forecast)


def written(tmp_path: Path, size: int = MEGABYTE) -> Path:
    """A text of a size, which is only looked at."""
    (tmp_path / "text.txt").write_text(("to be or not to be\n" * (size // 19 + 1))[:size])
    return tmp_path / "text.txt"


def requested(text: Path, **options: Any) -> RunRequest:
    return request_from_scratch([str(text)], options)


# ---- the law ---------------------------------------------------------------------


def test_more_weights_and_more_text_teach_more() -> None:
    losses = [loss_law.mean_bits(weights, 10**7, 10**9) for weights in (10**5, 10**6, 10**7)]
    assert losses == sorted(losses, reverse=True) and losses[-1] > 0
    losses = [loss_law.mean_bits(10**6, read, 10**9) for read in (10**6, 10**7, 10**8)]
    assert losses == sorted(losses, reverse=True)


def test_a_text_that_is_read_again_teaches_less_each_time() -> None:
    useful = [loss_law.useful_bytes(passes * 1000, 1000) for passes in range(1, 40)]
    gains = [after - before for before, after in itertools.pairwise(useful)]
    assert useful[0] == 1000 and loss_law.useful_bytes(300, 1000) == 300
    assert gains == sorted(gains, reverse=True) and gains[-1] > 0 and gains[0] < 1000


def test_longer_runs_have_lower_rates_and_larger_steps() -> None:
    rates = [loss_law.learning_rate(128, tokens) for tokens in (10**6, 10**7, 10**8)]
    assert rates == sorted({*rates}, reverse=True)
    assert loss_law.learning_rate(128, 1000) == rates[0] == loss_law.RATE
    assert loss_law.tokens_per_step(10**6) < loss_law.tokens_per_step(10**7)


def test_wider_models_have_lower_rates() -> None:
    rates = [loss_law.learning_rate(width, 10**6) for width in (64, 128, 256, 512)]
    assert rates == sorted({*rates}, reverse=True) and rates[1] == loss_law.RATE


def test_larger_models_learn_a_text_by_heart_sooner() -> None:
    passes = [loss_law.max_passes(weights, MEGABYTE) for weights in (10**4, 10**6, 10**8)]
    assert passes == sorted(passes, reverse=True) and passes[1] == loss_law.PASSES
    assert loss_law.max_passes(10**8, 100 * MEGABYTE) == passes[1]


# ---- what is chosen ----------------------------------------------------------------


@pytest.mark.usefixtures("nominal")
def test_more_time_makes_a_larger_model(tmp_path: Path) -> None:
    request = requested(written(tmp_path), precision="bf16")  # the default depends on the processor
    choices = [choose_model.choose_model(request, 100 * MEGABYTE, seconds) for seconds in (30, 300, 3000)]
    sizes = [choice.parameters for choice in choices]
    assert sizes == sorted({*sizes})
    assert [choice.bits for choice in choices] == sorted((choice.bits for choice in choices), reverse=True)


@pytest.mark.usefixtures("nominal")
def test_a_small_text_has_a_smaller_vocabulary(tmp_path: Path) -> None:
    request = requested(written(tmp_path), precision="bf16")
    sizes = [
        int(choose_model.choose_model(request, size, 300).options["vocab_size"])
        for size in (1000, 700_000, 100 * MEGABYTE)
    ]
    assert sizes[0] == choose_model.LEAST_VOCABULARY and sizes == sorted({*sizes})


@pytest.mark.usefixtures("nominal")
def test_no_other_shape_is_expected_to_learn_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose_model, "SHAPES", choose_model.SHAPES[:7])  # the largest take long to plan
    request = requested(written(tmp_path))
    best = choose_model.choose_model(request, 10 * MEGABYTE, 600)
    others = [
        choose_model.choose_rows(request, 10 * MEGABYTE, 600, shape, 16)
        for shape in choose_model.candidate_shapes(request, 10 * MEGABYTE)
    ]
    assert best.bits == min(other.bits for other in others if other)


@pytest.mark.usefixtures("nominal")
def test_a_small_text_does_not_take_all_the_time(tmp_path: Path) -> None:
    text = written(tmp_path, 100_000)
    request = time_budget.fit_time(requested(text, minutes=60))
    config = request.config
    h = config.model.hyperparameters(int(config.model.vocab_size))
    read = (config.train.iters or 0) * config.train.batch * 256 * loss_law.bytes_per_token(h.vocab)
    weights = h.parameter_count - 2 * h.vocab * h.embd
    passes = read / 100_000
    assert 0.8 * loss_law.max_passes(weights, 100_000) < passes <= loss_law.max_passes(weights, 100_000)
    assert any("by heart" in note for note in request.notes)
    assert not any("by heart" in note for note in time_budget.fit_time(requested(text, minutes=0.001)).notes)


@pytest.mark.usefixtures("nominal")
def test_a_model_that_fits_no_memory(tmp_path: Path) -> None:
    request = requested(written(tmp_path), size="large", memory="300MB", minutes=1)
    with raises("out-of-memory") as error:
        time_budget.fit_time(request)
    assert "--minutes" in str(error.value)


@pytest.mark.usefixtures("nominal")
@pytest.mark.parametrize(
    "given",
    [
        {"embd": 96, "layer": 3},
        {"size": "tiny"},
        {"head": 4, "ctx": 64},
        {"vocab_size": "bytes", "batch": 5},
        {"optimizer": "adamw"},
        {"lr": 0.001, "val_split": 0.0, "warmup": 3, "eval_every": 7},
    ],
)
def test_options_that_are_given_stay(given: dict[str, Any], tmp_path: Path) -> None:
    config = time_budget.fit_time(requested(written(tmp_path), minutes=1, **given)).config
    assert {name: config.values[name] for name in given} == given
    assert (
        config.model.minutes is None and config.train.iters and config.values["ctx"] == given.get("ctx", 256)
    )
    assert config.model.hyperparameters(1000).embd % config.model.hyperparameters(1000).heads == 0
    if "optimizer" in given:
        assert (config.train.lr, config.train.schedule, config.model.embd_std) == (1e-3, "wsd", None)
    else:
        assert (config.train.optimizer, config.train.schedule) == ("adamuon", "wsd")


def trained(
    request: RunRequest, seconds_per_step: float, monkeypatch: pytest.MonkeyPatch
) -> tuple[RunResult, list[RunRequest]]:
    """The result and the parts of a run whose steps take some time, and all else in it two seconds."""
    clock, parts = [100.0], list[RunRequest]()

    def train(part: RunRequest) -> RunResult:
        parts.append(part)
        pause, folder = part.hooks.pause, Path("run")
        seconds = pause * seconds_per_step
        clock[0] += 2.0 + seconds
        return RunResult(
            stop=StopReason(PAUSED if pause else DONE, finished=not pause),
            folder=folder,
            result=folder,
            steps=pause or part.config.train.iters or 0,
            seconds=seconds,
        )

    monkeypatch.setattr(time_budget.time, "monotonic", lambda: clock[0])
    return time_budget.train_in_time(request, train), parts


@pytest.mark.usefixtures("nominal")
@pytest.mark.parametrize("seconds_per_step", [0.05, 0.5, 5.0])
def test_the_first_steps_decide_how_many_follow(
    seconds_per_step: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_budget, "text_bytes", lambda request: 1000 * MEGABYTE)
    request = requested(written(tmp_path), minutes=1)
    result, (first, rest) = trained(request, seconds_per_step, monkeypatch)
    pause, expected = first.hooks.pause, first.config.train.iters or 0
    assert (pause, first.config.train.decay_steps) == (-(-expected // 3), expected - pause)
    assert rest.hooks.pause == 0 and rest.folder_options.resume == result.folder
    assert result.steps == rest.config.train.iters
    assert rest.config.train.decay_steps == result.steps - pause
    left = 60 - 2 - pause * seconds_per_step - 2
    assert abs(result.steps - pause - max(1, int(left / seconds_per_step))) <= 1  # rounding
    assert not any("by heart" in note for note in rest.notes)


@pytest.mark.usefixtures("nominal")
def test_steps_that_are_faster_than_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = requested(written(tmp_path), minutes=0.1)
    most = time_budget.fit_request(request, 0.1).most_steps
    result, (first, rest) = trained(request, 0.0, monkeypatch)
    assert not any("by heart" in note for note in first.notes)
    assert any("by heart" in note for note in rest.notes) and result.steps == most


@pytest.mark.usefixtures("nominal")
def test_the_steps_are_not_corrected_on_several_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = requested(written(tmp_path), minutes=1)
    assert time_budget.fit_request(request, 1).first_steps
    two_hosts = SimpleNamespace(size=2, local_size=1, broadcast=lambda value: value)
    monkeypatch.setattr(time_budget, "get_comm", lambda: two_hosts)
    assert time_budget.fit_request(request, 1).first_steps is None


@pytest.mark.usefixtures("nominal")
def test_a_schedule_that_falls_from_the_start_is_not_corrected(tmp_path: Path) -> None:
    parts = list[RunRequest]()

    def train(request: RunRequest) -> RunResult:
        parts.append(request)
        return RunResult(stop=StopReason(DONE), folder=tmp_path, result=tmp_path, steps=1, seconds=1.0)

    time_budget.train_in_time(requested(written(tmp_path), minutes=1, schedule="linear"), train)
    time_budget.train_in_time(requested(written(tmp_path)), train)
    assert [(part.hooks.pause, part.config.train.schedule) for part in parts] == [
        (0, "linear"),
        (0, "cosine"),
    ]


def test_what_is_chosen_is_shown(tmp_path: Path) -> None:
    done = ran("plan", "from-scratch", text_file(tmp_path), *SHORT)
    assert "--optimizer adamuon" in done.err and "bits per byte" in done.err and "--iters" in done.err


# ---- runs --------------------------------------------------------------------------


def test_a_run_can_be_repeated_and_resumed(tmp_path: Path) -> None:
    text = text_file(tmp_path)
    first, again, half = (tmp_path / name for name in ("first", "again", "half"))
    done = ran("from-scratch", text, *SHORT, "--out", first)
    assert " more follow" in done.err
    assert done.err.count("parameters  ") == done.err.count("the model:") == 1  # as if it were one run
    config = tomllib.loads((first / "config.toml").read_text())
    assert "minutes" not in config and config["optimizer"] == "adamuon"
    assert config["iters"] > 0 and config["val-split"] == time_budget.HELD_OUT
    ran("from-scratch", text, "--config", first / "config.toml", "--out", again)
    assert filecmp.cmp(first / "model.gguf", again / "model.gguf", shallow=False)
    steps = config["iters"] // 2
    ran(
        "from-scratch",
        text,
        "--config",
        first / "config.toml",
        "--out",
        half,
        "--save-every",
        steps,
        "--keep",
        9,
    )
    other = tmp_path / "other"
    ran("from-scratch", "--resume", half / f"checkpoint-{steps}.gguf", "--out", other)
    assert filecmp.cmp(first / "model.gguf", other / "model.gguf", shallow=False)


def test_from_python(tmp_path: Path) -> None:
    run = llamatrain.from_scratch(
        text_file(tmp_path),
        minutes=0.02,
        embd=32,
        head=2,
        layer=1,
        vocab_size="bytes",
        ctx=16,
        out=tmp_path / "run",
    )
    assert run.finished and any("parameters, which reads" in note for note in run.notes)


def test_a_rule_that_stops_the_first_steps_ends_the_run(tmp_path: Path) -> None:
    rules: tuple[Argument, ...] = ("--max-no-improvement", 1, "--stop-window", 1, "--stop-delta", 100)
    done = ran("from-scratch", text_file(tmp_path), *SHORT, *rules, "--out", tmp_path / "run")
    assert "stopped: " in done.err and " more follow" not in done.err
    assert (tmp_path / "run" / "model.gguf").exists()


@needs_mpi
def test_ranks_agree(tmp_path: Path) -> None:
    text = text_file(tmp_path)
    ran_on_ranks(2, "from-scratch", text, *SHORT, "--out", tmp_path / "two", "--threads", 1, seconds=200)
    ran("from-scratch", text, "--config", tmp_path / "two" / "config.toml", "--out", tmp_path / "one")
    assert filecmp.cmp(tmp_path / "two" / "model.gguf", tmp_path / "one" / "model.gguf", shallow=False)


# ---- what cannot be done -----------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--iters", 5), "--minutes chooses the number of steps, so --iters has no effect"),
        (("--epochs", 5), "so --epochs has no effect"),
        (("--max-time", "1h"), "so --max-time has no effect"),
        (("--optimizer", "lbfgs"), "needs steps that take the same time (got --optimizer lbfgs)"),
        (("--minutes", 0), "--minutes must be more than 0"),
        (("--minutes", "soon"), "--minutes must be a number"),
    ],
)
@pytest.mark.parametrize("command", [("from-scratch",), ("plan", "from-scratch")])
def test_contradictions(
    command: tuple[str, ...], words: tuple[Argument, ...], message: str, tmp_path: Path
) -> None:
    done = run(*command, text_file(tmp_path), "--minutes", 5, *words)
    assert done.code == 2 and len(done.errors) == 1 and message in done.errors[0]


def test_it_needs_text_in_files(tmp_path: Path) -> None:
    assert "needs the size of the text (got no data)" in run("from-scratch", "--minutes", 5).err
    assert "(got standard input)" in run("from-scratch", "-", "--minutes", 5).err


def test_a_config_file_is_named(tmp_path: Path) -> None:
    config = tmp_path / "some.toml"
    config.write_text("minutes = 5\niters = 10\n")
    done = run("from-scratch", text_file(tmp_path), "--config", config)
    assert done.code == 2 and f"{config}: minutes chooses the number of steps, so iters has" in done.errors[0]


def test_a_resumed_run_has_its_steps(tmp_path: Path) -> None:
    ran("from-scratch", text_file(tmp_path), *SMALL, "--iters", 1, "--out", tmp_path / "run")
    done = run("from-scratch", "--resume", tmp_path / "run", "--minutes", 5)
    assert done.code == 2 and "--minutes" in done.errors[0]


def test_a_model_that_is_loaded_has_its_size(tmp_path: Path) -> None:
    text = text_file(tmp_path)
    ran("from-scratch", text, *SMALL, "--iters", 1, "--out", tmp_path / "run")
    done = run("from-scratch", text, "--checkpoint-in", tmp_path / "run" / "model.gguf", "--minutes", 5)
    assert done.code == 2 and "--minutes" in done.errors[0]


def test_the_speed_of_the_machine_must_be_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        choose_model, "forecast_time", lambda *_: "known once a first run has compiled the kernels"
    )
    with raises("unknown-speed"):
        time_budget.fit_time(requested(written(tmp_path), minutes=1))


def test_runs_of_a_sweep_have_the_same_steps(tmp_path: Path) -> None:
    config = tmp_path / "sweep.toml"
    config.write_text("minutes = 1\nval-split = 0.1\n")
    done = run("sweep", config, text_file(tmp_path), "--lr", "0.001,0.002", "--out", tmp_path / "sweep")
    assert done.code == 2 and "same number of steps" in done.errors[0]
