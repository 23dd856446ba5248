"""The figures of a run: metrics.jsonl, and what is told of it elsewhere."""

from llamatrain.recipe.prepare import Prepared
from llamatrain.report.loggers import Logged, Loggers
from llamatrain.report.metrics import Metrics
from llamatrain.store.folder import RunFolder


def metrics_of(prepared: Prepared, folder: RunFolder) -> Metrics:
    """New, or those of the run so far; in a new folder its first part is told, too."""
    name, sources, run = "metrics.jsonl", prepared.sources, prepared.kept.run
    owed = sources.checkpoint is not None and sources.checkpoint.state.owed
    metrics = Metrics(folder.result(name), sources.home and sources.home / name, sources.step, owed)
    if run.log:
        told = Logged(
            folder=lambda: metrics.path.parent,
            name=run.name or folder.path.resolve().name,
            note=run.note,
            options=prepared.kept.plain(),
            step=sources.step,
            lines=metrics.lines,
        )

        def warn(line: str) -> None:
            metrics.tell(line)  # by whoever listens then

        metrics.also = Loggers(run.log, told, warn)
    return metrics
