"""Options, each declared once and whole, as a field of a dataclass: for the command line, config files, checkpoints and Python.

A field reads `batch: Annotated[int, Option("Rows that are run together.", least=1, unit="ROWS")] = 8` and is `--batch` on the
command line; a name of one letter is `-n`. What its type says:
    bool              --name; where that is the default, --no-name, too
    Literal[...]      one of these words
    T | None          T, or not given
    tuple[T, ...]     may be repeated; with T = tuple[A, B] each time takes two values
    Size, Duration, Bandwidth    as config.units reads them
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, MISSING, asdict, dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from llamatrain.config.messages import worded
from llamatrain.config.values import NAMES, UNITS, plainer, read, typed
from llamatrain.errors import UsageError

T = TypeVar("T", bound="Options")
Spelling = Callable[[str], str]  # how the name of an option is written where its value was found
COUNT = (1 << 31) - 1  # the most that a number of steps, rows and the like may be


def flag_of(name: str) -> str:
    return f"-{name}" if len(name) == 1 else f"--{name.rstrip('_').replace('_', '-')}"


FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9]*(?:-[a-z0-9]+)*)")


def respelt(message: str, spelt: Spelling) -> str:
    """With another spelling in the place of flags, but where a whole command is told."""
    words, command, rest = message.partition("llamatrain ")
    return FLAG.sub(lambda flag: spelt(flag[1].replace("-", "_")), words) + command + rest


class OptionError(UsageError):
    """An option has an invalid value, or options contradict each other."""

    def __init__(self, words: Callable[[Spelling], str], *, code: str = "invalid-option") -> None:
        super().__init__(words(flag_of), code=code)
        self.words = words


@dataclass(frozen=True)
class Option:
    """What an option's name, type and default do not say. Of a repeated one, bounds are those of each value."""

    sentence: str
    _: KW_ONLY
    panel: str = ""  # of the help; else its class's
    unit: str = ""  # what a value is called there
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    example: str = ""
    accepts: Callable[[Any], bool] | None = None
    takes: str = ""  # in words, where its bounds do not say it
    excludes: tuple[tuple[str, str], ...] = ()  # another option, and why
    short: str = ""  # another name of it, of one letter
    hidden: bool = False  # from help and README: an old name, or of use to few

    def bounds(self, value: float) -> bool:
        return (
            (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )


@dataclass(frozen=True)
class OptionSpec:
    """An option with what its field says."""

    name: str
    kind: Any  # of one of its values, where it is repeated
    default: Any
    option: Option
    panel: str
    optional: bool
    repeated: bool

    @property
    def choices(self) -> tuple[str, ...]:
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def parts(self) -> tuple[Any, ...]:
        """The types of the values that it takes each time."""
        return get_args(self.kind) if get_origin(self.kind) is tuple else (self.kind,)

    @property
    def unit(self) -> str:
        return self.option.unit or "|".join(self.choices) or " ".join(UNITS[part] for part in self.parts)

    @property
    def named(self) -> str:
        """What its type takes, in words."""
        return (
            self.option.takes or ", ".join(self.choices) or " and ".join(NAMES[part] for part in self.parts)
        )

    @property
    def takes(self) -> str:
        """What its bounds let through, in words."""
        o = self.option
        if o.takes or (o.least, o.above) == (None, None):
            return self.named
        least = f"more than {o.above:g}" if o.least is None else f"{worded(o.least)} or more"
        if o.most == COUNT:
            least += ", and less than 2^31"
        elif o.most is not None:
            least = f"{worded(o.least)} to {worded(o.most)}"
        elif o.below is not None:
            least += f" and less than {o.below:g}"
        return f"{least}, such as {o.example}" if o.example else least

    # ---- its values --------------------------------------------------------

    def checked(self, value: Any) -> Any:
        """A value of any origin, as the field has it."""
        if value is None and self.optional:
            return None
        if not self.repeated:
            return self.one(value)
        if not isinstance(value, list | tuple):
            raise self.refusal(value, "a list")
        return tuple(map(self.one, value))

    def one(self, value: Any) -> Any:
        try:
            value = typed(value, self.kind)
        except UsageError as error:  # in words of its own
            raise self.error(f": {error}") from None
        except ValueError:
            raise self.refusal(value, self.named) from None
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, int | float) and not self.option.bounds(part):
                raise self.refusal(value, self.takes)
        if self.option.accepts and not self.option.accepts(value):
            raise self.refusal(value, self.takes)
        return value

    def read(self, text: Any) -> Any:
        """What the command line gives: a text, a bool, or a sequence of either."""
        try:
            return tuple(read(each, self.kind) for each in text) if self.repeated else read(text, self.kind)
        except ValueError:
            raise self.refusal(text, self.named) from None

    def refusal(self, value: Any, takes: str) -> OptionError:
        return self.error(
            f" {worded(value)} cannot be; it takes {takes}{plainer(value, self.kind, self.choices)}"
        )

    def error(self, told: str) -> OptionError:
        return OptionError(lambda spelt: spelt(self.name) + told)


def declared(cls: type) -> dict[str, OptionSpec]:
    """The options of a class, by name."""
    if cls not in _DECLARED:
        _DECLARED[cls] = _declared(cls)
    return _DECLARED[cls]


_DECLARED: dict[type, dict[str, OptionSpec]] = {}


def _declared(cls: type) -> dict[str, OptionSpec]:
    hints = get_type_hints(cls, include_extras=True)
    found = {}
    for field in fields(cls):
        kind, option = get_args(hints[field.name])
        optional = get_origin(kind) in (Union, UnionType)
        if optional:
            kind = next(arg for arg in get_args(kind) if arg is not type(None))
        repeated = get_origin(kind) is tuple and get_args(kind)[-1] is Ellipsis
        found[field.name] = OptionSpec(
            name=field.name,
            kind=get_args(kind)[0] if repeated else kind,
            default=field.default,
            option=option,
            panel=option.panel or cls.PANEL,  # type: ignore[attr-defined]
            optional=optional,
            repeated=repeated,
        )
    return found


class Options:
    """Options, none of which has a value that cannot be, whoever gives it."""

    PANEL: ClassVar[str]

    def __init_subclass__(cls, panel: str = "Options") -> None:
        cls.PANEL = panel

    def __post_init__(self) -> None:
        options = declared(type(self))
        for name, each in options.items():
            object.__setattr__(self, name, each.checked(getattr(self, name)))
        off = {name for name, each in options.items() if each.optional and getattr(self, name) is False}
        said = [
            name for name, each in options.items() if getattr(self, name) != each.default and name not in off
        ]
        for name in said:
            for other, why in options[name].option.excludes:
                if other in said:
                    raise exclusion(name, other, why)
        self.agree()

    def agree(self) -> None:
        """Refuses what several options cannot be together."""


def exclusion(name: str, other: str, why: str) -> OptionError:
    return OptionError(lambda spelt: f"{spelt(name)} and {spelt(other)} exclude each other: {why}")


def build(cls: type[T], values: Mapping[str, Any]) -> T:
    """Options of values by name, which may hold those of other classes, too."""
    options = declared(cls)
    for name, each in options.items():
        if each.default is MISSING and name not in values:
            raise OptionError(lambda spelt, name=name: f"{spelt(name)} is missing")  # type: ignore[misc]
    return cls(**{name: value for name, value in values.items() if name in options})


def altered(values: Mapping[str, Any], *classes: type, **defaults: Any) -> set[str]:
    """Return the names of the options that are not at their defaults; a command may have some `defaults` of its own."""
    known = {name: each for cls in classes for name, each in declared(cls).items()}
    usual = {name: each.default for name, each in known.items()} | defaults
    return {
        name for name, value in values.items() if name in known and known[name].checked(value) != usual[name]
    }


# ---- plain values, for files -----------------------------------------------


def plain(options: Any) -> dict[str, Any]:
    """The fields of a dataclass as JSON and TOML have them."""
    return {name: _plain(value) for name, value in asdict(options).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def from_plain(cls: type[T], values: Mapping[str, Any], source: object) -> T:
    """The options again; what is missing has its default. The file that they come from may be broken."""
    try:
        return build(cls, values)
    except OptionError as error:
        raise UsageError(f"{source}: {error.words(str)}") from None
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None
