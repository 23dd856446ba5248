"""The changes that llama-server makes to messages before certain templates see them.

The server knows such a template by marks in its source, as here. The first rule that fits holds.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

Message = dict[str, Any]
Adapter = Callable[[list[Message]], list[Message]]

THOUGHTS = "reasoning_content"
GEMMA4 = "'<|tool_call>call:'"
CHANNEL_CHECK = '{%- if "<|channel|>analysis<|message|>" in message.content or "<|channel|>final<|message|>" in message.content %}'
EMPTY_CHECK = (
    "{%- if (message['content'] is none or message['content'] == '' or message['content']|length == 0) and "
    "(message['tool_calls'] is not defined or message['tool_calls'] is none or message['tool_calls']|length == 0) %}"
)


def adapter_for(source: str) -> Adapter | None:
    """Find what the server does for a template; None where messages stay as they are."""
    if contains(source, "[SYSTEM_PROMPT]", "[TOOL_CALLS]", "[ARGS]") and "[CALL_ID]" not in source:
        return put_thoughts_into_parts
    if "<|channel|>" in source:
        return name_thoughts_thinking_and_drop_words
    if contains(source, "<|ifm|im_start|>", "<ifm|tool_calls>"):
        return give_all_answers_thoughts
    if contains(source, "<|tool_list_start|>", "<|tool_list_end|>") or "List of tools: [" in source:
        return name_thoughts_thinking
    if contains(source, "dsml_token", "DSML", "tool_calls") and "function_calls" not in source:
        return sort_tool_results
    if GEMMA4 in source and "{#- OpenAI Chat Completions:" not in source:
        return join_turns_with_their_results
    if contains(source, "[source_lang_code]", "[target_lang_code]"):
        return name_languages
    if "You have access to the following functions in JSONSchema format" in source:
        return trim_words
    return None


def patched(source: str) -> str:
    """Take out of a template what llama.cpp takes out: checks that refuse messages which servers do have."""
    if "<|channel|>" in source:
        return source.replace(CHANNEL_CHECK, "{%- if false %}")
    return source.replace(EMPTY_CHECK, "{%- if false %}") if "[TOOL_CALLS]" in source else source


def opens_turn_after(source: str, prompt: str) -> str:
    """Find what the server puts behind a prompt whose template forgot to open the answer."""
    return "<|turn>model\n" if GEMMA4 in source and prompt.endswith("<turn|>\n") else ""


def words_of(message: Message) -> str:
    """Join the parts of a message by newlines."""
    content = message["content"]
    if isinstance(content, str):
        return content
    text = ""
    for part in content:
        text += ("\n" if text else "") + part.get("text", "")
    return text


def contains(source: str, *marks: str) -> bool:
    return all(mark in source for mark in marks)


def put_thoughts_into_parts(messages: list[Message]) -> list[Message]:
    """Ministral: system prompts and answers are lists of parts, with thoughts first."""
    return [
        in_parts(message) if message["role"] in ("system", "assistant") else message for message in messages
    ]


def in_parts(message: Message) -> Message:
    thoughts, content = message.get(THOUGHTS), message["content"]
    parts = [{"type": "thinking", "thinking": thoughts}] if isinstance(thoughts, str) else []
    parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return {key: value for key, value in message.items() if key != THOUGHTS} | {"content": parts}


def name_thoughts_thinking(messages: list[Message]) -> list[Message]:
    """LFM2: thoughts are called `thinking`."""
    return [
        {**message, "thinking": message[THOUGHTS]} if THOUGHTS in message else message for message in messages
    ]


def name_thoughts_thinking_and_drop_words(messages: list[Message]) -> list[Message]:
    """gpt-oss: thoughts are called `thinking`, and a call that has some has no words."""
    named = name_thoughts_thinking(messages)
    return [
        without(each, "content") if "thinking" in each and each.get("tool_calls") else each for each in named
    ]


def without(message: Message, key: str) -> Message:
    return {name: value for name, value in message.items() if name != key}


def give_all_answers_thoughts(messages: list[Message]) -> list[Message]:
    """K2 Horizon: each answer has thoughts, be they empty."""
    return [{THOUGHTS: "", **message} if message["role"] == "assistant" else message for message in messages]


def trim_words(messages: list[Message]) -> list[Message]:
    """StepFun: words have no white space around them."""
    return [{**message, "content": trimmed(message["content"])} for message in messages]


def trimmed(content: Any) -> Any:
    if isinstance(content, list):
        return [{**part, "text": part["text"].strip()} if "text" in part else part for part in content]
    return content.strip()


def name_languages(messages: list[Message]) -> list[Message]:
    """TranslateGemma: each question names the languages it is translated from and to."""
    return [
        {**message, "content": [in_english(message["content"])]} if message["role"] == "user" else message
        for message in messages
    ]


def in_english(content: Any) -> dict[str, str]:
    return {
        "type": "text",
        "text": words_of({"content": content}),
        "source_lang_code": "en-GB",
        "target_lang_code": "en-GB",
    }


def sort_tool_results(messages: list[Message]) -> list[Message]:
    """DeepSeek: results stand in the order of the calls that they answer."""
    sorted_, order, at = list(messages), dict[str, int](), 0
    while at < len(sorted_):
        message = sorted_[at]
        if message["role"] == "assistant" and message.get("tool_calls"):
            order = {call.get("id", ""): number for number, call in enumerate(message["tool_calls"])}
        if message["role"] not in ("user", "tool"):
            at += 1
            continue
        end = next(
            (i for i in range(at, len(sorted_)) if sorted_[i]["role"] not in ("user", "tool")), len(sorted_)
        )
        places = [i for i in range(at, end) if sorted_[i]["role"] == "tool"]
        results = sorted(
            (sorted_[i] for i in places), key=lambda each: order.get(each.get("tool_call_id", ""), 0)
        )
        for place, result in zip(places, results, strict=True):
            sorted_[place] = result
        at = end
    return sorted_


def join_turns_with_their_results(messages: list[Message]) -> list[Message]:
    """Gemma 4, older templates: a call, its results and the words that follow are one message."""
    joined, rest = list[Message](), list(messages)
    while rest:
        message = rest.pop(0)
        if message["role"] != "assistant" or not message.get("tool_calls"):
            joined.append(message)
            continue
        turn = {"role": "assistant", "tool_calls": message["tool_calls"]}
        responses = list[Any]()
        while rest and rest[0]["role"] == "tool":
            responses.append(response_to(message["tool_calls"], len(responses), rest.pop(0)))
        if responses:
            turn["tool_responses"] = responses
        if rest and rest[0]["role"] == "assistant" and not rest[0].get("tool_calls") and rest[0]["content"]:
            turn["content"] = rest.pop(0)["content"]
        if THOUGHTS in message:
            turn[THOUGHTS] = message[THOUGHTS]
        joined.append(turn)
    return joined


def response_to(calls: list[Any], number: int, result: Message) -> dict[str, Any]:
    content = result["content"]
    with suppress(ValueError):  # plain text
        content = json.loads(content) if isinstance(content, str) else content
    name = calls[number]["function"]["name"] if number < len(calls) else ""
    return {"name": name or result.get("tool_call_id", ""), "response": content}
