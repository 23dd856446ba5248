"""Training of graphs that users build themselves, on the engine that trains language models.

from llamatrain.custom import Dataset, Graph, evaluate, fit, ops

graph = Graph(batch=64)
images = graph.input((28, 28))
hidden = ops.relu(graph.linear("hidden", ops.flatten(images), 100))
graph.output = graph.linear("output", hidden, 10)
result = fit(graph, Dataset(train_images, train_digits), loss="cross_entropy", epochs=5, validation=0.1)
graph.save("digits.gguf")
"""

from llamatrain.custom.dataset import Dataset
from llamatrain.custom.graph import Graph
from llamatrain.custom.idx import read_idx
from llamatrain.custom.score import Score
from llamatrain.custom.training import EpochResult, FitResult, FitStep, evaluate, fit, predict
from llamatrain.graph import ops

__all__ = [
    "Dataset",
    "EpochResult",
    "FitResult",
    "FitStep",
    "Graph",
    "Score",
    "evaluate",
    "fit",
    "ops",
    "predict",
    "read_idx",
]
