"""The options that say how files become rows."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from llamatrain.errors import UsageError


@dataclass(frozen=True)
class DataOptions:
    train_on: Annotated[
        Literal["completion", "all"], "Train on the answers of prompts and chats, or on all of their tokens; text is always all."
    ] = "completion"
    as_chat: Annotated[bool, "Put prompts with answers through the model's chat template, as chats are."] = False
    pack: Annotated[bool, "Put several short samples in a row; each sees only itself."] = False
    shuffle: Annotated[bool, "Shuffle the samples anew in each epoch."] = True
    val: Annotated[tuple[str, ...], "A file, folder or glob of validation data; may be repeated."] = ()
    val_split: Annotated[float, "The part of the data that is kept for validation and never trained on, such as 0.05."] = 0.0
    sample_start: Annotated[str, "Text samples begin after this pattern; empty: wherever the one before ended."] = ""
    include_sample_start: Annotated[bool, "Include the pattern in the samples."] = False
    escape: Annotated[bool, "Read \\n, \\r, \\t, \\', \\\" and \\\\ in the pattern as the characters they stand for."] = False
    overlapping_samples: Annotated[
        bool, "Samples run on into the next; without a pattern, one begins at every token of a text."
    ] = False
    fill_with_next_samples: Annotated[bool, "Fill the rows of short samples with those that follow in shuffled order."] = False
    separate_with_eos: Annotated[bool, "When filling, put an end token between samples."] = False
    separate_with_bos: Annotated[bool, "When filling, put a begin token between samples."] = True
    sample_random_offsets: Annotated[bool, "Begin text samples at a random token of theirs."] = False
    force_reshuffle: Annotated[bool, "On resuming, begin a new shuffle instead of going on in the old one."] = False

    def __post_init__(self) -> None:
        if not 0 <= self.val_split < 1:
            raise UsageError(f"--val-split {self.val_split:g} must be at least 0 and less than 1, such as 0.05")
        if self.val and self.val_split:
            raise UsageError("--val and --val-split exclude each other: validation comes from files of its own, or from the data")
        if self.pack and self.fill_with_next_samples:
            raise UsageError("--pack and --fill-with-next-samples exclude each other: both say what fills a row")
        if self.sample_start and self.overlapping_samples and self.val_split:
            raise UsageError("--val-split cannot keep samples apart that overlap; give validation data with --val")

    @property
    def pattern(self) -> str:
        return unescape(self.sample_start) if self.escape else self.sample_start


def unescape(text: str) -> str:
    """The six escapes of the ancestors; any other backslash stays as it is."""
    meaning = {"n": "\n", "r": "\r", "t": "\t"}
    return re.sub(r"\\([nrt'\"\\])", lambda found: meaning.get(found[1], found[1]), text)
