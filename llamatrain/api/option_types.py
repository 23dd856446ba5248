"""The options of the Python API, for type checkers and editors.

Made by scripts/api_options.py from the dataclasses that declare them: edit those instead.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

Place = str | os.PathLike[str]


class FromScratchOptions(TypedDict, total=False):
    out: Place | None
    """Folder of the run; default: a new one, runs/<command>-<n>."""
    overwrite: bool
    """Replace the run in the folder out."""
    resume: Place | None
    """Resume the run in this folder, or from this checkpoint."""
    checkpoint_in: Place | None
    """Start from this GGUF file: the weights of a model, or the full state of a checkpoint."""
    trust: bool
    """Read the files that someone else's checkpoint names, without naming them again."""
    only_write_model: bool
    """Write the model of a checkpoint, without training."""
    config: Place | None
    """Read options from this TOML file; the command line overrides them."""
    quiet: bool
    """Print errors only."""
    verbose: bool
    """Print every step, and every option as it was resolved."""
    arch: str
    """Architecture: apertus, arcee, bailingmoe2, cohere2, command-r, deepseek2, ernie4_5, ernie4_5-moe, exaone, exaone4,
    falcon-h1, gemma, gemma2, gemma3, gemma3n, gemma4, glm4, glm4moe, gpt-oss, granite, granitehybrid, granitemoe, hunyuan-
    dense, hunyuan-moe, internlm2, lfm2, lfm2moe, llama, minicpm, mistral3, nemotron, olmo, olmo2, olmoe, phi2, phi3, qwen2,
    qwen2moe, qwen2vl, qwen3, qwen35, qwen35moe, qwen3moe, qwen3next, qwen3vl, seed_oss, smallthinker, smollm3, stablelm,
    starcoder2."""
    size: Literal["tiny", "small", "medium", "large"]
    """Sets embd, head and layer: tiny 64/4/2, small 256/8/4, medium 512/8/8, large 768/12/12."""
    embd: int | None
    """Width of the model; default: by size."""
    head: int | None
    """Attention heads; must divide embd. Default: by size."""
    head_kv: int | None
    """Key/value heads; must divide head. Default: the number of heads."""
    head_size: int | None
    """Width of a head, for architectures where it is independent; default: embd / head."""
    layer: int | None
    """Transformer blocks; default: by size."""
    ff: int | None
    """Width of the feed-forward layer, or of the experts that a token uses, together; default: 8/3 of embd, rounded up to
    32."""
    experts: int | None
    """Experts of each block, for architectures that have them; default: 8."""
    experts_used: int | None
    """Experts that each token uses; default: 2."""
    ctx: int | None
    """Tokens per row, and context of the new model; default: 128."""
    vocab_size: int | str
    """Size of the vocabulary that is learned from the text (fewer if the text has fewer); or bytes."""
    vocab_from: Place | None
    """Take the vocabulary of this GGUF file instead of learning one."""
    rope_freq_base: float
    """RoPE frequency base."""
    rope_freq_scale: float
    """RoPE frequency scale: 0.5 stretches the context to twice its length."""
    norm_rms_eps: float
    """Epsilon of the RMS norms."""
    tie_embeddings: bool
    """Use one matrix for embeddings and output."""
    embd_std: float | None
    """Standard deviation of the initial embeddings; default: 1 / the root of embd. AdaMuon learns faster with 0.02."""
    minutes: float | None
    """Choose sizes, vocabulary, optimizer, batch, learning rate and steps, unless they are given, so that training on this
    machine learns most in this time."""
    lora_r: int | None
    """Make the matrices of attention and output products of factors of this rank."""
    train_on: Literal["completion", "last", "all"]
    """Train on the answers of prompts and chats, only on the last answer of a chat, or on all tokens. In plain text, all
    tokens are trained."""
    thinking: Literal["auto", "keep", "strip", "off"]
    """Reasoning of answers: as the chat template renders it; kept in all turns; removed from all; or removed, with thinking
    switched off in the template."""
    columns: str
    """The column names that the data has for known keys: prompt=question,completion=answer."""
    as_: Literal["text", "rest"] | None
    """text: train on files as they are, whatever they look like; rest: train on the remaining pairs even if most are
    unusable."""
    as_chat: bool | None
    """Render prompts with answers by the model's chat template, like chats; auto: if it has one."""
    skip_bad_rows: bool
    """Skip rows of unknown form, or that the chat template refuses, and list them."""
    date: str
    """The date that a chat template sees, such as 2026-11-23; default: the day on which the run begins."""
    chat_template: Place | None
    """Render chats with the Jinja template in this file, or a built-in one (chatml, gemma, granite, llama3,
    mistral-v7-tekken, olmo2, phi3, phi4, phi4-mini); default: the model's own."""
    parse_special: bool
    """Read chat marks and other control tokens in text as tokens, for chats that are already rendered."""
    pack: bool | None
    """Pack several short samples into a row, each attending only to itself; auto: unless all data is plain text."""
    shuffle: bool
    """Shuffle the samples in each epoch."""
    val: Place | Sequence[Place] | Sequence[Mapping[str, Any]]
    """A file, folder or glob of validation data; may be given several times."""
    retain_data: str | Sequence[str]
    """Data that the model should not forget: its loss is measured at each validation, and chooses nothing; a file, folder or
    glob, may be given several times."""
    val_split: float
    """The share of the data to hold out for validation, such as 0.05."""
    sample_start: str
    """Text samples begin after this pattern; default: where the previous one ended."""
    include_sample_start: bool
    """Include the pattern in the samples."""
    escape: bool
    """Interpret the escapes \\n, \\r, \\t, \\', \\" and \\\\ in the pattern."""
    overlapping_samples: bool
    """Let samples overlap the next ones; without a pattern, one begins at every token of a text."""
    fill_with_next_samples: bool
    """Fill the rows of short samples with the next ones in shuffled order."""
    separate_with_eos: bool
    """When filling, put an end token between samples."""
    separate_with_bos: bool
    """When filling, put a begin token between samples."""
    sample_random_offsets: bool
    """Begin text samples at a random one of their tokens."""
    force_reshuffle: bool
    """When resuming, begin a new shuffle instead of continuing the old one."""
    batch: int
    """Rows per batch."""
    grad_acc: int
    """Batches per step; their gradients are added up."""
    iters: int | None
    """Steps in total, including those before a resume; default: 256, or as many as epochs takes."""
    epochs: int | None
    """Stop after this many passes over the data, or after iters if that is sooner."""
    optimizer: Literal["adamuon", "adamw", "lbfgs", "muon", "sgd"]
    """Optimizer. adamuon needs the fewest tokens, with lr 0.01; like muon it trains whole models only. sgd has momentum
    beta1, lbfgs uses the same rows in every step."""
    lr: float | None
    """Learning rate, at the peak of the schedule; default of finetune: 2 / the width of the model, but at most 0.01, for an
    adapter, less with a larger lora_alpha or lora_plus_ratio; 1e-4 with full or objective."""
    lr_min: float | None
    """Lowest learning rate of the schedule, also of the warm-up; default: a tenth of lr."""
    warmup: int | None
    """Steps in which the learning rate rises; default: 5 % of all steps."""
    schedule: Literal["constant", "linear", "cosine", "wsd"]
    """How the learning rate falls after the warm-up; wsd falls at the end only, and later if iters is raised."""
    decay_steps: int | None
    """Steps in which the learning rate falls; default: all after the warm-up, with wsd a fifth."""
    restart_growth: float
    """Restart the cosine; each period is longer than the one before by this factor. 0: never."""
    line_search: Literal["armijo", "wolfe", "strong-wolfe"]
    """Line search of L-BFGS."""
    lbfgs_history: int
    """Updates that L-BFGS keeps in its history."""
    lbfgs_refresh: int
    """Give L-BFGS new rows and an empty history after this many steps; 0: never."""
    weight_decay: float
    """Decoupled weight decay."""
    decay_min_ndim: int
    """Decay only tensors with at least this many dimensions."""
    clip: float
    """Clip the global gradient norm to this; 0: off."""
    beta1: float | None
    """Beta 1 of AdamW, momentum of SGD; default: 0.9, with adamuon 0.6."""
    beta2: float | None
    """Beta 2 of AdamW; default: 0.999, with adamuon 0.95."""
    eps: float
    """Epsilon of AdamW."""
    stop_window: int
    """Stop if the loss changed by less than stop_delta over this many steps; 0: never."""
    stop_delta: float
    """Least change of the loss over stop_window steps, as a share of the loss."""
    max_no_improvement: int
    """Stop after this many consecutive steps without a new lowest training loss; 0: never."""
    stop_rel: float
    """Stop if the loss changed by less than this share from one step to the next; 0: never."""
    loss: Literal["cross-entropy", "squared-error"]
    """Loss function; squared-error is for the sine wave only."""
    teacher: Place | None
    """Distill this model, which must have the same vocabulary."""
    teacher_weight: float
    """Share of the distillation loss; the data has the rest."""
    quant_aware: Literal[
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
    """Train for a model whose matrices have this type: products read them rounded to it. A new or whole model is written in
    it."""
    balance: float
    """Weight of a loss that balances the experts of each block; it is 1 if all are chosen equally often."""
    grad_groups: int | None
    """Groups of rows whose gradients are added in a fixed order, so that any number of ranks up to this one gives the same
    bits; default: 8 with several ranks."""
    seed: int
    """Seed of initial weights, shuffling and samples; -1: draw one, and print it."""
    precision: Literal["auto", "f32", "bf16"]
    """Number type of matrix products; auto: bf16 where it is faster, otherwise f32; f32 for L-BFGS."""
    flash: bool
    """Compute attention without storing all scores."""
    remat: str
    """Activations to recompute in the backward pass: none, light, block, optimal, a number of blocks, or a list such as
    block:3,wide:2; auto: light, or whatever fits the memory best."""
    memory: int | str | None
    """Memory limit of the run, such as 6GB; default: all that is free."""
    device: Literal["auto", "cpu", "cuda", "xpu", "mps", "torch-cpu"]
    """Processor: cpu, or with PyTorch a graphics card (cuda: NVIDIA or AMD, xpu: Intel, mps: Apple); auto: a card if PyTorch
    finds one."""
    kernels: Literal["cpu", "reference"]
    """Compiled kernels, or the numpy ones that define them."""
    threads: int | None
    """Threads; default: one per processor."""
    save_every: int
    """Save a checkpoint and the model every N steps; 0: at the end only."""
    keep: int
    """Checkpoints to keep; older ones are deleted."""
    eval_every: int
    """Validate every N steps and at the end; 0: never."""
    patience: int
    """Stop after this many consecutive validations without a new lowest loss; 0: never."""
    sample_every: int
    """Print a text that the model writes every N steps; 0: never."""
    sample_prompt: str | Sequence[str]
    """Prompt of these samples; may be repeated, for several texts."""
    report_every: int
    """Print a line every N steps; 0: at a readable rate."""
    max_time: float | str | None
    """Validate, save and stop after this time, such as 90m or 2h."""
    grad_comm_dtype: Literal["f32", "bf16"]
    """Number type of gradients between ranks; bf16 halves the traffic, and bits then depend on the number of ranks."""
    timeout: float | str
    """Exit with code 75 if one of several processes is silent for this long."""
    log: Literal["tensorboard", "wandb", "trackio", "csv"] | Sequence[Literal["tensorboard", "wandb", "trackio", "csv"]]
    """Also send metrics there; may be repeated."""
    name: str
    """Name of the run there; default: the name of its folder."""
    note: str
    """A note that is stored with the run."""
    ollama: str
    """Also create a model of this name in Ollama at the end, of the base with the adapter or of the new model."""
    profile: bool
    """Print where the time went, and write trace.json for Chrome and Perfetto."""
    checkpoint_out: str
    """Also write each checkpoint to this file; ITERATION in its name becomes the step, and LATEST in the name of a second
    copy."""
    model_out: str
    """Also write the model of each save to this file, named likewise."""
    lora_out: str
    """Also write the adapter of each save to this file, named likewise."""
    pattern_fn_it: str
    """Word in file names that becomes the step."""
    fn_latest: str
    """Word in place of the step in the name of the newest file."""
    keep_results: int
    """Keep this many models or adapters of earlier saves, named by step."""


class FinetuneOptions(TypedDict, total=False):
    out: Place | None
    """Folder of the run; default: a new one, runs/<command>-<n>."""
    overwrite: bool
    """Replace the run in the folder out."""
    resume: Place | None
    """Resume the run in this folder, or from this checkpoint."""
    checkpoint_in: Place | None
    """Start from this GGUF file: the weights of a model, or the full state of a checkpoint."""
    trust: bool
    """Read the files that someone else's checkpoint names, without naming them again."""
    only_write_model: bool
    """Write the model of a checkpoint, without training."""
    config: Place | None
    """Read options from this TOML file; the command line overrides them."""
    quiet: bool
    """Print errors only."""
    verbose: bool
    """Print every step, and every option as it was resolved."""
    ctx: int | None
    """Tokens per row; default: the context of the model, at most 512."""
    full: bool
    """Train every weight of the model, in float32, instead of an adapter."""
    lora_r: int
    """Rank of the adapter."""
    lora_alpha: float | None
    """Scale the adapter by alpha / rank; default: 8."""
    target: str | Sequence[str]
    """Weights that get an adapter: attn_q, blk.0-3.ffn_down, blk.8-, output, token_embd, or all of a group: attention,
    experts, shared (experts), router, norms; default: all linear ones but experts and routers."""
    lora_rank_of: str | Sequence[str]
    """Rank of one weight, such as attn_q=16, blk.0.ffn_up=4 or experts=2; may be repeated. Norms have rank 1."""
    lora_dropout: float
    """Dropout: the share of its input that an adapter does not see in a step; not for experts."""
    rslora: bool
    """Scale by alpha / sqrt(rank) instead of alpha / rank."""
    lora_plus_ratio: float
    """LoRA+: the learning rate of factor B is this many times lr."""
    lora_init: Place | None
    """Start from this adapter and its ranks: a GGUF file, a .bin, a PEFT folder."""
    only_write_lora: bool
    """Write the adapter of a checkpoint (resume), without training."""
    adapter_type: Literal["f32", "f16"]
    """Number type in adapter.gguf."""
    peft: Place | None
    """Also write the adapter in PEFT's format, into this folder."""
    base_precision: Literal["auto", "same", "int8"]
    """Number type of products with the base's weights; int8: 8-bit integers, which are faster; same: that of precision; auto:
    int8 if the base is quantized and large, the processor is an x86 without AMX, and no precision is given."""
    cache_base: Literal["auto", "off", "bf16", "int8"]
    """Copy the base's weights to the number type of its products, for speed; auto: if there is memory for it."""
    rope_freq_base: float | None
    """RoPE frequency base; default: the model's."""
    rope_freq_scale: float | None
    """RoPE frequency scale; default: the model's."""
    norm_rms_eps: float | None
    """Epsilon of the RMS norms; default: the model's."""
    lora: Place | Sequence[Place]
    """Adapter: a GGUF file, a .bin of llama.cpp's old finetune, or a PEFT folder; may be repeated."""
    lora_scaled: Sequence[tuple[Place, float]]
    """Adapter with a factor by which it is scaled; may be repeated."""
    objective: Literal["contrastive", "rerank", "grpo", "dpo", "kto", "orpo", "simpo"] | None
    """Preference training on rows of prompt, chosen and rejected; kto also takes prompt, completion and label. contrastive:
    train embeddings on rows of query, positive and negatives; rerank: train to tell on such rows whether a text answers a
    query; grpo: learn from rewards of answers that the model generates to the prompts."""
    beta: float | None
    """Strength of the preference term (lambda of ORPO), or of the divergence from the base in GRPO; default: 0.1, for simpo
    2, for grpo 0."""
    gamma: float
    """Target reward margin of SimPO."""
    desirable_weight: float
    """Weight of desirable answers in KTO."""
    undesirable_weight: float
    """Weight of undesirable answers in KTO."""
    pooling: Literal["auto", "last", "mean", "cls"]
    """The embedding of a text: the hidden state of its last token, the mean of all, or that of the first (cls); auto: what
    the file states, else last, or mean if tokens see later ones."""
    contrast_temp: float
    """Temperature of the contrastive loss, by which similarities are divided."""
    matryoshka: str
    """Sizes to which embeddings may be cut: the loss is added up over these first parts and the whole."""
    reward: str | Sequence[str]
    """Scores answers: a Python file with a function reward(prompt, answer, row), or a command that reads lines of JSON and
    writes a number for each; may be repeated."""
    reward_weights: str
    """Weights of several rewards in their sum; default: 1 each."""
    reward_timeout: float | str
    """Stop a reward that gives no further number for this long."""
    reward_memory: int | str
    """Memory that each process of a reward may take."""
    reward_failed: float | None
    """Reward of answers whose reward fails, with a warning; by default a failure stops the run."""
    num_generations: int
    """Answers to each prompt, which are compared; batch counts answers."""
    num_iterations: int
    """Steps with the same answers, before new ones are generated."""
    max_completion_length: int
    """Longest answer; those without an end are cut there."""
    temperature: float
    """Temperature of the answers, and of the probabilities that are trained."""
    top_k: int
    """Draw answers from this many of the most likely tokens; 0: from all."""
    top_p: float
    """Draw from the most likely tokens that have this probability in total; 1: from all."""
    min_p: float
    """Leave out tokens less likely than this fraction of the most likely one."""
    epsilon: float
    """How far below 1 a ratio of probabilities counts."""
    epsilon_high: float | None
    """How far above 1 a ratio counts; default: as epsilon."""
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo"]
    """How tokens are averaged: all of a step (dapo, bnpo), those of each answer first (grpo), or by a constant length
    (dr_grpo)."""
    scale_rewards: Literal["group", "batch", "none"]
    """Divide advantages by the standard deviation of a group of answers, or of all of a step."""
    mask_truncated_completions: bool
    """Train no answer that has no end."""
    train_on: Literal["completion", "last", "all"]
    """Train on the answers of prompts and chats, only on the last answer of a chat, or on all tokens. In plain text, all
    tokens are trained."""
    thinking: Literal["auto", "keep", "strip", "off"]
    """Reasoning of answers: as the chat template renders it; kept in all turns; removed from all; or removed, with thinking
    switched off in the template."""
    columns: str
    """The column names that the data has for known keys: prompt=question,completion=answer."""
    as_: Literal["text", "rest"] | None
    """text: train on files as they are, whatever they look like; rest: train on the remaining pairs even if most are
    unusable."""
    as_chat: bool | None
    """Render prompts with answers by the model's chat template, like chats; auto: if it has one."""
    skip_bad_rows: bool
    """Skip rows of unknown form, or that the chat template refuses, and list them."""
    date: str
    """The date that a chat template sees, such as 2026-11-23; default: the day on which the run begins."""
    chat_template: Place | None
    """Render chats with the Jinja template in this file, or a built-in one (chatml, gemma, granite, llama3,
    mistral-v7-tekken, olmo2, phi3, phi4, phi4-mini); default: the model's own."""
    parse_special: bool
    """Read chat marks and other control tokens in text as tokens, for chats that are already rendered."""
    pack: bool | None
    """Pack several short samples into a row, each attending only to itself; auto: unless all data is plain text."""
    shuffle: bool
    """Shuffle the samples in each epoch."""
    val: Place | Sequence[Place] | Sequence[Mapping[str, Any]]
    """A file, folder or glob of validation data; may be given several times."""
    retain_data: str | Sequence[str]
    """Data that the model should not forget: its loss is measured at each validation, and chooses nothing; a file, folder or
    glob, may be given several times."""
    val_split: float
    """The share of the data to hold out for validation, such as 0.05."""
    sample_start: str
    """Text samples begin after this pattern; default: where the previous one ended."""
    include_sample_start: bool
    """Include the pattern in the samples."""
    escape: bool
    """Interpret the escapes \\n, \\r, \\t, \\', \\" and \\\\ in the pattern."""
    overlapping_samples: bool
    """Let samples overlap the next ones; without a pattern, one begins at every token of a text."""
    fill_with_next_samples: bool
    """Fill the rows of short samples with the next ones in shuffled order."""
    separate_with_eos: bool
    """When filling, put an end token between samples."""
    separate_with_bos: bool
    """When filling, put a begin token between samples."""
    sample_random_offsets: bool
    """Begin text samples at a random one of their tokens."""
    force_reshuffle: bool
    """When resuming, begin a new shuffle instead of continuing the old one."""
    batch: int
    """Rows per batch."""
    grad_acc: int
    """Batches per step; their gradients are added up."""
    iters: int | None
    """Steps in total, including those before a resume; default: 256, or as many as epochs takes."""
    epochs: int | None
    """Stop after this many passes over the data, or after iters if that is sooner."""
    optimizer: Literal["adamuon", "adamw", "lbfgs", "muon", "sgd"]
    """Optimizer. adamuon needs the fewest tokens, with lr 0.01; like muon it trains whole models only. sgd has momentum
    beta1, lbfgs uses the same rows in every step."""
    lr: float | None
    """Learning rate, at the peak of the schedule; default of finetune: 2 / the width of the model, but at most 0.01, for an
    adapter, less with a larger lora_alpha or lora_plus_ratio; 1e-4 with full or objective."""
    lr_min: float | None
    """Lowest learning rate of the schedule, also of the warm-up; default: a tenth of lr."""
    warmup: int | None
    """Steps in which the learning rate rises; default: 5 % of all steps."""
    schedule: Literal["constant", "linear", "cosine", "wsd"]
    """How the learning rate falls after the warm-up; wsd falls at the end only, and later if iters is raised."""
    decay_steps: int | None
    """Steps in which the learning rate falls; default: all after the warm-up, with wsd a fifth."""
    restart_growth: float
    """Restart the cosine; each period is longer than the one before by this factor. 0: never."""
    line_search: Literal["armijo", "wolfe", "strong-wolfe"]
    """Line search of L-BFGS."""
    lbfgs_history: int
    """Updates that L-BFGS keeps in its history."""
    lbfgs_refresh: int
    """Give L-BFGS new rows and an empty history after this many steps; 0: never."""
    weight_decay: float
    """Decoupled weight decay."""
    decay_min_ndim: int
    """Decay only tensors with at least this many dimensions."""
    clip: float
    """Clip the global gradient norm to this; 0: off."""
    beta1: float | None
    """Beta 1 of AdamW, momentum of SGD; default: 0.9, with adamuon 0.6."""
    beta2: float | None
    """Beta 2 of AdamW; default: 0.999, with adamuon 0.95."""
    eps: float
    """Epsilon of AdamW."""
    stop_window: int
    """Stop if the loss changed by less than stop_delta over this many steps; 0: never."""
    stop_delta: float
    """Least change of the loss over stop_window steps, as a share of the loss."""
    max_no_improvement: int
    """Stop after this many consecutive steps without a new lowest training loss; 0: never."""
    stop_rel: float
    """Stop if the loss changed by less than this share from one step to the next; 0: never."""
    loss: Literal["cross-entropy", "squared-error"]
    """Loss function; squared-error is for the sine wave only."""
    teacher: Place | None
    """Distill this model, which must have the same vocabulary."""
    teacher_weight: float
    """Share of the distillation loss; the data has the rest."""
    quant_aware: Literal[
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
    """Train for a model whose matrices have this type: products read them rounded to it. A new or whole model is written in
    it."""
    balance: float
    """Weight of a loss that balances the experts of each block; it is 1 if all are chosen equally often."""
    grad_groups: int | None
    """Groups of rows whose gradients are added in a fixed order, so that any number of ranks up to this one gives the same
    bits; default: 8 with several ranks."""
    seed: int
    """Seed of initial weights, shuffling and samples; -1: draw one, and print it."""
    precision: Literal["auto", "f32", "bf16"]
    """Number type of matrix products; auto: bf16 where it is faster, otherwise f32; f32 for L-BFGS."""
    flash: bool
    """Compute attention without storing all scores."""
    remat: str
    """Activations to recompute in the backward pass: none, light, block, optimal, a number of blocks, or a list such as
    block:3,wide:2; auto: light, or whatever fits the memory best."""
    memory: int | str | None
    """Memory limit of the run, such as 6GB; default: all that is free."""
    device: Literal["auto", "cpu", "cuda", "xpu", "mps", "torch-cpu"]
    """Processor: cpu, or with PyTorch a graphics card (cuda: NVIDIA or AMD, xpu: Intel, mps: Apple); auto: a card if PyTorch
    finds one."""
    kernels: Literal["cpu", "reference"]
    """Compiled kernels, or the numpy ones that define them."""
    threads: int | None
    """Threads; default: one per processor."""
    save_every: int
    """Save a checkpoint and the model every N steps; 0: at the end only."""
    keep: int
    """Checkpoints to keep; older ones are deleted."""
    eval_every: int
    """Validate every N steps and at the end; 0: never."""
    patience: int
    """Stop after this many consecutive validations without a new lowest loss; 0: never."""
    sample_every: int
    """Print a text that the model writes every N steps; 0: never."""
    sample_prompt: str | Sequence[str]
    """Prompt of these samples; may be repeated, for several texts."""
    report_every: int
    """Print a line every N steps; 0: at a readable rate."""
    max_time: float | str | None
    """Validate, save and stop after this time, such as 90m or 2h."""
    grad_comm_dtype: Literal["f32", "bf16"]
    """Number type of gradients between ranks; bf16 halves the traffic, and bits then depend on the number of ranks."""
    timeout: float | str
    """Exit with code 75 if one of several processes is silent for this long."""
    log: Literal["tensorboard", "wandb", "trackio", "csv"] | Sequence[Literal["tensorboard", "wandb", "trackio", "csv"]]
    """Also send metrics there; may be repeated."""
    name: str
    """Name of the run there; default: the name of its folder."""
    note: str
    """A note that is stored with the run."""
    ollama: str
    """Also create a model of this name in Ollama at the end, of the base with the adapter or of the new model."""
    profile: bool
    """Print where the time went, and write trace.json for Chrome and Perfetto."""
    checkpoint_out: str
    """Also write each checkpoint to this file; ITERATION in its name becomes the step, and LATEST in the name of a second
    copy."""
    model_out: str
    """Also write the model of each save to this file, named likewise."""
    lora_out: str
    """Also write the adapter of each save to this file, named likewise."""
    pattern_fn_it: str
    """Word in file names that becomes the step."""
    fn_latest: str
    """Word in place of the step in the name of the newest file."""
    keep_results: int
    """Keep this many models or adapters of earlier saves, named by step."""


class ExportLoraOptions(TypedDict, total=False):
    only_adapter: bool
    """Write only the adapters, as one GGUF adapter."""
    peft: Place | None
    """Write the adapters, as one, in PEFT's format into this folder."""
    type: Literal[
        "auto",
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
    """Type of the new model's matrices, also without adapters; keep: the type that each has in BASE; auto: the type that the
    adapters were trained for (quant_aware), otherwise keep."""
    imatrix: Place | None
    """Importance matrix of BASE, as imatrix and llama.cpp write it: columns that matter more are rounded less."""
    overwrite: bool
    """Replace the file out."""
    ollama: str
    """Also create a model of this name in Ollama at the end, of the base with the adapter or of the new model."""
    check: str
    """Compare the logits of the new file with those of BASE and its adapters on this text."""
    threads: int | None
    """Threads; default: one per processor."""
    lora: Place | Sequence[Place]
    """Adapter: a GGUF file, a .bin of llama.cpp's old finetune, or a PEFT folder; may be repeated."""
    lora_scaled: Sequence[tuple[Place, float]]
    """Adapter with a factor by which it is scaled; may be repeated."""


class ControlVectorOptionsGiven(TypedDict, total=False):
    method: Literal["mean", "pca", "trained"]
    """mean: the mean of the differences; pca: the direction in which they are largest, as long as they are in it on average;
    trained: directions that make the positive texts likelier than the negative ones."""
    tokens: Literal["last", "all"]
    """Compare what blocks give out for the last token of a text, or the mean over all."""
    iters: int
    """Steps, each with all pairs."""
    lr: float
    """Change in a step, as a share of the size of what blocks give out."""
    overwrite: bool
    """Replace the file out."""
    threads: int | None
    """Threads; default: one per processor."""


class ExtractOptionsGiven(TypedDict, total=False):
    lora_r: int
    """Rank of the adapter."""
    target: str | Sequence[str]
    """Weights that get an adapter: attn_q, blk.0-3.ffn_down, blk.8-, output, token_embd, or all of a group: attention,
    experts, shared (experts), router, norms; default: all linear ones but experts and routers."""
    lora_rank_of: str | Sequence[str]
    """Rank of one weight, such as attn_q=16, blk.0.ffn_up=4 or experts=2; may be repeated. Norms have rank 1."""
    adapter_type: Literal["f32", "f16"]
    """Number type of the adapter."""
    overwrite: bool
    """Replace the file out."""
    verbose: bool
    """Print for each weight which share of the difference its pair holds."""
    threads: int | None
    """Threads; default: one per processor."""


class ImportOptionsGiven(TypedDict, total=False):
    out: Place | None
    """File to write; default: the folder's name with .gguf, beside the folder."""
    type: Literal[
        "auto",
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
    """Type of the matrices; auto: bf16 or f16, as the folder has them, f16 for f32."""
    overwrite: bool
    """Replace the file out."""
    threads: int | None
    """Threads; default: one per processor."""


class MergeOptionsGiven(TypedDict, total=False):
    method: Literal["linear", "slerp", "task-arithmetic", "ties", "dare-linear", "dare-ties"]
    """linear: the average of all; slerp: a point on the arc between two; the others add to a base what models have learned,
    with all values of the differences, with the largest (ties), or with random ones (dare), and where signs differ, with
    those of one sign (-ties)."""
    base: Place | None
    """The model that all of MODELS were made from."""
    weight: float | Sequence[float]
    """Weight of a model; given once, for all, or once for each; default: 1. With slerp, the place between the models: 0 is
    the first, 1 the second; default: 0.5."""
    density: float | Sequence[float]
    """Share of a model's difference that is kept; given once, for all, or once for each; default: 0.5."""
    lambda_: float
    """Factor of the merged differences."""
    normalize: bool | None
    """Divide by the sum of the weights, with -ties of those that take part; default: with linear and ties."""
    seed: int
    """Seed of the values that are dropped."""
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
    """Type of the new model's matrices; keep: the type that each has in the base or the first model."""
    overwrite: bool
    """Replace the file out."""
    threads: int | None
    """Threads; default: one per processor."""


class PushOptionsGiven(TypedDict, total=False):
    private: bool
    """Create a private repository; an existing one must be private."""
    base: Place | None
    """The base of an adapter, if it is not the one that the run names."""
    dry_run: Place | None
    """Write the files into this folder, which must not exist, and upload nothing."""


class EvaluateOptionsGiven(TypedDict, total=False):
    ctx: int | None
    """Tokens per row; default: the context of the model, at most 512."""
    batch: int
    """Rows per batch."""
    threads: int | None
    """Threads; default: one per processor."""
    device: Literal["auto", "cpu", "cuda", "xpu", "mps", "torch-cpu"]
    """Processor: cpu, or with PyTorch a graphics card (cuda: NVIDIA or AMD, xpu: Intel, mps: Apple); auto: a card if PyTorch
    finds one."""
    precision: Literal["f32", "bf16"]
    """Number type of matrix products."""
    compare: Place | None
    """Evaluate this model, too, and compare both: a GGUF file, or `base` for MODEL without its adapters."""
    choices: Place | Sequence[Place]
    """Questions with several choices, as JSON lines or Parquet of HellaSwag, Winogrande, ARC, or {question, choices, answer};
    may be repeated."""
    limit: int | None
    """Take only the first questions of each file."""
    report: Place | None
    """Add the result to the page of this run."""
    exact_match: Place | Sequence[Place]
    """Prompts with answers, or chats, as JSON lines: generate answers, and count those that equal the expected ones; may be
    repeated."""
    answer_tokens: int
    """Tokens of an answer, at most."""
    answer_stop: str | Sequence[str]
    """End an answer before this text; may be repeated."""
    answer_pattern: str
    """Compare what this regular expression finds first, or its first group, such as '#### (-?[0-9]+)'."""
    ignore_case: bool
    """Compare answers without regard to case."""
    ignore_punctuation: bool
    """Compare answers without their punctuation."""
    lora: Place | Sequence[Place]
    """Adapter: a GGUF file, a .bin of llama.cpp's old finetune, or a PEFT folder; may be repeated."""
    lora_scaled: Sequence[tuple[Place, float]]
    """Adapter with a factor by which it is scaled; may be repeated."""
    objective: Literal["contrastive", "rerank", "grpo", "dpo", "kto", "orpo", "simpo"] | None
    """Preference training on rows of prompt, chosen and rejected; kto also takes prompt, completion and label. contrastive:
    train embeddings on rows of query, positive and negatives; rerank: train to tell on such rows whether a text answers a
    query; grpo: learn from rewards of answers that the model generates to the prompts."""
    beta: float | None
    """Strength of the preference term (lambda of ORPO), or of the divergence from the base in GRPO; default: 0.1, for simpo
    2, for grpo 0."""
    gamma: float
    """Target reward margin of SimPO."""
    desirable_weight: float
    """Weight of desirable answers in KTO."""
    undesirable_weight: float
    """Weight of undesirable answers in KTO."""
    pooling: Literal["auto", "last", "mean", "cls"]
    """The embedding of a text: the hidden state of its last token, the mean of all, or that of the first (cls); auto: what
    the file states, else last, or mean if tokens see later ones."""
    contrast_temp: float
    """Temperature of the contrastive loss, by which similarities are divided."""
    matryoshka: str
    """Sizes to which embeddings may be cut: the loss is added up over these first parts and the whole."""
    train_on: Literal["completion", "last", "all"]
    """Train on the answers of prompts and chats, only on the last answer of a chat, or on all tokens. In plain text, all
    tokens are trained."""
    thinking: Literal["auto", "keep", "strip", "off"]
    """Reasoning of answers: as the chat template renders it; kept in all turns; removed from all; or removed, with thinking
    switched off in the template."""
    columns: str
    """The column names that the data has for known keys: prompt=question,completion=answer."""
    as_: Literal["text", "rest"] | None
    """text: train on files as they are, whatever they look like; rest: train on the remaining pairs even if most are
    unusable."""
    as_chat: bool | None
    """Render prompts with answers by the model's chat template, like chats; auto: if it has one."""
    skip_bad_rows: bool
    """Skip rows of unknown form, or that the chat template refuses, and list them."""
    date: str
    """The date that a chat template sees, such as 2026-11-23; default: the day on which the run begins."""
    chat_template: Place | None
    """Render chats with the Jinja template in this file, or a built-in one (chatml, gemma, granite, llama3,
    mistral-v7-tekken, olmo2, phi3, phi4, phi4-mini); default: the model's own."""
    parse_special: bool
    """Read chat marks and other control tokens in text as tokens, for chats that are already rendered."""
    pack: bool | None
    """Pack several short samples into a row, each attending only to itself; auto: unless all data is plain text."""
    shuffle: bool
    """Shuffle the samples in each epoch."""
    val: Place | Sequence[Place] | Sequence[Mapping[str, Any]]
    """A file, folder or glob of validation data; may be given several times."""
    retain_data: str | Sequence[str]
    """Data that the model should not forget: its loss is measured at each validation, and chooses nothing; a file, folder or
    glob, may be given several times."""
    val_split: float
    """The share of the data to hold out for validation, such as 0.05."""
    sample_start: str
    """Text samples begin after this pattern; default: where the previous one ended."""
    include_sample_start: bool
    """Include the pattern in the samples."""
    escape: bool
    """Interpret the escapes \\n, \\r, \\t, \\', \\" and \\\\ in the pattern."""
    overlapping_samples: bool
    """Let samples overlap the next ones; without a pattern, one begins at every token of a text."""
    fill_with_next_samples: bool
    """Fill the rows of short samples with the next ones in shuffled order."""
    separate_with_eos: bool
    """When filling, put an end token between samples."""
    separate_with_bos: bool
    """When filling, put a begin token between samples."""
    sample_random_offsets: bool
    """Begin text samples at a random one of their tokens."""
    force_reshuffle: bool
    """When resuming, begin a new shuffle instead of continuing the old one."""


class ImatrixOptionsGiven(TypedDict, total=False):
    ctx: int | None
    """Tokens per row; default: the context of the model, at most 512."""
    chunks: int | None
    """Read this many rows of the data, at most."""
    overwrite: bool
    """Replace the file out."""
    threads: int | None
    """Threads; default: one per processor."""
    lora: Place | Sequence[Place]
    """Adapter: a GGUF file, a .bin of llama.cpp's old finetune, or a PEFT folder; may be repeated."""
    lora_scaled: Sequence[tuple[Place, float]]
    """Adapter with a factor by which it is scaled; may be repeated."""
    train_on: Literal["completion", "last", "all"]
    """Train on the answers of prompts and chats, only on the last answer of a chat, or on all tokens. In plain text, all
    tokens are trained."""
    thinking: Literal["auto", "keep", "strip", "off"]
    """Reasoning of answers: as the chat template renders it; kept in all turns; removed from all; or removed, with thinking
    switched off in the template."""
    columns: str
    """The column names that the data has for known keys: prompt=question,completion=answer."""
    as_: Literal["text", "rest"] | None
    """text: train on files as they are, whatever they look like; rest: train on the remaining pairs even if most are
    unusable."""
    as_chat: bool | None
    """Render prompts with answers by the model's chat template, like chats; auto: if it has one."""
    skip_bad_rows: bool
    """Skip rows of unknown form, or that the chat template refuses, and list them."""
    date: str
    """The date that a chat template sees, such as 2026-11-23; default: the day on which the run begins."""
    chat_template: Place | None
    """Render chats with the Jinja template in this file, or a built-in one (chatml, gemma, granite, llama3,
    mistral-v7-tekken, olmo2, phi3, phi4, phi4-mini); default: the model's own."""
    parse_special: bool
    """Read chat marks and other control tokens in text as tokens, for chats that are already rendered."""
    pack: bool | None
    """Pack several short samples into a row, each attending only to itself; auto: unless all data is plain text."""
    shuffle: bool
    """Shuffle the samples in each epoch."""
    val: Place | Sequence[Place] | Sequence[Mapping[str, Any]]
    """A file, folder or glob of validation data; may be given several times."""
    retain_data: str | Sequence[str]
    """Data that the model should not forget: its loss is measured at each validation, and chooses nothing; a file, folder or
    glob, may be given several times."""
    val_split: float
    """The share of the data to hold out for validation, such as 0.05."""
    sample_start: str
    """Text samples begin after this pattern; default: where the previous one ended."""
    include_sample_start: bool
    """Include the pattern in the samples."""
    escape: bool
    """Interpret the escapes \\n, \\r, \\t, \\', \\" and \\\\ in the pattern."""
    overlapping_samples: bool
    """Let samples overlap the next ones; without a pattern, one begins at every token of a text."""
    fill_with_next_samples: bool
    """Fill the rows of short samples with the next ones in shuffled order."""
    separate_with_eos: bool
    """When filling, put an end token between samples."""
    separate_with_bos: bool
    """When filling, put a begin token between samples."""
    sample_random_offsets: bool
    """Begin text samples at a random one of their tokens."""
    force_reshuffle: bool
    """When resuming, begin a new shuffle instead of continuing the old one."""


class EmbedOptionsGiven(TypedDict, total=False):
    ctx: int | None
    """Tokens per row; default: the context of the model, at most 512."""
    batch: int
    """Rows per batch."""
    threads: int | None
    """Threads; default: one per processor."""
    device: Literal["auto", "cpu", "cuda", "xpu", "mps", "torch-cpu"]
    """Processor: cpu, or with PyTorch a graphics card (cuda: NVIDIA or AMD, xpu: Intel, mps: Apple); auto: a card if PyTorch
    finds one."""
    precision: Literal["f32", "bf16"]
    """Number type of matrix products."""
    lora: Place | Sequence[Place]
    """Adapter: a GGUF file, a .bin of llama.cpp's old finetune, or a PEFT folder; may be repeated."""
    lora_scaled: Sequence[tuple[Place, float]]
    """Adapter with a factor by which it is scaled; may be repeated."""
    pooling: Literal["auto", "last", "mean", "cls"]
    """The embedding of a text: the hidden state of its last token, the mean of all, or that of the first (cls); auto: what
    the file states, else last, or mean if tokens see later ones."""


class RerankOptionsGiven(TypedDict, total=False):
    ctx: int | None
    """Tokens per row; default: the context of the model, at most 512."""
    batch: int
    """Rows per batch."""
    threads: int | None
    """Threads; default: one per processor."""
    device: Literal["auto", "cpu", "cuda", "xpu", "mps", "torch-cpu"]
    """Processor: cpu, or with PyTorch a graphics card (cuda: NVIDIA or AMD, xpu: Intel, mps: Apple); auto: a card if PyTorch
    finds one."""
    precision: Literal["f32", "bf16"]
    """Number type of matrix products."""
    lora: Place | Sequence[Place]
    """Adapter: a GGUF file, a .bin of llama.cpp's old finetune, or a PEFT folder; may be repeated."""
    lora_scaled: Sequence[tuple[Place, float]]
    """Adapter with a factor by which it is scaled; may be repeated."""


class PreviewOptionsGiven(TypedDict, total=False):
    n: int
    """Number of rows to show; json continues with the next epochs."""
    ctx: int | None
    """Tokens per row; default: the context of the model, at most 512."""
    batch: int
    """Rows per batch; they share a length."""
    seed: int
    """Seed of the order of samples."""
    objective: Literal["contrastive", "rerank", "grpo", "dpo", "kto", "orpo", "simpo"] | None
    """Preference training on rows of prompt, chosen and rejected; kto also takes prompt, completion and label. contrastive:
    train embeddings on rows of query, positive and negatives; rerank: train to tell on such rows whether a text answers a
    query; grpo: learn from rewards of answers that the model generates to the prompts."""
    train_on: Literal["completion", "last", "all"]
    """Train on the answers of prompts and chats, only on the last answer of a chat, or on all tokens. In plain text, all
    tokens are trained."""
    thinking: Literal["auto", "keep", "strip", "off"]
    """Reasoning of answers: as the chat template renders it; kept in all turns; removed from all; or removed, with thinking
    switched off in the template."""
    columns: str
    """The column names that the data has for known keys: prompt=question,completion=answer."""
    as_: Literal["text", "rest"] | None
    """text: train on files as they are, whatever they look like; rest: train on the remaining pairs even if most are
    unusable."""
    as_chat: bool | None
    """Render prompts with answers by the model's chat template, like chats; auto: if it has one."""
    skip_bad_rows: bool
    """Skip rows of unknown form, or that the chat template refuses, and list them."""
    date: str
    """The date that a chat template sees, such as 2026-11-23; default: the day on which the run begins."""
    chat_template: Place | None
    """Render chats with the Jinja template in this file, or a built-in one (chatml, gemma, granite, llama3,
    mistral-v7-tekken, olmo2, phi3, phi4, phi4-mini); default: the model's own."""
    parse_special: bool
    """Read chat marks and other control tokens in text as tokens, for chats that are already rendered."""
    pack: bool | None
    """Pack several short samples into a row, each attending only to itself; auto: unless all data is plain text."""
    shuffle: bool
    """Shuffle the samples in each epoch."""
    val: Place | Sequence[Place] | Sequence[Mapping[str, Any]]
    """A file, folder or glob of validation data; may be given several times."""
    retain_data: str | Sequence[str]
    """Data that the model should not forget: its loss is measured at each validation, and chooses nothing; a file, folder or
    glob, may be given several times."""
    val_split: float
    """The share of the data to hold out for validation, such as 0.05."""
    sample_start: str
    """Text samples begin after this pattern; default: where the previous one ended."""
    include_sample_start: bool
    """Include the pattern in the samples."""
    escape: bool
    """Interpret the escapes \\n, \\r, \\t, \\', \\" and \\\\ in the pattern."""
    overlapping_samples: bool
    """Let samples overlap the next ones; without a pattern, one begins at every token of a text."""
    fill_with_next_samples: bool
    """Fill the rows of short samples with the next ones in shuffled order."""
    separate_with_eos: bool
    """When filling, put an end token between samples."""
    separate_with_bos: bool
    """When filling, put a begin token between samples."""
    sample_random_offsets: bool
    """Begin text samples at a random one of their tokens."""
    force_reshuffle: bool
    """When resuming, begin a new shuffle instead of continuing the old one."""


class LoadOptionsGiven(TypedDict, total=False):
    ctx: int | None
    """Tokens of prompt and text together; default: the context of the model, at most 4096."""
    threads: int | None
    """Threads; default: one per processor."""
    device: Literal["auto", "cpu", "cuda", "xpu", "mps", "torch-cpu"]
    """Processor: cpu, or with PyTorch a graphics card (cuda: NVIDIA or AMD, xpu: Intel, mps: Apple); auto: a card if PyTorch
    finds one."""
    lora: Place | Sequence[Place]
    """Adapter: a GGUF file, a .bin of llama.cpp's old finetune, or a PEFT folder; may be repeated."""
    lora_scaled: Sequence[tuple[Place, float]]
    """Adapter with a factor by which it is scaled; may be repeated."""
    control_vector: Place | Sequence[Place]
    """Control vector: a GGUF file; may be repeated."""
    control_vector_scaled: Sequence[tuple[Place, float]]
    """Control vector with a factor by which it is scaled; may be repeated."""
    control_vector_first: int
    """The first block that control vectors change; block 0 never is."""
    control_vector_last: int | None
    """The last block that control vectors change; default: the last of all."""


class SamplingOptionsGiven(TypedDict, total=False):
    n: int
    """Tokens to generate; -1: until the text ends or the context is full."""
    ctx_shift: bool
    """Continue when the context is full: drop the older half of the text."""
    keep: int
    """First tokens to keep when the context is shifted, besides a begin token; -1: all of the prompt."""
    temp: float
    """Temperature; 0 takes the most likely token."""
    top_k: int
    """Sample from this many of the most likely tokens; 0: from all."""
    top_p: float
    """Sample from the most likely tokens that have this probability in total; 1: from all."""
    min_p: float
    """Leave out tokens less likely than this fraction of the most likely one; 0: none."""
    repeat_penalty: float
    """Make recent tokens less likely; 1: off."""
    repeat_last_n: int
    """Number of recent tokens that the penalty applies to; 0: off, -1: all."""
    seed: int
    """Seed of sampling; -1: random."""
    stop: str | Sequence[str]
    """Stop before this text; may be repeated."""
    temperature: float
    """Another name of temp."""


class ChatOptionsGiven(TypedDict, total=False):
    ctx: int | None
    """Tokens of prompt and text together; default: the context of the model, at most 4096."""
    threads: int | None
    """Threads; default: one per processor."""
    device: Literal["auto", "cpu", "cuda", "xpu", "mps", "torch-cpu"]
    """Processor: cpu, or with PyTorch a graphics card (cuda: NVIDIA or AMD, xpu: Intel, mps: Apple); auto: a card if PyTorch
    finds one."""
    lora: Place | Sequence[Place]
    """Adapter: a GGUF file, a .bin of llama.cpp's old finetune, or a PEFT folder; may be repeated."""
    lora_scaled: Sequence[tuple[Place, float]]
    """Adapter with a factor by which it is scaled; may be repeated."""
    control_vector: Place | Sequence[Place]
    """Control vector: a GGUF file; may be repeated."""
    control_vector_scaled: Sequence[tuple[Place, float]]
    """Control vector with a factor by which it is scaled; may be repeated."""
    control_vector_first: int
    """The first block that control vectors change; block 0 never is."""
    control_vector_last: int | None
    """The last block that control vectors change; default: the last of all."""
    n: int
    """Tokens to generate; -1: until the text ends or the context is full."""
    ctx_shift: bool
    """Continue when the context is full: drop the older half of the text."""
    keep: int
    """First tokens to keep when the context is shifted, besides a begin token; -1: all of the prompt."""
    temp: float
    """Temperature; 0 takes the most likely token."""
    top_k: int
    """Sample from this many of the most likely tokens; 0: from all."""
    top_p: float
    """Sample from the most likely tokens that have this probability in total; 1: from all."""
    min_p: float
    """Leave out tokens less likely than this fraction of the most likely one; 0: none."""
    repeat_penalty: float
    """Make recent tokens less likely; 1: off."""
    repeat_last_n: int
    """Number of recent tokens that the penalty applies to; 0: off, -1: all."""
    seed: int
    """Seed of sampling; -1: random."""
    stop: str | Sequence[str]
    """Stop before this text; may be repeated."""
    temperature: float
    """Another name of temp."""
