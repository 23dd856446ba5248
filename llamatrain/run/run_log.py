"""The figures of a run: metrics.jsonl, what is told of it elsewhere, and its page."""

from llamatrain.checkpoints.checkpoint import Checkpoint
from llamatrain.checkpoints.run_folder import RunFolder
from llamatrain.report.html_report import RunPage
from llamatrain.report.loggers import LoggerContext, Loggers
from llamatrain.report.memory_layout import MemoryLayout
from llamatrain.report.metrics import Metrics
from llamatrain.run.header import facts
from llamatrain.run.prepare import PreparedRun


def metrics_of(prepared: PreparedRun, folder: RunFolder) -> Metrics:
    """New, or those of the run so far; in a new folder its first part is told, too."""
    name, sources, run = "metrics.jsonl", prepared.inputs, prepared.config.run
    owed = sources.checkpoint is not None and sources.checkpoint.state.validation_due
    metrics = Metrics(folder.result_path(name), sources.home and sources.home / name, sources.step, owed)
    if run.log:
        told = LoggerContext(
            folder=lambda: metrics.path.parent,
            name=run.name or folder.path.resolve().name,
            note=run.note,
            options=prepared.config.plain(),
            step=sources.step,
            lines=metrics.lines,
        )

        def warn(line: str) -> None:
            metrics.warn(line)  # by whoever listens then

        metrics.sink = Loggers(run.log, told, warn)
    return metrics


def shows_first(checkpoint: Checkpoint | None) -> bool:
    """Tell whether a run that goes on shows its sample of step 0 again: nothing was learned before it was ended."""
    return checkpoint is not None and not checkpoint.state.counters.step and not checkpoint.state.partial


def page_of(prepared: PreparedRun, folder: RunFolder, metrics: Metrics) -> RunPage:
    """It shows the memory of a batch of the longest rows, too."""
    name, sources, graphs = "samples.jsonl", prepared.inputs, prepared.plan.plan.graphs
    again = bool(prepared.config.run.sample_every) and shows_first(sources.checkpoint)
    samples = Metrics(folder.result_path(name), sources.home and sources.home / name, sources.step - again)
    arena = MemoryLayout.from_plan(graphs.plan(graphs.largest))
    told = {"facts": facts(prepared, folder.path), "memory": arena.to_json() if arena else None}
    return RunPage(metrics, samples, told, metrics.warn)
