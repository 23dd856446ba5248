"""Checkpoints from before GGUF, as llama.cpp's train-text-from-scratch and finetune wrote them in 2023, seen as the GGUF files
that its conversion scripts made of them.

u32 magic, version 0, iterations, samples, tokens; the model's numbers, for adapters their ranks; the tensors (records.py); then
the optimizer: version 0 with its options, or version 1. Of its vectors those that the scripts kept are seen, and of version 0
the parameters, which tell in what order they lie. What a file does not say is told in `training.unsaid`.
"""

from collections.abc import Iterator
from struct import Struct
from typing import NamedTuple

from llamatrain.gguf.legacy_tensors import ALIGNMENT, MappedCursor, read_record
from llamatrain.gguf.opened_file import FileTensor, Gguf, Metadata
from llamatrain.gguf.parser import Cursor
from llamatrain.gguf.values import Kind, Value, boolean, f32, number, string, u32, u64
from llamatrain.io.mapped_file import MappedFile, verify_unchanged

KINDS = {b"pcgg": "train_model", b"lcgg": "finetune_lora"}
MODELS = (b"tjgg", b"lmgg", b"fmgg")  # those of the same time, whose weights the checkpoints have, too
NUMBERS = ("n_vocab", "n_embd", "n_mult", "n_head", "n_layer", "n_rot")
BLOCK = (
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
ENDS = ("token_embd", "output_norm", "output")
# type, threads, past, delta, two switches; Adam's n_iter, sched, decay, alpha, beta1, beta2, eps, eps_f, eps_g; L-BFGS's m,
# n_iter, max_linesearch, eps, ftol, wolfe, min_step, max_step, linesearch
OPTIONS = Struct("<Iiif4x4xi8f3i5fI")
ADAM = ("first_moments", "second_moments", "past_loss_values")
ADAM_0 = (
    "current_parameters",
    "",
    "",
    "first_moments",
    "second_moments",
    "",
    "",
    "past_loss_values",
)  # unnamed: working memory
POINTS = (
    "current_parameters",
    "previous_parameters",
    "current_gradients",
    "previous_gradients",
    "search_direction",
)
LBFGS = (*POINTS, "past_loss_values", "memory_alpha", "memory_ys", "memory_s", "memory_y")
EPSILON = 1e-5
UNSAID = f"epsilon of its norms ({EPSILON:g} is taken), context length, vocabulary"


class LegacyFile(NamedTuple):
    metadata: dict[str, Value]
    tensors: dict[str, FileTensor]


def opened(file: MappedFile) -> Gguf:
    with verify_unchanged([file]):
        cursor = MappedCursor(file)
        kind = KINDS[cursor.first(4)]
        version, *counts = (cursor.u32() for _ in range(4))
        if version:
            raise cursor.fail(f"version {version}; 0 can be")
        n = dict(zip(NUMBERS, (cursor.u32() for _ in NUMBERS), strict=True))
        if n["n_layer"] > cursor.size // 100:  # a block's tensors take more
            raise cursor.fail(f"{n['n_layer']} layers cannot be in a file of {cursor.size} bytes")
        ranks = ranks_of(cursor) if kind == "finetune_lora" else {}
        tensors = {name: read(cursor, name) for name in names(n["n_layer"], bool(ranks))}
        if (rows := tensors["token_embd.weight" + (".lora_b" if ranks else "")].shape[0]) != n["n_vocab"]:
            raise cursor.fail(f"{n['n_vocab']} tokens cannot be, of which {rows} have embeddings")
        optimizer = optimizer_of(cursor)
        if cursor.at != cursor.size:
            raise cursor.fail(f"{cursor.size - cursor.at} bytes are left behind its end")
    ff = "blk.0.ffn_up.weight" + (".lora_b" if ranks else "")
    metadata = {
        "training.type": string(kind),
        "general.architecture": string("llama"),
        "general.file_type": u32(0),
        "llama.embedding_length": u32(n["n_embd"]),
        "llama.feed_forward_length": u32(tensors[ff].shape[0] if ff in tensors else 0),
        "llama.attention.head_count": u32(n["n_head"]),
        "llama.block_count": u32(n["n_layer"]),
        "llama.rope.dimension_count": u32(n["n_rot"]),
        "llama.attention.layer_norm_rms_epsilon": f32(EPSILON),
        **ranks,
        "training.file_version": u32(0),
        **{
            f"training.{name}_count": u32(count)
            for name, count in zip(("iteration", "sample", "token"), counts, strict=True)
        },
        "training.unsaid": string(UNSAID),
        **optimizer.metadata,
    }
    return Gguf(file.path, Metadata(metadata), tensors | optimizer.tensors)


def ranks_of(cursor: Cursor) -> dict[str, Value]:
    return {f"training.lora.rank.{name}": u32(cursor.u32()) for name in (*BLOCK, *ENDS)}


def names(layers: int, adapter: bool) -> Iterator[str]:
    for name in (*ENDS, *(f"blk.{layer}.{each}" for layer in range(layers) for each in BLOCK)):
        yield from (f"{name}.weight{half}" for half in ((".lora_a", ".lora_b") if adapter else ("",)))


def read(cursor: Cursor, name: str) -> FileTensor:
    """The next tensor, under the name that it has today."""
    found = read_record(cursor, named=False)
    if found.type.name != "F32":
        raise cursor.fail(f"its type is {found.type.name}; F32 can be")
    shape = found.shape
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return FileTensor(name, found.type, shape, found.offset, found.file)


# ---- the optimizer ---------------------------------------------------------


def optimizer_of(cursor: Cursor) -> LegacyFile:
    cursor.reading = "the optimizer"
    version, said = cursor.u32(), dict[str, Value]()
    if version == 0:
        options = OPTIONS.unpack_from(cursor.data, cursor.take(OPTIONS.size))
        kind, past, moves, said = options[0], options[2], options[13], options_said(options)
    elif version == 1:
        kind, past, moves = -1, cursor.u32(), cursor.u32()
    else:
        raise cursor.fail(f"version {version}; 0 and 1 can be")
    size, step, fresh = cursor.u64(), cursor.u32(), cursor.u32()
    if kind < 0:  # version 1 forgot to say it
        kind = 0 if is_adam(cursor) else 1
    if kind > 1:
        raise cursor.fail(f"of kind {kind}; 0 and 1 can be, Adam and L-BFGS")
    name, parts = ("lbfgs", LBFGS) if kind else ("adam", ADAM_0 if version == 0 else ADAM)
    prefix, tensors = f"optimizer.{name}.", dict[str, FileTensor]()
    for part in parts:
        if not is_empty(cursor):
            tensor = read(cursor, prefix + part)
            tensors |= {tensor.name: tensor} if part else {}
    metadata = {
        "optimizer.file_version": u32(0),
        "optimizer.convergence_past_count": u32(past),
        "optimizer.parameter_count": u64(size),
        "optimizer.iteration_count": u32(step),
        "optimizer.just_initialized": boolean(bool(fresh)),
        "optimizer.type": string(name),
        f"{prefix}best_loss": real(cursor),
        **said,
    }
    if kind:
        counts = ("line_search_j", "line_search_k", "line_search_end")
        metadata |= {f"{prefix}approx_hessian_count": u32(moves), f"{prefix}line_search_step": real(cursor)}
        metadata |= {f"{prefix}{each}": whole(cursor) for each in counts}
    else:
        metadata[f"{prefix}previous_loss"] = real(cursor)
    return LegacyFile({**metadata, f"{prefix}no_improvement_count": u32(cursor.u32())}, tensors)


def is_adam(cursor: Cursor) -> bool:
    """Whether two vectors, perhaps past losses, and three numbers are all that follows."""
    before = cursor.at
    for _ in range(3):
        if not is_empty(cursor):
            read_record(cursor, named=False)
    left, cursor.at = cursor.size - cursor.at, before
    return left == 12


def is_empty(cursor: Cursor) -> bool:
    """Whether no tensor is next but the place of one, which then is passed."""
    before = cursor.at
    if cursor.u32() == 0:
        cursor.take(8)
        cursor.take(-cursor.at % ALIGNMENT)
        return True
    cursor.at = before
    return False


def real(cursor: Cursor) -> Value:
    start = cursor.take(4)
    return Value(Kind.FLOAT32, cursor.since(start))


def whole(cursor: Cursor) -> Value:
    start = cursor.take(4)
    return number(Kind.INT32, int.from_bytes(cursor.since(start), "little", signed=True))


def options_said(options: tuple[float, ...]) -> dict[str, Value]:
    """Those of version 0 that ours has, which are said anew with each run."""
    kind, _, past, delta, _, _, decay, alpha, beta1, beta2, eps, *_ = options
    rate = f"--lr {alpha:g} --beta1 {beta1:g} --beta2 {beta2:g} --eps {eps:g} --weight-decay {decay:g}"
    told = f"--optimizer lbfgs --lbfgs-history {options[13]}" if kind else rate
    return {"training.said": string(told + (f" --past {past} --delta {delta:g}" if past > 0 else ""))}
