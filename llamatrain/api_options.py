"""The options of the Python API, for type checkers and editors.

Made by scripts/api_options.py from the dataclasses that declare them: edit those instead.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

Place = str | os.PathLike[str]


class FromScratchOptions(TypedDict, total=False):
    out: Place | None
    """The folder of the run; else a new one, runs/<command>-<n>."""
    overwrite: bool
    """Replace the run that is in the folder out."""
    resume: Place | None
    """Go on with the run in this folder, or from this checkpoint of one."""
    checkpoint_in: Place | None
    """Start from this GGUF file: a model's weights, or a checkpoint with all that goes with them."""
    trust: bool
    """Read the files that a checkpoint from elsewhere names, without naming them again."""
    only_write_model: bool
    """Write the model of a checkpoint, and train nothing."""
    config: Place | None
    """Read options from this TOML file; those given here win."""
    quiet: bool
    """Say nothing but what went wrong."""
    verbose: bool
    """Say each step, and each option as it was resolved."""
    arch: str
    """What it is built like: gemma2, gemma3, granite, llama, olmo2, phi3, qwen2, qwen3, smollm3."""
    size: Literal["tiny", "small", "medium", "large"]
    """Sets embd, head and layer: 64/4/2, 256/8/4, 512/8/8, 768/12/12."""
    embd: int | None
    """Width of the model; else by size."""
    head: int | None
    """Attention heads; they divide embd. Else by size."""
    head_kv: int | None
    """Key/value heads; they divide head. Else as many as heads."""
    head_size: int | None
    """Width of a head, for those that have one of their own; else embd / head."""
    layer: int | None
    """Blocks; else by size."""
    ff: int | None
    """Width of the feed-forward part; else 8/3 of embd, rounded up to 32."""
    ctx: int | None
    """Tokens in a row, and the context of a new model; else 128."""
    vocab_size: int | str
    """Tokens of a vocabulary learned from the text, fewer if it has fewer; or the word bytes."""
    vocab_from: Place | None
    """Take the vocabulary of this GGUF file instead of learning one."""
    rope_freq_base: float
    """Frequency base of the rotary positions."""
    rope_freq_scale: float
    """Positions count this much: 0.5 stretches the context to twice its length."""
    norm_rms_eps: float
    """Epsilon of the RMS norms."""
    tie_embeddings: bool
    """One matrix serves as embeddings and as output."""
    lora_r: int | None
    """The matrices of attention and output are products of factors of this rank."""
    train_on: Literal["completion", "last", "all"]
    """Train on the answers of prompts and chats, on the last of a chat alone, or on all tokens; text is always all."""
    thinking: Literal["auto", "keep", "strip"]
    """Thoughts of answers: as the chat template has them; all of them kept, in older turns, too; or all left out."""
    columns: str
    """What keys of the data's form are called in the data: prompt=question,completion=answer."""
    as_: Literal["text", "rest"] | None
    """Train on data as it stands, whatever it looks like; rest: on what is left where most pairs fall away."""
    as_chat: bool | None
    """Put prompts with answers through the model's chat template, as chats are; auto: where it has one."""
    skip_bad_rows: bool
    """Leave out rows that are of no known form, or that the chat template refuses, and list them."""
    date: str
    """The day that a chat template reads, as 2026-11-23; else that on which the run begins."""
    chat_template: Place | None
    """Put chats through the Jinja template in this file, or a known one: chatml, gemma, granite, llama3, mistral-v7-tekken,
    olmo2, phi3, phi4, phi4-mini; else the model's own."""
    parse_special: bool
    """Read marks of chats and other control tokens in text as such, as in chats that were rendered already."""
    pack: bool | None
    """Put several short samples in a row; each sees only itself; auto: where not all is plain text."""
    shuffle: bool
    """Shuffle the samples anew in each epoch."""
    val: Place | Sequence[Place] | Sequence[Mapping[str, Any]]
    """A file, folder or glob of validation data; may be repeated."""
    val_split: float
    """The part of the data that is kept for validation and never trained on, such as 0.05."""
    sample_start: str
    """Text samples begin after this pattern; empty: wherever the one before ended."""
    include_sample_start: bool
    """Include the pattern in the samples."""
    escape: bool
    """Read \\n, \\r, \\t, \\', \\" and \\\\ in the pattern as the characters they stand for."""
    overlapping_samples: bool
    """Samples run on into the next; without a pattern, one begins at every token of a text."""
    fill_with_next_samples: bool
    """Fill the rows of short samples with those that follow in shuffled order."""
    separate_with_eos: bool
    """When filling, put an end token between samples."""
    separate_with_bos: bool
    """When filling, put a begin token between samples."""
    sample_random_offsets: bool
    """Begin text samples at a random token of theirs."""
    force_reshuffle: bool
    """On resuming, begin a new shuffle instead of going on in the old one."""
    batch: int
    """Rows that are run together."""
    grad_acc: int
    """Batches whose gradients make one step."""
    iters: int | None
    """Steps in all, those before a resume included; else 256, or by epochs."""
    epochs: int | None
    """End after so many times through the data, or by iters if that is sooner."""
    optimizer: Literal["adamw", "lbfgs", "muon", "sgd"]
    """How weights are changed; Muon: of whole models, SGD: with momentum beta1, L-BFGS: on the same rows in every step."""
    lr: float
    """Learning rate, the highest of the schedule."""
    lr_min: float | None
    """The lowest rate of the schedule, warm-up included; else a tenth of lr."""
    warmup: int | None
    """Steps in which the rate rises; else 5 % of all."""
    schedule: Literal["constant", "linear", "cosine", "wsd"]
    """How the rate falls after the warm-up; wsd: at the end alone, and later where more iters follow."""
    decay_steps: int | None
    """Steps in which it falls; else all that follow the warm-up, with wsd a fifth."""
    restart_growth: float
    """Restart the cosine, each period this many times as long as the one before; 0: never."""
    line_search: Literal["armijo", "wolfe", "strong-wolfe"]
    """Line search of L-BFGS."""
    lbfgs_history: int
    """Moves that L-BFGS remembers."""
    lbfgs_fresh: int
    """New rows for L-BFGS, and no history, after so many steps; 0: never."""
    weight_decay: float
    """Decoupled weight decay."""
    decay_min_ndim: int
    """Only tensors of so many dimensions decay."""
    clip: float
    """The most that the norm of all gradients together may be; 0: no limit."""
    beta1: float
    """AdamW's first beta, SGD's momentum."""
    beta2: float
    """AdamW's second beta."""
    eps: float
    """AdamW's epsilon."""
    past: int
    """Stop when the loss differs by less than delta from the one so many steps ago; 0: never."""
    delta: float
    """What past compares with: a share of the loss."""
    max_no_improvement: int
    """Stop after so many steps in a row without a new lowest loss; 0: never."""
    epsf: float
    """Stop when the loss differs by less than this share from the one before; 0: never."""
    loss: Literal["cross-entropy", "squared-error"]
    """What is minimised; the squared error is for the sine wave only."""
    teacher: Place | None
    """Learn the distributions of this model, too, which has the same vocabulary."""
    teacher_weight: float
    """The teacher's share of the loss; the rest is the data's."""
    shards: int | None
    """Groups of rows that ranks divide a step by, whose sum has the same bits for any number of them; else 8 with ranks."""
    seed: int
    """What first weights, shuffling and samples follow from; -1: a random one, which is told."""
    precision: Literal["auto", "f32", "bf16"]
    """Of matrix products; auto: bf16 where the processor has it, but for L-BFGS."""
    flash: bool
    """Attention that never holds all its scores."""
    remat: str
    """Made again, not kept: none, light, block, optimal, so many blocks, block:3,wide:2; auto: light, or what fits best."""
    memory: int | str | None
    """The most that the run may take, such as 6GB; else what is free."""
    kernels: Literal["cpu", "reference"]
    """Compiled kernels, or the plain numpy ones that define them."""
    threads: int | None
    """Threads; else one for each processor."""
    save_every: int
    """Save a checkpoint and the model every so many steps; 0: at the end only."""
    keep: int
    """Checkpoints that stay; older ones are removed."""
    eval_every: int
    """Validate every so many steps and at the end; 0: never."""
    patience: int
    """Stop after so many validations in a row without a new lowest loss; 0: never."""
    sample_every: int
    """Show what the model writes every so many steps; 0: never."""
    sample_prompt: str
    """What those samples begin with."""
    report_every: int
    """Print a line every so many steps; 0: as often as reads well."""
    max_time: float | str | None
    """Validate, save and stop after this time, such as 90m or 2h."""
    wire: Literal["f32", "bf16"]
    """Of gradients between ranks; bf16 is half as much, and bits depend on how many they are."""
    timeout: float | str
    """End with code 75 where one of several processes falls silent for so long."""
    log: Literal["tensorboard", "wandb", "trackio", "csv"] | Sequence[Literal["tensorboard", "wandb", "trackio", "csv"]]
    """Write the figures there, too; may be repeated."""
    name: str
    """What the run is called there; else as its folder."""
    note: str
    """Some words on the run, which are kept with it."""
    profile: bool
    """Say where the time went, and write trace.json for Chrome and Perfetto."""
    checkpoint_out: str
    """Write each checkpoint to this file, too; in its name ITERATION becomes the step, and LATEST in another one."""
    model_out: str
    """Write the model of each save to this file, too, named likewise."""
    lora_out: str
    """Write the adapter of each save to this file, too, named likewise."""
    pattern_fn_it: str
    """What becomes the step."""
    fn_latest: str
    """What stands for the step in the name of the newest."""
    keep_results: int
    """Keep so many of the models or adapters of earlier saves, each under its step."""


class FinetuneOptions(TypedDict, total=False):
    out: Place | None
    """The folder of the run; else a new one, runs/<command>-<n>."""
    overwrite: bool
    """Replace the run that is in the folder out."""
    resume: Place | None
    """Go on with the run in this folder, or from this checkpoint of one."""
    checkpoint_in: Place | None
    """Start from this GGUF file: a model's weights, or a checkpoint with all that goes with them."""
    trust: bool
    """Read the files that a checkpoint from elsewhere names, without naming them again."""
    only_write_model: bool
    """Write the model of a checkpoint, and train nothing."""
    config: Place | None
    """Read options from this TOML file; those given here win."""
    quiet: bool
    """Say nothing but what went wrong."""
    verbose: bool
    """Say each step, and each option as it was resolved."""
    ctx: int | None
    """Tokens in a row; else what the model was made for, but no more than 512."""
    full: bool
    """Train every weight of the model, in float32, instead of an adapter."""
    lora_r: int
    """Rank of the adapter."""
    lora_alpha: float | None
    """What is added is scaled by alpha / rank; else alpha is lora_r."""
    target: str | Sequence[str]
    """Weights that get an adapter: attn_q, blk.0-3.ffn_down, blk.8-, output, token_embd, norms; else all linear ones."""
    rank: str | Sequence[str]
    """A rank of its own for a weight, such as attn_q=16 or blk.0.ffn_up=4; may be repeated. Norms have 1."""
    lora_dropout: float
    """The share of its input that an adapter does not see in a step."""
    rslora: bool
    """Scale by alpha / sqrt(rank) instead of alpha / rank."""
    lora_plus_ratio: float
    """The learning rate of an adapter's second factor is this many times lr."""
    lora_init: Place | None
    """Go on from this adapter, with its ranks: a GGUF file, a .bin, a PEFT folder."""
    only_write_lora: bool
    """Write the adapter of a checkpoint (resume) and train nothing."""
    adapter_type: Literal["f32", "f16"]
    """Number type in adapter.gguf."""
    peft: Place | None
    """Write the adapter for Hugging Face's PEFT, too, into this folder."""
    cache_base: Literal["auto", "off", "bf16"]
    """A copy of the base's weights in bf16, for speed; auto: where the memory is there."""
    rope_freq_base: float | None
    """Frequency base of the rotary positions, other than the model's."""
    rope_freq_scale: float | None
    """Positions count this much, other than in the model."""
    norm_rms_eps: float | None
    """Epsilon of the RMS norms, other than the model's."""
    lora: Place | Sequence[Place]
    """An adapter: a GGUF file, a .bin of llama.cpp's old finetune, or a folder of PEFT's; may be repeated."""
    lora_scaled: Sequence[tuple[Place, float]]
    """An adapter, and how much of it is added; may be repeated."""
    objective: Literal["orpo", "dpo", "simpo", "kto"] | None
    """Learn from answers that are compared: prompt, chosen and rejected; kto: or prompt, completion and label."""
    beta: float | None
    """How much an objective makes of them (ORPO's lambda); else 0.1, SimPO's 2."""
    gamma: float
    """The margin of rewards that SimPO asks for."""
    desirable_weight: float
    """What an answer that is good counts for in KTO."""
    undesirable_weight: float
    """What an answer that is not good counts for in KTO."""
    train_on: Literal["completion", "last", "all"]
    """Train on the answers of prompts and chats, on the last of a chat alone, or on all tokens; text is always all."""
    thinking: Literal["auto", "keep", "strip"]
    """Thoughts of answers: as the chat template has them; all of them kept, in older turns, too; or all left out."""
    columns: str
    """What keys of the data's form are called in the data: prompt=question,completion=answer."""
    as_: Literal["text", "rest"] | None
    """Train on data as it stands, whatever it looks like; rest: on what is left where most pairs fall away."""
    as_chat: bool | None
    """Put prompts with answers through the model's chat template, as chats are; auto: where it has one."""
    skip_bad_rows: bool
    """Leave out rows that are of no known form, or that the chat template refuses, and list them."""
    date: str
    """The day that a chat template reads, as 2026-11-23; else that on which the run begins."""
    chat_template: Place | None
    """Put chats through the Jinja template in this file, or a known one: chatml, gemma, granite, llama3, mistral-v7-tekken,
    olmo2, phi3, phi4, phi4-mini; else the model's own."""
    parse_special: bool
    """Read marks of chats and other control tokens in text as such, as in chats that were rendered already."""
    pack: bool | None
    """Put several short samples in a row; each sees only itself; auto: where not all is plain text."""
    shuffle: bool
    """Shuffle the samples anew in each epoch."""
    val: Place | Sequence[Place] | Sequence[Mapping[str, Any]]
    """A file, folder or glob of validation data; may be repeated."""
    val_split: float
    """The part of the data that is kept for validation and never trained on, such as 0.05."""
    sample_start: str
    """Text samples begin after this pattern; empty: wherever the one before ended."""
    include_sample_start: bool
    """Include the pattern in the samples."""
    escape: bool
    """Read \\n, \\r, \\t, \\', \\" and \\\\ in the pattern as the characters they stand for."""
    overlapping_samples: bool
    """Samples run on into the next; without a pattern, one begins at every token of a text."""
    fill_with_next_samples: bool
    """Fill the rows of short samples with those that follow in shuffled order."""
    separate_with_eos: bool
    """When filling, put an end token between samples."""
    separate_with_bos: bool
    """When filling, put a begin token between samples."""
    sample_random_offsets: bool
    """Begin text samples at a random token of theirs."""
    force_reshuffle: bool
    """On resuming, begin a new shuffle instead of going on in the old one."""
    batch: int
    """Rows that are run together."""
    grad_acc: int
    """Batches whose gradients make one step."""
    iters: int | None
    """Steps in all, those before a resume included; else 256, or by epochs."""
    epochs: int | None
    """End after so many times through the data, or by iters if that is sooner."""
    optimizer: Literal["adamw", "lbfgs", "muon", "sgd"]
    """How weights are changed; Muon: of whole models, SGD: with momentum beta1, L-BFGS: on the same rows in every step."""
    lr: float
    """Learning rate, the highest of the schedule."""
    lr_min: float | None
    """The lowest rate of the schedule, warm-up included; else a tenth of lr."""
    warmup: int | None
    """Steps in which the rate rises; else 5 % of all."""
    schedule: Literal["constant", "linear", "cosine", "wsd"]
    """How the rate falls after the warm-up; wsd: at the end alone, and later where more iters follow."""
    decay_steps: int | None
    """Steps in which it falls; else all that follow the warm-up, with wsd a fifth."""
    restart_growth: float
    """Restart the cosine, each period this many times as long as the one before; 0: never."""
    line_search: Literal["armijo", "wolfe", "strong-wolfe"]
    """Line search of L-BFGS."""
    lbfgs_history: int
    """Moves that L-BFGS remembers."""
    lbfgs_fresh: int
    """New rows for L-BFGS, and no history, after so many steps; 0: never."""
    weight_decay: float
    """Decoupled weight decay."""
    decay_min_ndim: int
    """Only tensors of so many dimensions decay."""
    clip: float
    """The most that the norm of all gradients together may be; 0: no limit."""
    beta1: float
    """AdamW's first beta, SGD's momentum."""
    beta2: float
    """AdamW's second beta."""
    eps: float
    """AdamW's epsilon."""
    past: int
    """Stop when the loss differs by less than delta from the one so many steps ago; 0: never."""
    delta: float
    """What past compares with: a share of the loss."""
    max_no_improvement: int
    """Stop after so many steps in a row without a new lowest loss; 0: never."""
    epsf: float
    """Stop when the loss differs by less than this share from the one before; 0: never."""
    loss: Literal["cross-entropy", "squared-error"]
    """What is minimised; the squared error is for the sine wave only."""
    teacher: Place | None
    """Learn the distributions of this model, too, which has the same vocabulary."""
    teacher_weight: float
    """The teacher's share of the loss; the rest is the data's."""
    shards: int | None
    """Groups of rows that ranks divide a step by, whose sum has the same bits for any number of them; else 8 with ranks."""
    seed: int
    """What first weights, shuffling and samples follow from; -1: a random one, which is told."""
    precision: Literal["auto", "f32", "bf16"]
    """Of matrix products; auto: bf16 where the processor has it, but for L-BFGS."""
    flash: bool
    """Attention that never holds all its scores."""
    remat: str
    """Made again, not kept: none, light, block, optimal, so many blocks, block:3,wide:2; auto: light, or what fits best."""
    memory: int | str | None
    """The most that the run may take, such as 6GB; else what is free."""
    kernels: Literal["cpu", "reference"]
    """Compiled kernels, or the plain numpy ones that define them."""
    threads: int | None
    """Threads; else one for each processor."""
    save_every: int
    """Save a checkpoint and the model every so many steps; 0: at the end only."""
    keep: int
    """Checkpoints that stay; older ones are removed."""
    eval_every: int
    """Validate every so many steps and at the end; 0: never."""
    patience: int
    """Stop after so many validations in a row without a new lowest loss; 0: never."""
    sample_every: int
    """Show what the model writes every so many steps; 0: never."""
    sample_prompt: str
    """What those samples begin with."""
    report_every: int
    """Print a line every so many steps; 0: as often as reads well."""
    max_time: float | str | None
    """Validate, save and stop after this time, such as 90m or 2h."""
    wire: Literal["f32", "bf16"]
    """Of gradients between ranks; bf16 is half as much, and bits depend on how many they are."""
    timeout: float | str
    """End with code 75 where one of several processes falls silent for so long."""
    log: Literal["tensorboard", "wandb", "trackio", "csv"] | Sequence[Literal["tensorboard", "wandb", "trackio", "csv"]]
    """Write the figures there, too; may be repeated."""
    name: str
    """What the run is called there; else as its folder."""
    note: str
    """Some words on the run, which are kept with it."""
    profile: bool
    """Say where the time went, and write trace.json for Chrome and Perfetto."""
    checkpoint_out: str
    """Write each checkpoint to this file, too; in its name ITERATION becomes the step, and LATEST in another one."""
    model_out: str
    """Write the model of each save to this file, too, named likewise."""
    lora_out: str
    """Write the adapter of each save to this file, too, named likewise."""
    pattern_fn_it: str
    """What becomes the step."""
    fn_latest: str
    """What stands for the step in the name of the newest."""
    keep_results: int
    """Keep so many of the models or adapters of earlier saves, each under its step."""


class ExportLoraOptions(TypedDict, total=False):
    only_adapter: bool
    """Write the adapters alone, as one that llama.cpp loads."""
    peft: Place | None
    """Write the adapters, as one, for Hugging Face's PEFT into this folder."""
    type: Literal[
        "keep",
        "f32",
        "f16",
        "bf16",
        "q8_0",
        "q6_k",
        "q5_k",
        "q4_k",
        "q3_k",
        "q2_k",
        "q5_1",
        "q5_0",
        "q4_1",
        "q4_0",
        "iq4_nl",
        "iq4_xs",
    ]
    """The type of the new model's matrices; keep: that which each has in BASE. Needs no adapter."""
    overwrite: bool
    """Replace the file out."""
    check: str
    """Compare the logits of BASE with its adapters to those of the new file, on this text, and judge the difference."""
    threads: int | None
    """Threads; else one for each processor."""
    lora: Place | Sequence[Place]
    """An adapter: a GGUF file, a .bin of llama.cpp's old finetune, or a folder of PEFT's; may be repeated."""
    lora_scaled: Sequence[tuple[Place, float]]
    """An adapter, and how much of it is added; may be repeated."""


class EvaluateOptionsGiven(TypedDict, total=False):
    ctx: int | None
    """Tokens in a row; else what the model was made for, but no more than 512."""
    batch: int
    """Rows that are run together."""
    threads: int | None
    """Threads; else one for each processor."""
    precision: Literal["f32", "bf16"]
    """Of matrix products."""
    lora: Place | Sequence[Place]
    """An adapter: a GGUF file, a .bin of llama.cpp's old finetune, or a folder of PEFT's; may be repeated."""
    lora_scaled: Sequence[tuple[Place, float]]
    """An adapter, and how much of it is added; may be repeated."""
    objective: Literal["orpo", "dpo", "simpo", "kto"] | None
    """Learn from answers that are compared: prompt, chosen and rejected; kto: or prompt, completion and label."""
    beta: float | None
    """How much an objective makes of them (ORPO's lambda); else 0.1, SimPO's 2."""
    gamma: float
    """The margin of rewards that SimPO asks for."""
    desirable_weight: float
    """What an answer that is good counts for in KTO."""
    undesirable_weight: float
    """What an answer that is not good counts for in KTO."""
    train_on: Literal["completion", "last", "all"]
    """Train on the answers of prompts and chats, on the last of a chat alone, or on all tokens; text is always all."""
    thinking: Literal["auto", "keep", "strip"]
    """Thoughts of answers: as the chat template has them; all of them kept, in older turns, too; or all left out."""
    columns: str
    """What keys of the data's form are called in the data: prompt=question,completion=answer."""
    as_: Literal["text", "rest"] | None
    """Train on data as it stands, whatever it looks like; rest: on what is left where most pairs fall away."""
    as_chat: bool | None
    """Put prompts with answers through the model's chat template, as chats are; auto: where it has one."""
    skip_bad_rows: bool
    """Leave out rows that are of no known form, or that the chat template refuses, and list them."""
    date: str
    """The day that a chat template reads, as 2026-11-23; else that on which the run begins."""
    chat_template: Place | None
    """Put chats through the Jinja template in this file, or a known one: chatml, gemma, granite, llama3, mistral-v7-tekken,
    olmo2, phi3, phi4, phi4-mini; else the model's own."""
    parse_special: bool
    """Read marks of chats and other control tokens in text as such, as in chats that were rendered already."""
    pack: bool | None
    """Put several short samples in a row; each sees only itself; auto: where not all is plain text."""
    shuffle: bool
    """Shuffle the samples anew in each epoch."""
    val: Place | Sequence[Place] | Sequence[Mapping[str, Any]]
    """A file, folder or glob of validation data; may be repeated."""
    val_split: float
    """The part of the data that is kept for validation and never trained on, such as 0.05."""
    sample_start: str
    """Text samples begin after this pattern; empty: wherever the one before ended."""
    include_sample_start: bool
    """Include the pattern in the samples."""
    escape: bool
    """Read \\n, \\r, \\t, \\', \\" and \\\\ in the pattern as the characters they stand for."""
    overlapping_samples: bool
    """Samples run on into the next; without a pattern, one begins at every token of a text."""
    fill_with_next_samples: bool
    """Fill the rows of short samples with those that follow in shuffled order."""
    separate_with_eos: bool
    """When filling, put an end token between samples."""
    separate_with_bos: bool
    """When filling, put a begin token between samples."""
    sample_random_offsets: bool
    """Begin text samples at a random token of theirs."""
    force_reshuffle: bool
    """On resuming, begin a new shuffle instead of going on in the old one."""


class PreviewOptionsGiven(TypedDict, total=False):
    n: int
    """How many rows to show; json goes on with the next epochs."""
    ctx: int | None
    """Tokens in a row; else what the model was made for, but no more than 512."""
    batch: int
    """Rows in a batch: they share a length."""
    seed: int
    """What the order of the samples follows from."""
    objective: Literal["orpo", "dpo", "simpo", "kto"] | None
    """Learn from answers that are compared: prompt, chosen and rejected; kto: or prompt, completion and label."""
    train_on: Literal["completion", "last", "all"]
    """Train on the answers of prompts and chats, on the last of a chat alone, or on all tokens; text is always all."""
    thinking: Literal["auto", "keep", "strip"]
    """Thoughts of answers: as the chat template has them; all of them kept, in older turns, too; or all left out."""
    columns: str
    """What keys of the data's form are called in the data: prompt=question,completion=answer."""
    as_: Literal["text", "rest"] | None
    """Train on data as it stands, whatever it looks like; rest: on what is left where most pairs fall away."""
    as_chat: bool | None
    """Put prompts with answers through the model's chat template, as chats are; auto: where it has one."""
    skip_bad_rows: bool
    """Leave out rows that are of no known form, or that the chat template refuses, and list them."""
    date: str
    """The day that a chat template reads, as 2026-11-23; else that on which the run begins."""
    chat_template: Place | None
    """Put chats through the Jinja template in this file, or a known one: chatml, gemma, granite, llama3, mistral-v7-tekken,
    olmo2, phi3, phi4, phi4-mini; else the model's own."""
    parse_special: bool
    """Read marks of chats and other control tokens in text as such, as in chats that were rendered already."""
    pack: bool | None
    """Put several short samples in a row; each sees only itself; auto: where not all is plain text."""
    shuffle: bool
    """Shuffle the samples anew in each epoch."""
    val: Place | Sequence[Place] | Sequence[Mapping[str, Any]]
    """A file, folder or glob of validation data; may be repeated."""
    val_split: float
    """The part of the data that is kept for validation and never trained on, such as 0.05."""
    sample_start: str
    """Text samples begin after this pattern; empty: wherever the one before ended."""
    include_sample_start: bool
    """Include the pattern in the samples."""
    escape: bool
    """Read \\n, \\r, \\t, \\', \\" and \\\\ in the pattern as the characters they stand for."""
    overlapping_samples: bool
    """Samples run on into the next; without a pattern, one begins at every token of a text."""
    fill_with_next_samples: bool
    """Fill the rows of short samples with those that follow in shuffled order."""
    separate_with_eos: bool
    """When filling, put an end token between samples."""
    separate_with_bos: bool
    """When filling, put a begin token between samples."""
    sample_random_offsets: bool
    """Begin text samples at a random token of theirs."""
    force_reshuffle: bool
    """On resuming, begin a new shuffle instead of going on in the old one."""


class LoadOptionsGiven(TypedDict, total=False):
    ctx: int | None
    """Tokens of prompt and text together; else what the model was made for, at most 4096."""
    threads: int | None
    """Threads; else one for each processor."""
    lora: Place | Sequence[Place]
    """An adapter: a GGUF file, a .bin of llama.cpp's old finetune, or a folder of PEFT's; may be repeated."""
    lora_scaled: Sequence[tuple[Place, float]]
    """An adapter, and how much of it is added; may be repeated."""


class SamplingOptionsGiven(TypedDict, total=False):
    n: int
    """Tokens to generate; -1: until the text ends or the context is full."""
    ctx_shift: bool
    """Go on where the context is full: the older half of the text goes."""
    keep: int
    """Tokens that stay when the context is shifted, beside one that begins a text; -1: as many as the prompt has."""
    temp: float
    """Temperature: the higher, the more surprising; 0 takes the likeliest token."""
    top_k: int
    """Draw among this many of the likeliest tokens; 0: among all."""
    top_p: float
    """Draw among the likeliest tokens that together have this probability; 1: among all."""
    min_p: float
    """Leave tokens out that are less likely than this part of the likeliest; 0: none."""
    repeat_penalty: float
    """Makes tokens that were there lately less likely; 1: does not."""
    repeat_last_n: int
    """How many tokens back the penalty looks; 0: it is off, -1: all of them."""
    seed: int
    """What the draws follow from; -1: a new one each time."""
    stop: str | Sequence[str]
    """Stop before this text; may be repeated."""
    temperature: float
    """Another name of temp."""


class ChatOptionsGiven(TypedDict, total=False):
    ctx: int | None
    """Tokens of prompt and text together; else what the model was made for, at most 4096."""
    threads: int | None
    """Threads; else one for each processor."""
    lora: Place | Sequence[Place]
    """An adapter: a GGUF file, a .bin of llama.cpp's old finetune, or a folder of PEFT's; may be repeated."""
    lora_scaled: Sequence[tuple[Place, float]]
    """An adapter, and how much of it is added; may be repeated."""
    n: int
    """Tokens to generate; -1: until the text ends or the context is full."""
    ctx_shift: bool
    """Go on where the context is full: the older half of the text goes."""
    keep: int
    """Tokens that stay when the context is shifted, beside one that begins a text; -1: as many as the prompt has."""
    temp: float
    """Temperature: the higher, the more surprising; 0 takes the likeliest token."""
    top_k: int
    """Draw among this many of the likeliest tokens; 0: among all."""
    top_p: float
    """Draw among the likeliest tokens that together have this probability; 1: among all."""
    min_p: float
    """Leave tokens out that are less likely than this part of the likeliest; 0: none."""
    repeat_penalty: float
    """Makes tokens that were there lately less likely; 1: does not."""
    repeat_last_n: int
    """How many tokens back the penalty looks; 0: it is off, -1: all of them."""
    seed: int
    """What the draws follow from; -1: a new one each time."""
    stop: str | Sequence[str]
    """Stop before this text; may be repeated."""
    temperature: float
    """Another name of temp."""
