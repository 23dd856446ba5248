"""Parses preference data: pairs of a chosen and a rejected answer, or answers with a label."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeGuard

from llamatrain.data.chat.messages import (
    Message,
    describe_type,
    has_media,
    parse_list,
    read_messages,
    read_tools,
)
from llamatrain.data.column_names import ANSWERS, MESSAGES, PROMPTS, rename_keys
from llamatrain.data.files import DataFile
from llamatrain.data.records import ChatRecord, PromptRecord, parse_object, read_history, read_prompt
from llamatrain.errors import DataError
from llamatrain.gguf.parser import shorten

PreferenceKind = Literal["pairs", "answers"]  # both of a pair, or each answer by itself
# or texts whose embeddings are compared, or that are judged by a query
ComparedKind = PreferenceKind | Literal["texts", "judged texts"]
PAIR = '{"prompt", "chosen", "rejected"}'
LABELLED = '{"prompt", "completion", "label": true or false}'
OBJECTIVES: dict[PreferenceKind, str] = {"pairs": "orpo, dpo or simpo", "answers": "kto"}
ROLE = "assistant"
HINT = "remove the row"


def is_preference(kind: ComparedKind | None) -> TypeGuard[PreferenceKind]:
    """Return True if rows have answers; those of other kinds have a query and several texts."""
    return kind in ("pairs", "answers")


@dataclass(frozen=True)
class PreferencePair:
    """A chosen and a rejected answer; one of them is None for a labelled answer."""

    chosen: PromptRecord | ChatRecord | None
    rejected: PromptRecord | ChatRecord | None

    @property
    def both(self) -> tuple[PromptRecord | ChatRecord | None, PromptRecord | ChatRecord | None]:
        """The chosen and the rejected answer."""
        return self.chosen, self.rejected

    def map(self, change: Callable[[PromptRecord | ChatRecord], Any]) -> "PreferencePair":
        """Return the pair with each answer changed."""
        return PreferencePair(*(change(record) if record else None for record in self.both))


def parse_preference(
    line: bytes, location: str, compare: PreferenceKind, columns: Mapping[str, str] | None = None
) -> PreferencePair:
    """Parse a JSON line into a preference pair."""
    return read_preference(
        rename_keys(parse_object(line, location), columns or {}, location), location, compare
    )


def read_preference(row: dict[str, Any], location: str, compare: PreferenceKind) -> PreferencePair:
    """Read a row as a preference pair."""
    row = normalize_keys(row, location)
    if "chosen" in row and "rejected" in row:
        chosen, rejected = (_read_answer(row, key, location) for key in ("chosen", "rejected"))
        # One may be a string and the other messages.
        if isinstance(chosen, ChatRecord) or isinstance(rejected, ChatRecord):
            chosen, rejected = (
                record.as_chat() if isinstance(record, PromptRecord) else record
                for record in (chosen, rejected)
            )
        if chosen == rejected:
            raise DataError(
                f'{location}: "chosen" and "rejected" are the same, so there is nothing to prefer; {HINT}',
                code="same-answers",
            )
        if _prompt(chosen) != _prompt(rejected):
            raise DataError(
                f'{location}: "chosen" and "rejected" differ before their last message; '
                "both must answer the same prompt",
                code="different-prompts",
            )
        return PreferencePair(chosen, rejected)
    if "label" in row and "completion" in row:
        if compare == "pairs":
            raise DataError(
                f'{location}: an answer with a "label", but pairs are compared; give {PAIR}, or use '
                "--objective kto",
                code="wrong-objective",
            )
        if not isinstance(row["label"], bool):
            raise DataError(
                f'{location}: "label" is {describe_type(row["label"])}; expected true or false',
                code="wrong-type",
            )
        answer = _read_answer(row, "completion", location)
        return PreferencePair(answer, None) if row["label"] else PreferencePair(None, answer)
    keys = ", ".join(json.dumps(shorten(key)) for key in list(row)[:8]) or "none"
    forms = f"{PAIR} or {LABELLED}" if compare == "answers" else PAIR
    raise DataError(
        f"{location}: nothing to compare (got keys {keys}); --objective {OBJECTIVES[compare]} needs {forms}",
        code="no-preferences",
    )


def normalize_keys(row: dict[str, Any], location: str) -> dict[str, Any]:
    """Give a row the keys of TRL.

    LLaMA-Factory and others keep the prompt in messages, or as an instruction with its input.
    """
    row = dict(row)
    for key in ("chosen", "rejected", "completion"):
        if is_message(row.get(key)):
            row[key] = [row[key]]
    if "label" not in row and isinstance(row.get("kto_tag"), bool):
        row["label"] = row["kto_tag"]
    is_labelled = "label" in row and not {"chosen", "rejected"} & row.keys()
    messages = _find_messages(row)
    if messages and "prompt" not in row:
        if is_labelled:
            row["prompt"] = messages[:-1]
            row["completion"] = messages[-1:]
        else:
            row["prompt"] = messages
    if is_labelled and "completion" not in row:
        answer_key = next((key for key in ANSWERS if key in row), None)
        if answer_key:
            row["completion"] = row[answer_key]
    if "prompt" not in row:
        prompt_key = next((key for key in PROMPTS if isinstance(row.get(key), str)), None)
        if prompt_key:
            row["prompt"] = read_prompt(row, prompt_key, location)
    return row


def _find_messages(row: dict[str, Any]) -> list[Any] | None:
    """Return the list of messages of a row, if it has one."""
    for key in MESSAGES:
        messages = parse_list(row.get(key))
        if isinstance(messages, list) and messages:
            return messages
    return None


def is_message(value: Any) -> bool:
    """Return True if a value is a single message."""
    return isinstance(value, dict) and bool({"role", "from"} & value.keys())


def check_has_rows(sources: Iterable[DataFile], compare: PreferenceKind) -> None:
    """Raise DataError for plain text, which has nothing to compare."""
    for source in sources:
        if source.kind != "lines":
            hint = f"--objective {OBJECTIVES[compare]} needs JSON lines of {PAIR}"
            raise DataError(
                f"{source.name}: plain text has nothing to compare; {hint}", code="no-preferences"
            )


def _read_answer(row: dict[str, Any], key: str, location: str) -> PromptRecord | ChatRecord:
    """Read a prompt with one of its answers.

    Either may be messages; an answer may be a whole conversation.
    """
    prompt = row.get("prompt")
    answer = row[key]
    if isinstance(answer, str):
        if not answer:
            raise DataError(f"{location}: {json.dumps(key)} is empty; {HINT}", code="empty-answer")
        if isinstance(prompt, str):
            system = row.get("system")
            system_text = system if isinstance(system, str) else ""
            return PromptRecord(
                prompt,
                answer,
                system=system_text,
                has_media=has_media(row),
                history=read_history(row, location),
            )
        answer = [{"role": ROLE, "content": answer}]
    elif not isinstance(answer, list):
        raise DataError(
            f"{location}: {json.dumps(key)} is {describe_type(answer)}; expected a string or a list of "
            "messages",
            code="wrong-type",
        )
    messages = _read_messages(row, answer, key, location)
    if messages[-1]["role"] != ROLE:
        last = json.dumps(shorten(messages[-1]["role"]))
        raise DataError(
            f'{location}: {json.dumps(key)} must end with a message of "assistant" (got {last})',
            code="bad-message",
        )
    if not messages[-1]["content"] and not messages[-1].get("tool_calls"):
        raise DataError(f"{location}: {json.dumps(key)} is empty; {HINT}", code="empty-answer")
    context = (
        [] if len(messages) > 1 and messages[0]["role"] != ROLE else _read_context(row, prompt, location)
    )
    return ChatRecord([*context, *messages], read_tools(row, location), has_media(row))


def _read_context(row: dict[str, Any], prompt: Any, location: str) -> list[Message]:
    """Read the messages before an answer that does not bring them."""
    if isinstance(prompt, str):
        *earlier, _ = PromptRecord(prompt, "", history=read_history(row, location)).as_chat().messages
        return _read_messages(row, earlier, "prompt", location)
    if isinstance(prompt, list) and prompt:
        return _read_messages(row, prompt, "prompt", location)
    problem = f'"prompt" is {describe_type(prompt)}' if "prompt" in row else 'there is no "prompt"'
    raise DataError(f"{location}: {problem}; expected a string or a list of messages", code="wrong-type")


def _read_messages(row: dict[str, Any], value: Any, key: str, location: str) -> list[Message]:
    row_of_messages = (
        {"messages": value} if key != "prompt" else {"messages": value, "system": row.get("system")}
    )
    try:
        return read_messages(row_of_messages, location)
    except DataError as error:
        message = str(error).replace(f"{location}: ", f"{location}: {json.dumps(key)}: ", 1)
        raise DataError(message, code=error.code) from None


def _prompt(document: PromptRecord | ChatRecord) -> Any:
    return document.prompt if isinstance(document, PromptRecord) else document.messages[:-1]
