"""Functions of log-probabilities, for preference losses: a few numbers in a batch."""

from llamatrain.graph.ops.activations import sigmoid
from llamatrain.graph.ops.arithmetic import mul
from llamatrain.graph.ops.shape_rules import SECOND, floats, require
from llamatrain.graph.tensor import Node, Spec, Tensor, gradient, op

MAX_LOG_PROB = -1e-6  # the largest log-probability with finite odds


@op(in_place=((0, 0),))
def softplus(x: Spec) -> Spec:
    """Return log(1 + exp(x)); softplus(-x) is -log(sigmoid(x))."""
    return Spec(x.shape, floats(x))


@gradient(softplus)
def _(node: Node, dy: Tensor):
    return (mul(dy, sigmoid(node.sources[0])),)


@op(in_place=((0, 0),))
def log_odds(x: Spec) -> Spec:
    """Return log(p / (1 - p)) for x = log(p)."""
    return Spec(x.shape, floats(x))


@gradient(log_odds)
def _(node: Node, dy: Tensor):
    return (log_odds_back(dy, node.sources[0]),)


@op(in_place=((0, 0), (0, 1)), no_gradient=SECOND)
def log_odds_back(dy: Spec, x: Spec) -> Spec:
    """Return dy times the derivative of log_odds at x."""
    require(dy.shape == x.shape, "needs dy like x")
    return Spec(x.shape, floats(dy, x))


@op(in_place=((0, 0),), stops_gradient=True, no_gradient="it is taken as a number that nothing changes")
def detached(x: Spec) -> Spec:
    """Return x without a gradient."""
    return Spec(x.shape, floats(x))
