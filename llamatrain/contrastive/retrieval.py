"""Measures retrieval: how high the texts that answer a query rank among all texts, by the cosine of embeddings."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

RECALL_AT, RANKED = (1, 5, 10), 10  # recall is measured at these ranks; MRR and NDCG look at the first RANKED
SHORTEST = 1e-30  # length by which a vector is divided at least
CHUNK = 256  # queries that are compared with all texts at a time


@dataclass(frozen=True, kw_only=True)
class RetrievalScores:
    """Means over queries."""

    queries: int
    candidates: int  # different texts that each query is compared with
    recall: dict[int, float]  # at each of RECALL_AT: the share of the texts that answer a query
    mrr: float  # of the first RANKED: one divided by the rank of the first text that answers the query
    ndcg: float


@dataclass
class TextCollection:
    """Different texts with their embeddings, and which of them answer which query."""

    queries: dict[bytes, int] = field(default_factory=dict)
    texts: dict[bytes, int] = field(default_factory=dict)
    query_vectors: list[np.ndarray] = field(default_factory=list)
    text_vectors: list[np.ndarray] = field(default_factory=list)
    answers: list[set[int]] = field(default_factory=list)  # by query

    def add(self, keys: Sequence[bytes], vectors: np.ndarray) -> None:
        """Add a group: the query, the text that answers it, and others. A key identifies a text."""
        query = keep_once(self.queries, self.query_vectors, keys[0], vectors[0])
        if query == len(self.answers):
            self.answers.append(set())
        numbers = [
            keep_once(self.texts, self.text_vectors, key, vector)
            for key, vector in zip(keys[1:], vectors[1:], strict=True)
        ]
        self.answers[query].add(numbers[0])

    def scores(self) -> RetrievalScores:
        """Rank all texts for each query, and return the means."""
        vectors = np.stack(self.text_vectors)
        ranks = list[np.ndarray]()
        for first in range(0, len(self.query_vectors), CHUNK):
            similarities = np.stack(self.query_vectors[first : first + CHUNK]) @ vectors.T
            for row, answers in zip(similarities, self.answers[first : first + CHUNK], strict=True):
                ranks.append(rank(row, np.array(sorted(answers))))
        return mean_scores(ranks, len(vectors))


def keep_once(known: dict[bytes, int], kept: list[np.ndarray], key: bytes, vector: np.ndarray) -> int:
    """Return the number of a text; keep its vector, with length 1, if the text is new."""
    if key not in known:
        known[key] = len(known)
        kept.append(vector / max(float(np.linalg.norm(vector)), SHORTEST))
    return known[key]


def mean_scores(ranks: Sequence[np.ndarray], candidates: int) -> RetrievalScores:
    """Return the means over queries, given the ranks of the texts that answer each one, in ascending order."""
    recalls = [[float(np.mean(each <= limit)) for limit in RECALL_AT] for each in ranks]
    return RetrievalScores(
        queries=len(ranks),
        candidates=candidates,
        recall=dict(zip(RECALL_AT, np.mean(recalls, axis=0).tolist(), strict=True)),
        mrr=float(np.mean([1 / each[0] if each[0] <= RANKED else 0.0 for each in ranks])),
        ndcg=float(np.mean([normalized_gain(each) for each in ranks])),
    )


def rank(similarities: np.ndarray, answers: np.ndarray) -> np.ndarray:
    """Return the ranks of some texts, from 1, in ascending order; of equal texts, earlier ones rank higher."""
    order = np.argsort(-similarities, kind="stable")
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(1, len(order) + 1)
    return np.sort(ranks[answers])


def normalized_gain(ranks: np.ndarray) -> float:
    """Return the discounted gain of the first RANKED texts, divided by the largest that is possible (NDCG)."""
    best = np.arange(1, min(len(ranks), RANKED) + 1)
    return float((1 / np.log2(1 + ranks[ranks <= RANKED])).sum() / (1 / np.log2(1 + best)).sum())
