"""The Jinja environment that chat templates run in: the language as llama-server reads it, in a sandbox.

llama.cpp has a Jinja engine of its own, which differs from jinja2 in a few places. Where templates depend on such a place this
environment follows llama.cpp: a missing attribute of a missing value is missing, too; a missing or null value counts as an
empty string where it is added to one; filters that select give lists; `safe` changes nothing; lists can be appended to.
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
    """A value that is not there."""

    def __add__(self, other: Any) -> Any:
        return other if isinstance(other, str) else self._fail_with_undefined_error()

    __radd__ = __add__


class StringProbe(str):
    """A text that records whether a template takes it for a list; as in llama.cpp it cannot be walked over."""

    uses: set[str]

    def __new__(cls, text: str, uses: set[str] | None = None) -> "StringProbe":
        made = super().__new__(cls, text)
        made.uses = set() if uses is None else uses
        return made

    def __iter__(self) -> Any:
        self.uses.add("array")
        raise TypeError("a string is no list")

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int):
            self.uses.add("array")
        return super().__getitem__(key)


class ListProbe(list):
    """An empty list that records whether a template walks over it."""

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
    """A message, or the arguments of a call, that records which keys a template reads."""

    def __init__(self, message: dict[str, Any], uses: set[str]) -> None:
        super().__init__(message)
        self.uses = uses

    def __getitem__(self, key: Any) -> Any:
        self.uses.add(key)
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self.uses.add(key)
        return super().get(key, default)

    def items(self) -> Any:
        self.uses |= self.keys()
        return super().items()


PROBES = (StringProbe, ListProbe)


class GenerationTag(Extension):
    """Skip Hugging Face's mark around an assistant's words, and keep what it encloses."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Environment(SandboxedEnvironment):
    intercepted_binops = frozenset({"+"})
    probing = False  # whether it is asked what a template can take, as llama.cpp asks it

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Read `message.role` without the exception that jinja2 finds it by, which takes longer than all else in a chat."""
        if type(obj) is dict and attribute in obj and not hasattr(dict, attribute):
            return obj[attribute]
        return super().getattr(obj, attribute)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Add; null counts as an empty string beside one."""
        if left is None and isinstance(right, str):
            return right
        return left if right is None and isinstance(left, str) else left + right


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as Hugging Face's filter does: jinja2's own escapes < and > for HTML."""
    if isinstance(value, ListProbe):
        return "[]"
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=jsonable,
    )


def jsonable(value: Any) -> Any:
    if isinstance(value, jinja2.Undefined):
        return None
    if isinstance(value, Generator | map | filter | range):
        return list(value)
    raise TypeError(f"a value of type {type(value).__name__} is no JSON")


def is_string(value: Any) -> bool:
    if isinstance(value, PROBES):
        value.uses.add("string")
    return isinstance(value, str)


def as_list(name: str) -> Callable:
    """Make a filter give a list, and record what it selects from."""
    select = FILTERS[name]

    def selected(context: Any, value: Any, *arguments: Any, **named: Any) -> list[Any]:
        if isinstance(value, PROBES):
            value.uses.add("array")
        if context.environment.probing and name == "map" and arguments:
            raise jinja2.TemplateError("llama.cpp maps no filters")
        return list(select(context, value, *arguments, **named))

    return jinja2.pass_context(selected)


def fill_braces(text: str, *values: Any) -> str:
    """Put values in place of {}, as llama.cpp's `format` does; %s is text to it."""
    first, *others = text.split("{}")
    return first + "".join(str(value) + part for value, part in zip(values, others, strict=False))


def as_text(escape: Callable) -> Callable:
    """Make a filter give plain text: jinja2 escapes whatever is added to text that it marked as safe."""

    def escaped(*arguments: Any, **named: Any) -> str:
        return str.__str__(escape(*arguments, **named))

    return escaped


def make_environment(now: datetime) -> jinja2.Environment:
    """Make the environment in which it is `now` all the time."""
    extensions: list[Any] = [GenerationTag, loopcontrols]
    made = Environment(trim_blocks=True, lstrip_blocks=True, extensions=extensions, undefined=MissingValue)
    made.tests["string"] = is_string
    made.filters |= {name: as_list(name) for name in ("map", "select", "reject", "selectattr", "rejectattr")}
    made.filters |= {name: as_text(FILTERS[name]) for name in ("escape", "e", "forceescape", "urlize")}
    made.filters |= {"tojson": to_json, "safe": lambda value: value, "format": fill_braces}
    made.globals |= {"raise_exception": raise_exception, "strftime_now": now.strftime}
    return made
