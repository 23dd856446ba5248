"""Chooses the type that each tensor of a new file has."""

from collections.abc import Mapping

from llamatrain.config.options import format_flag
from llamatrain.errors import UsageError
from llamatrain.gguf.opened_file import FileTensor
from llamatrain.gguf.types import GgmlType, TensorInfo
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.lora_targets import group_weights


def choose_types(
    tensors: Mapping[str, FileTensor] | Mapping[str, TensorInfo],
    h: Hyperparameters,
    target: GgmlType | None,
    source: object,
    option: str = "type",
) -> dict[str, GgmlType]:
    """Return the types of all tensors of a new model, by name.

    With a target, matrices and stacks of experts whose rows are whole blocks get it; all else keeps its own type.
    llama.cpp reads norms, biases and taps of convolutions in float32 alone, also if they have rows, and leaves
    routers as they are. `source` has the tensors, and `option` asked for the target, in an error.
    """
    if target is None:
        return {name: tensor.type for name, tensor in tensors.items()}
    unchanged = {name for name, kind in h.weight_kinds() if kind.stays_float32} | group_weights("router", h)
    stacks = group_weights("experts", h)
    types = {
        name: target
        if name not in unchanged
        and (len(tensor.shape) == 2 or name in stacks)
        and tensor.shape[-1] % target.block_size == 0
        else tensor.type
        for name, tensor in tensors.items()
    }
    if target not in types.values():
        raise UsageError(
            f"{format_flag(option)} {target.name.lower()} fits no matrix of {source}: rows must be multiples "
            f"of {target.block_size}",
            code="type-does-not-fit",
        )
    return types
