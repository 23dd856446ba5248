"""Prepares a run: everything that can fail, before anything is written; and which way of running it fits the memory."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from llamatrain.config.units import Size
from llamatrain.data.sine import Sine
from llamatrain.data.sources import find_sources
from llamatrain.errors import MemoryPlanError
from llamatrain.machine.memory import resident
from llamatrain.machine.threads import runner
from llamatrain.machine.units import cores
from llamatrain.recipe.asked import Options, Start, gone_on_with, start_of
from llamatrain.recipe.material import Material, Model, material_of, sine_of
from llamatrain.recipe.memory import Choice, excess
from llamatrain.recipe.options import PlaceOptions
from llamatrain.recipe.samples import Watch
from llamatrain.recipe.target import Task
from llamatrain.recipe.tasks import caches, model_for, task_for
from llamatrain.recipe.ways import allowed, chosen, resolved, watch_of


@dataclass(frozen=True)
class Prepared:
    """A run that could begin."""

    options: Options
    start: Start
    model: Model
    material: Material
    task: Task
    watch: Watch
    choice: Choice
    notes: tuple[str, ...]


def prepare(options: Options, start: Start, notes: list[str], given: Collection[str]) -> Prepared:
    """Everything that can fail, before anything is written."""
    model = model_for(options, start, given)
    task_for(options, model, start)  # what adapters are not as they should be is told before the data is read
    material = material_of(options.files, model, options.data, options.train.seed)
    train, tune = resolved(options.train, material.rows.count), options.tune
    alpha = tune.lora_alpha if tune.full or tune.lora_init else tune.alpha
    options = replace(
        options, train=train, model=replace(options.model, ctx=model.row), tune=replace(tune, ctx=model.row, lora_alpha=alpha)
    )
    kept = bool(start.checkpoint and start.checkpoint.options)
    lengths, validating = material.rows.lengths, material.validation is not None
    options, task, watch, choice = fitting(options, model, start, lengths, validating, material.sine, goes_on=kept)
    if (told := excess(choice, options.train.memory, allowed(options.train))) is not None:
        raise MemoryPlanError(told)
    notes = [*notes, *remarks(options, model, start, choice)]
    remat, acc = str(choice.policy), options.train.grad_acc * choice.splits
    options = replace(options, train=replace(options.train, remat=remat, batch=choice.setting.batch, grad_acc=acc))
    return Prepared(options, start, model, material, task, watch, choice, tuple(notes))


def fitting(
    options: Options, model: Model, start: Start, lengths: tuple[int, ...], validating: bool, sine: Sine | None, *,
    goes_on: bool = False, refuse: bool = True,
) -> tuple[Options, Task, Watch, Choice]:  # fmt: skip
    """The way to run that fits the memory; where it is open, without copies of the base if not with them."""
    ways = [replace(options, tune=replace(options.tune, cache_base=cache)) for cache in caches(options, model.h)]
    runner(options.run.threads or cores())  # every run needs it, and what it loads is to be counted as what the process holds
    held = resident()
    for way in ways:
        task = task_for(way, model, start)
        watch = watch_of(way, model, task, sine)
        last = way is ways[-1]
        choice = chosen(way, task, lengths, validating, watch, held, refuse=refuse and last, goes_on=goes_on)
        if last or excess(choice, way.train.memory, allowed(way.train)) is None:
            break
    return way, task, watch, choice


def remarks(options: Options, model: Model, start: Start, choice: Choice) -> Iterator[str]:
    """What a run's user should know of it."""
    tune = options.tune
    if start.checkpoint and start.checkpoint.counters.step >= (options.train.iters or 0):
        yield f"all {options.train.iters} steps are done already; --iters with a larger number goes on"
    if choice.splits > 1:
        yield f"a batch is run in {choice.splits} parts, to fit the memory"
    if model.row > model.h.ctx:
        yield f"rows have {model.row} tokens, and the model was made for {model.h.ctx}"
    if tune.cache_base == "off" and choice.needs.packed_copies:
        copied = Size(choice.needs.packed_copies).words
        yield f"weights of types that no product unpacks on its way are unpacked once, which takes {copied}"
    changed = (tune.rope_freq_base, tune.rope_freq_scale, tune.norm_rms_eps) != (None, None, None)
    if changed and options.command == "finetune" and not tune.full:
        yield "the adapter is for the base with this rope and epsilon: it is to be run with the same"


def planned(options: Options, place: PlaceOptions, given: Collection[str]) -> tuple[Choice, str | None]:
    """How a run would be run, and why it would not, if so; its text is not read, and nothing is written."""
    start = start_of(place, options.command, options.base)
    if start.checkpoint:
        options, _ = gone_on_with(options, start, given)
    if named := [file for file in options.files if file != "-"]:
        find_sources(named)
    model = model_for(options, start, given, read=False)
    sine = None if options.files else sine_of(model, 0).sine
    options = replace(options, train=resolved(options.train, lambda epochs: epochs))
    validating = bool(options.data.val or options.data.val_split)
    options, *_, choice = fitting(options, model, start, (model.row,), validating, sine, refuse=False)
    return choice, excess(choice, options.train.memory, allowed(options.train))
