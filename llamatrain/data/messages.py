"""The messages of a chat, in the form in which llama-server hands them to a template, whatever form the data has."""

import json
from collections.abc import Iterator
from typing import Any

from llamatrain.data.json_values import parsed
from llamatrain.errors import DataError

Message = dict[str, Any]
ROLES = {"developer": "system"}
SHARED = {  # the words of ShareGPT
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function": "tool",
    "function_call": "assistant",
    "function_response": "tool",
    "observation": "tool",
    **ROLES,
}
KEPT = ("reasoning_content", "name", "tool_call_id")  # of what a message may have besides
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # what thoughts are called in a message
WEIGHTS = ("weight", "train", "training")  # what says whether a message is trained
UNTRAINED = "untrained"  # what is left of that in ours: the child that renders them takes it out


def messages_of(row: dict[str, Any], place: str) -> list[Message]:
    """The form of OpenAI and of everybody since."""
    value = listed(row["messages"])
    if not isinstance(value, list) or not value:
        raise DataError(f'{place}: "messages" is {kind_of(value)} where a list of messages is expected')
    return _opened(row, [_message(message, f"{place}: message {number}") for number, message in enumerate(value, 1)], place)


def shared_of(row: dict[str, Any], place: str) -> list[Message]:
    """The ShareGPT form, in the other's words."""
    value = listed(row["conversations"])
    if not isinstance(value, list) or not value:
        raise DataError(f'{place}: "conversations" is {kind_of(value)} where a list of turns is expected')
    messages, calls = list[Message](), 0
    for number, turn in enumerate(value, 1):
        if not isinstance(turn, dict) or not isinstance(turn.get("from"), str) or not isinstance(turn.get("value"), str):
            raise DataError(f'{place}: turn {number} is not {{"from", "value"}} with two strings')
        message: Message = {"role": SHARED.get(turn["from"], turn["from"]), "content": turn["value"]}
        if turn["from"] == "function_call":
            made = list(_written_calls(turn["value"], calls))
            calls += len(made)
            message |= {"tool_calls": made, "written": turn["value"]} if made else {}
        elif message["role"] == "tool" and calls:
            message["tool_call_id"] = _name_of(calls - 1)
        messages.append(message | _besides(turn, message["role"], f"{place}: turn {number}") if len(turn) > 2 else message)
    return _opened(row, messages, place)


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
            raise DataError(f"{place} has {json.dumps(key)} {json.dumps(message[key])[:40]}; 0 or 1 can be, or true or false")
    if len({bool(message[key]) for key in found}) > 1:
        raise DataError(f"{place} has {json.dumps(found[0])} and {json.dumps(found[1])} that say different things")
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


def text_of(content: Any, place: str) -> str:
    """Parts of text are joined by newlines, as llama.cpp joins them; there is no other part that can be trained."""
    if not isinstance(content, list):
        return str(content or "")
    text = ""
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            known = f"of type {json.dumps(kind)}" if kind else "without a type"
            raise DataError(f'{place} has a part {known}; what can be trained is {{"type": "text", "text"}}')
        text += ("\n" if text else "") + part["text"]
    return text


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
    role = message["role"]
    made: Message = {"role": ROLES.get(role, role), "content": content if type(content) is str else text_of(content, place)}
    if len(message) > 2 or calls:
        made |= _besides(message, made["role"], place)
        if calls:
            made["tool_calls"] = [_call(call, place) for call in calls] if isinstance(calls, list) else [_call(None, place)]
    return made


def _besides(message: dict[str, Any], role: str, place: str) -> Message:
    """What a message has beside role and content."""
    made: Message = {key: message[key] for key in KEPT if isinstance(message.get(key), str) and message[key]}
    thoughts = next((message[key] for key in THOUGHTS if isinstance(message.get(key), str) and message[key]), None)
    if thoughts and role == "assistant":
        made[THOUGHTS[0]] = thoughts
    if not is_trained(message, place) and role == "assistant":
        made[UNTRAINED] = True
    return made


def _call(call: Any, place: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f'{place} has "tool_calls" that are not {{"type": "function", "function": {{"name", "arguments"}}}}')
    arguments = function.get("arguments", {})
    made = {"type": "function", "function": {"name": function["name"], "arguments": {} if arguments is None else arguments}}
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
        raise DataError(f'{place} is not {{"type": "function", "function": {{"name", "description", "parameters"}}}}')
    told = {"name": function["name"], "description": function.get("description") or "", "parameters": function.get("parameters")}
    return {"type": "function", "function": {**told, "parameters": told["parameters"] or {}}}
