"""Opens the metrics and the page of a run."""

from llamatrain.checkpoints.checkpoint import Checkpoint
from llamatrain.checkpoints.run_folder import RunFolder
from llamatrain.report.html_report import RunPage
from llamatrain.report.loggers import LoggerContext, Loggers
from llamatrain.report.memory_layout import MemoryLayout
from llamatrain.report.metrics import Metrics
from llamatrain.run.prepare import PreparedRun
from llamatrain.run.summary import describe_run


def open_metrics(prepared: PreparedRun, folder: RunFolder) -> Metrics:
    """Open metrics.jsonl and the loggers; a resumed run in a new folder takes over its earlier lines."""
    name, inputs, run = "metrics.jsonl", prepared.inputs, prepared.config.run
    validation_due = inputs.checkpoint is not None and inputs.checkpoint.state.validation_due
    metrics = Metrics(
        folder.result_path(name), inputs.folder and inputs.folder / name, inputs.step, validation_due
    )
    if run.log:
        context = LoggerContext(
            folder=lambda: metrics.path.parent,
            name=run.name or folder.path.resolve().name,
            note=run.note,
            options=prepared.config.plain(),
            step=inputs.step,
            lines=metrics.lines,
        )

        def warn(line: str) -> None:
            metrics.warn(line)  # looked up at each call, since the report replaces it later

        metrics.sink = Loggers(run.log, context, warn)
    return metrics


def repeats_first_sample(checkpoint: Checkpoint | None) -> bool:
    """Return True if a resumed run prints the sample of step 0 again, because it had learned nothing."""
    return checkpoint is not None and not checkpoint.state.counters.step and not checkpoint.state.partial


def open_page(prepared: PreparedRun, folder: RunFolder, metrics: Metrics) -> RunPage:
    """Open the report page, which also shows the memory layout of the longest batch."""
    name, inputs, graphs = "samples.jsonl", prepared.inputs, prepared.fitted.plan.graphs
    repeats = bool(prepared.config.run.sample_every) and repeats_first_sample(inputs.checkpoint)
    samples = Metrics(folder.result_path(name), inputs.folder and inputs.folder / name, inputs.step - repeats)
    layout = MemoryLayout.from_plan(graphs.plan(graphs.largest))
    page_facts = {
        "facts": describe_run(prepared, folder.path),
        "memory": layout.to_json() if layout else None,
    }
    return RunPage(metrics, samples, page_facts, metrics.warn)
