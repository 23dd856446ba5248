"""Declares options: once each, as a typed field of a dataclass, for every place that reads or shows it.

A field reads `batch: Annotated[int, Option("Rows per batch.", least=1, unit="ROWS")] = 8` and is `--batch` on
the command line; a name of one letter is `-n`. The same declaration serves config files, checkpoints, the
Python API and the documentation. The type of the field says which values are accepted:

    bool              --name; if the default is True or None, also --no-name
    Literal[...]      one of these words
    T | None          T, or not given
    tuple[T, ...]     may be repeated; with T = tuple[A, B] each use takes two values
    Size, Duration, Bandwidth    as config.units reads them
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, asdict, dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from llamatrain.config.messages import quote
from llamatrain.config.remote_names import remote_name
from llamatrain.config.values import NAMES, UNITS, convert, parse, suggest_value
from llamatrain.errors import UsageError

T = TypeVar("T", bound="Options")
Spelling = Callable[[str], str]  # how the name of an option is written where its value was found
COUNT = (1 << 31) - 1  # the most that a number of steps, rows and the like may be


def format_flag(name: str) -> str:
    """Return the flag of an option on the command line."""
    return f"-{name}" if len(name) == 1 else f"--{name.rstrip('_').replace('_', '-')}"


FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9]*(?:-[a-z0-9]+)*)")


def in_words(choices: Sequence[str]) -> str:
    """Join alternatives: "a, b or c"."""
    return " or ".join(filter(None, (", ".join(choices[:-1]), *choices[-1:])))


def replace_flags(message: str, spelt: Spelling) -> str:
    """Replace flags in a message by another spelling, except within a quoted command."""
    words, command, rest = message.partition("llamatrain ")
    return FLAG.sub(lambda flag: spelt(flag[1].replace("-", "_")), words) + command + rest


class OptionError(UsageError):
    """An option has an invalid value, or options contradict each other."""

    def __init__(self, message: Callable[[Spelling], str], *, code: str = "invalid-option") -> None:
        super().__init__(message(format_flag), code=code)
        self.format = message


Values = Mapping[str, Any]  # the values of all options of a command, by name


@dataclass(frozen=True)
class Condition:
    """A condition on other options, under which an option has an effect.

    `otherwise` completes the message "--option has no effect ..."; it may quote values: "with --schedule
    {schedule}".
    """

    holds: Callable[[Values], Any]
    otherwise: str


def needs(name: str) -> Condition:
    """Return the condition that another option is set."""
    return Condition(lambda values: values.get(name), f"without {format_flag(name)}")


def excluded_by(name: str) -> Condition:
    """Return the condition that another option is not set."""
    return Condition(lambda values: not values.get(name), f"with {format_flag(name)}")


@dataclass(frozen=True)
class Option:
    """Describes an option, as far as its name, type and default do not.

    Bounds apply to each value of a repeated option.
    """

    sentence: str
    _: KW_ONLY
    panel: str = ""  # of the help; default: the panel of the class
    unit: str = ""  # placeholder for a value in the help
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    example: str = ""
    accepts: Callable[[Any], bool] | None = None
    takes: str = ""  # what `accepts` accepts, in words
    excludes: tuple[tuple[str, str], ...] = ()  # other options, and why both cannot be given
    when: tuple[Condition, ...] = ()  # the option has an effect only if all of these hold
    resumable: bool | Callable[[Values], bool] = False  # may change when a run is resumed
    announced: bool = False  # such a change is printed
    transient: bool = False  # holds for this process only, and is not stored with the run
    resolved: bool = False  # is set in every checkpoint, even if the user left it open
    new_model: bool = False  # describes a new model, and has no effect on one that is loaded
    short: str = ""  # another name, of one letter
    aliases: tuple[str, ...] = ()  # former names, which still work
    takes_one: bool = (
        False  # may be repeated, and a file or a caller may also give one text instead of a list
    )
    hidden: bool = False  # not shown in the help

    def is_in_bounds(self, value: float) -> bool:
        """Return True if a number lies within the bounds."""
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )


@dataclass(frozen=True)
class OptionSpec:
    """An option together with the name, type and default of its field."""

    name: str
    kind: Any  # the type of one value
    default: Any
    option: Option
    panel: str
    optional: bool
    repeated: bool
    resumable: bool | Callable[[Values], bool]

    def unused_reason(self, values: Values) -> str | None:
        """Return why the option has no effect with these values, or None if it has one."""
        failed = (condition for condition in self.option.when if not condition.holds(values))
        return next((condition.otherwise.format_map(values) for condition in failed), None)

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that a Literal accepts."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def parts(self) -> tuple[Any, ...]:
        """The types of the values that one use takes."""
        return get_args(self.kind) if get_origin(self.kind) is tuple else (self.kind,)

    @property
    def unit(self) -> str:
        """The placeholder for a value in the help."""
        return self.option.unit or "|".join(self.choices) or " ".join(UNITS[part] for part in self.parts)

    @property
    def accepted_type(self) -> str:
        """The values that the type accepts, in words."""
        return self.option.takes or in_words(self.choices) or " and ".join(NAMES[part] for part in self.parts)

    @property
    def accepted(self) -> str:
        """The values that type and bounds accept, in words."""
        o = self.option
        if o.takes or (o.least, o.above) == (None, None):
            return self.accepted_type
        least = f"more than {o.above:g}" if o.least is None else f"{quote(o.least)} or more"
        if o.most == COUNT:
            least += ", and less than 2^31"
        elif o.most is not None:
            least = (
                f"{least}, and at most {o.most:g}"
                if o.least is None
                else f"{quote(o.least)} to {quote(o.most)}"
            )
        elif o.below is not None:
            least += f" and less than {o.below:g}"
        return f"{least}, such as {o.example}" if o.example else least

    # ---- its values --------------------------------------------------------

    def check(self, value: Any) -> Any:
        """Return a value from any source in the type of the field; raise OptionError if it is invalid."""
        if value is None and self.optional:
            return None
        if not self.repeated:
            return self._check_one(value)
        if self.option.takes_one and isinstance(value, str):
            value = [value] if value else []
        if not isinstance(value, list | tuple):
            raise self._invalid(value, "a list")
        return tuple(map(self._check_one, value))

    def _check_one(self, value: Any) -> Any:
        """Check one value of the option."""
        try:
            value = convert(value, self.kind)
        except UsageError as error:  # the error explains itself
            raise self._error(f": {error}") from None
        except ValueError:
            raise self._invalid(value, self.accepted_type) from None
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, int | float) and not self.option.is_in_bounds(part):
                raise self._invalid(value, self.accepted)
        if self.option.accepts and not self.option.accepts(value):
            raise self._invalid(value, self.accepted)
        return value

    def parse(self, text: Any) -> Any:
        """Convert what the command line gives: a text, a bool, or a sequence of either."""
        try:
            return (
                tuple(parse(value, self.kind) for value in text) if self.repeated else parse(text, self.kind)
            )
        except ValueError:
            raise self._invalid(text, self.accepted_type) from None

    def _invalid(self, value: Any, accepted: str) -> OptionError:
        return self._error(
            f" must be {accepted} (got {quote(value)}){suggest_value(value, self.kind, self.choices)}"
        )

    def _error(self, problem: str) -> OptionError:
        return OptionError(lambda spelt: spelt(self.name) + problem)


def option_specs(cls: type) -> dict[str, OptionSpec]:
    """Return the options of a class by name."""
    if cls not in _SPECS:
        _SPECS[cls] = _read_specs(cls)
    return _SPECS[cls]


_SPECS: dict[type, dict[str, OptionSpec]] = {}


def _read_specs(cls: type) -> dict[str, OptionSpec]:
    hints = get_type_hints(cls, include_extras=True)
    specs = {}
    for field in fields(cls):
        kind, option = get_args(hints[field.name])
        optional = get_origin(kind) in (Union, UnionType)
        if optional:
            kind = next(arg for arg in get_args(kind) if arg is not type(None))
        repeated = get_origin(kind) is tuple and get_args(kind)[-1] is Ellipsis
        specs[field.name] = OptionSpec(
            name=field.name,
            kind=get_args(kind)[0] if repeated else kind,
            default=field.default,
            option=option,
            panel=option.panel or cls.PANEL,  # type: ignore[attr-defined]
            optional=optional,
            repeated=repeated,
            resumable=option.resumable or cls.RESUMABLE,  # type: ignore[attr-defined]
        )
    return specs


class Options:
    """Base class of option dataclasses. Every instance is valid: values are checked when it is made."""

    PANEL: ClassVar[str]  # of the help
    RESUMABLE: ClassVar[bool]  # all options of the class may change when a run is resumed

    def __init_subclass__(cls, panel: str = "Options", resumable: bool = False) -> None:
        cls.PANEL, cls.RESUMABLE = panel, resumable

    def __post_init__(self) -> None:
        options = option_specs(type(self))
        for name, spec in options.items():
            object.__setattr__(self, name, spec.check(getattr(self, name)))
        off = {name for name, spec in options.items() if spec.optional and getattr(self, name) is False}
        chosen = [
            name for name, spec in options.items() if getattr(self, name) != spec.default and name not in off
        ]
        for name in chosen:
            for other, why in options[name].option.excludes:
                if other in chosen:
                    raise conflict(name, other, why)
        self.validate()

    def validate(self) -> None:
        """Raise OptionError if options contradict each other."""


def conflict(name: str, other: str, why: str) -> OptionError:
    """Return the error for two options that exclude each other."""
    return OptionError(
        lambda spelt: f"{spelt(name)} and {spelt(other)} exclude each other: {why}",
        code="conflicting-options",
    )


def present_name(name: str, *classes: type) -> str:
    """Return the present name of an option that may be given by a former one."""
    for cls in classes:
        for present, spec in option_specs(cls).items():
            if name in spec.option.aliases:
                return present
    return name


def with_present_names(values: Values, *classes: type) -> dict[str, Any]:
    """Return values by the present names of their options."""
    return {present_name(name, *classes): value for name, value in values.items()}


# ---- options without an effect ---------------------------------------------


def unused_options(values: Values, *classes: type) -> dict[str, str]:
    """Return the options of these classes that have no effect with these values, and why."""
    reasons = (
        (name, spec.unused_reason(values)) for cls in classes for name, spec in option_specs(cls).items()
    )
    return {name: reason for name, reason in reasons if reason is not None}


def reject_unused(unused: Mapping[str, str], changed: Collection[str]) -> None:
    """Raise if an option that differs from its default has no effect."""
    for name, reason in unused.items():
        if name in changed:
            raise UsageError(
                f"{format_flag(name)} has no effect {reason}; leave it out", code="unused-option"
            )


# ---- making options --------------------------------------------------------


def build(cls: type[T], values: Mapping[str, Any]) -> T:
    """Make options of values by name; names of other classes are ignored, and former names are accepted."""
    options, values = option_specs(cls), with_present_names(values, cls)
    for name, spec in options.items():
        if spec.default is MISSING and name not in values:
            raise OptionError(lambda spelt, name=name: f"{spelt(name)} is missing", code="missing-option")  # type: ignore[misc]
    return cls(**{name: value for name, value in values.items() if name in options})


def changed_options(values: Mapping[str, Any], *classes: type, **defaults: Any) -> set[str]:
    """Return the names of the options that differ from their defaults; `defaults` are those of the command."""
    known = {name: spec for cls in classes for name, spec in option_specs(cls).items()}
    defaults_by_name = {name: spec.default for name, spec in known.items()} | defaults
    return {
        name
        for name, value in values.items()
        if name in known and known[name].check(value) != defaults_by_name[name]
    }


# ---- plain values, for files -----------------------------------------------


def plain(options: Any) -> dict[str, Any]:
    """Return the fields of a dataclass as JSON and TOML store them."""
    return {name: _plain_value(value) for name, value in asdict(options).items()}


def _plain_value(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain_value(item) for item in value]
    return remote_name(value) or str(value) if isinstance(value, Path) else value


def from_plain(cls: type[T], values: Mapping[str, Any], source: object) -> T:
    """Make options of stored values; missing ones get their defaults. The file may be damaged."""
    try:
        return build(cls, values)
    except OptionError as error:
        raise UsageError(f"{source}: {error.format(str)}", code=error.code) from None
    except UsageError as error:
        raise UsageError(f"{source}: {error}", code=error.code) from None
