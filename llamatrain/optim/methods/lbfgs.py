"""L-BFGS on a flat vector (Nocedal and Wright, Numerical Optimization, 2nd edition, algorithms 7.4 and 7.5).

The state is a plain object: a point with its loss and gradient, and a ring of the last m moves s and gradient
changes y. `step` runs one whole iteration, so that a checkpoint between two iterations has everything. Sums
are float64, vectors have the dtype of the parameters.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from llamatrain.errors import UsageError
from llamatrain.io.madvise import release_pages
from llamatrain.optim.line_search import PATIENCE, SEARCHES, Line, line_search
from llamatrain.optim.optimizer import Evaluate, Minimizer, Values

MIN_COSINE = 1e-8  # smallest cosine of s and y that says something about the curvature
PIECE = 1 << 18  # elements of a vector
MAX_ROUNDING = 1e-3  # largest difference of a stored product s·y, relative to the norms


@dataclass(frozen=True, kw_only=True)
class LBFGS(Minimizer):
    """L-BFGS with a line search."""

    checkpoint_name = "lbfgs"
    extra_options = ("lbfgs_refresh",)
    options: ClassVar = {"history": "lbfgs_history", "tolerance": None}

    history: int = 6
    line_search: str = "wolfe"
    tolerance: float = 1e-5  # gradient norm relative to max(1, norm of the point)

    def __post_init__(self) -> None:
        if self.line_search not in SEARCHES:
            raise UsageError(
                f"line search must be one of {', '.join(SEARCHES)} (got {self.line_search!r})",
                code="unknown-line-search",
            )
        if self.history < 1:
            raise UsageError(
                f"the history must be 1 move or more (got {self.history})", code="invalid-history"
            )

    @property
    def vector_count(self) -> int:
        """The size of its state in vectors: both rings, point and gradient, and four of working memory."""
        return 2 * self.history + 6

    def create_minimizer(self, x: np.ndarray) -> "LbfgsState":
        """Return the state at this point."""
        return LbfgsState(x, self)

    @classmethod
    def required_shapes(cls, values: Values, size: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes that resuming needs; nothing if the history is empty."""
        moves = values["memory_ys"].size if "memory_ys" in values else 0
        memory = {"memory_s": (moves, size), "memory_y": (moves, size), "memory_ys": (moves,)}
        if "current_parameters" in values:
            return {"current_gradients": (size,), **memory}
        # it may start over, or with the history of llama.cpp
        return memory if values.keys() & memory.keys() else {}

    @classmethod
    def state_problem(cls, values: Values) -> str | None:
        """Return why the history is inconsistent, or None."""
        if "memory_ys" not in values:
            return None
        numbers = (
            {"loss": float, "iteration": int, "evaluations": int} if "current_parameters" in values else {}
        )
        numbers |= {name: int for name in ("idle",) if name in values}
        if invalid := [name for name, kind in numbers.items() if type(values.get(name)) is not kind]:
            return f"the number {cls.checkpoint_key(invalid[0])} is missing, or of another kind"
        moves = values["memory_ys"].size
        count = values.get("approx_hessian_count")
        end = values.get("line_search_end")
        if not (type(count) is int and type(end) is int and 0 <= count <= moves and 0 <= end < moves):
            return (
                f"{count} moves held and the next one to go to place {end} cannot be in a history of {moves}"
            )
        for slot in slots_newest_first(count, end, moves):
            s, y, ys = values["memory_s"][slot], values["memory_y"][slot], float(values["memory_ys"][slot])
            both, moved, changed = _dots(s, y)
            if ys <= 0 or abs(both - ys) > MAX_ROUNDING * math.sqrt(moved * changed):
                return (
                    f"{cls.checkpoint_key('memory_ys')} {ys:g} cannot be: move {slot} and the change of "
                    "gradients give another number"
                )
        return None


class LbfgsState:
    """The state of L-BFGS. After a failed step `x`, `loss` and `gradient` are the best found so far."""

    def __init__(self, x: np.ndarray, options: LBFGS | None = None) -> None:
        self.options = options or LBFGS()
        ring = (self.options.history, x.size)
        self.x, self.gradient = x.copy(), np.zeros_like(x)  # (n,)
        self.loss = math.nan  # unknown before `begin`
        self.s, self.y = np.zeros(ring, x.dtype), np.zeros(ring, x.dtype)  # (m, n)
        self.ys = np.zeros(self.options.history)  # (m,)
        self.move_count, self.next_slot = 0, 0  # moves in the ring, and the slot of the next
        self.iteration, self.evaluations = 0, 0  # on these rows, and in total
        self.idle = 0  # evaluations since the loss fell by more than rounding
        self.length = 0.0  # of the last step, in multiples of the direction
        # working memory, empty between two steps
        self._trial, self._next_gradient, self._direction, self._product = (
            np.empty_like(x) for _ in range(4)
        )

    # ---- one iteration -----------------------------------------------------

    def step(self, evaluate: Evaluate) -> str | None:
        """Move to a point with a lower loss, or return why that is impossible.

        An exception changes nothing.
        """
        if math.isnan(self.loss):
            self.begin(evaluate)
        saved = self.move_count, self.evaluations, self.idle
        try:
            return self._step(evaluate)
        except BaseException:
            self.move_count, self.evaluations, self.idle = saved
            raise

    def begin(self, evaluate: Evaluate) -> None:
        """Evaluate loss and gradient at the first point."""
        self.loss = self._evaluate_at(self.x, evaluate, into=self.gradient)

    def _step(self, evaluate: Evaluate) -> str | None:
        norm = math.sqrt(_dot(self.gradient, self.gradient))
        if not math.isfinite(self.loss + norm):
            return f"stuck: the loss is {self.loss} and the gradient's norm {norm}"
        if norm <= self.options.tolerance * max(1.0, math.sqrt(_dot(self.x, self.x))):
            return f"converged: the gradient's norm is {norm:.3g}"
        previous_loss, left = self.loss, PATIENCE - self.idle
        improved = self._descend(evaluate, patience=(left + 1) // 2 if self.move_count else left)
        # the history may mislead: try again without it
        if not improved and self.move_count and self.idle < PATIENCE:
            s = self.s[slots_newest_first(1, self.next_slot, len(self.ys))[0]]
            self.clear_history()
            improved = self._descend(evaluate, patience=PATIENCE - self.idle, reach=math.sqrt(_dot(s, s)))
        if previous_loss - self.loss > float(np.finfo(self.x.dtype).eps) * abs(previous_loss):
            self.idle = 0
        elif self.idle >= PATIENCE or not improved:
            reason = (
                f"the loss of {self.loss:.6g} fell by no more than its rounding in {self.idle} evaluations"
            )
            return f"stuck: {reason} (the gradient's norm is {norm:.3g})"
        self.iteration += 1
        return None

    def clear_history(self) -> None:
        """Drop the history: the next direction is the steepest descent."""
        self.move_count = 0

    def restart(self) -> None:
        """Continue on other rows, whose loss is unknown."""
        self.clear_history()
        self.loss, self.iteration, self.idle = math.nan, 0, 0

    def _descend(self, evaluate: Evaluate, patience: int, reach: float = 1.0) -> bool:
        """Search for a lower loss along the direction, with at most `patience` evaluations without improvement.

        Without a history the first step has the length `reach`.
        """
        direction, slope = self.direction(), _dot(self._direction, self.gradient)
        if not -math.inf < slope < 0:  # uphill, or not finite
            self.clear_history()
            direction, slope = self.direction(), _dot(self._direction, self.gradient)

        def evaluate_at(length: float) -> tuple[float, float]:
            self.length = length
            np.multiply(direction, length, out=self._trial)
            self._trial += self.x
            loss = self._evaluate_at(self._trial, evaluate, into=self._next_gradient)
            return loss, _dot(direction, self._next_gradient)

        # without a history the direction has the gradient's length, which says little about how far to go
        first = 1.0 if self.move_count else min(1.0, reach / math.sqrt(-slope))
        evaluations = self.evaluations
        loss_found = line_search(
            Line(evaluate_at, self.loss, slope), SEARCHES[self.options.line_search], first, max(1, patience)
        )
        self.idle += self.evaluations - evaluations
        if loss_found is None:
            return False
        self._remember()
        self.loss = loss_found
        self.x, self._trial = self._trial, self.x
        self.gradient, self._next_gradient = self._next_gradient, self.gradient
        return True

    def _evaluate_at(self, x: np.ndarray, evaluate: Evaluate, into: np.ndarray) -> float:
        loss, gradient = evaluate(x)
        into[:] = gradient
        self.evaluations += 1
        return float(loss)

    # ---- the curvature -----------------------------------------------------

    def direction(self) -> np.ndarray:
        """Return minus the inverse Hessian of the history times the gradient (two-loop recursion)."""
        d, product = self._direction, self._product
        np.negative(self.gradient, out=d)
        moves, alpha = slots_newest_first(self.move_count, self.next_slot, len(self.ys)), {}
        with np.errstate(over="ignore", invalid="ignore"):  # an overflow shows in the slope
            for i in moves:
                alpha[i] = _dot(self.s[i], d) / float(self.ys[i])
                d -= np.multiply(self.y[i], alpha[i], out=product)
            if moves:
                d *= float(self.ys[moves[0]]) / _dot(self.y[moves[0]], self.y[moves[0]])
            for i in reversed(moves):
                beta = _dot(self.y[i], d) / float(self.ys[i])
                d += np.multiply(self.s[i], alpha[i] - beta, out=product)
        return d

    def _remember(self) -> None:
        """Add the move to the ring, unless its curvature is too small to divide by."""
        s = np.subtract(self._trial, self.x, out=self._direction)
        y = np.subtract(self._next_gradient, self.gradient, out=self._product)
        ys = _dot(y, s)
        if ys > MIN_COSINE * math.sqrt(_dot(s, s) * _dot(y, y)):
            self.s[self.next_slot], self.y[self.next_slot], self.ys[self.next_slot] = s, y, ys
            self.next_slot = (self.next_slot + 1) % len(self.ys)
            self.move_count = min(self.move_count + 1, len(self.ys))

    # ---- the checkpoint ----------------------------------------------------

    def state_values(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        memory = {
            "memory_s": self.s,
            "memory_y": self.y,
            "memory_ys": self.ys,
            "approx_hessian_count": np.uint32(self.move_count),  # llama.cpp has both in 32 bits
            "line_search_end": np.int32(self.next_slot),
        }
        if math.isnan(self.loss):
            return (memory if self.move_count else {}) | (
                {"evaluations": self.evaluations} if self.evaluations else {}
            )
        point = {"current_parameters": self.x, "current_gradients": self.gradient}
        numbers = {
            "loss": self.loss,
            "iteration": self.iteration,
            "evaluations": self.evaluations,
            "idle": self.idle,
        }
        return point | memory | numbers

    def restore(self, values: Values) -> None:
        """Restore the state of a checkpoint."""
        self.evaluations, self.idle = int(values.get("evaluations", 0)), int(values.get("idle", 0))
        if "memory_s" not in values:
            return
        if values["memory_s"].shape != self.s.shape:
            stored, wanted = len(values["memory_s"]), self.options.history
            raise UsageError(
                f"the checkpoint has a history of {stored} moves (got {wanted}); the history cannot "
                "change when resuming",
                code="history-differs",
            )
        _copy(self.s, values["memory_s"])
        _copy(self.y, values["memory_y"])
        self.ys[:] = values["memory_ys"]
        self.move_count, self.next_slot = int(values["approx_hessian_count"]), int(values["line_search_end"])
        if "current_parameters" not in values:  # the next step begins with an evaluation
            return
        _copy(self.x, values["current_parameters"])
        _copy(self.gradient, values["current_gradients"])
        self.loss, self.iteration = float(values["loss"]), int(values["iteration"])


def _copy(target: np.ndarray, source: np.ndarray) -> None:
    """Copy an array piece by piece, and release the pages of the mapped file."""
    flat, values = target.reshape(-1), source.reshape(-1)
    for start in range(0, flat.size, PIECE):
        flat[start : start + PIECE] = values[start : start + PIECE]
        release_pages(values[start : start + PIECE])


def slots_newest_first(count: int, end: int, slots: int) -> list[int]:
    """Return the ring slots of the last `count` moves, newest first; the next move goes to slot `end`."""
    return [(end - 1 - age) % slots for age in range(count)]


def _dot(a: np.ndarray, b: np.ndarray) -> float:
    """Return the product in float64, in a fixed order of additions and without a float64 copy."""
    return float(np.einsum("i,i", a, b, dtype=np.float64))


def _dots(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a·b, a·a and b·b, and release the pages of the mapped file."""
    sums = np.zeros(3)
    for start in range(0, a.size, PIECE):
        parts = [vector[start : start + PIECE] for vector in (a, b)]
        sums += _dot(*parts), _dot(parts[0], parts[0]), _dot(parts[1], parts[1])
        for part in parts:
            release_pages(part)
    return sums


OPTIMIZER = LBFGS
