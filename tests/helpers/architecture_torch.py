"""The same small models as Hugging Face's own classes in torch, and arrays to and from their names and ways."""

import warnings
from fnmatch import fnmatch
from typing import Any

import numpy as np
import pytest

from tests.helpers.architecture_family import CONTROL, EMBEDDINGS, LAYERS_OF_EXPERTS, Shape
from tests.helpers.architecture_models import Arrays, prompt, rows, trainable, weights
from tests.helpers.architecture_runs import ALPHA, RANK, RATE, STEPS, Pairs, corner, factors, halves, seen
from tests.helpers.architectures import FAMILIES

VECTORS = ("norm.weight", "shared_expert_gate.weight")  # also if they have two axes there


def model(shape: Shape, arrays: Arrays) -> Any:
    """In float32, with plain attention."""
    torch, library = pytest.importorskip("torch"), pytest.importorskip("transformers")
    family = FAMILIES[shape.arch]
    family.adjust(shape)
    config, kind = getattr(library, family.config), getattr(library, family.model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = settings(shape)
        if family.vision is not None:
            tied = given["tie_word_embeddings"]
            given = {"text_config": given, "vision_config": family.vision, "tie_word_embeddings": tied}
        made = kind(config(**given, attn_implementation="eager")).float().eval()
    state: dict[str, Any] = {}
    for name, (theirs, _) in rows(shape).items():
        for part, array in split_stack(theirs, to_theirs(shape, name, arrays[name])):
            whole, _, number = part.partition("#")
            parts = [state[whole]] if number not in ("", "0") else []
            dim = -1 if "bias" in theirs else -min(2, array.ndim)
            state[whole] = torch.cat([*parts, torch.from_numpy(array)], dim=dim)
    if shape.tied and family.predicts_text:
        state["lm_head.weight"] = state[rows(shape)[EMBEDDINGS][0]]
    constants = family.their_constants(shape)
    state |= {name: torch.from_numpy(np.asarray(array)) for name, array in constants.items()}
    state = {
        name: torch.from_numpy(family.whole_to_theirs(shape, name, each.numpy()))
        for name, each in state.items()
    }
    lacking, unknown = made.load_state_dict(state, strict=False)
    assert not unknown and all(".visual." in name for name in lacking)
    for name, each in made.named_parameters():
        if name in constants:
            each.requires_grad_(False)
    return made


def split_stack(theirs: str, array: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Return the matrices of a stack by their names, in which `*` is a number; or the array alone."""
    if "*" not in theirs:
        return [(theirs, array)]
    return [(theirs.replace("*", f"{number}"), each) for number, each in enumerate(array)]


def stacked_gradient(named: dict[str, Any], shape: Shape, mine: str, theirs: str, size: int) -> np.ndarray:
    """Return the gradient of a weight, of a stack of matrices, or of some rows of a weight: the part behind `#`.

    The first part has the first rows of its weight, and the second the last, unless the family says which.
    """
    family = FAMILIES[shape.arch]
    if "#" in theirs:
        whole, _, number = theirs.partition("#")
        grad, listed = (
            family.whole_to_ours(shape, whole, named[whole].grad.numpy()),
            family.part_rows(shape, mine),
        )
        rows = (slice(size) if number == "0" else slice(-size, None)) if listed is None else listed
        return grad[..., rows] if theirs.endswith(f"bias#{number}") else grad[..., rows, :]
    if "*" not in theirs:
        return family.whole_to_ours(shape, theirs, named[theirs].grad.numpy())
    names = sorted(name for name in named if fnmatch(name, theirs))
    return np.stack([named[name].grad.numpy() for name in names])


def settings(shape: Shape) -> dict[str, Any]:
    found = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.embd,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "intermediate_size": shape.ff,
        "max_position_embeddings": shape.ctx,
        "rms_norm_eps": shape.eps,
        "tie_word_embeddings": shape.tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.base},
        "pad_token_id": None,
        "bos_token_id": 1,
        "eos_token_id": CONTROL - 1,
    }
    return found | FAMILIES[shape.arch].settings(shape)


def heads_of(shape: Shape, name: str) -> int:
    """How many heads' rows are in another order there than here."""
    if not FAMILIES[shape.arch].pairs:
        return 0
    return {"attn_q": shape.heads, "attn_k": shape.kv_heads}.get(name.split(".")[-2], 0)


def order(size: int) -> np.ndarray:
    """Of theirs, in ours: theirs turns row i of a head with i + half, ours 2 i with 2 i + 1."""
    return np.arange(size).reshape(2, -1).T.ravel()


def has_less_one(shape: Shape, name: str, array: np.ndarray) -> bool:
    """Return True if the weight is a norm that Hugging Face keeps less 1."""
    family = FAMILIES[shape.arch]
    return family.norms_less_one and array.ndim == 1 and name.endswith("norm.weight") and "ssm_" not in name


def to_theirs(shape: Shape, name: str, array: np.ndarray) -> np.ndarray:
    array = FAMILIES[shape.arch].to_theirs(shape, name, array)
    if heads := heads_of(shape, name):
        whole = array.reshape(heads, -1, *array.shape[1:])
        array = whole[:, np.argsort(order(whole.shape[1]))].reshape(array.shape)
    return np.ascontiguousarray(array - np.float32(1)) if has_less_one(shape, name, array) else array.copy()


def change_to_ours(shape: Shape, name: str, array: np.ndarray) -> np.ndarray:
    """Of a gradient: what is beside 1 is of no account."""
    if heads := heads_of(shape, name):
        whole = array.reshape(heads, -1, *array.shape[1:])
        array = whole[:, order(whole.shape[1])].reshape(array.shape)
    return FAMILIES[shape.arch].gradient_to_ours(shape, name, array)


def logits(made: Any, ids: list[int]) -> np.ndarray:
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        return made(torch.tensor([ids])).logits[0].numpy()


# ---- training ---------------------------------------------------------------


def loss(made: Any, batch: list[dict[str, list[float]]]) -> Any:
    """The mean over what is trained of all rows."""
    torch = pytest.importorskip("torch")
    tokens, targets = (
        torch.tensor([row[name] for row in batch], dtype=torch.int64) for name in ("tokens", "targets")
    )
    counted = torch.tensor([row["weights"] for row in batch], dtype=torch.float32)
    found = made(tokens, use_cache=False).logits.float()
    each = torch.nn.functional.cross_entropy(found.flatten(0, 1), targets.flatten(), reduction="none")
    return (each * counted.flatten()).sum() / counted.sum()


def gradients(made: Any, shape: Shape, batch: list[dict[str, list[float]]]) -> Arrays:
    """By GGUF's names, in its ways."""
    loss(made, batch).backward()
    named, wanted = dict(made.named_parameters()), trainable(shape)
    return {
        mine: change_to_ours(
            shape,
            mine,
            stacked_gradient(named, shape, mine, theirs, axes[-1 if "bias" in theirs else -2 :][0]),
        )
        for mine, (theirs, axes) in rows(shape).items()
        if mine in wanted
    }


def with_adapter(made: Any, shape: Shape, pairs: Pairs) -> Any:
    """PEFT's own, on every linear weight, with these factors."""
    torch, library = pytest.importorskip("torch"), pytest.importorskip("peft")
    theirs = [rows(shape)[name][0] for name in pairs]
    ends = LAYERS_OF_EXPERTS if FAMILIES[shape.arch].adapts_by_weight else ()
    by_weight = [name for name in theirs if name.split(".")[-2] in ends]
    wanted = sorted({name.split(".")[-2] for name in theirs if name not in by_weight})
    config = library.LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=wanted, target_parameters=by_weight, task_type="CAUSAL_LM"
    )
    held = library.get_peft_model(made, config)
    named = dict(held.named_parameters())
    for name, pair in pairs.items():
        for half, array in zip("AB", pair, strict=True):
            theirs = factor_to_theirs(shape, name, half, array)
            named[factor(shape, name, half)].data = torch.from_numpy(theirs.copy())
    trained = {name for name, each in named.items() if each.requires_grad}
    assert trained == {factor(shape, name, half) for name in pairs for half in "AB"}
    return held


def factor(shape: Shape, name: str, half: str) -> str:
    return f"base_model.model.{rows(shape)[name][0].removesuffix('.weight')}.lora_{half}.default.weight"


def lora_gradients(held: Any, shape: Shape, batch: list[dict[str, list[float]]], pairs: Pairs) -> Pairs:
    loss(held, batch).backward()
    named = dict(held.named_parameters())
    found = {name: [named[factor(shape, name, half)].grad.numpy() for half in "AB"] for name in pairs}
    return {name: factor_gradients(shape, name, a, b) for name, (a, b) in found.items()}


def factor_to_theirs(shape: Shape, name: str, half: str, array: np.ndarray) -> np.ndarray:
    """Return a factor of an adapter as PEFT has it: A has the columns of the weight, B its rows."""
    order = FAMILIES[shape.arch].input_order(shape, name)
    if half == "A":
        return array if order is None else array[:, order]
    return array if order is not None else to_theirs(shape, name, array)


def factor_gradients(shape: Shape, name: str, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradients of both factors as ours are."""
    order = FAMILIES[shape.arch].input_order(shape, name)
    if order is None:
        return a, change_to_ours(shape, name, b)
    return a[:, np.argsort(order)], b


def losses(made: Any, batch: list[dict[str, list[float]]], steps: int, rate: float) -> list[float]:
    """Of AdamW with its usual numbers, a tenth of decay for matrices, and gradients cut to a norm of 1."""
    torch = pytest.importorskip("torch")
    named = {name: p for name, p in made.named_parameters() if p.requires_grad}
    trained = [*named.values()]
    vectors = {name for name, p in named.items() if p.ndim < 2 or name.endswith(VECTORS)}
    groups = [{"params": [p for name, p in named.items() if name not in vectors], "weight_decay": 0.1}]
    groups.append({"params": [named[name] for name in sorted(vectors)], "weight_decay": 0.0})
    optimizer, found = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.999), eps=1e-8), []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(made, batch)
        value.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        found.append(float(value.detach()))
    return found


def told(shape: Shape, batch: list[dict[str, list[float]]]) -> dict[str, Any]:
    """What is compared of a model: logits, gradients of one batch, and the losses of a run, in full and with LoRA."""
    hot, calm, pairs = weights(shape), weights(shape, last=1.0), factors(shape)
    lora = lora_gradients(with_adapter(model(shape, calm), shape, pairs), shape, batch, pairs)
    return {
        "logits": corner(logits(model(shape, hot), prompt())),
        "gradients": seen(gradients(model(shape, calm), shape, batch)),
        "losses": losses(model(shape, calm), batch, STEPS, RATE),
        "lora_gradients": seen(halves(lora)),
        "lora_losses": losses(with_adapter(model(shape, calm), shape, pairs), batch, STEPS, RATE),
    }
