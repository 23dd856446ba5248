"""Profiles a run: starts the recorder, prints the table, and writes the trace."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from llamatrain.checkpoints.run_folder import RunFolder
from llamatrain.engine.profiler import Recorder, current_recorder, record
from llamatrain.errors import FileError
from llamatrain.io.atomic_write import AtomicFile
from llamatrain.platform.processes import process_age
from llamatrain.platform.terminal import log_line
from llamatrain.report.records import StepLine
from llamatrain.run.signals import Interrupts
from llamatrain.train.protocols import Listener


@contextmanager
def profile(enabled: bool, interrupts: Interrupts) -> Iterator[None]:
    """Record a run, and print a table at its end, also if it is interrupted."""
    if not enabled:
        yield
        return
    recorder = Recorder(process_age() if interrupts.owns_process else 0.0)
    interrupts.after_exit = lambda: print_profile(recorder)
    try:
        with record(recorder):
            yield
    finally:
        if recorder.steps or recorder.trace:
            print_profile(recorder)


def print_profile(recorder: Recorder) -> None:
    """Print the table of a recorder."""
    from llamatrain.report.profile import profile_table, trace_contents

    for line in profile_table(recorder):
        log_line(line)
    if recorder.trace:
        log_line(f"the trace: {recorder.trace}, {trace_contents(recorder)}")


def write_trace(command: str, folder: RunFolder, warn: Callable[[str], None]) -> None:
    """Write trace.json to the run's folder, if the run is profiled."""
    if not (recorder := current_recorder()):
        return
    from llamatrain.report.profile import trace_json

    recorder.trace = folder.result_path("trace.json")
    try:
        with AtomicFile(recorder.trace) as file:
            file.write(trace_json(recorder, f"llamatrain {command}"))
    except FileError as error:
        recorder.trace = None
        warn(str(error))


def with_profile(listener: Listener) -> Listener:
    """Return a listener that also tells the recorder where steps end."""
    recorder = current_recorder()
    return ProfiledRun(listener, recorder) if recorder else listener


class ProfiledRun:
    """A listener that tells the recorder where a step ends."""

    def __init__(self, listener: Listener, recorder: Recorder) -> None:
        self.listener, self.recorder = listener, recorder
        self.log = listener.log
        self.show_activity = listener.show_activity
        self.on_validation, self.on_retained = listener.on_validation, listener.on_retained
        self.on_save, self.on_save_error = listener.on_save, listener.on_save_error

    def on_step(self, line: StepLine) -> None:
        """End the step in the recorder, and pass the line on."""
        self.recorder.end_step(line.step, line.seconds_waited or 0.0)
        self.listener.on_step(line)
        self.recorder.discard_step()
