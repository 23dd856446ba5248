"""The names that other tools give to options and commands.

Options are accepted if they mean the same here; others are explained in errors.
"""

BASE, DATA = "BASE", "DATA"
TRAINERS = {
    "--learning-rate": "--lr",
    "--min-lr": "--lr-min",
    "--warmup-steps": "--warmup",
    "--lr-scheduler-type": "--schedule",
    "--lr-scheduler": "--schedule",
    "--batch-size": "--batch",
    "--micro-batch-size": "--batch",
    "--train-batch-size": "--batch",
    "--per-device-train-batch-size": "--batch",
    "--gradient-accumulation-steps": "--grad-acc",
    "--grad-accumulation-steps": "--grad-acc",
    "--max-grad-norm": "--clip",
    "--grad-clip": "--clip",
    "--num-train-epochs": "--epochs",
    "--num-epochs": "--epochs",
    "--epoch": "--epochs",
    "--max-steps": "--iters",
    "--max-iters": "--iters",
    "--num-steps": "--iters",
    "--train-steps": "--iters",
    "--steps": "--iters",
    "--max-seq-length": "--ctx",
    "--max-seq-len": "--ctx",
    "--max-length": "--ctx",
    "--seq-len": "--ctx",
    "--block-size": "--ctx",
    "--ctx-size": "--ctx",
    "--context-length": "--ctx",
    "--adam-epsilon": "--eps",
    "--optim": "--optimizer",
    "--output-dir": "--out",
    "--output": "--out",
    "--out-dir": "--out",
    "--resume-from-checkpoint": "--resume",
    "--logging-steps": "--report-every",
    "--save-steps": "--save-every",
    "--save-total-limit": "--keep",
    "--eval-steps": "--eval-every",
    "--eval-interval": "--eval-every",
    "--report-to": "--log",
    "--run-name": "--name",
    "--validation-split": "--val-split",
    "--validation-file": "--val",
    "--val-data": "--val",
    "--eval-data": "--val",
    "--random-seed": "--seed",
    "--num-threads": "--threads",
    "--bf16": "--precision bf16",
    "--fp32": "--precision f32",
    "--gradient-checkpointing": "--remat block",
    "--data": DATA,
    "--data-path": DATA,
    "--dataset": DATA,
    "--train-file": DATA,
    "--text": DATA,
    "--text-file": DATA,
    "--input": DATA,
    "--early-stopping-patience": "--patience",
}
SHAPES = {
    "--n-ctx": "--ctx",
    "--n-embd": "--embd",
    "--dim": "--embd",
    "--d-model": "--embd",
    "--hidden-size": "--embd",
    "--n-layer": "--layer",
    "--n-layers": "--layer",
    "--num-layers": "--layer",
    "--num-hidden-layers": "--layer",
    "--n-head": "--head",
    "--n-heads": "--head",
    "--num-heads": "--head",
    "--num-attention-heads": "--head",
    "--n-kv-heads": "--head-kv",
    "--num-key-value-heads": "--head-kv",
    "--intermediate-size": "--ff",
    "--tokenizer": "--vocab-from",
}
TUNERS = {
    "-m": BASE,
    "--model": BASE,
    "--base": BASE,
    "--base-model": BASE,
    "--model-name-or-path": BASE,
    "--lora-rank": "--lora-r",
    "--r": "--lora-r",
    "--loraplus-lr-ratio": "--lora-plus-ratio",
    "--use-rslora": "--rslora",
    "--dpo-beta": "--beta",
}
GENERATORS = {
    "-m": BASE,
    "--model": BASE,
    "-p": "--prompt",
    "-f": "--file",
    "-c": "--ctx",
    "--ctx-size": "--ctx",
    "-t": "--threads",
    "-s": "--seed",
    "-np": "-n",
    "--n-predict": "-n",
    "--predict": "-n",
    "--max-tokens": "-n",
    "--max-new-tokens": "-n",
    "--temperature": "--temp",
    "--repetition-penalty": "--repeat-penalty",
    "--context-shift": "--ctx-shift",
    "-r": "--stop",
    "--reverse-prompt": "--stop",
    "-cnv": "--chat",
    "--conversation": "--chat",
    "-i": "--chat",
    "--interactive": "--chat",
    "--adapter": "--lora",
    "-sys": "--system",
    "--system-prompt": "--system",
    "-ngl": "",
    "--n-gpu-layers": "",
}
ALONE = (
    *("--bf16", "--fp32", "--gradient-checkpointing", "--use-rslora", "--context-shift"),
    *("-cnv", "--conversation", "-i", "--interactive"),
)
# Hints for options that have no direct counterpart.
ANSWERS = {
    "--early-stopping": "use --patience 3 to stop after three validations in a row without a new lowest loss",
    "--f": "name data files without an option; generate reads a prompt from --file",
    "--warmup-ratio": "--warmup takes a number of steps; default: 5 % of all",
    "--fp16": "--precision takes f32 or bf16, and chooses the faster one by default",
    "--load-in-4bit": "leave it out: a quantized BASE stays as it is",
    "--load-in-8bit": "leave it out: a quantized BASE stays as it is",
    "--target-modules": "--target takes GGUF's names: attn_q, attn_k, attn_v, attn_output, ffn_gate, ffn_up, ffn_down",
    "--lora-target-modules": "--target takes GGUF's names: attn_q, attn_k, attn_v, attn_output, ffn_gate, ffn_up, ffn_down",
    "--device": "leave it out: all work is done by the processor",
    "--gpu": "leave it out: all work is done by the processor",
    "--gpus": "leave it out: all work is done by the processor",
    "--cuda": "leave it out: all work is done by the processor",
    "--model": "name the model first, without an option; from-scratch starts from one with --checkpoint-in",
    "--dry-run": "llamatrain plan shows what a run takes, llamatrain preview what it trains on",
    "--packing": "short samples are packed unless --no-pack is given",
    "--merge": "llamatrain export-lora merges an adapter into its base",
    "--num-workers": "leave it out: data is always read ahead",
    "--do-train": "leave it out: llamatrain finetune trains",
}
SUBCOMMANDS = {
    "train": "from-scratch for a new model, finetune for an existing one",
    "lora": "finetune",
    "sft": "finetune",
    "dpo": "finetune, with --objective dpo",
    "tune": "finetune",
    "run": "generate",
    "chat": "generate, with --chat",
    "eval": "evaluate",
    "perplexity": "evaluate",
    "merge-models": "merge",
    "mergekit": "merge",
    "quantize": "export-lora MODEL.gguf --type q8_0 --out NEW.gguf",
    "info": "inspect",
    "show": "inspect",
    "help": "--help, also after a command",
    "resume": "from-scratch or finetune, with --resume RUN",
    "version": "--version",
    "pretrain": "from-scratch",
    "sample": "generate",
    "tokenize": "preview",
    "serve": "not part of llamatrain: use llama.cpp's llama-server",
    "pull": "not needed: name the model hf:OWNER/NAME or ollama:NAME in place of a file",
    "download": "not needed: name the model hf:OWNER/NAME or ollama:NAME in place of a file",
    "convert": "import",
}


def suggest_command(command: str) -> str:
    """Return a hint for a command that does not exist."""
    hint = SUBCOMMANDS.get(command, "")
    return f"; {'' if hint.startswith('not ') else 'use '}{hint}" if hint else ""


def suggest_option(option: str) -> str:
    """Return a hint for an option that does not exist."""
    flag = f"--{option.partition('=')[0].lstrip('-')}".replace("_", "-")
    if flag in ANSWERS:
        return f"; {ANSWERS[flag]}"
    known = {**GENERATORS, **TUNERS, **SHAPES, **TRAINERS}.get(flag, "")
    return (
        f"; it is called {known} here"
        if known.startswith("-")
        else "; name it without an option"
        if known
        else ""
    )
