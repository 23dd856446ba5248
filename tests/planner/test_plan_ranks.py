"""`plan --ranks`: what a run would take on several ranks, and how long its steps."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamatrain.compiler.store import ObjectStore
from llamatrain.config.units import Bandwidth
from llamatrain.data.options import DataOptions
from llamatrain.errors import UsageError
from llamatrain.graph.op_cost import OpCost, estimate_cost
from llamatrain.graph.tensor import BF16, collect_nodes
from llamatrain.optim.registry import get_optimizer
from llamatrain.planner import speeds
from llamatrain.planner.memory import MemoryDemand, plan_memory
from llamatrain.planner.speeds import OTHER_OPS, OpSpeeds, OpTiming
from llamatrain.run import scaling
from llamatrain.run.config import RunConfig
from llamatrain.run.options import RunOptions, TrainOptions
from llamatrain.run.scaling import StepShape, StepTime, find_useful_ranks, forecast_ranks, step_time
from llamatrain.train.graphs import StepGraphs, StepSpec
from tests.helpers.cli import TINY, Argument, Done, ran, run, text_file
from tests.helpers.lora_runs import base
from tests.helpers.small_models import small
from tests.run.test_from_scratch_errors import refused

MADE_UP = OpSpeeds({OTHER_OPS: (1e-6, 1e-10, 1e-10)}, 1.8e9)
EFFORT = StepTime(row=0.1, overhead=0.02, adding=0.01, update=0.05)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured."""
    monkeypatch.setattr(scaling, "get_speeds", lambda spec, measure: MADE_UP)


def planned(folder: Path, *more: Argument) -> Done:
    return ran("plan", "from-scratch", text_file(folder), *TINY, "--ctx", 32, "--threads", 1, *more)


def told(folder: Path, *more: Argument) -> dict[str, Any]:
    return json.loads(planned(folder, *more, "--json").out)


# ---- what is asked ----------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "bits", "words"),
    [
        ("10Gbit", 1e10, "10 Gbit/s"),
        ("1gbit", 1e9, "1 Gbit/s"),
        ("100Mbit/s", 1e8, "100 Mbit/s"),
        (" 2.5 Gbit ", 2.5e9, "2.5 Gbit/s"),
        ("400Gbit", 4e11, "400 Gbit/s"),
        ("56kbit", 56e3, "56 kbit/s"),
        ("9bit", 9, "9 bit/s"),
    ],
)
def test_speeds_of_networks(text: str, bits: float, words: str) -> None:
    found = Bandwidth.parse(text)
    assert found == pytest.approx(bits) and found.words == words


WRONG = (
    *(
        "10",
        "10GB",
        "10Gb",
        "Gbit",
        "0Gbit",
        "-1Gbit",
        "1e9bit",
        "nan",
        "infbit",
        "",
        "1Gbit1",
        "9999Tbit",
        "1Gbit\n2",
    ),
    "9" * 400 + "Gbit",
    "\N{FULLWIDTH DIGIT ONE}Gbit",
)


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_speed_of_a_network(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not a network speed; write it as 100Mbit, 1Gbit or 10Gbit$"):
        Bandwidth.parse(text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--ranks", "0"), ("--ranks must be 1 to 4096 .got 0.", "invalid-option")),
        (("--ranks", "4097"), ("--ranks must be 1 to 4096 .got 4097.", "invalid-option")),
        (("--ranks", "9" * 5000), ("--ranks",)),
        (("--ranks", "two"), ("--ranks must be a whole number .got 'two'.", "invalid-option")),
        (
            ("--ranks", "2", "--network", "10GB"),
            ("--network: '10GB' is not a network speed", "invalid-option"),
        ),
        (("--ranks", "2", "--network", "x" * 9999), ("--network: 'xxx",)),
        (("--network", "10Gbit"), ("--network has no effect without --ranks", "unused-option")),
        (("--ranks", "2", "--graph", "text"), ("--ranks and --graph exclude each other",)),
    ],
)
@pytest.mark.usefixtures("known")
def test_what_cannot_be_asked(options: tuple[str, ...], words: tuple[str, ...], tmp_path: Path) -> None:
    refused(run("plan", "from-scratch", text_file(tmp_path), *TINY, *options), 2, *words)


# ---- what is said -----------------------------------------------------------


@pytest.mark.usefixtures("known")
def test_for_people_who_have_several_machines(tmp_path: Path) -> None:
    done = planned(tmp_path, "--ranks", 3, "--network", "1Gbit")
    assert not re.sub("compil.*\n", "", done.err) and max(map(len, done.out.splitlines())) <= 80
    assert re.search(r"speed test just now; .+\n(Other .+\n)?Links of 1 Gbit/s", done.out)
    rows = [
        line.replace(",", "").split()
        for line in done.out.splitlines()
        if re.match(r" +[\d,]+ +[\d,]+ ", line)
    ]
    assert [int(row[0]) for row in rows] == [1, 2, 3, *(2**power for power in range(2, 13))]
    assert [int(row[1]) for row in rows] == [8, 8, 8, 8, 8, *(2**power for power in range(4, 13))]
    assert rows[0][3:] == ["0", "%", "100", "%", "100", "%"]
    assert re.search(r"\nsent +[\d,]+ +[\d.]+ kB  by each of 3, a step\nreceived ", done.out)
    pays = r"(Up to \d ranks help|More ranks do not help) in steps of 8 rows: .*\n"
    assert re.search(pays + r"With 8 rows each, 4,096 ranks keep \d+ % of their speed\.\n$", done.out)


@pytest.mark.usefixtures("known")
def test_the_same_for_programs(tmp_path: Path) -> None:
    plain, found = told(tmp_path), told(tmp_path, "--ranks", 4)
    ranks = found.pop("ranks")
    assert found.keys() == plain.keys()
    assert not found["seconds_of_step"], "which the ranks' own tell"
    trained = plain["parameters"]
    assert ranks["count"] == 4 and ranks["sent"] == ranks["received"] == 0.75 * 8 * trained
    steps = ranks["steps"]
    assert [step["ranks"] for step in steps] == [2**power for power in range(13)]
    assert (
        steps[0]["efficiency"] == steps[0]["efficiency_grown"] == pytest.approx(1)
        and steps[0]["seconds_exposed"] == 0
    )
    assert all(0 < step["efficiency"] < 1 and step["seconds_exposed"] > 0 for step in steps[1:])
    slow = told(tmp_path, "--ranks", 4, "--network", "10Mbit")["ranks"]["steps"]
    assert all(more["seconds"] > less["seconds"] for more, less in zip(slow[1:], steps[1:], strict=True))


@pytest.mark.usefixtures("known")
def test_memory_is_that_of_one_rank(tmp_path: Path) -> None:
    """Weights and gradients whole, a part of the moments, and what joins it to others."""
    _, plain, found = (told(tmp_path, *ranks) for ranks in ((), (), ("--ranks", 4)))
    assert (
        found["weights"] == found["gradients"] == plain["weights"]
        and plain["exchange"] == 0 < found["exchange"]
    )
    assert 4 * found["moments"] == pytest.approx(plain["moments"], rel=0.01)
    assert 15e6 < found["interpreter"] - plain["interpreter"] < 25e6


@pytest.mark.usefixtures("known")
def test_of_an_adapter_the_adapter_alone_is_sent(tmp_path: Path) -> None:
    model = base(tmp_path / "base.gguf", small(embd=256, heads=4, head_size=64, ff=512, vocab=259), "Q4_0")
    done = ran(
        "plan", "finetune", model, text_file(tmp_path), "--ctx", 32, "--lora-r", 4, "--ranks", 2, "--json"
    )
    found = json.loads(done.out)
    assert found["ranks"]["sent"] == found["weights"], "half of the gradients, and of the weights"


def test_without_ranks_none_are_told_of(tmp_path: Path) -> None:
    assert "ranks" not in planned(tmp_path).out


# ---- how a step is shared -----------------------------------------------------


def one_step(batch: int, grad_acc: int, trained: int = 1000, **more: Any) -> StepShape:
    asked = RunConfig(
        files=(),
        data=DataOptions(),
        train=TrainOptions(batch=batch, grad_acc=grad_acc, **more),
        run=RunOptions(),
    )
    return StepShape(config=asked, trained=trained, grad_bytes=4, max_rows=batch)


@pytest.mark.parametrize(("batch", "grad_acc"), [(8, 1), (12, 1), (6, 4), (1, 16), (7, 3), (5, 2)])
def test_a_step_stays_what_it_is(batch: int, grad_acc: int) -> None:
    step = one_step(batch, grad_acc)
    assert (step.strong_scaled(1)[0].groups, step.strong_scaled(1)[1]) == (1, batch)
    for ranks in (2, 3, 4, 16, 64):
        shared, rows = step.strong_scaled(ranks)
        larger, many = step.weak_scaled(ranks)
        if ranks <= 1 << (step.rows.bit_length() - 1):
            assert shared.micro * rows == step.rows and shared.micro >= shared.groups >= ranks
        elif ranks > step.rows:
            assert (shared.micro, rows, shared.max_micro) == (ranks, 1, 1)
        assert larger.micro * many == ranks * step.rows


def test_groups_that_are_asked_for() -> None:
    step = one_step(8, 1, grad_groups=2)
    assert [(step.strong_scaled(ranks)[0].groups, step.strong_scaled(ranks)[1]) for ranks in (1, 2, 4)] == [
        (1, 8),
        (2, 4),
        (8, 1),
    ]


def test_memory_has_the_last_word_on_rows() -> None:
    assert replace(one_step(32, 1), max_rows=1).strong_scaled(2) == (
        replace(one_step(32, 1).strong_scaled(2)[0], micro=32),
        1,
    )


def test_steps_grow_as_far_as_rows_can_be_counted() -> None:
    step = one_step(1, 1 << 21)
    assert [row.ranks for row in forecast_ranks(step, EFFORT, EFFORT, 1e9, 1)][-1] == 512
    (alone,) = forecast_ranks(one_step(1 << 16, (1 << 31) - 1), EFFORT, EFFORT, 1e9, 1)
    assert alone.efficiency == 1


def test_where_it_stops_paying() -> None:
    """Of 64 rows each of 0.1 seconds, over links on which all that is trained takes a second, or none."""
    step = one_step(64, 1, trained=10**6)
    fast, slow = (list(forecast_ranks(step, EFFORT, EFFORT, bits, 1)) for bits in (1e15, 64e6))
    assert find_useful_ranks(step, fast) == (64, 0.0)
    ranks, more = find_useful_ranks(step, slow)
    rate = {row.ranks: row.rows_per_second for row in slow}
    assert 1 < ranks < 64 and more == rate[2 * ranks] / rate[ranks] < 1.25 <= rate[ranks] / rate[ranks // 2]
    assert all(one.efficiency <= 1.001 for one in (*fast, *slow))
    grown = [row.weak_efficiency for row in slow]
    assert grown == sorted(grown, reverse=True) and grown[0] == 1


# ---- how fast a machine is ----------------------------------------------------


def test_costs_are_found_again() -> None:
    random = np.random.default_rng(1)
    true, seen = {"matmul": (1e-5, 1e-11, 0.0), "add": (2e-6, 0.0, 3e-11)}, []
    for name, (call, flop, byte) in true.items():
        for _ in range(20):
            flops, moved = (
                int(random.integers(10**5, 10**9)) if name == "matmul" else 0,
                int(random.integers(10**3, 10**8)),
            )
            seen.append(
                OpTiming(name, f"{name} f32", OpCost(flops, moved), call + flop * flops + byte * moved)
            )
    found = speeds.fit_costs(seen)
    for name, costs in true.items():
        assert (
            found[name] == found[f"{name} f32"] == pytest.approx([*costs, 0.0, 0.0, 0.0], rel=1e-6, abs=1e-15)
        )
    assert found[OTHER_OPS] == found["add"]


def some(layers: int, **more: Any) -> StepSpec:
    setting = speeds.small_spec(replace(TRAINED, **more) if more else TRAINED, None, (32, 4, 96, 64, 32, 4))
    h = replace(setting.h, layers=layers)
    weights = speeds.trainable_weights(h)
    return replace(setting, h=h, weights=weights, trainable=dict(weights.tensors))


TRAINED = speeds.small_spec(
    StepSpec(
        **dict.fromkeys(("h", "weights", "trainable", "batch", "rope_length")), precision="f32", threads=1
    ),  # type: ignore[arg-type]
    None,
    (32, 4, 96, 64, 32, 4),
)


@pytest.mark.parametrize("policy", ["none", "light", "block"])
def test_few_layers_and_rows_tell_of_many(policy: str) -> None:
    setting = some(7)
    found = step_time(setting, policy, MADE_UP)
    graphs = StepGraphs(replace(setting, batch=5), policy)
    whole = MADE_UP.graph_seconds(graphs.grad_graph(setting.rope_length, True), setting.device)
    assert found.micro_batch(5) == pytest.approx(whole, rel=0.01)
    assert found.update == pytest.approx(
        MADE_UP.graph_seconds(graphs.update_graph(setting.rope_length), setting.device), rel=0.01
    )


def test_a_graph_takes_what_its_nodes_take() -> None:
    setting = some(1)
    graph = StepGraphs(setting).grad_graph(32, True)
    flops = OpSpeeds({OTHER_OPS: (0.0, 1.0, 0.0)}, 0.0).graph_seconds(graph, setting.device)
    assert (
        flops
        == sum(estimate_cost(node).flops for node in collect_nodes(graph.outputs))
        > 6 * 128 * 32 * 4 * 32
    )


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], Path]:
    """Counts measurements, which cost nothing, in a cache of their own."""
    monkeypatch.setenv("LLAMATRAIN_CACHE", str(tmp_path))
    counted = list[int]()

    def measured(setting: StepSpec, base: Any) -> OpSpeeds:
        counted.append(1)
        return OpSpeeds({OTHER_OPS: (1.0, 2.0, float(len(counted)))}, speeds.time.time())

    monkeypatch.setattr(speeds, "measure_speeds", measured)
    return counted, tmp_path / "llamatrain" / "speeds"


def test_a_measurement_serves_for_a_day(
    kept: tuple[list[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, folder = kept
    first = speeds.get_speeds(TRAINED)
    assert speeds.get_speeds(TRAINED).copy_seconds(1) == first.copy_seconds(1) == 1 and len(counted) == 1
    assert speeds.get_speeds(replace(TRAINED, threads=2)).copy_seconds(1) == 2, "of another number of threads"
    assert speeds.get_speeds(replace(TRAINED, precision="bf16")).copy_seconds(1) == 3
    assert speeds.get_speeds(replace(TRAINED, kernels="reference")).copy_seconds(1) == 4
    frozen = replace(TRAINED, trainable={}, weights=speeds.adapter_weights(TRAINED.h, BF16))
    assert speeds.get_speeds(frozen).copy_seconds(1) == 5, "of weights that are read as another type"
    assert len([*folder.iterdir()]) == 5
    now = speeds.time.time()
    monkeypatch.setattr(speeds.time, "time", lambda: now + 2 * speeds.LIFETIME)
    assert speeds.get_speeds(TRAINED).copy_seconds(1) == 6
    monkeypatch.setattr(speeds.time, "time", lambda: now)
    assert speeds.get_speeds(TRAINED).copy_seconds(1) == 7, "nor is one of tomorrow"


def test_a_damaged_measurement_is_made_again(kept: tuple[list[int], Path]) -> None:
    counted, folder = kept
    speeds.get_speeds(TRAINED)
    (file,) = folder.iterdir()
    for content in (b"", b"x", file.read_bytes()[:-1], file.read_bytes().replace(b"1.0", b"9.0")):
        file.write_bytes(content)
        before = len(counted)
        speeds.get_speeds(TRAINED)
        assert len(counted) == before + 1


def test_nowhere_to_keep_it(kept: tuple[list[int], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speeds, "default_cache_dir", lambda name: None)
    assert speeds.get_speeds(TRAINED).copy_seconds(1) == 1 and ObjectStore(None).problem


def test_something_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each op of a training has a cost, and takes longer where there is more of it."""
    monkeypatch.setattr(speeds, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(speeds, "SIZES", speeds.SIZES[3:])
    found = speeds.measure_speeds(TRAINED, None)
    assert {"matmul", "out_prod", "opt_step_adamw", OTHER_OPS} <= found.costs.keys()
    one, more = (step_time(some(layers), "none", found) for layers in (1, 4))
    assert 0 < one.micro_batch(4) < more.micro_batch(4) < 1 and 0 < one.update < more.update


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adamuon", "lbfgs"])
@pytest.mark.parametrize("ranks", [3, 8])
def test_every_rank_plans_alike(optimizer: str, ranks: int) -> None:
    """Those that have more to add up, too: else each would choose another way where memory is short."""
    demand = MemoryDemand(lengths=[32], has_validation=False, decoder_positions=0, resident=0, batches=16)
    more: dict[str, Any] = {
        "groups": 8,
        "ranks": ranks,
        "gradients": "flat",
        "optimizer": get_optimizer(optimizer)(),
    }
    needs = [
        plan_memory(replace(some(2), rank=rank, **more), "none", demand).breakdown for rank in range(ranks)
    ]
    assert all(each == needs[0] for each in needs) and needs[0].exchange
