"""Where a run stands between two of its micro-batches: with the vectors of its programs, all that it needs to go on."""

from dataclasses import dataclass, field

from llamatrain.data.rows import State
from llamatrain.optim.stop import StopState
from llamatrain.train.comparison import Rewards


@dataclass
class Counters:
    """Of the whole run so far."""

    step: int = 0
    samples: int = 0
    tokens: int = 0
    epoch: int = 0
    seconds: float = 0.0


@dataclass
class Partial:
    """A step left half way: the loss of each micro-batch whose gradients are added up already, and the seconds that they took."""

    losses: list[float]
    seconds: float = 0.0
    rewards: Rewards | None = None  # of its answers, where they are compared


@dataclass
class RunState:
    """What the loop advances, and a checkpoint keeps whole."""

    counters: Counters = field(default_factory=Counters)
    data: State | None = None  # before a step that is under way, after one that is done; None: at its beginning
    stop: StopState = field(default_factory=StopState)
    partial: Partial | None = None
    owed: bool = False  # the validation of the step that was done last
    ended: str | None = None  # by a stop rule, and why
