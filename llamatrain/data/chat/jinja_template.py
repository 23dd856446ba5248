"""Chat templates as the child that renders them compiles them, and what each of them can take."""

import re
from contextlib import suppress
from datetime import date, datetime
from functools import cached_property
from typing import Any

from llamatrain.data.chat.jinja_env import ListProbe, MessageProbe, StringProbe, make_environment
from llamatrain.data.chat.server_messages import (
    GEMMA4,
    adapter_for,
    give_all_answers_thoughts,
    opens_turn_after,
    patched,
    words_of,
)

PROBE = "Qhxzv"  # a text that no template writes of itself
TAG = re.compile(r"<([A-Za-z_:]+)>\s*$")
EMPTY = re.compile(r"<([a-z_:]*think[a-z_:]*)>\s*</\1>\s*$")
THOUGHT = re.compile(r"<[a-z_:]*think[a-z_:]*>\s*$")
SPLIT = "content.split('</think>')"  # by which llama.cpp knows older templates of models that think
CHANGES = re.compile(r"\b(?:append|extend|insert|pop|popitem|remove|clear|update|setdefault|sort|reverse)\b")


class JinjaTemplate:
    """A template, and what it can take: the rest is written otherwise for it, as llama-server does."""

    def __init__(
        self, source: str, values: dict[str, Any], ends: list[str], keeps: bool = False, day: str = ""
    ) -> None:
        now = datetime.combine(date.fromisoformat(day) if day else date.today(), datetime.min.time())
        self.source, self.ends, self.thinks, self.keeps = (
            source,
            ends,
            "</think>" in source,
            keeps,
        )  # thoughts of older turns
        self.template, self.adapt = make_environment(now).from_string(patched(source)), adapter_for(source)
        self.changes = CHANGES.search(source) is not None
        dates = {"date_string": f"{now:%d %b %Y}", "datetime": f"{now:%b %d %Y}"}
        self.values = {**dates, "enable_thinking": True, **values}
        self.values["enable_thinking"] = self._can_think

    def render(self, messages: list[Any], tools: Any = None, answer_next: bool = False, **values: Any) -> str:
        if self.wants_parts:
            messages = [in_parts(each) for each in messages]
        elif not self.takes_parts:
            messages = [joined(each) for each in messages]
        messages = self.adapt(messages) if self.adapt else messages
        if self.changes:
            messages, tools = copied(messages), copied(tools)
        text = self._render(messages, tools, answer_next, **values)
        return text + opens_turn_after(self.source, text) if answer_next else text

    def _render(self, messages: list[Any], tools: Any, answer_next: bool, **values: Any) -> str:
        """Render the template with `tools` only where there are any: some ask whether they are defined, or null."""
        given = {**self.values, "tools": tools} if tools else self.values
        return self.template.render(
            **{**given, **values}, messages=messages, add_generation_prompt=answer_next
        )

    def _shows(self, messages: list[Any], tools: Any = None) -> bool:
        try:
            return PROBE in self.render(messages, tools, True)
        except Exception:
            return False

    # ---- what it can take, found as llama.cpp finds it -----------------------------------------

    @cached_property
    def _content_uses(self) -> tuple[bool, bool]:
        """Find whether a message's content can be a string, and whether it can be a list of parts."""
        uses = set[str]()
        text = self._probed([{"role": "user", "content": StringProbe(PROBE, uses)}])
        strings = text is not None and (PROBE in text or "array" not in uses)
        lists = "array" in uses
        if "string" in uses:
            uses = set[str]()
            lists |= (
                self._probed([{"role": "user", "content": ListProbe(uses)}]) is not None and "array" in uses
            )
        return strings, lists

    def _probed(self, messages: list[Any], tools: Any = ()) -> str | None:
        """Render messages as they are; None where the template fails."""
        environment = self.template.environment
        environment.probing = True  # type: ignore[attr-defined]
        plain = {"tools": list(tools), "bos_token": "", "eos_token": "", "add_generation_prompt": True}
        try:
            for tried in (messages, give_all_answers_thoughts(messages)):
                with suppress(Exception):
                    return self.template.render(messages=tried, **plain)
            return None
        finally:
            environment.probing = False  # type: ignore[attr-defined]

    @property
    def wants_parts(self) -> bool:
        """Tell whether content can only be a list."""
        strings, lists = self._content_uses
        return lists and not strings

    @property
    def takes_parts(self) -> bool:
        strings, lists = self._content_uses
        return lists or not strings

    @cached_property
    def takes_system(self) -> bool:
        uses = set[str]()
        text = self._probed(
            [MessageProbe({"role": "system", "content": PROBE}, uses), {"role": "user", "content": "hi"}]
        )
        return "content" in uses or PROBE in (text or "")

    @cached_property
    def takes_objects(self) -> bool:
        """Tell whether the arguments of a call can be what their JSON stands for."""
        uses = set[str]()
        messages, tools = calling("name", MessageProbe({"a": PROBE}, uses))
        text = self._probed([{**each, "content": StringProbe(each["content"])} for each in messages], tools)
        return text is not None and (PROBE in text or "a" in uses)

    @cached_property
    def takes_calls(self) -> bool:
        return self._shows(*calling(PROBE, {"a": 1})) or self._shows(*calling(PROBE, '{"a": 1}'))

    # ---- thoughts -------------------------------------------------------------------------------

    @cached_property
    def _can_think(self) -> bool:
        """Tell whether llama-server takes this for a template with thoughts: only then it enables them."""
        if (
            self.adapt
            or GEMMA4 in self.source
            or "enable_thinking" not in self.source
            or self._thoughts_end is not None
        ):
            return True
        on, off = self._prompts
        return adds_at_its_end(off, on) or adds_at_its_end(on, off)

    @cached_property
    def _prompts(self) -> tuple[str, str]:
        """Ask for an answer to the same question with thoughts, and without."""
        user = [{"role": "user", "content": "hi"}]
        try:
            return self.render(user, None, True, enable_thinking=True), self.render(
                user, None, True, enable_thinking=False
            )
        except Exception:
            return "", ""

    @cached_property
    def is_served_with_thoughts(self) -> bool:
        """Tell whether llama-server takes thoughts out of answers."""
        if self._thoughts_end is not None or self._end_in_prompt:
            return True
        nemotron = "<SPECIAL_12>" in self.source and "<TOOL_RESPONSE>" in self.source
        return nemotron or (SPLIT in self.source and "reasoning_content" not in self.source)

    @cached_property
    def _end_in_prompt(self) -> str:
        """Find what the template puts behind the beginning of a thought where there is to be none."""
        on, off = self._prompts
        return off[len(on) :] if off.startswith(on) else ""

    @cached_property
    def shows_thoughts(self) -> bool:
        return self.thinks or self._thoughts_end is not None

    @cached_property
    def _thoughts_end(self) -> str | None:
        """Find what the template writes between an answer's thoughts and its words; None where it writes no thoughts."""
        answer = {"role": "assistant", "content": PROBE, "reasoning_content": PROBE[::-1]}
        try:
            text = self.render([{"role": "user", "content": "hi"}, answer])
        except Exception:
            return None
        found = re.search(re.escape(PROBE[::-1]) + "(.*?)" + PROBE, text, re.DOTALL)
        return found[1] if found else None

    def thought_opened(self, prompt: str, shared: int) -> str:
        """Find the beginning of a thought that a prompt ends with, of which old answers share so much."""
        text = prompt[shared:]
        if tag := (TAG if text.strip() else THOUGHT).search(prompt[-64:]):
            text = prompt[
                min(shared, len(prompt) - len(tag[0])) :
            ]  # old answers may share the first letters of a mark
        if (
            not text.strip()
            or not self.is_served_with_thoughts
            or (self._thoughts_end is None and not TAG.search(text))
        ):
            return ""
        return "" if self.end_of_thoughts(text).strip() in text else text

    def end_of_thoughts(self, opened: str) -> str:
        """Find what stands between thoughts and words: as the template writes it, else as most do."""
        if self._thoughts_end is not None:
            return self._thoughts_end
        tag = TAG.search(opened)
        return f"\n</{tag[1] if tag else 'think'}>\n\n"

    def empty_thought(self, opened: str) -> str:
        """Write the end of a thought that has no words."""
        if self._thoughts_end is None and self._end_in_prompt:
            return self._end_in_prompt
        end = self.end_of_thoughts(opened)
        return end if opened[-1:].isspace() or self._thoughts_end is not None else "\n" + end

    def end_of(self, text: str, content: str, calls: bool = False) -> tuple[str, bool]:
        """Cut an answer at its first end, of those that only space stands between; without one, at the end of its words."""
        size, rest = 0, text.rstrip()
        while found := next((end for end in self.ends if rest.endswith(end)), None):
            size, rest = len(rest), rest[: -len(found)].rstrip()
        if size:
            return text[:size], True
        words = content.strip()
        if not words and not calls:
            return "", False
        return (text[: text.index(words) + len(words)] if words and words in text else text.rstrip()), False


def adds_at_its_end(less: str, more: str) -> bool:
    """Tell whether a prompt has marks of thoughts at its very end that another one has not."""
    if more.startswith(less):
        return more[len(less) :].strip() != "" and not more[-1:].isspace()
    tail = more.rpartition(less[-64:])
    return tail[1] != "" and tail[2].strip() != ""


def copied(value: Any) -> Any:
    """Copy what a template may change."""
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    return [copied(each) for each in value] if isinstance(value, list) else value


def in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    return (
        {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
    )


def joined(message: dict[str, Any]) -> dict[str, Any]:
    """Join parts of text by newlines."""
    return {**message, "content": words_of(message)} if isinstance(message["content"], list) else message


def calling(name: str, arguments: Any) -> tuple[list[Any], list[Any]]:
    """A chat with a call, and the tools for it."""
    call = {"id": "call00001", "type": "function", "function": {"name": name, "arguments": arguments}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = [
        {"role": "tool", "content": "x", "tool_call_id": "call00001"},
        {"role": "assistant", "content": "x"},
    ]
    user = {"role": "user", "content": "hi"}
    parameters = {
        "type": "object",
        "properties": {"a": {"type": "string", "description": "x"}},
        "required": ["a"],
    }
    function = {"name": "other", "description": "x", "parameters": parameters}
    return [user, answer, *result, user], [{"type": "function", "function": function}]
