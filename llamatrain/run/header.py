"""Describes a run in a few lines before it starts."""

from pathlib import Path

from llamatrain.run.prepare import PreparedRun


def describe_run(prepared: PreparedRun, folder: Path) -> list[tuple[str, str]]:
    """Return the lines of the header: label and text."""
    train, plan, h = prepared.config.train, prepared.plan.plan, prepared.model.h
    batches = f", {train.grad_acc} batches a step" if train.grad_acc > 1 else ""
    steps = f"{train.iters} step{'s' * (train.iters != 1)}"
    rows = f"{train.batch} rows of {max(prepared.data.rows.lengths)}{batches}"
    recomputed = "" if str(plan.policy) == "none" else f", recomputing {plan.policy}"
    trained = sum(tensor.size for tensor in prepared.plan.weights.trainable.values())
    adapter = f"; an adapter of {trained:,} is trained" if prepared.trainable.kind == "finetune_lora" else ""
    return [
        ("model", h.describe()),
        ("parameters", f"{h.parameter_count:,}{adapter}"),
        (
            "data",
            "; ".join(filter(None, (prepared.data.description, prepared.data.describe_packing(train.batch)))),
        ),
        (
            "training",
            f"{train.optimizer}, {steps} of {rows}, {train.precision}, {plan.spec.threads} threads",
        ),
        ("memory", plan.breakdown.describe() + recomputed),
        ("folder", str(folder)),
        *([("note", note)] if (note := prepared.config.run.note) else []),
    ]


def join_settings(config: str) -> str:
    """Return the settings of a TOML text in one line."""
    whole = config.replace("[\n    ", "[").replace(",\n    ", ", ").replace(",\n]", "]")
    return ", ".join(line for line in whole.splitlines() if line and not line.startswith("#"))
