"""The options of contrastive training."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from llamatrain.config.options import Condition, Option, OptionError, Options
from llamatrain.data.options import CONTRASTIVE

if TYPE_CHECKING:
    from llamatrain.contrastive.settings import Contrastive, Pooling
    from llamatrain.gguf.values import Value
    from llamatrain.model.hyperparameters import Hyperparameters

USED = Condition(lambda values: values.get("objective") == CONTRASTIVE, f"without --objective {CONTRASTIVE}")
SIZES = re.compile(r"[1-9][0-9]{0,8}(,[1-9][0-9]{0,8})*")


def are_sizes(text: Any) -> bool:
    """Return True if a text lists sizes."""
    return not text or SIZES.fullmatch(text) is not None


@dataclass(frozen=True)
class PoolingOptions(Options, panel="Embeddings"):
    """The option that decides which hidden states become the embedding of a text."""

    pooling: Annotated[
        Literal["auto", "last", "mean", "cls"],
        Option(
            "The embedding of a text: the hidden state of its last token, the mean of all, or that of the first "
            "(cls); auto: what the file states, else last, or mean if tokens see later ones.",
            when=(USED,),
        ),
    ] = "auto"

    def choose_pooling(self, h: "Hyperparameters", metadata: Mapping[str, "Value"]) -> "Pooling":
        """Return how the embedding of a text is made, given the metadata of the model's file."""
        from llamatrain.contrastive.settings import choose_pooling, pooling_key

        stored = metadata.get(pooling_key(h))
        return choose_pooling(self.pooling, stored and stored.decode(), h.architecture.causal)


@dataclass(frozen=True)
class ContrastiveOptions(PoolingOptions, panel="Embeddings"):
    """The parameters of contrastive training."""

    contrast_temp: Annotated[
        float,
        Option(
            "Temperature of the contrastive loss, by which similarities are divided.",
            unit="TEMPERATURE",
            above=0,
            below=1e6,
            example="0.05",
            when=(USED,),
        ),
    ] = 0.05
    matryoshka: Annotated[
        str,
        Option(
            "Sizes to which embeddings may be cut: the loss is added up over these first parts and the whole.",
            unit="SIZE,...",
            accepts=are_sizes,
            takes="sizes such as 512,256",
            when=(USED,),
        ),
    ] = ""

    def embedding_sizes(self, width: int) -> tuple[int, ...]:
        """Return the sizes that are trained, beginning with the whole width of the model."""
        sizes = tuple(dict.fromkeys(map(int, self.matryoshka.split(",")))) if self.matryoshka else ()
        if too_large := [size for size in sizes if size > width]:
            raise OptionError(
                lambda spelt: (
                    f"{spelt('matryoshka')} must be sizes of at most {width}, the width of the model "
                    f"(got {too_large[0]})"
                ),
                code="too-large",
            )
        return (width, *(size for size in sizes if size != width))

    def settings(
        self, h: "Hyperparameters", metadata: Mapping[str, "Value"], texts: int, rows: int
    ) -> "Contrastive":
        """Return the settings of steps with a number of rows, each with a number of texts."""
        from llamatrain.contrastive.settings import Contrastive

        return Contrastive(
            pooling=self.choose_pooling(h, metadata),
            temperature=self.contrast_temp,
            sizes=self.embedding_sizes(h.embd),
            texts=texts,
            rows=rows,
        )


def check_contrastive(rows: int, dropout: float) -> None:
    """Raise if a step has too few rows, or if its embeddings would differ when they are computed again."""
    if rows < 2:
        raise OptionError(
            lambda spelt: (
                f"{spelt('batch')} must be at least 2 with {spelt('objective')} {CONTRASTIVE}, which compares the "
                f"texts of a step with each other (got {rows})"
            ),
            code="batch-too-small",
        )
    if dropout:
        raise OptionError(
            lambda spelt: (
                f"{spelt('lora_dropout')} cannot be used with {spelt('objective')} {CONTRASTIVE}, which computes "
                "embeddings twice; leave it out"
            ),
            code="conflicting-options",
        )
