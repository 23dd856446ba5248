"""Reads the messages of a chat into the form in which llama-server passes them to a template."""

import json
from collections.abc import Iterator
from typing import Any

from llamatrain.data.column_names import MEDIA as MEDIA_KEYS
from llamatrain.data.column_names import MESSAGES, lower_keys
from llamatrain.data.json_values import parse_json
from llamatrain.errors import DataError

Message = dict[str, Any]
ROLES = {  # other names for OpenAI's roles, including ShareGPT's
    "developer": "system",
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "chatbot": "assistant",
    "model": "assistant",
    "function": "tool",
    "function_call": "assistant",
    "function_response": "tool",
    "observation": "tool",
}
KNOWN_ROLES = {"system", "user", "assistant", "tool"}
EXTRA_KEYS = ("reasoning_content", "name", "tool_call_id")  # optional keys of a message that are kept
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # keys of reasoning in a message
WEIGHT_KEYS = ("weight", "train", "training")  # keys that tell whether a message is trained
MESSAGE_KEYS = ("role", "content", "from", "value", "tool_calls", *EXTRA_KEYS, *REASONING_KEYS, *WEIGHT_KEYS)
UNTRAINED = "untrained"  # our key for messages that are not trained; the child removes it
TEXT_PARTS = ("text", "input_text", "output_text")  # types of parts
MEDIA_PARTS = (
    "image",
    "image_url",
    "input_image",
    "video",
    "video_url",
    "audio",
    "audio_url",
    "input_audio",
    "file",
    "media",
)
CALL_PARTS = ("tool_call", "tool_use", "function", "function_call")


def read_messages(row: dict[str, Any], location: str, key: str = "messages") -> list[Message]:
    """Read a list of messages.

    They are {"role", "content"} as in OpenAI's format, or {"from", "value"} as in ShareGPT's.
    """
    value = parse_list(row[key])
    if not isinstance(value, list) or not value:
        raise DataError(
            f"{location}: {json.dumps(key)} is {describe_type(value)}; expected a list of messages",
            code="wrong-type",
        )
    messages = list[Message]()
    calls = 0
    for number, message in enumerate(value, 1):
        where = f"{location}: message {number}"
        message = lower_keys(message, MESSAGE_KEYS) if isinstance(message, dict) else message
        result = (
            _read_sharegpt_message(message, where, calls)
            if isinstance(message, dict) and "from" in message
            else _read_openai_message(message, where)
        )
        if "written" in result:
            calls += len(result["tool_calls"])
        messages.append(result)
    unknown_roles = dict.fromkeys(
        json.dumps(other["role"]) for other in messages if other["role"] not in KNOWN_ROLES
    )
    if unknown_roles and all(other["role"] != "assistant" for other in messages):
        raise DataError(
            f'{location}: no message has the role "assistant" (got {", ".join(unknown_roles)[:80]}); '
            "rename the roles",
            code="unknown-roles",
        )
    return _with_system(row, messages, location)


def normalize_role(name: str) -> str:
    """Return the usual name of a role."""
    lower = name.strip().lower()
    return ROLES.get(lower, lower if lower in KNOWN_ROLES else name)


def has_media(row: dict[str, Any]) -> bool:
    """Return True if a row has images, audio or video, which cannot be trained on."""
    if row.get("media") is True or any(row.get(name) for name in MEDIA_KEYS):
        return True
    messages = (
        message
        for key in MESSAGES
        if isinstance(values := parse_list(row.get(key)), list)
        for message in values
    )
    contents = (message.get("content") for message in messages if isinstance(message, dict))
    parts = (
        part
        for content in contents
        if isinstance(content, list)
        for part in content
        if isinstance(part, dict)
    )
    return any(part.get("type") in MEDIA_PARTS for part in parts)


def parse_list(value: Any) -> Any:
    """Return a list, or parse the JSON of one, as in a field of a table."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return parse_json(value.encode())
        except (ValueError, RecursionError):
            return value
    return value


def is_trained(message: dict[str, Any], location: str) -> bool:
    """Return whether a message is trained, by the keys of OpenAI and Axolotl: 0 or 1, true or false."""
    keys = [key for key in WEIGHT_KEYS if message.get(key) is not None]
    for key in keys:
        if type(message[key]) not in (bool, int, float) or message[key] not in (0, 1):
            raise DataError(
                f"{location}: {json.dumps(key)} must be 0 or 1, or true or false (got "
                f"{json.dumps(message[key])[:40]})",
                code="bad-weight",
            )
    if len({bool(message[key]) for key in keys}) > 1:
        raise DataError(
            f"{location}: {json.dumps(keys[0])} and {json.dumps(keys[1])} contradict each other; keep one",
            code="bad-weight",
        )
    return not keys or bool(message[keys[0]])


def read_tools(row: dict[str, Any], location: str) -> list[Any] | None:
    """Read the functions that the assistant may call: a list, or its JSON."""
    value = row.get("tools")
    if isinstance(value, str) and value.strip():
        try:
            value = parse_json(value.encode())
        except (ValueError, RecursionError):
            raise DataError(
                f'{location}: "tools" is a string that is not JSON; give a list of objects', code="not-json"
            ) from None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(
            f'{location}: "tools" is {describe_type(value)}; expected a list of objects', code="wrong-type"
        )
    return [_read_tool(tool, f"{location}: tool {number}") for number, tool in enumerate(value, 1)]


def read_content(content: Any, location: str) -> str | list[dict[str, str]]:
    """Read text, or parts of text.

    Templates that accept parts join them in their own way; for others, newlines join them.
    """
    if not isinstance(content, list):
        return str(content or "")
    parts = [
        part
        for part in content
        if not (isinstance(part, dict) and part.get("type") in (*MEDIA_PARTS, *CALL_PARTS, *REASONING_KEYS))
    ]
    return [
        {"type": "text", "text": read_text_part(part, TEXT_PARTS, ("text", "value", "content"), location)}
        for part in parts
    ] or ""


def read_text_part(part: Any, types: tuple[str, ...], keys: tuple[str, ...], location: str) -> str:
    """Return the text of a part; raise DataError for other types."""
    kind = part.get("type") if isinstance(part, dict) else None
    text = (
        next((part[key] for key in keys if isinstance(part.get(key), str)), None) if kind in types else None
    )
    if text is None:
        type_name = f"of type {json.dumps(kind)}" if kind else "without a type"
        raise DataError(
            f'{location} has a part {type_name}; only {{"type": "text", "text"}} can be trained on',
            code="bad-message",
        )
    return text


def read_reasoning(content: Any, location: str) -> str:
    """Join the reasoning among the parts of a message."""
    parts = [part for part in content if isinstance(part, dict) and part.get("type") in REASONING_KEYS]
    return "\n".join(
        read_text_part(part, REASONING_KEYS, (*REASONING_KEYS, "text", "value", "content"), location)
        for part in parts
    )


def find_calls(content: Any) -> list[Any]:
    """Return the tool calls among the parts of a message.

    A part is {"type": "tool_call", "name", "arguments"}, or contains such an object.
    """
    parts = [part for part in content if isinstance(part, dict) and part.get("type") in CALL_PARTS]
    return [
        next((part[key] for key in CALL_PARTS if isinstance(part.get(key), dict)), part) for part in parts
    ]


def describe_type(value: Any) -> str:
    """Name the type of a JSON value for a message."""
    if value in ([], {}, ""):
        return "empty"
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _with_system(row: dict[str, Any], messages: list[Message], location: str) -> list[Message]:
    """Prepend the system prompt of the row, unless the messages have one."""
    system = row.get("system")
    if not system or messages[0]["role"] == "system":
        return messages
    if not isinstance(system, str):
        raise DataError(
            f'{location}: "system" is {describe_type(system)}; expected a string', code="wrong-type"
        )
    return [{"role": "system", "content": system}, *messages]


def _read_openai_message(message: Any, location: str) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(f'{location} has no "role"; expected {{"role", "content"}}', code="bad-message")
    content = message.get("content")
    calls = message.get("tool_calls")
    if not isinstance(content, str | list) and (content is not None or not calls):
        raise DataError(f'{location} has no "content"; expected {{"role", "content"}}', code="bad-message")
    result: Message = {
        "role": normalize_role(message["role"]),
        "content": content if type(content) is str else read_content(content, location),
    }
    if isinstance(content, list):
        calls = calls or find_calls(content)
        if reasoning := read_reasoning(content, location):
            result[REASONING_KEYS[0]] = reasoning
    if len(message) > 2 or calls:
        result |= _read_other_fields(message, result["role"], location)
        if calls:
            result["tool_calls"] = (
                [_read_call(call, location) for call in calls]
                if isinstance(calls, list)
                else [_read_call(None, location)]
            )
    return result


def _read_sharegpt_message(turn: Any, location: str, calls: int) -> Message:
    """Read a message in ShareGPT's format; `calls` counts the tool calls before it."""
    if not isinstance(turn.get("from"), str) or not isinstance(turn.get("value"), str):
        raise DataError(f'{location} is not {{"from", "value"}} with two strings', code="bad-message")
    message: Message = {"role": normalize_role(turn["from"]), "content": turn["value"]}
    if turn["from"] == "function_call":
        tool_calls = list(_parse_calls(turn["value"], calls))
        message |= {"tool_calls": tool_calls, "written": turn["value"]} if tool_calls else {}
    elif message["role"] == "tool" and calls:
        message["tool_call_id"] = _call_id(calls - 1)
    return message | _read_other_fields(turn, message["role"], location) if len(turn) > 2 else message


def _read_other_fields(message: dict[str, Any], role: str, location: str) -> Message:
    """Read the fields of a message other than role and content."""
    fields: Message = {
        key: message[key] for key in EXTRA_KEYS if isinstance(message.get(key), str) and message[key]
    }
    reasoning = next(
        (message[key] for key in REASONING_KEYS if isinstance(message.get(key), str) and message[key]), None
    )
    if reasoning and role == "assistant":
        fields[REASONING_KEYS[0]] = reasoning
    if not is_trained(message, location) and role == "assistant":
        fields[UNTRAINED] = True
    return fields


def _read_call(call: Any, location: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(
            f'{location}: bad "tool_calls"; expected '
            '{"type": "function", "function": {"name", "arguments"}}',
            code="bad-tool-call",
        )
    arguments = function.get("arguments", {})
    result = {
        "type": "function",
        "function": {"name": function["name"], "arguments": {} if arguments is None else arguments},
    }
    return result | ({"id": call["id"]} if isinstance(call.get("id"), str) and call["id"] else {})


def _parse_calls(value: str, call_count: int) -> Iterator[dict[str, Any]]:
    """Yield the tool calls that a text is the JSON of, each with an id that its result can name."""
    try:
        value_read = parse_json(value.encode())
    except (ValueError, RecursionError):
        return
    calls = value_read if isinstance(value_read, list) else [value_read]
    if all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        yield from (
            _read_call(call, "") | {"id": _call_id(call_count + number)} for number, call in enumerate(calls)
        )


def _call_id(call: int) -> str:
    """Return an id of nine letters and digits, which some templates require."""
    return f"call{call:05}"


def _read_tool(tool: dict[str, Any], location: str) -> dict[str, Any]:
    function = tool.get("function", tool)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(
            f"{location}: not a tool; expected "
            '{"type": "function", "function": {"name", "description", "parameters"}}',
            code="bad-tool",
        )
    description = {
        "name": function["name"],
        "description": function.get("description") or "",
        "parameters": function.get("parameters"),
    }
    return {"type": "function", "function": {**description, "parameters": description["parameters"] or {}}}
