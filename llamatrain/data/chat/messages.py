"""The messages of a chat, in the form in which llama-server hands them to a template, whatever form the data has."""

import json
from collections.abc import Iterator
from typing import Any

from llamatrain.data.column_names import MEDIA as MEDIA_KEYS
from llamatrain.data.column_names import MESSAGES, in_small_letters
from llamatrain.data.json_values import parsed
from llamatrain.errors import DataError

Message = dict[str, Any]
ROLES = {  # other words for those of OpenAI, ShareGPT's among them
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
KNOWN = {"system", "user", "assistant", "tool"}
KEPT = ("reasoning_content", "name", "tool_call_id")  # of what a message may have besides
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # what thoughts are called in a message
WEIGHTS = ("weight", "train", "training")  # what says whether a message is trained
MESSAGE_KEYS = ("role", "content", "from", "value", "tool_calls", *KEPT, *THOUGHTS, *WEIGHTS)
UNTRAINED = "untrained"  # what is left of that in ours: the child that renders them takes it out
TEXTS = ("text", "input_text", "output_text")  # types of parts
MEDIA = (
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
CALLS = ("tool_call", "tool_use", "function", "function_call")


def messages_of(row: dict[str, Any], place: str, key: str = "messages") -> list[Message]:
    """Read a list of messages, each {"role", "content"} as OpenAI has it or {"from", "value"} as ShareGPT has it."""
    value = listed(row[key])
    if not isinstance(value, list) or not value:
        raise DataError(
            f"{place}: {json.dumps(key)} is {kind_of(value)} where a list of messages is expected"
        )
    messages, calls = list[Message](), 0
    for number, message in enumerate(value, 1):
        where = f"{place}: message {number}"
        message = in_small_letters(message, MESSAGE_KEYS) if isinstance(message, dict) else message
        made = (
            _turn(message, where, calls)
            if isinstance(message, dict) and "from" in message
            else _message(message, where)
        )
        if "written" in made:
            calls += len(made["tool_calls"])
        messages.append(made)
    others = dict.fromkeys(json.dumps(each["role"]) for each in messages if each["role"] not in KNOWN)
    if others and all(each["role"] != "assistant" for each in messages):
        raise DataError(
            f'{place}: nobody is "assistant" in it (got {", ".join(others)[:80]}); name the roles so'
        )
    return _opened(row, messages, place)


def role_of(name: str) -> str:
    """Find the role that is meant, however it is called."""
    lower = name.strip().lower()
    return ROLES.get(lower, lower if lower in KNOWN else name)


def has_media(row: dict[str, Any]) -> bool:
    """Tell whether a row has images, audio or video, of which nothing can be trained."""
    if row.get("media") is True or any(row.get(name) for name in MEDIA_KEYS):
        return True
    messages = (each for key in MESSAGES if isinstance(found := listed(row.get(key)), list) for each in found)
    contents = (each.get("content") for each in messages if isinstance(each, dict))
    parts = (
        part
        for content in contents
        if isinstance(content, list)
        for part in content
        if isinstance(part, dict)
    )
    return any(part.get("type") in MEDIA for part in parts)


def listed(value: Any) -> Any:
    """A list, or the JSON of one, as a field of a table has it."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return parsed(value.encode())
        except (ValueError, RecursionError):
            return value
    return value


def is_trained(message: dict[str, Any], place: str) -> bool:
    """By the keys of OpenAI and of Axolotl: 0 or 1, true or false."""
    found = [key for key in WEIGHTS if message.get(key) is not None]
    for key in found:
        if type(message[key]) not in (bool, int, float) or message[key] not in (0, 1):
            raise DataError(
                f"{place} has {json.dumps(key)} {json.dumps(message[key])[:40]}; 0 or 1 can be, or true or false"
            )
    if len({bool(message[key]) for key in found}) > 1:
        raise DataError(
            f"{place} has {json.dumps(found[0])} and {json.dumps(found[1])} that say different things"
        )
    return not found or bool(message[found[0]])


def tools_of(row: dict[str, Any], place: str) -> list[Any] | None:
    """Functions that the assistant may call, as a list or as its JSON."""
    value = row.get("tools")
    if isinstance(value, str) and value.strip():
        try:
            value = parsed(value.encode())
        except (ValueError, RecursionError):
            raise DataError(f'{place}: "tools" is a string, and no JSON') from None
    if not value:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise DataError(f'{place}: "tools" is {kind_of(value)} where a list of objects is expected')
    return [_tool(tool, f"{place}: tool {number}") for number, tool in enumerate(value, 1)]


def content_of(content: Any, place: str) -> str | list[dict[str, str]]:
    """Read words, or parts of text: templates that take parts join them in their own way, and others get them in lines."""
    if not isinstance(content, list):
        return str(content or "")
    parts = [
        part
        for part in content
        if not (isinstance(part, dict) and part.get("type") in (*MEDIA, *CALLS, *THOUGHTS))
    ]
    return [
        {"type": "text", "text": text_of(part, TEXTS, ("text", "value", "content"), place)} for part in parts
    ] or ""


def text_of(part: Any, types: tuple[str, ...], keys: tuple[str, ...], place: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = (
        next((part[key] for key in keys if isinstance(part.get(key), str)), None) if kind in types else None
    )
    if text is None:
        known = f"of type {json.dumps(kind)}" if kind else "without a type"
        raise DataError(f'{place} has a part {known}; what can be trained is {{"type": "text", "text"}}')
    return text


def thoughts_in(content: Any, place: str) -> str:
    """Join the thoughts among the parts of a message."""
    parts = [part for part in content if isinstance(part, dict) and part.get("type") in THOUGHTS]
    return "\n".join(
        text_of(part, THOUGHTS, (*THOUGHTS, "text", "value", "content"), place) for part in parts
    )


def calls_in(content: Any) -> list[Any]:
    """Find the calls among the parts of a message: {"type": "tool_call", "name", "arguments"}, or such an object within."""
    parts = [part for part in content if isinstance(part, dict) and part.get("type") in CALLS]
    return [next((part[key] for key in CALLS if isinstance(part.get(key), dict)), part) for part in parts]


def kind_of(value: Any) -> str:
    if value in ([], {}, ""):
        return "empty"
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _opened(row: dict[str, Any], messages: list[Message], place: str) -> list[Message]:
    """With the system prompt that stands beside the messages."""
    system = row.get("system")
    if not system or messages[0]["role"] == "system":
        return messages
    if not isinstance(system, str):
        raise DataError(f'{place}: "system" is {kind_of(system)} where a string is expected')
    return [{"role": "system", "content": system}, *messages]


def _message(message: Any, place: str) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise DataError(f'{place} has no "role"; expected is {{"role", "content"}}')
    content, calls = message.get("content"), message.get("tool_calls")
    if not isinstance(content, str | list) and (content is not None or not calls):
        raise DataError(f'{place} has no "content"; expected is {{"role", "content"}}')
    made: Message = {
        "role": role_of(message["role"]),
        "content": content if type(content) is str else content_of(content, place),
    }
    if isinstance(content, list):
        calls = calls or calls_in(content)
        if thoughts := thoughts_in(content, place):
            made[THOUGHTS[0]] = thoughts
    if len(message) > 2 or calls:
        made |= _besides(message, made["role"], place)
        if calls:
            made["tool_calls"] = (
                [_call(call, place) for call in calls] if isinstance(calls, list) else [_call(None, place)]
            )
    return made


def _turn(turn: Any, place: str, calls: int) -> Message:
    """Read a message in ShareGPT's words; so many calls were made before."""
    if not isinstance(turn.get("from"), str) or not isinstance(turn.get("value"), str):
        raise DataError(f'{place} is not {{"from", "value"}} with two strings')
    message: Message = {"role": role_of(turn["from"]), "content": turn["value"]}
    if turn["from"] == "function_call":
        made = list(_written_calls(turn["value"], calls))
        message |= {"tool_calls": made, "written": turn["value"]} if made else {}
    elif message["role"] == "tool" and calls:
        message["tool_call_id"] = _name_of(calls - 1)
    return message | _besides(turn, message["role"], place) if len(turn) > 2 else message


def _besides(message: dict[str, Any], role: str, place: str) -> Message:
    """What a message has beside role and content."""
    made: Message = {key: message[key] for key in KEPT if isinstance(message.get(key), str) and message[key]}
    thoughts = next(
        (message[key] for key in THOUGHTS if isinstance(message.get(key), str) and message[key]), None
    )
    if thoughts and role == "assistant":
        made[THOUGHTS[0]] = thoughts
    if not is_trained(message, place) and role == "assistant":
        made[UNTRAINED] = True
    return made


def _call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(
            f'{place} has "tool_calls" that are not {{"type": "function", "function": {{"name", "arguments"}}}}'
        )
    arguments = function.get("arguments", {})
    made = {
        "type": "function",
        "function": {"name": function["name"], "arguments": {} if arguments is None else arguments},
    }
    return made | ({"id": call["id"]} if isinstance(call.get("id"), str) and call["id"] else {})


def _written_calls(value: str, before: int) -> Iterator[dict[str, Any]]:
    """Calls that a turn is the JSON of, each with a name that its answer can have."""
    try:
        found = parsed(value.encode())
    except (ValueError, RecursionError):
        return
    calls = found if isinstance(found, list) else [found]
    if all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        yield from (_call(call, "") | {"id": _name_of(before + number)} for number, call in enumerate(calls))


def _name_of(call: int) -> str:
    """Nine letters and figures, which some templates insist on."""
    return f"call{call:05}"


def _tool(tool: dict[str, Any], place: str) -> dict[str, Any]:
    function = tool.get("function", tool)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(
            f'{place} is not {{"type": "function", "function": {{"name", "description", "parameters"}}}}'
        )
    told = {
        "name": function["name"],
        "description": function.get("description") or "",
        "parameters": function.get("parameters"),
    }
    return {"type": "function", "function": {**told, "parameters": told["parameters"] or {}}}
