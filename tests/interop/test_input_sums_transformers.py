"""The sums of an importance matrix are those of what transformers' modules are called with."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamatrain.adapters.load_adapted import load_with_adapters
from llamatrain.adapters.options import AdapterOptions
from llamatrain.data.batches import Batch
from llamatrain.gguf.imatrix import InputSums
from llamatrain.gguf.reader import open_gguf
from llamatrain.sample.input_sums import InputMeter
from tests.helpers import architecture_torch as theirs
from tests.helpers.architecture_models import SHAPES, prompt, rows, shape_of, weights, written

pytestmark = [pytest.mark.reference, pytest.mark.filterwarnings("ignore")]
TOKENS, PADDING = 40, 8


@pytest.fixture(autouse=True)
def libraries() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")


def measured(path: Path, ids: list[int]) -> dict[str, InputSums]:
    """Those of a row with padding behind the tokens."""
    gguf = open_gguf(path)
    h, leaves, arrays = load_with_adapters(gguf, AdapterOptions(), 1)
    length = len(ids) + PADDING
    padded = np.array([[*ids, *[3] * PADDING]], np.int32)
    own = np.arange(length, dtype=np.int32)
    starts = np.where(own < len(ids), 0, own)[None].astype(np.int32)
    positions = np.where(own < len(ids), own, 0)[None].astype(np.int32)
    nothing = np.zeros_like(padded)
    batch = Batch(padded, nothing, nothing.astype(np.float32), positions, starts, len(ids))
    return InputMeter(gguf, h, leaves, arrays, [length], 1).measure(batch)


def expert_sums(module: Any, x: Any, ids: Any) -> dict[str, list[np.ndarray]]:
    """Return the sums and the counts of each expert's inputs, of its first and its last product."""
    import torch

    found: dict[str, list[np.ndarray]] = {"gate_up_proj": [], "down_proj": [], "counts": []}
    for expert in range(len(module.gate_up_proj)):
        tokens = (ids == expert).any(-1)
        gate, up = torch.nn.functional.linear(x[tokens], module.gate_up_proj[expert]).chunk(2, dim=-1)
        for name, inputs in (("gate_up_proj", x[tokens]), ("down_proj", module.act_fn(gate) * up)):
            found[name].append(inputs.square().sum(0).numpy())
        found["counts"].append(tokens.sum().numpy())
    return found


def watched(model: Any, ids: list[int]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the sums of all linear modules and stacks of experts by name, and the counts of the latter."""
    import torch

    sums, counts = {}, {}

    def watch(name: str, module: Any) -> None:
        def linear(_: Any, inputs: tuple[Any, ...]) -> None:
            sums[name] = inputs[0].reshape(-1, inputs[0].shape[-1]).square().sum(0).numpy()

        def experts(_: Any, inputs: tuple[Any, ...]) -> None:
            found = expert_sums(module, *inputs[:2])
            for part in ("gate_up_proj", "down_proj"):
                sums[f"{name}.{part}"], counts[f"{name}.{part}"] = (
                    np.stack(found[part]),
                    np.stack(found["counts"]),
                )

        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(linear)
        elif type(module).__name__ in ("MixtralExperts", "Qwen3MoeExperts", "Qwen2MoeExperts"):
            module.register_forward_pre_hook(experts)

    for name, module in model.named_modules():
        watch(name, module)
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]), use_cache=False)
    return sums, counts


def comparable(name: str, sums: np.ndarray) -> np.ndarray:
    """Return sums without what files change.

    Some have the scale of the logits in the final norm, and some the heads of values in another order.
    """
    if name == "output.weight":
        return np.asarray(sums / sums.mean())
    return np.sort(sums) if name.endswith("ssm_out.weight") else sums


@pytest.mark.parametrize("arch", SHAPES)
def test_sums_and_counts(arch: str, tmp_path: Path) -> None:
    shape = shape_of(arch, "a")
    arrays = weights(shape, last=1.0)
    ids = prompt(TOKENS)
    found = measured(written(tmp_path / "m.gguf", shape, arrays), ids)
    sums, counts = watched(theirs.model(shape, arrays), ids)
    compared = 0
    for name, (module, axes) in rows(shape).items():
        key = module.partition("#")[0].removesuffix(".weight")
        if key not in sums or name not in found:
            continue
        if sums[key].shape[-1] != axes[-1]:  # a module that two weights share after a transposition
            continue
        squares, tokens = found[name]
        got, wanted = (comparable(name, each) for each in (squares, sums[key].reshape(squares.shape)))
        np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=1e-6, err_msg=name)
        assert tokens.tolist() == (counts[key].tolist() if key in counts else [TOKENS]), name
        compared += 1
    missing = [
        name for name, (_, axes) in rows(shape).items() if "attn_output.weight" in name and name not in found
    ]
    assert compared >= 4 and not missing
