"""Ranks texts by how likely a model says that they answer a query, as llama-server's rerankers do."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from llamatrain.adapters.options import AdapterOptions
from llamatrain.commands.embed import EmbedOptions
from llamatrain.commands.evaluation import Retrieval
from llamatrain.commands.opened_model import DEFAULT_CTX, OpenedModel, open_model
from llamatrain.config.options import build
from llamatrain.errors import DataError, LlamatrainError, UsageError

if TYPE_CHECKING:
    import numpy as np

    from llamatrain.data.batches import Segment
    from llamatrain.data.contrastive_records import TextGroup
    from llamatrain.data.encode import Encoder
    from llamatrain.data.options import DataOptions

RERANK_OPTIONS = (EmbedOptions, AdapterOptions)


class Judgment(NamedTuple):
    """The verdict of a model about a text: the probability of yes rather than no, and the loss of the right answer."""

    score: float
    loss: float


@dataclass(frozen=True)
class Judge:
    """A model that says whether texts answer queries, in rows of up to `ctx` tokens."""

    model: OpenedModel
    ctx: int
    batch: int
    precision: str

    def judge(self, questions: "Sequence[tuple[str, str, bool]]") -> list[Judgment]:
        """Judge pairs of a query and a text, of which each has the right answer. Ranks share them."""
        import numpy as np

        from llamatrain.data.batches import collate_rows, row_lengths, rows_by_length
        from llamatrain.data.encode import Encoder
        from llamatrain.data.options import DataOptions
        from llamatrain.distributed.comm import get_comm
        from llamatrain.io.mapped_file import mapped_files, verify_unchanged
        from llamatrain.model.rerank_head import check_head
        from llamatrain.platform.terminal import progress_bar

        encoder = Encoder(self.model.tokenizer, DataOptions(), self.ctx, "judged texts")
        verdicts, comm = [encoder.verdicts.yes, encoder.verdicts.no], get_comm()
        check_head(self.model.gguf, self.model.h, verdicts)
        segments = [self.segment(encoder, *question) for question in questions]
        lengths = row_lengths(self.ctx, DataOptions(), full=False, plain=False, compare="answers")
        programs = self.model.make_programs(
            lengths, self.batch, self.precision, has_untrained_tokens=True, with_logits=True
        )
        found = dict[int, Judgment]()
        batches = list(rows_by_length(segments, self.batch, lengths))
        with progress_bar("judging", total=len(segments), unit=" texts") as progress:
            for numbers, rows, length in batches[comm.rank :: comm.size]:
                batch = collate_rows(rows, length, 0)
                with verify_unchanged(mapped_files(self.model.arrays.values())):
                    logits = np.concatenate([np.array(part) for part in programs.scored_logits(batch)])
                targets = batch.targets[batch.weights != 0]
                for number, row, target in zip(numbers, logits.astype(np.float64), targets, strict=True):
                    found[number] = judge_logits(row, verdicts, int(target))
                progress.update(len(numbers) * comm.size)
        merged = {number: one for part in comm.all_gather(found) for number, one in part.items()}
        if not all(math.isfinite(one.loss) for one in merged.values()):
            raise LlamatrainError(
                f"{self.model.gguf.path}: the loss of an answer is not finite; the weights are damaged or too large",
                code="not-finite",
            )
        return [merged[number] for number in range(len(questions))]

    def segment(self, encoder: "Encoder", query: str, text: str, answers: bool) -> "Segment":
        """Return the row of one question, whose last token has the answer as its target."""
        import numpy as np

        from llamatrain.data.batches import Segment

        tokens = encoder.encode_judged(query, text, answers=answers).tokens
        if len(tokens) - 1 > self.ctx:
            raise DataError(
                f"a query with a text needs {len(tokens) - 1:,} tokens, but a row has {self.ctx:,}; raise --ctx, or "
                f"shorten the text that begins with {text[:40]!r}",
                code="text-too-long",
            )
        weights = np.zeros(len(tokens) - 1, np.float32)
        weights[-1] = 1
        return Segment(tokens[:-1], tokens[1:], weights)


def judge_logits(logits: "np.ndarray", verdicts: Sequence[int], target: int) -> Judgment:
    """Return the probability of yes rather than no, and the loss of the right answer among all tokens."""
    import numpy as np

    yes, no = (float(logits[verdict]) for verdict in verdicts)
    with np.errstate(invalid="ignore"):
        loss = float(np.logaddexp.reduce(logits) - logits[target])
    return Judgment(1 / (1 + math.exp(min(no - yes, 700))), loss)


def rank_texts(path: Path, query: str, texts: Sequence[str], given: Mapping[str, Any]) -> "np.ndarray":
    """Return the probability that each text answers the query. `given` are options of RERANK_OPTIONS by name."""
    import numpy as np

    options = build(EmbedOptions, given)
    model = open_model(path, build(AdapterOptions, given), options.threads, options.device)
    ctx = options.ctx or min(DEFAULT_CTX, model.h.ctx)
    found = Judge(model, ctx, options.batch, options.precision).judge([(query, text, True) for text in texts])
    return np.array([one.score for one in found], np.float32)


def evaluate_ranking(
    model: OpenedModel,
    data: Sequence[str],
    data_options: "DataOptions",
    ctx: int | None,
    batch: int,
    precision: str,
) -> Retrieval:
    """Rank the texts of each row of data, and measure how high the one is that answers the query."""
    import numpy as np

    from llamatrain.contrastive.retrieval import mean_scores, rank

    groups = read_groups(data, data_options)
    questions = [
        (group.query, text, index == 0) for group in groups for index, text in enumerate(group.texts[1:])
    ]
    found = Judge(model, ctx or min(DEFAULT_CTX, model.h.ctx), batch, precision).judge(questions)
    ranks, first = [], 0
    for group in groups:
        count = 1 + len(group.negatives)
        scores = np.array([one.score for one in found[first : first + count]])
        ranks.append(rank(scores[::-1], np.array([count - 1])))  # of equal scores, that of the answer is last
        first += count
    scores_of_all = mean_scores(ranks, len({text for group in groups for text in group.texts[1:]}))
    return Retrieval(
        loss=math.fsum(one.loss for one in found) / len(found),
        tokens=len(found),
        recall_at_1=scores_of_all.recall[1],
        recall_at_5=scores_of_all.recall[5],
        recall_at_10=scores_of_all.recall[10],
        mrr_at_10=scores_of_all.mrr,
        ndcg_at_10=scores_of_all.ndcg,
        queries=scores_of_all.queries,
        candidates=scores_of_all.candidates,
    )


def read_groups(data: Sequence[str], options: "DataOptions") -> "list[TextGroup]":
    """Return all rows of the data; raise if no row has texts to rank."""
    from llamatrain.data.contrastive_records import check_has_groups, parse_group
    from llamatrain.data.find_files import find_sources

    sources, groups = find_sources(data, options.mapping, "judge", options.raw), list["TextGroup"]()
    check_has_groups(sources)
    for source in sources:
        for number, line in source.rows():
            try:
                groups.append(parse_group(line, source.locate(number), source.columns))
            except DataError:
                if not options.skip_bad_rows:
                    raise
    if not any(group.negatives for group in groups):
        raise UsageError(
            "no row of the data has negatives, so there is nothing to rank; add some to the rows",
            code="no-data",
        )
    return groups
