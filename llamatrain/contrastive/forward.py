"""The graph of embeddings: from the tokens of a batch to a vector for each text.

All pairs of a step are compared, but the step runs in micro-batches. So embeddings are computed twice (GradCache, Gao
et al. 2021): first all of the step, to get the loss and its gradient with respect to each embedding; then, micro-batch
by micro-batch, in a graph whose loss is the sum of embeddings times these gradients. The gradients of the weights are
those of the step's loss.
"""

from llamatrain.contrastive.settings import Pooling
from llamatrain.graph import ops as O
from llamatrain.graph.ops import scale_rows
from llamatrain.graph.tensor import I32, Tensor, placeholder
from llamatrain.model.hyperparameters import Hyperparameters
from llamatrain.model.lora import Weights
from llamatrain.model.transformer import TrainingGraph, forward, make_inputs
from llamatrain.model.visible_keys import range_names, visible_windows

ONE_TOKEN: dict[Pooling, str] = {
    "last": "last_tokens",
    "cls": "first_tokens",
}  # inputs: the token of each text


def build_embeddings(
    h: Hyperparameters,
    weights: Weights,
    *,
    pooling: Pooling,
    batch: int,
    length: int,
    texts: int,
    table: Tensor,
    flash: bool = True,
) -> TrainingGraph:
    """Build the graph of the embeddings of a batch whose rows have up to `texts` texts.

    Its loss is the sum of embeddings times the input `embedding_gradients`.
    """
    inputs = embedding_inputs(h, batch, length, table, flash)
    if pooling in ONE_TOKEN:
        scored = inputs[ONE_TOKEN[pooling]] = placeholder(ONE_TOKEN[pooling], (batch * texts,), I32)
        # the last block computes nothing for other tokens than these
        weights = weights.for_rows(length, scored)
        embeddings, borders = forward(h, weights, inputs | {"scored_indices": scored}, table)
    else:
        inputs["text_shares"] = placeholder("text_shares", (batch * length,), table.dtype)
        inputs["text_numbers"] = placeholder("text_numbers", (batch * length,), I32)
        hidden, borders = forward(h, weights.for_rows(length, None), inputs, table)
        parts = scale_rows(hidden, inputs["text_shares"])
        embeddings = O.get_rows_back(parts, inputs["text_numbers"], rows=batch * texts)
    gradients = placeholder("embedding_gradients", embeddings.shape, table.dtype)
    inputs["embedding_gradients"] = gradients
    loss = O.sum(O.mul(embeddings, gradients))
    return TrainingGraph(inputs, table, borders, loss, {}, embeddings=embeddings)


def embedding_inputs(
    h: Hyperparameters, batch: int, length: int, table: Tensor, flash: bool
) -> dict[str, Tensor]:
    """Return the inputs that give each token and the tokens that it sees."""
    if h.architecture.causal:
        inputs = make_inputs(batch, length, table.dtype, flash, drop_untrained=False)
        return {name: tensor for name, tensor in inputs.items() if name not in ("targets", "weights")}
    ranges = [name for window in visible_windows(h) for name in range_names(window)]
    return {name: placeholder(name, (batch, length), I32) for name in ("tokens", "positions", *ranges)}
