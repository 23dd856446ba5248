"""A chat template in the child process: compiles it and detects what it accepts.

llama.cpp has its own Jinja engine, which differs from jinja2 in a few points. Where templates depend on one
of them, the sandboxed environment here follows llama.cpp: an attribute of a missing value is missing, too; a
missing or null value counts as an empty string when it is added to one; filters that select return lists;
`safe` does nothing; lists have append.
"""

import json
import re
from collections.abc import Callable, Generator
from contextlib import suppress
from datetime import date, datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment

from llamatrain.data.chat.server_messages import (
    GEMMA4,
    adapter_for,
    give_all_answers_reasoning,
    message_text,
    missing_turn_opening,
    patch_source,
)

# ---- the language of llama.cpp ---------------------------------------------------


class MissingValue(jinja2.ChainableUndefined):
    """A value that does not exist."""

    def __add__(self, other: Any) -> Any:
        return other if isinstance(other, str) else self._fail_with_undefined_error()

    __radd__ = __add__


class StringProbe(str):
    """A string that records whether a template treats it as a list.

    As in llama.cpp, it cannot be iterated.
    """

    uses: set[str]

    def __new__(cls, text: str, uses: set[str] | None = None) -> "StringProbe":
        """Make a probe that records uses in a set."""
        probe = super().__new__(cls, text)
        probe.uses = set() if uses is None else uses
        return probe

    def __iter__(self) -> Any:
        self.uses.add("array")
        raise TypeError("a string is not a list")

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int):
            self.uses.add("array")
        return super().__getitem__(key)


class ListProbe(list):
    """An empty list that records whether a template iterates over it."""

    def __init__(self, uses: set[str]) -> None:
        self.uses = uses

    def __iter__(self) -> Any:
        self.uses.add("array")
        return super().__iter__()

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int):
            self.uses.add("array")
        return super().__getitem__(key)


class MessageProbe(dict):
    """A message, or the arguments of a tool call, that records which keys a template reads."""

    def __init__(self, message: dict[str, Any], uses: set[str]) -> None:
        super().__init__(message)
        self.uses = uses

    def __getitem__(self, key: Any) -> Any:
        self.uses.add(key)
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """Return a value and record its key."""
        self.uses.add(key)
        return super().get(key, default)

    def items(self) -> Any:
        """Return all items and record their keys."""
        self.uses |= self.keys()
        return super().items()


PROBES = (StringProbe, ListProbe)


class GenerationTag(Extension):
    """Ignores Hugging Face's tag around an assistant's text, and keeps what it encloses."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> Any:
        """Return the statements inside the tag."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Environment(SandboxedEnvironment):
    """A sandboxed environment with the additions of llama.cpp."""

    intercepted_binops = frozenset({"+"})
    probing = False  # True while detecting what a template accepts, as llama.cpp does

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Read `message.role` without the exception that jinja2 uses.

        The exception would dominate the time of a chat.
        """
        if type(obj) is dict and attribute in obj and not hasattr(dict, attribute):
            return obj[attribute]
        return super().getattr(obj, attribute)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Add two values; null counts as an empty string next to one."""
        if left is None and isinstance(right, str):
            return right
        return left if right is None and isinstance(left, str) else left + right


def raise_exception(message: str) -> None:
    """Raise an error that the template reports."""
    raise jinja2.TemplateError(message)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as Hugging Face's filter does: jinja2's own filter escapes < and > for HTML."""
    if isinstance(value, ListProbe):
        return "[]"
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=to_jsonable,
    )


def to_jsonable(value: Any) -> Any:
    """Convert a value that json does not know."""
    if isinstance(value, jinja2.Undefined):
        return None
    if isinstance(value, Generator | map | filter | range):
        return list(value)
    raise TypeError(f"a value of type {type(value).__name__} is not JSON")


def is_string(value: Any) -> bool:
    """Return True for strings, and record the test."""
    if isinstance(value, PROBES):
        value.uses.add("string")
    return isinstance(value, str)


def return_list(name: str) -> Callable:
    """Wrap a filter so that it returns a list and records what it selects from."""
    select = FILTERS[name]

    def select_list(context: Any, value: Any, *arguments: Any, **named: Any) -> list[Any]:
        if isinstance(value, PROBES):
            value.uses.add("array")
        if context.environment.probing and name == "map" and arguments:
            raise jinja2.TemplateError("llama.cpp cannot map filters")
        return list(select(context, value, *arguments, **named))

    return jinja2.pass_context(select_list)


def fill_braces(text: str, *values: Any) -> str:
    """Replace {} by values, as llama.cpp's `format` does; it does not interpret %s."""
    first, *rest = text.split("{}")
    return first + "".join(str(value) + part for value, part in zip(values, rest, strict=False))


def return_text(escape: Callable) -> Callable:
    """Wrap a filter so that it returns plain text.

    jinja2 would escape text that is added to a safe string.
    """

    def escape_text(*arguments: Any, **named: Any) -> str:
        return str.__str__(escape(*arguments, **named))

    return escape_text


def make_environment(now: datetime) -> jinja2.Environment:
    """Build the environment; `now` is the constant time that templates see."""
    extensions: list[Any] = [GenerationTag, loopcontrols]
    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=extensions, undefined=MissingValue
    )
    environment.tests["string"] = is_string
    environment.filters |= {
        name: return_list(name) for name in ("map", "select", "reject", "selectattr", "rejectattr")
    }
    environment.filters |= {
        name: return_text(FILTERS[name]) for name in ("escape", "e", "forceescape", "urlize")
    }
    environment.filters |= {"tojson": to_json, "safe": lambda value: value, "format": fill_braces}
    environment.globals |= {"raise_exception": raise_exception, "strftime_now": now.strftime}
    return environment


# ---- templates -------------------------------------------------------------------

GEMMA4_REASONING = ("<|channel>thought\n", "\n<channel|>")
PROBE = "Qhxzv"  # a text that no template contains
TAG = re.compile(r"<([A-Za-z_:]+)>\s*$")
EMPTY_REASONING = re.compile(
    r"(?:<([a-z_:]*think[a-z_:]*)>\s*</\1>|<\|channel>thought\s*<channel\|>|<\|START_THINKING\|>\s*<\|END_THINKING\|>)\s*$"
)
REASONING_TAG = re.compile(r"<[a-z_:]*think[a-z_:]*>\s*$")
OPENED_CHANNEL = re.compile(r"<\|channel>thought\s*$")  # of Gemma 4
REASONING_SPLIT = "content.split('</think>')"  # by which llama.cpp recognizes older templates with reasoning
MUTATORS = re.compile(r"\b(?:append|extend|insert|pop|popitem|remove|clear|update|setdefault|sort|reverse)\b")


class JinjaTemplate:
    """A template, and what it accepts; other input is rewritten for it, as llama-server does."""

    def __init__(
        self,
        source: str,
        values: dict[str, Any],
        ends: list[str],
        keep_reasoning: bool = False,
        day: str = "",
        think: bool | None = None,
    ) -> None:
        now = datetime.combine(date.fromisoformat(day) if day else date.today(), datetime.min.time())
        self.source = source
        self.ends = ends
        self.has_reasoning_mark = "</think>" in source
        self.keep_reasoning = keep_reasoning  # of older turns
        self.template = make_environment(now).from_string(patch_source(source))
        self.adapt = adapter_for(source)
        self.modifies_messages = MUTATORS.search(source) is not None
        dates = {"date_string": f"{now:%d %b %Y}", "datetime": f"{now:%b %d %Y}"}
        self.values = {**dates, "enable_thinking": True, **values}
        self.values["enable_thinking"] = self._enables_reasoning
        self.chosen_values = {} if think is None else {"enable_thinking": think}

    def render_chat(self, messages: list[Any], tools: Any = None, answer_next: bool = False) -> str:
        """Render messages with thinking switched as the user chose."""
        return self.render(messages, tools, answer_next, **self.chosen_values)

    def render(self, messages: list[Any], tools: Any = None, answer_next: bool = False, **values: Any) -> str:
        """Render messages; `answer_next` appends the prompt for an answer."""
        if self.requires_parts:
            messages = [to_parts(message) for message in messages]
        elif not self.accepts_parts:
            messages = [join_parts(message) for message in messages]
        messages = self.adapt(messages) if self.adapt else messages
        if self.modifies_messages:
            messages = copy_value(messages)
            tools = copy_value(tools)
        text = self._render(messages, tools, answer_next, **values)
        return text + missing_turn_opening(self.source, text) if answer_next else text

    def _render(self, messages: list[Any], tools: Any, answer_next: bool, **values: Any) -> str:
        """Render the template, with `tools` only if there are any.

        Some templates test whether tools are defined or null.
        """
        variables = {**self.values, "tools": tools} if tools else self.values
        return self.template.render(
            **{**variables, **values}, messages=messages, add_generation_prompt=answer_next
        )

    def _renders_probe(self, messages: list[Any], tools: Any = None) -> bool:
        try:
            return PROBE in self.render(messages, tools, True)
        except Exception:
            return False

    # ---- what it accepts, detected as in llama.cpp --------------------------------------------

    @cached_property
    def _content_uses(self) -> tuple[bool, bool]:
        """Detect whether the content of a message may be a string, and whether it may be a list of parts."""
        uses = set[str]()
        text = self._render_probe([{"role": "user", "content": StringProbe(PROBE, uses)}])
        strings = text is not None and (PROBE in text or "array" not in uses)
        lists = "array" in uses
        if "string" in uses:
            uses = set[str]()
            lists |= (
                self._render_probe([{"role": "user", "content": ListProbe(uses)}]) is not None
                and "array" in uses
            )
        return strings, lists

    def _render_probe(self, messages: list[Any], tools: Any = ()) -> str | None:
        """Render messages as they are; return None if the template fails."""
        environment = self.template.environment
        environment.probing = True  # type: ignore[attr-defined]
        plain = {"tools": list(tools), "bos_token": "", "eos_token": "", "add_generation_prompt": True}
        try:
            for attempt in (messages, give_all_answers_reasoning(messages)):
                with suppress(Exception):
                    return self.template.render(messages=attempt, **plain)
            return None
        finally:
            environment.probing = False  # type: ignore[attr-defined]

    @property
    def requires_parts(self) -> bool:
        """True if content must be a list."""
        strings, lists = self._content_uses
        return lists and not strings

    @property
    def accepts_parts(self) -> bool:
        """True if content may be a list."""
        strings, lists = self._content_uses
        return lists or not strings

    @cached_property
    def accepts_system(self) -> bool:
        """True if a system prompt is rendered."""
        uses = set[str]()
        text = self._render_probe(
            [MessageProbe({"role": "system", "content": PROBE}, uses), {"role": "user", "content": "hi"}]
        )
        return "content" in uses or PROBE in (text or "")

    @cached_property
    def accepts_objects(self) -> bool:
        """True if the arguments of a call may be an object instead of its JSON."""
        uses = set[str]()
        messages, tools = make_call_chat("name", MessageProbe({"a": PROBE}, uses))
        text = self._render_probe(
            [{**message, "content": StringProbe(message["content"])} for message in messages], tools
        )
        return text is not None and (PROBE in text or "a" in uses)

    @cached_property
    def accepts_calls(self) -> bool:
        """True if tool calls are rendered."""
        return self._renders_probe(*make_call_chat(PROBE, {"a": 1})) or self._renders_probe(
            *make_call_chat(PROBE, '{"a": 1}')
        )

    # ---- reasoning ------------------------------------------------------------------------------

    @cached_property
    def _enables_reasoning(self) -> bool:
        """True if llama-server regards this as a template with reasoning; only then it enables it."""
        if (
            self.adapt
            or GEMMA4 in self.source
            or "enable_thinking" not in self.source
            or self._reasoning_end is not None
            or self._is_known_with_reasoning
        ):
            return True
        on, off = self._reasoning_prompts
        return adds_at_end(off, on) or adds_at_end(on, off)

    @cached_property
    def _reasoning_prompts(self) -> tuple[str, str]:
        """The prompts for an answer to one question with reasoning enabled and disabled."""
        user = [{"role": "user", "content": "hi"}]
        try:
            return self.render(user, None, True, enable_thinking=True), self.render(
                user, None, True, enable_thinking=False
            )
        except Exception:
            return "", ""

    @cached_property
    def has_thinking_switch(self) -> bool:
        """True if prompts depend on whether reasoning is enabled."""
        on, off = self._reasoning_prompts
        return on != off

    @cached_property
    def server_extracts_reasoning(self) -> bool:
        """True if llama-server removes the reasoning from answers."""
        if self._reasoning_end is not None or self._empty_reasoning_end or GEMMA4 in self.source:
            return True
        return self._is_known_with_reasoning

    @cached_property
    def _is_known_with_reasoning(self) -> bool:
        """True if llama-server recognizes this template as one with reasoning by marks in its source."""
        nemotron = "<SPECIAL_12>" in self.source and "<TOOL_RESPONSE>" in self.source
        return nemotron or (REASONING_SPLIT in self.source and "reasoning_content" not in self.source)

    @cached_property
    def _empty_reasoning_end(self) -> str:
        """The text that the template puts after the beginning of reasoning if it is disabled."""
        on, off = self._reasoning_prompts
        return off[len(on) :] if off.startswith(on) else ""

    @cached_property
    def renders_reasoning(self) -> bool:
        """True if the template renders the reasoning of answers."""
        return self.has_reasoning_mark or self._reasoning_end is not None

    @cached_property
    def _reasoning_end(self) -> str | None:
        """The text between an answer's reasoning and its content; None if no reasoning is rendered."""
        answer = {"role": "assistant", "content": PROBE, "reasoning_content": PROBE[::-1]}
        try:
            text = self.render([{"role": "user", "content": "hi"}, answer])
        except Exception:
            return None
        match = re.search(re.escape(PROBE[::-1]) + "(.*?)" + PROBE, text, re.DOTALL)
        return match[1] if match else None

    @cached_property
    def keeps_old_reasoning(self) -> bool:
        """True if the template renders the reasoning of older turns."""
        user = {"role": "user", "content": "hi"}
        plain = {"role": "assistant", "content": "x"}
        answer = {"role": "assistant", "content": "x", "reasoning_content": PROBE}
        try:
            return PROBE in self.render([user, answer, user, plain, user], None, True)
        except Exception:
            return False

    @cached_property
    def reasoning_marks(self) -> tuple[str, str]:
        """The texts that the template puts around the reasoning of an answer, or else the usual ones."""
        if self._reasoning_end is not None and (opening := self._reasoning_opening.lstrip()):
            return opening, self._reasoning_end
        return GEMMA4_REASONING if GEMMA4 in self.source else ("<think>\n", "\n</think>\n\n")

    @cached_property
    def _reasoning_opening(self) -> str:
        """The text between a prompt, or what precedes an answer without reasoning, and the reasoning."""
        user = [{"role": "user", "content": "hi"}]
        answer = {"role": "assistant", "content": PROBE}
        try:
            text = self.render([*user, {**answer, "reasoning_content": PROBE[::-1]}])
            plain = self.render([*user, answer]).partition(PROBE)[0]
            prompt = self.render(user, None, True)
        except Exception:
            return ""
        head = text.partition(PROBE[::-1])[0]
        return next((head[len(start) :] for start in (plain, prompt) if head.startswith(start)), "")

    def find_opened_reasoning(self, prompt: str, shared: int) -> str:
        """Return the beginning of reasoning that a prompt ends with.

        Rendered old answers share the first `shared` characters of the prompt.
        """
        text = prompt[shared:]
        channel = OPENED_CHANNEL.search(prompt[-64:])
        if GEMMA4 in self.source and not channel:
            return ""
        if tag := channel or (TAG if text.strip() else REASONING_TAG).search(prompt[-64:]):
            # Old answers may share the first letters of a tag.
            text = prompt[min(shared, len(prompt) - len(tag[0])) :]
        if (
            not text.strip()
            or not self.server_extracts_reasoning
            or (self._reasoning_end is None and not TAG.search(text))
        ):
            return ""
        return "" if self.end_reasoning(text).strip() in text else text

    def end_reasoning(self, opened: str) -> str:
        """Return the text between reasoning and content: the template's own, else the usual one."""
        if self._reasoning_end is not None:
            return self._reasoning_end
        tag = TAG.search(opened)
        return f"\n</{tag[1] if tag else 'think'}>\n\n"

    def end_empty_reasoning(self, opened: str) -> str:
        """Return the end of reasoning that is empty."""
        if self._reasoning_end is None and self._empty_reasoning_end:
            return self._empty_reasoning_end
        end = self.end_reasoning(opened)
        return end if opened[-1:].isspace() or self._reasoning_end is not None else "\n" + end

    def cut_at_end(self, text: str, content: str, calls: bool = False) -> tuple[str, bool]:
        """Cut an answer at its first end mark, or else at the end of its text.

        Return the answer and whether it has an end mark.

        Several end marks may follow each other, with only white space between them.
        """
        size = 0
        rest = text.rstrip()
        while mark := next((end for end in self.ends if rest.endswith(end)), None):
            size = len(rest)
            rest = rest[: -len(mark)].rstrip()
        if size:
            return text[:size], True
        answer = content.strip()
        if not answer and not calls:
            return "", False
        return (
            text[: text.index(answer) + len(answer)] if answer and answer in text else text.rstrip()
        ), False


def adds_at_end(less: str, more: str) -> bool:
    """Return True if a prompt has reasoning marks at its very end that another prompt lacks."""
    if more.startswith(less):
        return more[len(less) :].strip() != "" and not more[-1:].isspace()
    tail = more.rpartition(less[-64:])
    return tail[1] != "" and tail[2].strip() != ""


def copy_value(value: Any) -> Any:
    """Copy a value that a template may change."""
    if isinstance(value, dict):
        return {key: copy_value(item) for key, item in value.items()}
    return [copy_value(item) for item in value] if isinstance(value, list) else value


def to_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its text as a list of parts."""
    content = message["content"]
    return (
        {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
    )


def join_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its parts joined by newlines."""
    return {**message, "content": message_text(message)} if isinstance(message["content"], list) else message


def make_call_chat(name: str, arguments: Any) -> tuple[list[Any], list[Any]]:
    """Return a chat with a tool call, and the tools for it."""
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
