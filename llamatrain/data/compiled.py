"""Chat templates as the child that renders them compiles them, and what each of them can take."""

import json
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

PROBE = "Qhxzv"  # a text that no template writes of itself


class JinjaTemplate:
    """A template, and what it can take: the rest is written otherwise for it, as llama-server does."""

    def __init__(self, source: str, values: dict[str, Any], ends: list[str], keeps: bool = False) -> None:
        today = datetime.now()
        dates = {"date_string": f"{today:%d %b %Y}", "datetime": f"{today:%b %d %Y}"}
        self.template, self.ends, self.thinks = environment().from_string(source), ends, "</think>" in source
        self.keeps = keeps  # the thoughts of older turns
        self.values = {**dates, "enable_thinking": True, **values}

    def render(self, messages: list[Any], tools: Any = None, answer_next: bool = False) -> str:
        if self.wants_parts:
            messages = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]
        return self._render(messages, tools, answer_next)

    def _render(self, messages: list[Any], tools: Any, answer_next: bool) -> str:
        return self.template.render(**self.values, messages=messages, tools=tools, add_generation_prompt=answer_next)

    def _shows(self, messages: list[Any], tools: Any = None) -> bool:
        try:
            return PROBE in self._render(messages, tools, True)
        except Exception:
            return False

    @cached_property
    def wants_parts(self) -> bool:
        """Whether content can only be a list."""
        parts = [{"type": "text", "text": PROBE}]
        return not self._shows([{"role": "user", "content": PROBE}]) and self._shows([{"role": "user", "content": parts}])

    @cached_property
    def takes_system(self) -> bool:
        return self._shows([{"role": "system", "content": PROBE}, {"role": "user", "content": "hi"}])

    @cached_property
    def takes_objects(self) -> bool:
        """Whether the arguments of a call can be what their JSON stands for."""
        return self._shows(*calling("name", {"a": PROBE}))

    @cached_property
    def takes_calls(self) -> bool:
        return self._shows(*calling(PROBE, {"a": 1})) or self._shows(*calling(PROBE, '{"a": 1}'))

    def end_of(self, text: str, content: str) -> tuple[str, bool]:
        """An answer up to its first end, of those that only space stands between; without one, up to the end of its words."""
        size, rest = 0, text.rstrip()
        while found := next((end for end in self.ends if rest.endswith(end)), None):
            size, rest = len(rest), rest[: -len(found)].rstrip()
        if size:
            return text[:size], True
        words = content.strip()
        return (text[: text.index(words) + len(words)] if words and words in text else text.rstrip()), False


def calling(name: str, arguments: Any) -> tuple[list[Any], list[Any]]:
    """A chat with a call, and the tools for it."""
    call = {"id": "call00001", "type": "function", "function": {"name": name, "arguments": arguments}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = [{"role": "tool", "content": "x", "tool_call_id": "call00001"}, {"role": "assistant", "content": "x"}]
    user = {"role": "user", "content": "hi"}
    parameters = {"type": "object", "properties": {"a": {"type": "string", "description": "x"}}, "required": ["a"]}
    function = {"name": "other", "description": "x", "parameters": parameters}
    return [user, answer, *result, user], [{"type": "function", "function": function}]


class GenerationTag(Extension):
    """Hugging Face's mark around what the assistant says: only its body counts here."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Sandbox(ImmutableSandboxedEnvironment):
    def getattr(self, obj: Any, attribute: str) -> Any:
        """`message.role` without the exception that finds it otherwise, which takes longer than all else in a chat."""
        if type(obj) is dict and attribute in obj and not hasattr(dict, attribute):
            return obj[attribute]
        return super().getattr(obj, attribute)


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """As in Hugging Face's: jinja2's own escapes < and > for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment() -> jinja2.Environment:
    extensions: list[Any] = [GenerationTag, loopcontrols]
    made = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    made.filters["tojson"] = to_json
    made.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return made
