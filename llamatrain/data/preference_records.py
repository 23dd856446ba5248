"""Parses preference data: pairs of a chosen and a rejected answer, or answers with a label."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from llamatrain.data.chat.messages import Message, has_media, kind_of, listed, messages_of, tools_of
from llamatrain.data.column_names import ANSWERS, MESSAGES, PROMPTS, rename_keys
from llamatrain.data.files import DataFile
from llamatrain.data.records import ChatRecord, PromptRecord, history_of, prompt_of, row_of
from llamatrain.errors import DataError
from llamatrain.gguf.parser import shorten

Compare = Literal["pairs", "answers"]  # both of a pair, or each answer by itself
PAIR = '{"prompt", "chosen", "rejected"}'
LABELLED = '{"prompt", "completion", "label": true or false}'
OBJECTIVES: dict[Compare, str] = {"pairs": "orpo, dpo or simpo", "answers": "kto"}
ROLE = "assistant"
LEAVE = "leave the row out"


@dataclass(frozen=True)
class PreferencePair:
    """A chosen and a rejected answer; one of them is None for a labelled answer."""

    chosen: PromptRecord | ChatRecord | None
    rejected: PromptRecord | ChatRecord | None

    @property
    def both(self) -> tuple[PromptRecord | ChatRecord | None, PromptRecord | ChatRecord | None]:
        """The chosen and the rejected answer."""
        return self.chosen, self.rejected

    def changed(self, change: Callable[[PromptRecord | ChatRecord], Any]) -> "PreferencePair":
        """Return the pair with each answer changed."""
        return PreferencePair(*(change(each) if each else None for each in self.both))


def judged_in(
    line: bytes, place: str, compare: Compare, columns: Mapping[str, str] | None = None
) -> PreferencePair:
    """Parse a JSON line into a preference pair."""
    return judged_of(rename_keys(row_of(line, place), columns or {}, place), place, compare)


def judged_of(row: dict[str, Any], place: str, compare: Compare) -> PreferencePair:
    """Read a row as a preference pair."""
    row = unified(row, place)
    if "chosen" in row and "rejected" in row:
        chosen, rejected = (_answered(row, key, place) for key in ("chosen", "rejected"))
        if isinstance(chosen, ChatRecord) or isinstance(
            rejected, ChatRecord
        ):  # one is a string, and the other messages
            chosen, rejected = (
                each.as_chat() if isinstance(each, PromptRecord) else each for each in (chosen, rejected)
            )
        if chosen == rejected:
            raise DataError(
                f'{place}: "chosen" and "rejected" are the same, so there is nothing to prefer; {LEAVE}'
            )
        if _prompt_of(chosen) != _prompt_of(rejected):
            raise DataError(
                f'{place}: "chosen" and "rejected" differ before their last message; answers to one prompt are compared'
            )
        return PreferencePair(chosen, rejected)
    if "label" in row and "completion" in row:
        if compare == "pairs":
            raise DataError(
                f'{place}: an answer with a "label", where pairs are compared, {PAIR}; --objective kto takes it'
            )
        if not isinstance(row["label"], bool):
            raise DataError(f'{place}: "label" is {kind_of(row["label"])} where true or false is expected')
        answer = _answered(row, "completion", place)
        return PreferencePair(answer, None) if row["label"] else PreferencePair(None, answer)
    keys = ", ".join(json.dumps(shorten(key)) for key in list(row)[:8]) or "none"
    forms = f"{PAIR} or {LABELLED}" if compare == "answers" else PAIR
    raise DataError(
        f"{place}: nothing to compare: found {keys}; --objective {OBJECTIVES[compare]} takes {forms}"
    )


def unified(row: dict[str, Any], place: str) -> dict[str, Any]:
    """Give a row the keys of TRL.

    LLaMA-Factory and others keep the prompt in messages, or as an instruction with its input.
    """
    row = {
        **row,
        **{key: [row[key]] for key in ("chosen", "rejected", "completion") if is_message(row.get(key))},
    }
    if "label" not in row and isinstance(row.get("kto_tag"), bool):
        row["label"] = row["kto_tag"]
    judges = "label" in row and not {"chosen", "rejected"} & row.keys()
    messages = next(
        (found for key in MESSAGES if isinstance(found := listed(row.get(key)), list) and found), None
    )
    if messages and "prompt" not in row:
        row |= {"prompt": messages[:-1], "completion": messages[-1:]} if judges else {"prompt": messages}
    if judges and "completion" not in row and (answer := next((key for key in ANSWERS if key in row), None)):
        row["completion"] = row[answer]
    if "prompt" not in row and (ask := next((key for key in PROMPTS if isinstance(row.get(key), str)), None)):
        row["prompt"] = prompt_of(row, ask, place)
    return row


def is_message(value: Any) -> bool:
    """Return True if a value is a single message."""
    return isinstance(value, dict) and bool({"role", "from"} & value.keys())


def check_lines(sources: Iterable[DataFile], compare: Compare) -> None:
    """Raise DataError for plain text, which has nothing to compare."""
    for source in sources:
        if source.kind != "lines":
            known = f"--objective {OBJECTIVES[compare]} takes JSON lines of {PAIR}"
            raise DataError(f"{source.name}: plain text, in which nothing is compared; {known}")


def _answered(row: dict[str, Any], key: str, place: str) -> PromptRecord | ChatRecord:
    """Read a prompt with one of its answers.

    Either may be messages; an answer may be a whole conversation.
    """
    prompt, answer = row.get("prompt"), row[key]
    if isinstance(answer, str):
        if not answer:
            raise DataError(
                f"{place}: {json.dumps(key)} is empty, so there is nothing to learn from; {LEAVE}"
            )
        if isinstance(prompt, str):
            system = row.get("system")
            spoken = system if isinstance(system, str) else ""
            return PromptRecord(
                prompt, answer, system=spoken, media=has_media(row), history=history_of(row, place)
            )
        answer = [{"role": ROLE, "content": answer}]
    elif not isinstance(answer, list):
        raise DataError(
            f"{place}: {json.dumps(key)} is {kind_of(answer)} where a string or a list of messages is expected"
        )
    said = _messages(row, answer, key, place)
    if said[-1]["role"] != ROLE:
        last = json.dumps(shorten(said[-1]["role"]))
        raise DataError(
            f"{place}: {json.dumps(key)} ends with a message of {last}, where the assistant's is expected"
        )
    if not said[-1]["content"] and not said[-1].get("tool_calls"):
        raise DataError(f"{place}: {json.dumps(key)} is empty, so there is nothing to learn from; {LEAVE}")
    before = [] if len(said) > 1 and said[0]["role"] != ROLE else _before(row, prompt, place)
    return ChatRecord([*before, *said], tools_of(row, place), has_media(row))


def _before(row: dict[str, Any], prompt: Any, place: str) -> list[Message]:
    """Read the messages before an answer that does not bring them."""
    if isinstance(prompt, str):
        *earlier, _ = PromptRecord(prompt, "", history=history_of(row, place)).as_chat().messages
        return _messages(row, earlier, "prompt", place)
    if isinstance(prompt, list) and prompt:
        return _messages(row, prompt, "prompt", place)
    found = f'"prompt" is {kind_of(prompt)}' if "prompt" in row else 'there is no "prompt"'
    raise DataError(f"{place}: {found} where a string or a list of messages is expected")


def _messages(row: dict[str, Any], value: Any, key: str, place: str) -> list[Message]:
    own = {"messages": value} if key != "prompt" else {"messages": value, "system": row.get("system")}
    try:
        return messages_of(own, place)
    except DataError as error:
        raise DataError(str(error).replace(f"{place}: ", f"{place}: {json.dumps(key)}: ", 1)) from None


def _prompt_of(document: PromptRecord | ChatRecord) -> Any:
    return document.prompt if isinstance(document, PromptRecord) else document.messages[:-1]
