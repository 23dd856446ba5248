"""Estimates the cost of a node: floating-point operations and bytes moved."""

from collections.abc import Callable
from dataclasses import dataclass

from llamatrain.graph.ops.recurrent import CHUNK
from llamatrain.graph.tensor import Node, QuantizedType, Tensor


@dataclass(frozen=True)
class OpCost:
    """The cost of a node."""

    flops: int  # of products and attention; 0: the op is bound by memory
    bytes_moved: int  # bytes read and written, each once
    bytes_written: int = 0  # bytes of the results
    exponentials: int = 0  # exponentials, of logits and of scores
    dequantized: int = 0  # elements of quantized weights


def estimate_cost(node: Node) -> OpCost:
    """Return the cost of a node."""
    flops = FLOPS.get(node.op.name)
    bytes_moved = MOVED.get(node.op.name, all_bytes)
    exponentials = EXPONENTIALS.get(node.op.name)
    bytes_written = sum(output.nbytes for output in node.outputs if output.index not in node.aliases)
    dequantized = (
        sum(source.size for source in node.sources if isinstance(source.dtype, QuantizedType)) if flops else 0
    )
    return OpCost(
        flops(node) if flops else 0,
        bytes_moved(node),
        bytes_written,
        exponentials(node) if exponentials else 0,
        dequantized,
    )


# ---- operations ------------------------------------------------------------


def matmul_flops(node: Node, shared_axis: int = -1) -> int:
    """Return the operations of a matrix product."""
    return 2 * node.outputs[0].size * node.sources[0].shape[shared_axis]


def expert_sum_flops(node: Node) -> int:
    """Return the operations of sums over the choices of experts."""
    a, b, order = node.sources[:3]
    return 2 * order.size * a.shape[-1] * b.shape[-1]


def head_flops(node: Node) -> int:
    """Return the operations of the fused output head: one product, and one more for each gradient."""
    x, w = head_operands(node)
    return 2 * x.size * w.shape[0] * (1 + node.attrs.get("dx", False) + node.attrs.get("dw", False))


def head_operands(node: Node) -> tuple[Tensor, Tensor]:
    """Return the input rows and the weight of the fused output head."""
    first = node.op.name.endswith("_back")  # the number of sources before x
    x, w = node.sources[first : first + 2]
    return x, w


def attention_flops(node: Node) -> int:
    """Return the operations of attention: two products forward and five backward.

    A causal mask and a window limit the keys. With explicit ranges, the window's limit is assumed.
    """
    first = node.op.name.endswith("_back")
    (batch, queries, heads, size), keys = node.sources[first].shape, node.sources[first + 1].shape[1]
    causal = len(node.sources) == (7 if first else 4)
    window = node.attrs.get("window") or keys
    past = max(0, keys - window)  # keys before the window of the last query; one less for each query before
    if causal:
        few = min(queries, past)
        seen = queries * keys - queries * (queries - 1) // 2 - few * past + few * (few - 1) // 2
    else:
        seen = queries * (keys - past)
    return 2 * (5 if first else 2) * size * batch * heads * seen


def delta_rule_flops(node: Node) -> int:
    """Return the operations of the gated delta rule in chunks: half of each square of scores is used.

    Without correction, the keys are not compared with each other, nor read from the state.
    """
    back = node.op.name.endswith("_back")
    q, _, v = node.sources[back : back + 3]
    (batch, length, heads, width), size, chunk = v.shape, q.shape[3], node.attrs.get("chunk", CHUNK)
    both, correct = size * width, node.attrs.get("correct", True)
    work = chunk * (4 * size + 2 * width) + 6 * both if correct else chunk * (2 * size + width) + 4 * both
    if back and correct:
        work += chunk * (8 * size + 6 * width) + 14 * both
    elif back:
        work += chunk * (4 * size + 4 * width) + 10 * both
    return batch * length * heads * work


def delta_step_flops(node: Node) -> int:
    """Return the operations of the gated delta rule, token by token: three products with the state, or two."""
    state, tokens = node.sources[0], node.sources[1].shape[1]
    return (6 if node.attrs.get("correct", True) else 4) * state.size * tokens


FLOPS: dict[str, Callable[[Node], int]] = {
    "gated_delta_rule": delta_rule_flops,
    "gated_delta_rule_back": delta_rule_flops,
    "gated_delta_step": delta_step_flops,
    "matmul": matmul_flops,
    "matmul_nn": matmul_flops,
    "matmul_int8": matmul_flops,
    "matmul_nn_int8": matmul_flops,
    "matmul_add": lambda node: 2 * node.outputs[0].size * node.sources[1].shape[-1],
    "matmul_nn_add": lambda node: 2 * node.outputs[0].size * node.sources[1].shape[-1],
    "out_prod": lambda node: matmul_flops(node, -2),
    "expert_matmul": matmul_flops,
    "expert_matmul_nn": matmul_flops,
    "expert_matmul_int8": matmul_flops,
    "expert_matmul_nn_int8": matmul_flops,
    "expert_out_prod": expert_sum_flops,
    "linear_cross_entropy": head_flops,
    "linear_cross_entropy_judged": head_flops,
    "linear_cross_entropy_back": head_flops,
    "flash_attn": attention_flops,
    "flash_attn_back": attention_flops,
}


# ---- exponentials ----------------------------------------------------------


def logit_exponentials(node: Node) -> int:
    """Return the number of exponentials of the output head."""
    x, w = head_operands(node)
    return x.size // x.shape[-1] * w.shape[0]


def score_exponentials(node: Node) -> int:
    """Return the number of exponentials of attention, one for each score."""
    first = node.op.name.endswith("_back")
    return attention_flops(node) // (2 * (5 if first else 2) * node.sources[first].shape[-1])


EXPONENTIALS: dict[str, Callable[[Node], int]] = {
    "linear_cross_entropy": logit_exponentials,
    "linear_cross_entropy_judged": logit_exponentials,
    "linear_cross_entropy_back": logit_exponentials,
    "flash_attn": score_exponentials,
    "flash_attn_back": score_exponentials,
}

# ---- bytes -----------------------------------------------------------------


def all_bytes(node: Node) -> int:
    """Return the bytes of all sources and results."""
    return sum(tensor.nbytes for tensor in dict.fromkeys((*node.sources, *node.outputs)))


def gathered_bytes(node: Node) -> int:
    """Return the bytes of a lookup: only the rows that are asked for."""
    table, ids = node.sources
    return ids.nbytes + ids.size * (table.nbytes // max(1, table.shape[0])) + node.outputs[0].nbytes


def used_share(node: Node) -> float:
    """Return the largest share of experts that choices can use."""
    choices, experts = node.sources[2].size, node.sources[3].size
    return min(1.0, choices / experts)


def expert_bytes(node: Node) -> int:
    """Return the bytes of a product with experts, of which only those with choices are read."""
    w = node.sources[1]
    return all_bytes(node) - w.nbytes + int(w.nbytes * used_share(node))


def update_bytes(part: Tensor, node: Node, times: int) -> int:
    """Return the bytes of an update of a part: in place, or with a copy of the rest."""
    return times * part.nbytes if node.attrs.get("into") else all_bytes(node)


MOVED: dict[str, Callable[[Node], int]] = {
    "get_rows": gathered_bytes,
    "expert_matmul": expert_bytes,
    "expert_matmul_nn": expert_bytes,
    "expert_matmul_int8": expert_bytes,
    "expert_matmul_nn_int8": expert_bytes,
    "set_rows": lambda node: (
        update_bytes(node.sources[1], node, 2) + (node.sources[2].nbytes if node.attrs.get("into") else 0)
    ),
    "acc": lambda node: update_bytes(node.sources[1], node, 3),
    "set": lambda node: update_bytes(node.sources[1], node, 2),
    "cpy": lambda node: node.sources[1].nbytes + node.outputs[0].nbytes,
}

# ---- bytes of a base -------------------------------------------------------


def quantized_bytes(node: Node) -> float:
    """Return the bytes of quantized weights that a node reads: the rows that are asked for, and experts in use."""
    total = sum(source.nbytes for source in node.sources if isinstance(source.dtype, QuantizedType))
    if node.op.name == "get_rows":
        table, ids = node.sources
        return total * min(1.0, ids.size / max(1, table.shape[0]))
    return total * used_share(node) if node.op.name.startswith("expert_") else total
