"""Groups of texts for contrastive training, and the loss of their embeddings in torch."""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WORDS = ["red", "green", "blue", "dog", "cat", "sun", "moon", "tree", "fish", "bird"]
Group = dict[str, Any]


def groups(count: int, negatives: Sequence[int] = (0, 1, 2), seed: int = 0) -> list[Group]:
    """Return groups whose positive names the words of the query, and which have these numbers of negatives in turn."""
    draw = random.Random(seed)

    def sentence(words: Sequence[str]) -> str:
        return f"the {words[1]} of a {words[0]}" + f" {draw.choice(WORDS)}" * draw.randint(0, 3)

    made = list[Group]()
    for number in range(count):
        words = draw.sample(WORDS, 2)
        others = [draw.sample(WORDS, 2) for _ in range(negatives[number % len(negatives)])]
        made.append(
            {
                "query": " ".join(words),
                "positive": sentence(words),
                "negatives": [f"not {sentence(each)}" for each in others],
            }
        )
    return made


def write_groups(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def torch_loss(embeddings: Sequence[Any], sizes: Sequence[int], temperature: float) -> Any:
    """Return InfoNCE of groups, each a tensor (texts, width), summed over sizes of embeddings."""
    import torch
    from torch.nn.functional import cross_entropy, normalize

    loss: Any = 0
    for size in sizes:
        queries = normalize(torch.stack([group[0, :size] for group in embeddings]), dim=1)
        others = normalize(torch.cat([group[1:, :size] for group in embeddings]), dim=1)
        counts = [len(group) - 1 for group in embeddings]
        own = torch.tensor([sum(counts[:number]) for number in range(len(counts))])
        loss = loss + cross_entropy(queries @ others.T / temperature, own)
    return loss
