"""Answers that are compared, in the forms that data has them in; what is told of those that cannot be; and the rows they make."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamatrain.data.dataset import open_dataset
from llamatrain.data.options import DataOptions
from llamatrain.data.preference_records import PreferenceKind, PreferencePair, parse_preference
from llamatrain.data.records import ChatRecord, PromptRecord
from llamatrain.errors import DataError
from llamatrain.preference.batches import KtoBatches, PairBatches
from llamatrain.preference.dataset import PreferenceDataset
from llamatrain.run.row_kinds import KINDS
from tests.helpers.byte_tokenizer import ByteTokenizer
from tests.helpers.chat_templates import LLAMA3
from tests.helpers.cli import ran
from tests.helpers.lora_runs import base
from tests.helpers.preferences import H, labelled, lines, pairs_of, rows

HI, YES, NO = (
    {"role": role, "content": text}
    for role, text in (("user", "hi"), ("assistant", "yes"), ("assistant", "no"))
)
BE = {"role": "system", "content": "be"}


def judged(compare: PreferenceKind = "pairs", **row: Any) -> PreferencePair:
    return parse_preference(json.dumps(row).encode(), "d.jsonl, line 3", compare)


# ---- forms -------------------------------------------------------------------


def test_strings() -> None:
    assert judged(prompt="a", chosen="b", rejected="c") == PreferencePair(
        PromptRecord("a", "b"), PromptRecord("a", "c")
    )


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "hi", "chosen": [YES], "rejected": [NO]},
        {"prompt": [HI], "chosen": [YES], "rejected": [NO]},
        {"prompt": [HI], "chosen": "yes", "rejected": "no"},
        {
            "prompt": "hi",
            "chosen": [HI, YES],
            "rejected": [HI, NO],
            "score_chosen": 8.5,
        },  # as UltraFeedback has it
        {"chosen": [HI, YES], "rejected": [HI, NO]},
        {"prompt": [HI], "chosen": [HI, YES], "rejected": [HI, NO]},
        {"prompt": "hi", "chosen": "yes", "rejected": [NO]},  # one as a string, the other as a message
        {"prompt": "hi", "chosen": [YES], "rejected": "no"},
        {"Prompt": "hi", "Chosen": [{"Role": "assistant", "Content": "yes"}], "Rejected": [NO]},
    ],
)
def test_messages(row: dict[str, Any]) -> None:
    assert judged(**row) == PreferencePair(ChatRecord([HI, YES]), ChatRecord([HI, NO]))


def test_longer_conversations_and_what_stands_beside_them() -> None:
    long = [BE, HI, NO, HI]
    assert judged(prompt=long, chosen=[YES], rejected=[NO]) == PreferencePair(
        ChatRecord([*long, YES]), ChatRecord([*long, NO])
    )
    assert judged(prompt="hi", chosen=[YES], rejected=[NO], system="be").chosen == ChatRecord([BE, HI, YES])


def test_labels() -> None:
    good, bad = (judged("answers", prompt="a", completion="b", label=label) for label in (True, False))
    assert good == PreferencePair(PromptRecord("a", "b"), None) and bad == PreferencePair(
        None, PromptRecord("a", "b")
    )
    assert judged("answers", prompt=[HI], completion=[YES], label=True).chosen == ChatRecord([HI, YES])
    assert judged("answers", prompt="a", chosen="b", rejected="c") == PreferencePair(
        PromptRecord("a", "b"), PromptRecord("a", "c")
    )


def test_forms_of_other_trainers() -> None:
    asked = [{"from": "human", "value": "hi"}]
    yes, no = ({"from": "gpt", "value": text} for text in ("yes", "no"))
    both = PreferencePair(ChatRecord([HI, YES]), ChatRecord([HI, NO]))
    assert judged("pairs", conversations=asked, chosen=yes, rejected=no) == both
    assert judged("pairs", messages=[HI], chosen=YES, rejected=NO) == both
    assert judged("answers", messages=[HI, YES], label=True) == PreferencePair(ChatRecord([HI, YES]), None)
    assert judged("answers", conversations=[*asked, no], kto_tag=False) == PreferencePair(
        None, ChatRecord([HI, NO])
    )
    alpaca = judged("pairs", instruction="a", input="b", chosen="c", rejected="d")
    assert alpaca == PreferencePair(PromptRecord("a\n\nb", "c"), PromptRecord("a\n\nb", "d"))
    assert judged("pairs", question="a", chosen="c", rejected="d") == PreferencePair(
        PromptRecord("a", "c"), PromptRecord("a", "d")
    )
    earlier = judged("pairs", instruction="c", history=[["a", "b"]], chosen="d", rejected="e")
    assert earlier.chosen == PromptRecord("c", "d", history=(("a", "b"),))
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, HI]
    assert judged(
        "pairs", prompt="hi", history=[["a", "b"]], chosen=[YES], rejected=[NO]
    ).chosen == ChatRecord([*turns, YES])
    assert judged("answers", instruction="a", output="b", label=False) == PreferencePair(
        None, PromptRecord("a", "b")
    )


BAD: list[tuple[PreferenceKind, dict[str, Any], str]] = [
    (
        "pairs",
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        '"chosen" and "rejected" are the same, so there is nothing to prefer',
    ),
    ("pairs", {"chosen": [HI, YES], "rejected": [HI, YES]}, "are the same"),
    (
        "pairs",
        {"prompt": "a", "chosen": "", "rejected": "b"},
        '"chosen" is empty; remove the row',
    ),
    (
        "pairs",
        {"prompt": "a", "chosen": [HI, YES], "rejected": [HI, NO | {"content": ""}]},
        '"rejected" is empty',
    ),
    (
        "pairs",
        {"prompt": "a", "chosen": [HI], "rejected": [HI, NO]},
        '"chosen" must end with a message of "assistant" (got "user")',
    ),
    ("pairs", {"chosen": [HI, YES], "rejected": [BE, HI, NO]}, "differ before their last message"),
    (
        "pairs",
        {"chosen": "a", "rejected": "b"},
        'there is no "prompt"; expected a string or a list of messages',
    ),
    (
        "pairs",
        {"prompt": 7, "chosen": "a", "rejected": "b"},
        '"prompt" is a number; expected a string or a list',
    ),
    (
        "pairs",
        {"prompt": "a", "chosen": {"x": 1}, "rejected": "b"},
        '"chosen" is an object; expected a string or a list',
    ),
    (
        "pairs",
        {"prompt": "a", "chosen": [{"text": "b"}], "rejected": "b"},
        '"chosen": message 1 has no "role"',
    ),
    ("pairs", {"prompt": "a", "chosen": [], "rejected": "b"}, '"chosen": "messages" is empty'),
    (
        "pairs",
        {"prompt": "a", "completion": "b"},
        'nothing to compare (got keys "prompt", "completion"); --objective orpo, dpo or simpo',
    ),
    ("pairs", {"prompt": "a", "completion": "b", "label": True}, "use --objective kto"),
    (
        "answers",
        {"prompt": "a", "completion": "b", "label": 1},
        '"label" is a number; expected true or false',
    ),
    (
        "answers",
        {"prompt": "a", "completion": "b", "label": None},
        '"label" is null; expected true or false',
    ),
    ("answers", {"prompt": "a", "completion": "", "label": True}, '"completion" is empty'),
]


@pytest.mark.parametrize(("compare", "row", "told"), BAD)
def test_what_cannot_be_compared_is_told_by_its_place(
    compare: PreferenceKind, row: dict[str, Any], told: str
) -> None:
    with pytest.raises(DataError) as info:
        judged(compare, **row)
    assert (
        str(info.value).startswith("d.jsonl, line 3: ")
        and told in str(info.value)
        and "\n" not in str(info.value)
    )


# ---- rows --------------------------------------------------------------------


def opened(
    path: Path, compare: PreferenceKind, ctx: int = 96, pack: bool = False, **options: Any
) -> PairBatches | KtoBatches:
    said = DataOptions(shuffle=False, pack=pack, **{"as_chat": False, **options})
    corpus, _ = open_dataset(
        [str(path)], ByteTokenizer(chat_template=LLAMA3), said, ctx, 0, KINDS[compare].dataset
    )
    assert isinstance(corpus, PreferenceDataset)
    return (PairBatches if compare == "pairs" else KtoBatches)(corpus, said, 0, eos=2, bos=1)


@pytest.mark.parametrize("pack", [False, True])
def test_pairs_lie_in_rows_whole_and_apart(pack: bool, tmp_path: Path) -> None:
    made = rows(12)
    found = opened(lines(tmp_path / "d.jsonl", made), "pairs", pack=pack)
    seen = []
    while len(seen) < 12:
        batch = found.batch(2)
        assert batch.answers and batch.answers.count == np.count_nonzero(batch.answers.sides)
        seen += pairs_of(batch)
        starts, positions = batch.starts, batch.positions
        assert np.array_equal(positions + starts, np.broadcast_to(np.arange(starts.shape[1]), starts.shape))
        assert batch.answers.chosen_tokens > np.count_nonzero(batch.weights[batch.answers.chosen])
    decode = ByteTokenizer().decode
    texts = {tuple(decode(np.array(each, np.int32)).decode() for each in pair) for pair in seen[:12]}
    assert len(texts) == 12
    for prompt, chosen, rejected in texts:
        assert any(
            row["prompt"] in prompt and row["chosen"] in chosen and row["rejected"] in rejected
            for row in made
        )


def test_of_a_conversation_the_last_answer_is_compared(tmp_path: Path) -> None:
    said = [BE, HI, NO | {"content": "before"}, HI]
    path = lines(tmp_path / "d.jsonl", [{"prompt": said, "chosen": [YES], "rejected": [NO]}] * 2)
    ((prompt, chosen, rejected), _) = pairs_of(opened(path, "pairs", ctx=400).batch(2))
    text = ByteTokenizer().decode
    assert b"before" in text(np.array(prompt)) and text(np.array(chosen)).startswith(b"yes")
    assert text(np.array(rejected)).startswith(b"no") and b"yes" not in text(np.array(prompt))


def test_each_answer_meets_the_prompt_of_the_row_behind_it(tmp_path: Path) -> None:
    made = labelled(rows(4))
    batch = opened(lines(tmp_path / "d.jsonl", made), "answers").batch(4)
    assert batch.answers and batch.answers.others and batch.answers.sides.tolist() == [1, -1, -1, 1]
    others, text = batch.answers.others, ByteTokenizer().decode
    for number in range(4):
        words = text(
            others.tokens[number][others.positions[number] == np.arange(others.tokens.shape[1])]
        ).decode()
        assert made[number]["prompt"] + made[number - 1]["completion"] in words
        trained = text(others.targets[number][others.weights[number] > 0]).decode()
        assert made[number - 1]["completion"] in trained
    assert others.tokens.shape == batch.tokens.shape


def test_each_answer_of_a_batch_is_met_once_whatever_its_prompt(tmp_path: Path) -> None:
    """Of pairs both answers may be in a batch; TRL goes one row back, too."""
    made = rows(2)
    batch = opened(lines(tmp_path / "d.jsonl", made), "answers").batch(4)
    assert batch.answers and batch.answers.others
    others, text = batch.answers.others, ByteTokenizer().decode
    trained = [text(others.targets[number][others.weights[number] > 0]).decode() for number in range(4)]
    (first, second) = made
    wanted = (second["rejected"], first["chosen"], first["rejected"], second["chosen"])
    assert all(each in found for each, found in zip(wanted, trained, strict=True))


def test_a_line_that_is_too_much_is_skipped_as_a_pair(tmp_path: Path) -> None:
    much = {"prompt": "a", "chosen": "b", "rejected": "c", "more": [0] * 300_000}
    path = lines(tmp_path / "d.jsonl", [*rows(2), much, *rows(2, seed=1)])
    corpus = opened(path, "pairs").dataset
    assert len(corpus) == 4 and corpus.too_large == [f"{path}:3"] and not corpus.skipped


def test_a_prompt_that_fills_the_row_is_skipped_and_told(tmp_path: Path) -> None:
    made = [
        *rows(3),
        {"prompt": "x" * 200, "chosen": "a", "rejected": "b"},
        {"prompt": "y", "chosen": "a" * 200, "rejected": "b" * 200},
    ]
    path = lines(tmp_path / "d.jsonl", made)
    for compare, count in (("pairs", 4), ("answers", 8)):
        corpus = opened(path, compare).dataset
        assert len(corpus) == count
        assert {*corpus.skipped} == {f"{path}:4"} and corpus.truncated == [f"{path}:5"] * (
            1 if compare == "pairs" else 2
        )


def test_a_split_keeps_pairs_together(tmp_path: Path) -> None:
    path = lines(tmp_path / "d.jsonl", rows(20))
    train, validation = open_dataset(
        [str(path)], ByteTokenizer(), DataOptions(val_split=0.25), 96, 0, KINDS["pairs"].dataset
    )
    assert validation and len(train) == 15 and len(validation) == 5


def test_the_last_batch_of_a_validation_is_filled_up(tmp_path: Path) -> None:
    for compare, counts in (("pairs", [2, 1]), ("answers", [2, 2, 2])):
        found = opened(lines(tmp_path / "d.jsonl", rows(3)), compare)
        batches = list(found.one_epoch(2))
        assert [batch.answers.count for batch in batches if batch.answers] == counts


def test_a_preview_shows_both(tmp_path: Path) -> None:
    model, path = base(tmp_path / "m.gguf", H), lines(tmp_path / "d.jsonl", rows(4))
    said = ("preview", path, "--model", model, "--objective", "dpo", "-n", 1, "--no-shuffle", "--no-pack")
    shown = ran(*said).out.splitlines()
    (chosen,), (rejected,) = (
        [line for line in shown if line.startswith(kind)] for kind in ("chosen: ", "rejected: ")
    )
    assert rows(1)[0]["chosen"] in chosen and rows(1)[0]["rejected"] in rejected
    row = json.loads(ran(*said, "--json").out)
    assert len(row["chosen"]) == len(row["tokens"]) and 0 < sum(row["chosen"]) < len(row["tokens"])
