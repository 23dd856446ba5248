"""The Jinja environment of chat templates: the language as llama-server reads it, in a sandbox.

llama.cpp has its own Jinja engine, which differs from jinja2 in a few points. Where templates depend on one
of them, this environment follows llama.cpp: an attribute of a missing value is missing, too; a missing or
null value counts as an empty string when it is added to one; filters that select return lists; `safe` does
nothing; lists have append.
"""

import json
from collections.abc import Callable, Generator
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment


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
        """Read `message.role` without the exception that jinja2 uses, which would dominate the time of a
        chat.
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
