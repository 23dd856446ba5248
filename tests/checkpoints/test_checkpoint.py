"""Checkpoints: what is written comes back to the bit, and what is damaged or does not fit together is refused in a line."""

import math
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamatrain.checkpoints import read as reading
from llamatrain.checkpoints.checkpoint import GRADIENTS, Checkpoint, write_checkpoint
from llamatrain.checkpoints.read import read_checkpoint
from llamatrain.errors import FileError
from llamatrain.gguf.reader import open_gguf
from llamatrain.gguf.values import Kind, Value, boolean, f32, number, numbers, string, strings, u32, u64
from llamatrain.grpo.metrics import RolloutStats
from llamatrain.optim.early_stop import StopState
from llamatrain.optim.methods import lbfgs
from llamatrain.optim.methods.lbfgs import LbfgsState
from llamatrain.train.state import BestValidation, Counters, PartialStep, RunState
from tests.helpers.cli import TINY, ran, text_file
from tests.helpers.tiny_checkpoint import forge, sign, tiny_checkpoint
from tests.helpers.tiny_gguf import write_arrays

OPTIMIZERS = ["adam", "sgd", "lbfgs"]


@pytest.fixture(scope="module", params=OPTIMIZERS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("written") / "c.gguf"
    write_checkpoint(path, tiny_checkpoint(request.param, partial=request.param == "adam"))
    return path


@pytest.fixture(scope="module")
def adam(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("adam") / "c.gguf"
    write_checkpoint(path, tiny_checkpoint(partial=True))
    return path


def plain(checkpoint: Checkpoint) -> dict[str, Any]:
    """All of it as things that `==` compares, which NaN is not."""
    facts = {name: value for name, value in vars(checkpoint).items() if name not in ("metadata", "state")}
    arrays = {"weights", "vectors"}
    facts |= {
        name: {key: (a.dtype.str, a.shape, a.tobytes()) for key, a in facts[name].items()} for name in arrays
    }
    metadata = {key: (value.kind, bytes(value.raw)) for key, value in checkpoint.metadata.items()}
    return {
        **facts,
        "metadata": list(metadata.items()),
        "state": repr(checkpoint.state),
        "names": list(checkpoint.weights),
    }


def refused(path: Path) -> str:
    with pytest.raises(FileError) as caught:
        read_checkpoint(path)
    told = str(caught.value)
    assert told.startswith(f"{path}: ") and "\n" not in told
    return told


# ---- there and back --------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("partial", [False, True])
def test_all_comes_back_to_the_bit(tmp_path: Path, optimizer: str, partial: bool) -> None:
    checkpoint = tiny_checkpoint(optimizer, partial=partial)
    write_checkpoint(tmp_path / "a.gguf", checkpoint)
    found = read_checkpoint(tmp_path / "a.gguf")
    assert plain(found) == plain(checkpoint)
    write_checkpoint(tmp_path / "b.gguf", found)
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_rewards_of_generated_answers_come_back(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(partial=True)
    assert checkpoint.state.partial
    checkpoint.state.partial.rewards = RolloutStats(1 / 3, 1 / 9, 4, 17, 1, 16, -2 / 7, None)
    write_checkpoint(tmp_path / "a.gguf", checkpoint)
    assert plain(read_checkpoint(tmp_path / "a.gguf")) == plain(checkpoint)


@pytest.mark.parametrize("seed", [-1, 0, 2**64 - 1, -(2**63)])
def test_ends_of_the_ranges(tmp_path: Path, seed: int) -> None:
    checkpoint = tiny_checkpoint()
    assert checkpoint.state.data
    checkpoint.state.data = checkpoint.state.data._replace(seed=seed, position=2**63, fingerprint="")
    checkpoint.state.counters = Counters(2**40, 2**63, 2**64 - 1, 2**33, 5e-324)
    checkpoint.state.stop = StopState(past_loss_values=[1e300, -0.0])  # infinity and NaN; beyond float32
    checkpoint.metadata |= {
        "general.alignment": u32(256),
        "training.of_a_stranger": u32(1),
        "general.name": string("\udcff"),
    }
    write_checkpoint(tmp_path / "a.gguf", checkpoint)
    for name in ("general.alignment", "training.of_a_stranger"):
        del checkpoint.metadata[name]
    assert plain(read_checkpoint(tmp_path / "a.gguf")) == plain(checkpoint)


def test_data_may_begin_anew(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint()
    checkpoint.state.data = None
    write_checkpoint(tmp_path / "a.gguf", checkpoint)
    assert read_checkpoint(tmp_path / "a.gguf").state.data is None


def test_pieces_are_the_parameters_of_a_vector(adam: Path) -> None:
    checkpoint = read_checkpoint(adam)
    name = "optimizer.adam.first_moments"
    pieces = checkpoint.split_vector(name)
    assert list(pieces) == checkpoint.order
    assert all(piece.shape == checkpoint.weights[key].shape for key, piece in pieces.items())
    np.testing.assert_array_equal(
        np.concatenate([piece.ravel() for piece in pieces.values()]), checkpoint.vectors[name]
    )


def test_lbfgs_goes_on_as_if_never_stopped(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("lbfgs")
    n = checkpoint.vectors["optimizer.lbfgs.current_gradients"].size
    scale = np.linspace(1, 30, n).astype(np.float32)

    def evaluate(x: np.ndarray) -> tuple[float, np.ndarray]:
        return float(np.sum(scale * np.cos(x, dtype=np.float64))), -scale * np.sin(x)

    state = LbfgsState(np.linspace(0.1, 2, n).astype(np.float32))
    for _ in range(8):
        assert state.step(evaluate) is None
    prefix, kept = "optimizer.lbfgs.", state.state_values()
    checkpoint.vectors = {prefix + key: value for key, value in kept.items() if isinstance(value, np.ndarray)}
    checkpoint.numbers = {
        prefix + key: value for key, value in kept.items() if not isinstance(value, np.ndarray)
    }
    write_checkpoint(tmp_path / "a.gguf", checkpoint)
    found = read_checkpoint(tmp_path / "a.gguf")
    resumed = LbfgsState(np.zeros(n, np.float32))
    resumed.restore(found.optimizer_values)
    for _ in range(3):
        state.step(evaluate), resumed.step(evaluate)
    assert state.x.tobytes() == resumed.x.tobytes() and state.loss == resumed.loss


def test_what_is_counted_on_from_the_largest_number_stays_it(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint()
    checkpoint.state.stop.no_improvement_count = 2**64
    write_checkpoint(tmp_path / "a.gguf", checkpoint)
    assert read_checkpoint(tmp_path / "a.gguf").state.stop.no_improvement_count == 2**64 - 1


def test_other_readers_find_the_keys_of_the_ancestors(adam: Path) -> None:
    gguf = open_gguf(adam)
    kinds = {
        "training.type": Kind.STRING,
        "training.file_version": Kind.UINT32,
        **{f"training.{name}_count": Kind.UINT64 for name in ("iteration", "sample", "token", "epoch")},
        "training.shuffle.next_sample": Kind.UINT64,
        "optimizer.file_version": Kind.UINT32,
        "optimizer.convergence_past_count": Kind.UINT32,
        "optimizer.parameter_count": Kind.UINT64,
        "optimizer.iteration_count": Kind.UINT32,
        "optimizer.just_initialized": Kind.BOOL,
        "optimizer.type": Kind.STRING,
        "optimizer.adam.best_loss": Kind.FLOAT32,
        "optimizer.adam.previous_loss": Kind.FLOAT32,
        "optimizer.adam.no_improvement_count": Kind.UINT32,
    }
    assert {key: gguf.metadata.raw_values[key].kind for key in kinds} == kinds
    assert gguf.kind == "checkpoint" and list(gguf.tensors)[-1] == "optimizer.adam.past_loss_values"
    ring = gguf.tensors["optimizer.adam.past_loss_values"].raw.view("<f4")
    losses = tiny_checkpoint().state.stop.past_loss_values  # of iterations 2 to 6, of 7
    np.testing.assert_array_equal([ring[i % 5] for i in range(2, 7)], np.array(losses, np.float32))


def test_big_arrays_are_not_copied(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint()
    checkpoint.weights["big.weight"] = np.ones((1 << 12, 1 << 12), np.float32)
    tracemalloc.start()
    write_checkpoint(tmp_path / "a.gguf", checkpoint)
    found = read_checkpoint(tmp_path / "a.gguf")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20
    assert not any(array.flags.writeable for array in (found.weights | found.vectors).values())


def test_metadata_does_not_keep_the_file_open(adam: Path) -> None:
    """A run has it until its end, and its first checkpoint is removed long before."""
    assert all(type(value.raw) is bytes for value in read_checkpoint(adam).metadata.values())


# ---- damage ----------------------------------------------------------------


def test_any_flipped_bit_is_seen(written: Path, tmp_path: Path) -> None:
    content, random = written.read_bytes(), np.random.default_rng(5)
    head = min(tensor.offset for tensor in open_gguf(written).tensors.values())
    places = [
        *range(64),
        *random.integers(0, head, 150).tolist(),
        *random.integers(head, len(content), 100).tolist(),
    ]
    path = tmp_path / "c.gguf"
    for place in [*places, len(content) - 1]:
        damaged = bytearray(content)
        damaged[place] ^= 1 << int(random.integers(8))
        path.write_bytes(damaged)
        refused(path)


def test_what_is_cut_off_or_behind_is_seen(written: Path, tmp_path: Path) -> None:
    content, path = written.read_bytes(), tmp_path / "c.gguf"
    for length in (0, 10, 60, 4000, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        refused(path)
    path.write_bytes(content + b"\0")
    assert "the file is damaged" in refused(path)


def test_hostile_files_with_a_right_checksum_never_end_in_a_traceback(written: Path, tmp_path: Path) -> None:
    content, random = written.read_bytes(), np.random.default_rng(6)
    start = content.index(b"training.file_version")
    head = min(tensor.offset for tensor in open_gguf(written).tensors.values())
    path, passed = tmp_path / "c.gguf", 0
    for _ in range(300):
        damaged = bytearray(content)
        for place in random.integers(start, head, random.integers(1, 4)):
            damaged[place] = random.choice(
                [0, 1, 0x0A, 0x7F, 0x80, 0xFF, *random.integers(256, size=2).tolist()]
            )
        path.write_bytes(damaged)
        try:
            read_checkpoint(sign(path))
            passed += 1
        except FileError as error:
            assert "\n" not in str(error)
    assert passed < 200


# ---- what does not fit together --------------------------------------------


VALUES: list[tuple[dict[str, Value | None], str]] = [
    ({"training.file_version": u32(3)}, "version must be 0 to 2 (got 3); a newer llamatrain wrote it"),
    ({"training.file_version": None}, "the key training.file_version is missing"),
    ({"training.checksum": None}, "training.checksum is missing"),
    ({"training.type": string("dance")}, "type of run must be train_model or finetune_lora (got 'dance')"),
    ({"training.type": u32(1)}, "training.type must be of type str (got UINT32)"),
    (
        {"training.iteration_count": number(Kind.INT64, -1)},
        "training.iteration_count must be at least 0 (got -1)",
    ),
    (
        {"training.shuffle.next_row": number(Kind.INT8, -1)},
        "training.shuffle.next_row must be at least 0 (got -1)",
    ),
    ({"training.shuffle.fingerprint": None}, "training.shuffle.fingerprint is missing"),
    ({"training.seconds": number(Kind.FLOAT64, math.inf)}, "training.seconds is out of range (got inf)"),
    ({"training.seconds": number(Kind.FLOAT64, math.nan)}, "training.seconds is out of range (got nan)"),
    ({"training.best_loss": number(Kind.FLOAT64, math.nan)}, "(best loss nan)"),
    (
        {"training.past_loss_values": numbers(Kind.FLOAT64, [1, math.nan])},
        "the past losses are invalid",
    ),
    (
        {"training.past_loss_values": strings(["1"])},
        "training.past_loss_values must be of type ndarray (got ARRAY)",
    ),
    ({"training.options": string("{")}, "training.options is not valid JSON"),
    ({"training.options": string("[" * 100_000)}, "training.options is not valid JSON"),
    ({"training.options": string("9" * 5000)}, "training.options is not valid JSON"),
    ({"training.options": string("[]")}, "training.options must be a JSON object"),
    ({"training.partial": None}, "is missing; one needs the other"),
    ({"training.partial": string('{"count": 2, "losses": [0.5], "extra": {}}')}, "has invalid losses"),
    ({"training.partial": string('{"count": 1, "losses": [NaN], "extra": {}}')}, "has invalid losses"),
    ({"training.partial": string('{"count": 1, "losses": ["1"], "extra": {}}')}, "has invalid losses"),
    ({"training.partial": string("{}")}, "has invalid losses"),
    ({"optimizer.type": string("nothing")}, "the optimizer must be one of adamuon, adam, lbfgs, "),
    ({"optimizer.type": string("sgd")}, "tensor optimizer.sgd.momentum is missing"),
    ({"optimizer.parameter_count": u64(2**60)}, "11 parameters must have 1152921504606846976 elements"),
    ({"optimizer.parameter_order": strings([])}, "must be a list of names"),
    (
        {"optimizer.parameter_order": numbers(Kind.UINT8, [1])},
        "optimizer.parameter_order must be of type list (got ARRAY)",
    ),
    ({"optimizer.parameter_order": strings(["x\n"])}, r"parameter 'x\n' has no weights"),
    (
        {
            "optimizer.parameter_order": strings(["output_norm.weight"] * 2),
            "optimizer.parameter_count": u64(64),
        },
        "2 parameters must have",
    ),
    ({"optimizer.adam.more": string("x")}, "'optimizer.adam.more' must be a number"),
]


@pytest.mark.parametrize(
    ("values", "reason"), VALUES, ids=lambda each: each[:30] if isinstance(each, str) else None
)
def test_values_that_do_not_fit(
    adam: Path, tmp_path: Path, values: dict[str, Value | None], reason: str
) -> None:
    assert reason in refused(forge(adam, tmp_path / "c.gguf", values))


def spoiled(name: str, value: float) -> Callable[[Checkpoint], None]:
    def spoil(checkpoint: Checkpoint) -> None:
        arrays = checkpoint.weights if name in checkpoint.weights else checkpoint.vectors
        arrays[name].flat[-1] = value

    return spoil


def cut(name: str) -> Callable[[Checkpoint], None]:
    return lambda checkpoint: checkpoint.vectors.update({name: checkpoint.vectors[name][..., 1:]})


def turned(name: str) -> Callable[[Checkpoint], None]:
    return lambda checkpoint: checkpoint.vectors.update({name: checkpoint.vectors[name].reshape(2, -1)})


def told(key: str, value: int) -> Callable[[Checkpoint], None]:
    return lambda checkpoint: checkpoint.numbers.update({key: value})


ARRAYS: list[tuple[str, Callable[[Checkpoint], object], str]] = [
    ("adam", spoiled("output_norm.weight", math.nan), "'output_norm.weight' has values that are not finite"),
    ("adam", spoiled("token_embd.weight", -math.inf), "'token_embd.weight' has values that are not finite"),
    (
        "adam",
        spoiled("optimizer.adam.first_moments", math.inf),
        "first_moments' has values that are not finite",
    ),
    ("adam", spoiled("optimizer.adam.second_moments", -1e-30), "second_moments has values below 0"),
    (
        "adam",
        cut("optimizer.adam.first_moments"),
        "first_moments' must have the shape [18624] (got [18623])",
    ),
    (
        "adam",
        turned("optimizer.adam.first_moments"),
        "first_moments' must have the shape [18624] (got [2, 9312])",
    ),
    (
        "adam",
        lambda c: c.vectors.pop("optimizer.adam.second_moments"),
        "tensor optimizer.adam.second_moments is missing",
    ),
    (
        "adam",
        lambda c: c.vectors.update({GRADIENTS: np.ones(5, np.float32)}),
        "is missing; one needs the other",
    ),
    ("adam", lambda c: setattr(c.state, "partial", PartialStep([0.5])), "is missing; one needs the other"),
    ("adam", lambda c: c.weights.update(extra=np.ones(3)), "tensor 'extra' must be F32 (got F64)"),
    ("lbfgs", cut("optimizer.lbfgs.memory_y"), "memory_y' must have the shape [3, 18624] (got [3, 18623])"),
    (
        "lbfgs",
        cut("optimizer.lbfgs.memory_ys"),
        "memory_s' must have the shape [2, 18624] (got [3, 18624])",
    ),
    (
        "lbfgs",
        lambda c: c.vectors.pop("optimizer.lbfgs.memory_ys"),
        "tensor optimizer.lbfgs.memory_ys is missing",
    ),
    (
        "lbfgs",
        told("optimizer.lbfgs.line_search_end", 3),
        "the next one to go to place 3 cannot be in a history of 3",
    ),
    ("lbfgs", told("optimizer.lbfgs.approx_hessian_count", 4), "4 moves held"),
    (
        "lbfgs",
        lambda c: c.numbers.pop("optimizer.lbfgs.line_search_end"),
        "place None cannot be in a history of 3",
    ),
]


@pytest.mark.parametrize(("optimizer", "spoil", "reason"), ARRAYS, ids=[each[2][:30] for each in ARRAYS])
def test_arrays_that_do_not_fit(
    tmp_path: Path, optimizer: str, spoil: Callable[[Checkpoint], object], reason: str
) -> None:
    checkpoint = tiny_checkpoint(optimizer)
    spoil(checkpoint)
    write_checkpoint(tmp_path / "c.gguf", checkpoint)
    assert reason in refused(tmp_path / "c.gguf")


def test_lbfgs_may_begin_anew(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("lbfgs")
    checkpoint.vectors, checkpoint.numbers = {}, {}
    write_checkpoint(tmp_path / "c.gguf", checkpoint)
    assert not read_checkpoint(tmp_path / "c.gguf").vectors


def test_files_of_other_kinds(tmp_path: Path) -> None:
    model = write_arrays(tmp_path / "m.gguf", tiny_checkpoint().metadata, tiny_checkpoint().weights)
    assert "not a checkpoint of a training run (kind model)" in refused(model)
    assert "No such file" in refused(tmp_path / "nothing.gguf")
    empty = write_arrays(
        tmp_path / "e.gguf", {"training.checksum": f32(1), "training.iteration_count": u32(1)}, {}
    )
    assert "training.file_version is missing" in refused(empty)
    told = {
        "training.checksum": u32(1),
        "training.iteration_count": boolean(True),
        "training.file_version": u32(2),
    }
    assert "the file has no tensors" in refused(write_arrays(tmp_path / "e.gguf", told, {}))


def test_nothing_of_a_checkpoint_is_forgotten_by_these_tests() -> None:
    """Each field of the tiny checkpoint differs from what a fresh one has, so that one that is lost is seen."""
    checkpoint = tiny_checkpoint(partial=True)
    state = checkpoint.state
    assert state.partial and state.data and all(asdict(state.partial).values())
    parts = ((state.counters, Counters()), (state.stop, StopState()), (state.best, BestValidation()))
    for told, fresh in ((state, RunState()), *parts):
        assert all(repr(a) != repr(b) for a, b in zip(vars(told).values(), vars(fresh).values(), strict=True))
    assert all(state.data._replace(taken=1)), "what follows from the others is not kept"
    assert checkpoint.extra and checkpoint.options and tiny_checkpoint("lbfgs").numbers


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the pages of files are told by Linux")
def test_what_was_looked_at_does_not_stay_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a history, which is held against itself."""
    large = ("--embd", 256, "--ff", 512, "--optimizer", "lbfgs", "--ctx", 16, "--batch", 1, "--iters", 3)
    ran("from-scratch", text_file(tmp_path), *TINY, *large, "--out", tmp_path / "run")
    newest = tmp_path / "run" / "checkpoint-3.gguf"
    held, dot, ends, before = list[int](), lbfgs._dot, reading._min_max, pages()
    monkeypatch.setattr(lbfgs, "_dot", lambda a, b: held.append(pages()) or dot(a, b))
    monkeypatch.setattr(reading, "_min_max", lambda array: held.append(pages()) or ends(array))
    assert read_checkpoint(newest).vectors and newest.stat().st_size > 40e6
    assert len(held) > 10 and max(held) - before < 8e6


def pages() -> int:
    """Bytes of files that this process has in memory."""
    return int(Path("/proc/self/status").read_text().partition("RssFile:")[2].split()[0]) * 1024
