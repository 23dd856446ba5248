"""Reads checkpoints from before GGUF, as llama.cpp's train-text-from-scratch and finetune wrote them in 2023.

The result looks like the GGUF file that llama.cpp's conversion scripts made of such a checkpoint.

Layout: u32 magic, version 0, iterations, samples, tokens; the hyperparameters, for adapters their ranks; the
tensors (tensor_records.py); then the optimizer: version 0 with its options, or version 1. Of its vectors,
those that the scripts kept are read, and for version 0 also the parameters, which show in what order the
vectors lie. `training.unsaid` lists what such a file does not contain.
"""

from collections.abc import Iterator
from struct import Struct
from typing import NamedTuple

from llamatrain.gguf.opened_file import FileTensor, Gguf, Metadata
from llamatrain.gguf.parser import Cursor
from llamatrain.gguf.values import Kind, Value, boolean, f32, number, string, u32, u64
from llamatrain.io.mapped_file import MappedFile, verify_unchanged
from llamatrain.legacy.tensor_records import ALIGNMENT, MappedCursor, read_record

KINDS = {b"pcgg": "train_model", b"lcgg": "finetune_lora"}
HYPERPARAMETERS = ("n_vocab", "n_embd", "n_mult", "n_head", "n_layer", "n_rot")
BLOCK_WEIGHTS = (
    "attn_norm",
    "attn_q",
    "attn_k",
    "attn_v",
    "attn_output",
    "ffn_norm",
    "ffn_gate",
    "ffn_down",
    "ffn_up",
)
OTHER_WEIGHTS = ("token_embd", "output_norm", "output")
# type, threads, past, delta, two switches; Adam's n_iter, sched, decay, alpha, beta1, beta2, eps, eps_f,
# eps_g; L-BFGS's m,
# n_iter, max_linesearch, eps, ftol, wolfe, min_step, max_step, linesearch
OPTIONS = Struct("<Iiif4x4xi8f3i5fI")
ADAM = ("first_moments", "second_moments", "past_loss_values")
# unnamed: working memory
ADAM_0 = ("current_parameters", "", "", "first_moments", "second_moments", "", "", "past_loss_values")
POINTS = (
    "current_parameters",
    "previous_parameters",
    "current_gradients",
    "previous_gradients",
    "search_direction",
)
LBFGS = (*POINTS, "past_loss_values", "memory_alpha", "memory_ys", "memory_s", "memory_y")
EPSILON = 1e-5
NOT_IN_FILE = f"epsilon of its norms ({EPSILON:g} is taken), context length, vocabulary"


class LegacyFile(NamedTuple):
    """Metadata and tensors of one part of a legacy file."""

    metadata: dict[str, Value]
    tensors: dict[str, FileTensor]


def read_legacy(file: MappedFile) -> Gguf:
    """Read a legacy checkpoint as the GGUF file that it would be today."""
    with verify_unchanged([file]):
        cursor = MappedCursor(file)
        kind = KINDS[cursor.first_bytes(4)]
        version, *counts = (cursor.read_u32() for _ in range(4))
        if version:
            raise cursor.error(f"unsupported version {version}; it must be 0", code="unsupported-version")
        hyperparameters = dict(
            zip(HYPERPARAMETERS, (cursor.read_u32() for _ in HYPERPARAMETERS), strict=True)
        )
        if hyperparameters["n_layer"] > cursor.size // 100:  # a block's tensors take more
            raise cursor.error(
                f"a file of {cursor.size} bytes is too small for {hyperparameters['n_layer']} layers"
            )
        ranks = read_ranks(cursor) if kind == "finetune_lora" else {}
        tensors = {
            name: read_tensor(cursor, name) for name in tensor_names(hyperparameters["n_layer"], bool(ranks))
        }
        if (rows := tensors["token_embd.weight" + (".lora_b" if ranks else "")].shape[0]) != hyperparameters[
            "n_vocab"
        ]:
            raise cursor.error(f"{hyperparameters['n_vocab']} tokens do not match {rows} embeddings")
        optimizer = read_optimizer(cursor)
        if cursor.offset != cursor.size:
            raise cursor.error(f"{cursor.size - cursor.offset} unexpected bytes follow the end")
    ff = "blk.0.ffn_up.weight" + (".lora_b" if ranks else "")
    metadata = {
        "training.type": string(kind),
        "general.architecture": string("llama"),
        "general.file_type": u32(0),
        "llama.embedding_length": u32(hyperparameters["n_embd"]),
        "llama.feed_forward_length": u32(tensors[ff].shape[0] if ff in tensors else 0),
        "llama.attention.head_count": u32(hyperparameters["n_head"]),
        "llama.block_count": u32(hyperparameters["n_layer"]),
        "llama.rope.dimension_count": u32(hyperparameters["n_rot"]),
        "llama.attention.layer_norm_rms_epsilon": f32(EPSILON),
        **ranks,
        "training.file_version": u32(0),
        **{
            f"training.{name}_count": u32(count)
            for name, count in zip(("iteration", "sample", "token"), counts, strict=True)
        },
        "training.unsaid": string(NOT_IN_FILE),
        **optimizer.metadata,
    }
    return Gguf(file.path, Metadata(metadata), tensors | optimizer.tensors)


def read_ranks(cursor: Cursor) -> dict[str, Value]:
    """Read the LoRA rank of each weight as metadata."""
    return {f"training.lora.rank.{name}": u32(cursor.read_u32()) for name in (*BLOCK_WEIGHTS, *OTHER_WEIGHTS)}


def tensor_names(layers: int, adapter: bool) -> Iterator[str]:
    """Return today's names of the tensors, in file order."""
    for name in (
        *OTHER_WEIGHTS,
        *(f"blk.{layer}.{weight}" for layer in range(layers) for weight in BLOCK_WEIGHTS),
    ):
        yield from (f"{name}.weight{half}" for half in ((".lora_a", ".lora_b") if adapter else ("",)))


def read_tensor(cursor: Cursor, name: str) -> FileTensor:
    """Read the next tensor and give it today's name."""
    record = read_record(cursor, named=False)
    if record.type.name != "F32":
        raise cursor.error(
            f"type {record.type.name} is not supported; it must be F32", code="unsupported-tensor-type"
        )
    shape = record.shape
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return FileTensor(name, record.type, shape, record.offset, record.file)


# ---- the optimizer ---------------------------------------------------------


def read_optimizer(cursor: Cursor) -> LegacyFile:
    """Read the optimizer's options, counters and vectors."""
    cursor.context = "the optimizer"
    version, option_metadata = cursor.read_u32(), dict[str, Value]()
    if version == 0:
        options = OPTIONS.unpack_from(cursor.data, cursor.advance(OPTIONS.size))
        kind, past, moves, option_metadata = options[0], options[2], options[13], format_options(options)
    elif version == 1:
        kind, past, moves = -1, cursor.read_u32(), cursor.read_u32()
    else:
        raise cursor.error(f"unsupported version {version}; it must be 0 or 1", code="unsupported-version")
    size, step, just_initialized = cursor.read_u64(), cursor.read_u32(), cursor.read_u32()
    if kind < 0:  # version 1 forgot to say it
        kind = 0 if looks_like_adam(cursor) else 1
    if kind > 1:
        raise cursor.error(f"unknown optimizer {kind}; it must be 0 (Adam) or 1 (L-BFGS)")
    name, parts = ("lbfgs", LBFGS) if kind else ("adam", ADAM_0 if version == 0 else ADAM)
    prefix, tensors = f"optimizer.{name}.", dict[str, FileTensor]()
    for part in parts:
        if not skip_if_empty(cursor):
            tensor = read_tensor(cursor, prefix + part)
            tensors |= {tensor.name: tensor} if part else {}
    metadata = {
        "optimizer.file_version": u32(0),
        "optimizer.convergence_past_count": u32(past),
        "optimizer.parameter_count": u64(size),
        "optimizer.iteration_count": u32(step),
        "optimizer.just_initialized": boolean(bool(just_initialized)),
        "optimizer.type": string(name),
        f"{prefix}best_loss": read_f32(cursor),
        **option_metadata,
    }
    if kind:
        counts = ("line_search_j", "line_search_k", "line_search_end")
        metadata |= {
            f"{prefix}approx_hessian_count": u32(moves),
            f"{prefix}line_search_step": read_f32(cursor),
        }
        metadata |= {f"{prefix}{count_name}": read_i32(cursor) for count_name in counts}
    else:
        metadata[f"{prefix}previous_loss"] = read_f32(cursor)
    return LegacyFile({**metadata, f"{prefix}no_improvement_count": u32(cursor.read_u32())}, tensors)


def looks_like_adam(cursor: Cursor) -> bool:
    """Return True if two vectors, perhaps past losses, and three numbers are all that follows."""
    start = cursor.offset
    for _ in range(3):
        if not skip_if_empty(cursor):
            read_record(cursor, named=False)
    left, cursor.offset = cursor.size - cursor.offset, start
    return left == 12


def skip_if_empty(cursor: Cursor) -> bool:
    """Skip the empty record of a tensor that does not exist. Return False if a tensor follows."""
    start = cursor.offset
    if cursor.read_u32() == 0:
        cursor.advance(8)
        cursor.advance(-cursor.offset % ALIGNMENT)
        return True
    cursor.offset = start
    return False


def read_f32(cursor: Cursor) -> Value:
    """Read a float32 as a metadata value."""
    start = cursor.advance(4)
    return Value(Kind.FLOAT32, cursor.bytes_since(start))


def read_i32(cursor: Cursor) -> Value:
    """Read an int32 as a metadata value."""
    start = cursor.advance(4)
    return number(Kind.INT32, int.from_bytes(cursor.bytes_since(start), "little", signed=True))


def format_options(options: tuple[float, ...]) -> dict[str, Value]:
    """Format the options of version 0 as options of this program, which each run sets anew."""
    kind, _, past, delta, _, _, decay, alpha, beta1, beta2, eps, *_ = options
    rate = f"--lr {alpha:g} --beta1 {beta1:g} --beta2 {beta2:g} --eps {eps:g} --weight-decay {decay:g}"
    text = f"--optimizer lbfgs --lbfgs-history {options[13]}" if kind else rate
    return {
        "training.said": string(text + (f" --stop-window {past} --stop-delta {delta:g}" if past > 0 else ""))
    }


FORMATS = dict.fromkeys(KINDS, read_legacy)
