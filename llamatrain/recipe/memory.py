"""What a run will take, before it takes it; and what is computed again, or split, so that it fits."""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace

from llamatrain.config.units import Size
from llamatrain.engine.budget import cheapest
from llamatrain.optim.step import SGD, AdamW
from llamatrain.recipe.options import AUTO
from llamatrain.sample.decoder import Decoder
from llamatrain.train.graphs import Graphs, Policy, Setting

SHARE = 0.9  # of what is free, where no limit is given
ROW = 20  # bytes of a token in a batch: five arrays
BOUND = 5000  # bytes of a node that is bound to memory and a kernel: arrays, and the words of its calls
SMALL = 256  # tokens: a batch of fewer is split no further, its products would run below their speed


@dataclass(frozen=True)
class Needs:
    """Bytes, by what they are for."""

    weights: int
    gradients: int
    moments: int
    packed_copies: int
    base_pages: int
    inputs: int
    arena: int
    decoding: int
    interpreter: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())

    def describe(self) -> str:
        kinds = [f"{name} {Size(size).words}" for name, size in asdict(self).items() if size]
        return f"{Size(self.total).words}: {', '.join(kinds)}"


@dataclass(frozen=True)
class Shape:
    """What of a run decides its memory, beside the setting."""

    lengths: tuple[int, ...]
    validating: bool
    decoding: int  # positions of the cache for samples; 0: none
    history: int  # of L-BFGS
    interpreter: int  # what the process holds already
    batches: int = 1  # of a step, which are read before it
    copies: int = 0  # of the base
    pages: int = 0  # of its float32 weights, read where they lie, that are in memory at once


@dataclass(frozen=True)
class Choice:
    """A way to run: with its graphs, so that they are built once."""

    setting: Setting
    policy: Policy
    splits: int  # a batch is run in so many parts
    graphs: Graphs
    arena: int  # that programs share
    needs: Needs

    @property
    def total(self) -> int:
        return self.needs.total


MOMENTS: dict[type, int] = {AdamW: 2, SGD: 1}  # vectors as long as all that is trained


def fixed(setting: Setting, shape: Shape) -> int:
    """What no way to run it can change: weights, gradients that stay, moments."""
    vectors = 1 + (setting.gradients != "streamed") + moments_of(setting, shape)
    return vectors * 4 * sum(tensor.size for tensor in setting.trained.values()) + shape.copies


def moments_of(setting: Setting, shape: Shape) -> int:
    return MOMENTS.get(type(setting.optimizer), 2 * shape.history + 6)


def decoding_of(setting: Setting, positions: int) -> int:
    return Decoder.plan(setting.h, positions, setting.threads, setting.kernels, setting.weights).total


def needs_of(setting: Setting, policy: Policy, shape: Shape, splits: int = 1) -> Choice:
    gradients = "flat" if splits > 1 else setting.gradients
    setting = replace(setting, batch=setting.batch // splits, gradients=gradients)
    graphs = Graphs(setting, policy)
    shared, own = graphs.all(shape.lengths, gradients == "flat", shape.validating)
    plans, updates = ([graphs.plan(graph) for graph in each] for each in (shared, own))
    size = 4 * sum(tensor.size for tensor in setting.trained.values())
    inputs = (
        ROW * setting.batch * splits * max(shape.lengths) * shape.batches
        + sum(plan.bytes("input") for plan in plans)
        + graphs.table.nbytes
        + sum(a.nbytes for a in graphs.states.values())
    )
    decoding = decoding_of(setting, shape.decoding) if shape.decoding else 0
    moments = moments_of(setting, shape)
    arena, pages = max(plan.arena for plan in plans), max(shape.pages, *(plan.base_bytes for plan in plans))
    kept = 0 if gradients == "streamed" else size
    beside = arena + sum(plan.arena for plan in updates) - (kept if gradients == "arena" else 0)
    held = shape.interpreter + BOUND * sum(len(plan.nodes) for plan in (*plans, *updates))
    needs = Needs(size, kept, moments * size, shape.copies, pages, inputs, beside, decoding, held)
    return Choice(setting, policy, splits, graphs, arena, needs)


def choose(setting: Setting, remat: str, shape: Shape, most: int | None, parts: bool) -> Choice:
    """The first way that takes no more than `most`: recomputation where that is open, batches in `parts`. Else the leanest."""
    best: Choice | None = None
    for splits in _splits(setting, shape.lengths) if parts else (1,):
        if remat != AUTO:
            found = needs_of(setting, int(remat) if remat.isdecimal() else remat, shape, splits)
        else:
            found = _cheapest(setting, shape, splits, most)
        best = found if best is None or found.total < best.total else best
        if most is None or found.total <= most:
            return found
    assert best
    return best


def excess(choice: Choice, limit: int | None, most: int | None) -> str | None:
    """What to say of a run that takes more than was allowed, or is free."""
    if most is None or choice.total <= most:
        return None
    told = f"--memory allows {Size(most).words}" if limit is not None else f"{Size(most).words} are free for it"
    takes = f"{Size(choice.total).words} ({choice.needs.describe().partition(': ')[2]})"
    copied = choice.needs.packed_copies and not choice.setting.drop_base
    less = "--cache-base off, a smaller --batch or --ctx" if copied else "a smaller --batch, --ctx or model"
    return f"the run takes {takes}, and {told}; {less} takes less"


def _splits(setting: Setting, lengths: Iterable[int]) -> Iterator[int]:
    """Into how many parts a batch may be run: 1, and more where gradients can be added up."""
    yield 1
    longest, splits = max(lengths), 2
    while setting.gradients != "streamed" and setting.batch % splits == 0 and setting.batch // splits * longest >= SMALL:
        yield splits
        splits *= 2


def _cheapest(setting: Setting, shape: Shape, splits: int, most: int | None) -> Choice:
    """Of the recomputations the one that costs least time, or least memory where none fits."""
    limit = sys.maxsize if most is None else most
    _, found = cheapest(lambda policy: needs_of(setting, policy, shape, splits), setting.h.layers, limit)
    return found
