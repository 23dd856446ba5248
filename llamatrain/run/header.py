"""What a run is, in a few lines, before it begins."""

from pathlib import Path

from llamatrain.run.prepare import PreparedRun


def facts(prepared: PreparedRun, folder: Path) -> list[tuple[str, str]]:
    train, way, h = prepared.config.train, prepared.plan.plan, prepared.model.h
    batches = f", {train.grad_acc} batches a step" if train.grad_acc > 1 else ""
    steps = f"{train.iters} step{'s' * (train.iters != 1)}"
    rows = f"{train.batch} rows of {max(prepared.data.rows.lengths)}{batches}"
    recomputed = "" if str(way.policy) == "none" else f", recomputing {way.policy}"
    trained = sum(tensor.size for tensor in prepared.plan.weights.trainable.values())
    some = f"; an adapter of {trained:,} is trained" if prepared.trainable.kind == "finetune_lora" else ""
    return [
        ("model", h.describe()),
        ("parameters", f"{h.parameter_count:,}{some}"),
        ("data", "; ".join(filter(None, (prepared.data.described, prepared.data.filled(train.batch))))),
        (
            "training",
            f"{train.optimizer}, {steps} of {rows}, {train.precision}, {way.spec.threads} threads",
        ),
        ("memory", way.breakdown.describe() + recomputed),
        ("folder", str(folder)),
        *([("note", note)] if (note := prepared.config.run.note) else []),
    ]


def in_a_line(config: str) -> str:
    """What a file of options says."""
    whole = config.replace("[\n    ", "[").replace(",\n    ", ", ").replace(",\n]", "]")
    return ", ".join(line for line in whole.splitlines() if line and not line.startswith("#"))
