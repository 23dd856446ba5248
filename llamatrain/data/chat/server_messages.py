"""Rewrites messages for certain templates, as llama-server does.

The server recognizes such a template by marks in its source; the first rule that matches applies.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

Message = dict[str, Any]
Adapter = Callable[[list[Message]], list[Message]]

REASONING = "reasoning_content"
GEMMA4 = "'<|tool_call>call:'"
CHANNEL_CHECK = '{%- if "<|channel|>analysis<|message|>" in message.content or "<|channel|>final<|message|>" in message.content %}'
EMPTY_CHECK = (
    "{%- if (message['content'] is none or message['content'] == '' or message['content']|length == 0) and "
    "(message['tool_calls'] is not defined or message['tool_calls'] is none or "
    "message['tool_calls']|length == 0) %}"
)


def adapter_for(source: str) -> Adapter | None:
    """Return the rewriting for a template, or None."""
    if contains_all(source, "[SYSTEM_PROMPT]", "[TOOL_CALLS]", "[ARGS]") and "[CALL_ID]" not in source:
        return put_reasoning_into_parts
    if "<|channel|>" in source:
        return name_reasoning_thinking_and_drop_text
    if contains_all(source, "<|ifm|im_start|>", "<ifm|tool_calls>"):
        return give_all_answers_reasoning
    if contains_all(source, "<|tool_list_start|>", "<|tool_list_end|>") or "List of tools: [" in source:
        return name_reasoning_thinking
    if contains_all(source, "dsml_token", "DSML", "tool_calls") and "function_calls" not in source:
        return sort_tool_results
    if GEMMA4 in source and "{#- OpenAI Chat Completions:" not in source:
        return join_turns_with_their_results
    if contains_all(source, "[source_lang_code]", "[target_lang_code]"):
        return name_languages
    if "You have access to the following functions in JSONSchema format" in source:
        return trim_text
    return None


def patch_source(source: str) -> str:
    """Remove from a template what llama.cpp removes: checks that reject messages which servers produce."""
    if "<|channel|>" in source:
        return source.replace(CHANNEL_CHECK, "{%- if false %}")
    return source.replace(EMPTY_CHECK, "{%- if false %}") if "[TOOL_CALLS]" in source else source


def missing_turn_opening(source: str, prompt: str) -> str:
    """Return the text that the server appends to a prompt whose template forgot to open the answer."""
    return "<|turn>model\n" if GEMMA4 in source and prompt.endswith("<turn|>\n") else ""


def message_text(message: Message) -> str:
    """Return the text of a message; newlines join its parts."""
    content = message["content"]
    if isinstance(content, str):
        return content
    text = ""
    for part in content:
        text += ("\n" if text else "") + part.get("text", "")
    return text


def contains_all(source: str, *marks: str) -> bool:
    """Return True if a source contains all marks."""
    return all(mark in source for mark in marks)


def put_reasoning_into_parts(messages: list[Message]) -> list[Message]:
    """Rewrite for Ministral: system prompts and answers are lists of parts, reasoning first."""
    return [
        to_parts(message) if message["role"] in ("system", "assistant") else message for message in messages
    ]


def to_parts(message: Message) -> Message:
    """Return a message as a list of parts, reasoning first."""
    reasoning = message.get(REASONING)
    content = message["content"]
    parts = [{"type": "thinking", "thinking": reasoning}] if isinstance(reasoning, str) else []
    parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {key: value for key, value in message.items() if key != REASONING} | {"content": parts}


def name_reasoning_thinking(messages: list[Message]) -> list[Message]:
    """Rewrite for LFM2: reasoning is named `thinking`."""
    return [
        {**message, "thinking": message[REASONING]} if REASONING in message else message
        for message in messages
    ]


def name_reasoning_thinking_and_drop_text(messages: list[Message]) -> list[Message]:
    """Rewrite for gpt-oss: reasoning is named `thinking`, and a tool call with reasoning has no text."""
    renamed = name_reasoning_thinking(messages)
    return [
        drop_key(message, "content") if "thinking" in message and message.get("tool_calls") else message
        for message in renamed
    ]


def drop_key(message: Message, key: str) -> Message:
    """Return a message without one key."""
    return {name: value for name, value in message.items() if name != key}


def give_all_answers_reasoning(messages: list[Message]) -> list[Message]:
    """Rewrite for K2 Horizon: each answer has reasoning, even if it is empty."""
    return [{REASONING: "", **message} if message["role"] == "assistant" else message for message in messages]


def trim_text(messages: list[Message]) -> list[Message]:
    """Rewrite for StepFun: text has no white space around it."""
    return [{**message, "content": trim_content(message["content"])} for message in messages]


def trim_content(content: Any) -> Any:
    """Strip the white space around content or each of its parts."""
    if isinstance(content, list):
        return [{**part, "text": part["text"].strip()} if "text" in part else part for part in content]
    return content.strip()


def name_languages(messages: list[Message]) -> list[Message]:
    """Rewrite for TranslateGemma: each question names its source and target languages."""
    return [
        {**message, "content": [mark_as_english(message["content"])]}
        if message["role"] == "user"
        else message
        for message in messages
    ]


def mark_as_english(content: Any) -> dict[str, str]:
    """Return content as a part with English as both languages."""
    return {
        "type": "text",
        "text": message_text({"content": content}),
        "source_lang_code": "en-GB",
        "target_lang_code": "en-GB",
    }


def sort_tool_results(messages: list[Message]) -> list[Message]:
    """Rewrite for DeepSeek: tool results are in the order of their calls."""
    sorted_ = list(messages)
    order = dict[str, int]()
    begin = 0
    while begin < len(sorted_):
        message = sorted_[begin]
        if message["role"] == "assistant" and message.get("tool_calls"):
            order = {call.get("id", ""): number for number, call in enumerate(message["tool_calls"])}
        if message["role"] not in ("user", "tool"):
            begin += 1
            continue
        end = next(
            (i for i in range(begin, len(sorted_)) if sorted_[i]["role"] not in ("user", "tool")),
            len(sorted_),
        )
        indices = [i for i in range(begin, end) if sorted_[i]["role"] == "tool"]
        results = sorted(
            (sorted_[i] for i in indices), key=lambda each: order.get(each.get("tool_call_id", ""), 0)
        )
        for index, result in zip(indices, results, strict=True):
            sorted_[index] = result
        begin = end
    return sorted_


def join_turns_with_their_results(messages: list[Message]) -> list[Message]:
    """Rewrite for older templates of Gemma 4: a call, its results and the following text are one message."""
    joined = list[Message]()
    rest = list(messages)
    while rest:
        message = rest.pop(0)
        if message["role"] != "assistant" or not message.get("tool_calls"):
            joined.append(message)
            continue
        turn = {"role": "assistant", "tool_calls": message["tool_calls"]}
        responses = list[Any]()
        while rest and rest[0]["role"] == "tool":
            responses.append(make_tool_response(message["tool_calls"], len(responses), rest.pop(0)))
        if responses:
            turn["tool_responses"] = responses
        if rest and rest[0]["role"] == "assistant" and not rest[0].get("tool_calls") and rest[0]["content"]:
            turn["content"] = rest.pop(0)["content"]
        if REASONING in message:
            turn[REASONING] = message[REASONING]
        joined.append(turn)
    return joined


def make_tool_response(calls: list[Any], number: int, result: Message) -> dict[str, Any]:
    """Return the result of a tool call as Gemma 4 expects it."""
    content = result["content"]
    with suppress(ValueError):  # plain text
        content = json.loads(content) if isinstance(content, str) else content
    name = calls[number]["function"]["name"] if number < len(calls) else ""
    return {"name": name or result.get("tool_call_id", ""), "response": content}
