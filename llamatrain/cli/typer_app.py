"""Makes typer commands from declared options."""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import MISSING
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from llamatrain.config.flag_hints import suggest_command
from llamatrain.config.messages import quote, suggest
from llamatrain.config.options import Options, OptionSpec, format_flag, option_specs
from llamatrain.distributed.comm import get_comm, get_launch_info
from llamatrain.errors import UsageError
from llamatrain.extensions import load_extensions
from llamatrain.platform import terminal

HELP = ["--help", "-h"]
ALIASES = {"train-from-scratch": "from-scratch", "finetune-lora": "finetune"}


class PassThrough:
    """Replaces the value converter of typer 0.29, which imports pydantic (10 MB).

    Options check their values themselves.
    """

    @staticmethod
    def coerce(value: Any, param: Any, ctx: Any) -> Any:
        """Return the value as it is."""
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        return parse_path(value) if param.type_descriptor.annotation is Path else value


def pass_values_through(params: Sequence[Any]) -> Sequence[Any]:
    """Make typer leave the values of parameters alone."""
    for param in params:
        if hasattr(param, "get_runtime_param"):  # typer 0.29
            param.get_runtime_param = lambda: PassThrough
    return params


class Command(TyperCommand):
    """A command with declared options."""

    is_multi_process = False  # True if several processes can share the work

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.context_settings.setdefault("help_option_names", HELP)
        # typer cannot declare an option that repeats and takes several values, but can parse it
        for param in self.params:
            if isinstance(param, TyperOption) and param.multiple:
                param.nargs = len((param.metavar or "").split())
                param.callback = check_values if param.nargs > 1 else None

    def get_params(self, ctx: Any) -> Any:
        """Return the parameters."""
        return pass_values_through(super().get_params(ctx))

    def get_help_option_names(self, ctx: Any) -> list[str]:
        """Return the names of the help option in a fixed order."""
        return sorted(super().get_help_option_names(ctx))  # from a set

    def get_help(self, ctx: Any) -> str:
        """Return the text of --help."""
        return get_help_page(self, ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments, after replacing names that other programs or former versions use."""
        self.notes: list[str] = []
        if not ctx.resilient_parsing:
            for translate in load_extensions("command_lines"):
                args, notes = translate(self.name or "", args, self.params)
                self.notes += notes
            args, renamed = replace_former_flags(args, getattr(self.callback, "former_flags", {}))
            self.notes += renamed
        with explain_short_option([*args], {name for param in self.params for name in param.opts}):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command, if it can run in this number of processes."""
        if self.is_multi_process:
            get_comm()
        else:
            check_single_process(ctx.command_path)
        with terminal.show_log(), self.run_context(ctx):
            for note in self.notes:
                terminal.log_line(f"note: {note}")
            return super().invoke(ctx)

    def run_context(self, ctx: Any) -> AbstractContextManager[None]:
        """Return a context manager for the run of the command."""
        return nullcontext()


def check_single_process(command: str) -> None:
    """Raise if several processes were started for a command whose work they cannot share."""
    if (started := get_launch_info()) and started.is_multi_process:
        error = UsageError(
            f"{command} runs in a single process (got: {started.description}); start it without mpiexec",
            code="single-process",
        )
        error.shared = True
        raise error


class ReadOnlyCommand(Command):
    """A command that only shows something, and does not wait for a compiler unless it measures speed."""

    def run_context(self, ctx: Any) -> AbstractContextManager[None]:
        """Return a context in which nothing is compiled, unless the command measures speed."""
        from llamatrain.compiler.cache import code_cache

        return nullcontext() if ctx.params.get("ranks") else code_cache.without_compiling()


class MultiProcessCommand(Command):
    """A command whose work several processes can share."""

    is_multi_process = True


class CommandGroup(TyperGroup):
    """A group of commands, some of which have further names."""

    aliases = ALIASES

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.context_settings.setdefault("help_option_names", HELP)

    def get_help_option_names(self, ctx: Any) -> list[str]:
        """Return the names of the help option in a fixed order."""
        return sorted(super().get_help_option_names(ctx))

    def get_params(self, ctx: Any) -> Any:
        """Return the parameters."""
        return pass_values_through(super().get_params(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by its name or another name of it."""
        return super().get_command(ctx, ALIASES.get(cmd_name, cmd_name))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments; explain an option that stands before the command."""
        try:
            return super().parse_args(ctx, [*args])
        except typer.TyperException as error:
            there = [word for word in args if self.get_command(ctx, word)]
            if not ctx.resilient_parsing and there and hasattr(error, "option_name"):
                raise UsageError(
                    f"{error.option_name} must follow the command: {ctx.command_path} {there[0]} ... "
                    f"{error.option_name}",
                    code="option-before-command",
                ) from None
            raise

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the first argument names, or raise with a hint."""
        if not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None:
            near = (
                suggest_command(args[0])
                or suggest_for_file(args[0], self.list_commands(ctx), ctx)
                or suggest(args[0], (*self.list_commands(ctx), *ALIASES))
            )
            raise UsageError(
                f"no such command {quote(args[0])}{near or see_help(ctx)}", code="unknown-command"
            )
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return command_names(super().list_commands(ctx), ctx)

    def get_help(self, ctx: Any) -> str:
        """Return the text of --help."""
        return get_help_page(self, ctx)


def command_names(names: Sequence[str], context: Any) -> list[str]:
    """Return the names of commands; shell completion also gets their other names."""
    others = (
        [other for other, meant in ALIASES.items() if meant in names] if context.resilient_parsing else []
    )
    return [*names, *others]


def check_values(context: Any, option: Any, values_list: Any) -> Any:
    """Raise if an option's name stands in place of one of the values that another option takes."""
    names = {name for param in context.command.params for name in (*param.opts, *param.secondary_opts)}
    for values in values_list or ():
        if option_name := next((value for value in values if value in names), None):
            context.fail(
                f"{option.opts[0]} takes {option.metavar} (got "
                f"{' '.join(values[: values.index(option_name)])})"
            )
    return values_list


def parse_path(text: str) -> Path:
    """Return a path; an empty text, as of a variable that is not set, is refused."""
    if not text:  # such as an unset variable; it would mean the current folder
        raise typer.BadParameter("the path is empty")
    return Path(text)


@contextmanager
def explain_short_option(args: Sequence[str], known: Collection[str]) -> Iterator[None]:
    """Explain an unknown option that lacks its second hyphen."""
    try:
        yield
    except typer.TyperException as error:
        short = getattr(error, "option_name", "")
        long_forms = [
            word
            for word in args
            if not word.startswith("--") and word.startswith(short) and f"-{word}" in known
        ]
        if len(short) == 2 and long_forms:
            raise UsageError(
                f"no such option {long_forms[0]}; did you mean -{long_forms[0]}?", code="unknown-option"
            ) from None
        raise


def suggest_for_file(word: str, commands: Sequence[str], context: Any) -> str:
    """Return a hint if a file stands in place of a command."""
    if not Path(word).exists():
        return ""
    first = commands[0] if len(commands) < 3 else "finetune"
    there = "a folder" if Path(word).is_dir() else "a file"
    return f", which is {there}; the command comes first: {context.command_path} {first} ..."


def see_help(context: Any) -> str:
    """Return a hint that names the help."""
    return f"; see {context.command_path} --help" if context else ""


def get_help_page(command: Any, context: Any) -> str:
    """Return the help of a command."""
    from llamatrain.cli.help import format_help

    return format_help(command, context)


def make_app(**settings: Any) -> typer.Typer:
    """Return a typer application for one command or a group."""
    return typer.Typer(add_completion=False, rich_markup_mode=None, **settings)


# ---- options ---------------------------------------------------------------


def with_options(
    *classes: type[Options], defaults: Mapping[str, Any] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the options of these classes.

    It is called with those that were given; `defaults` are its own.
    """
    options = {name: spec for cls in classes for name, spec in option_specs(cls).items()}
    default_of = {name: spec.default for name, spec in options.items()} | dict(defaults or {})

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        own = [
            parameter
            for parameter in inspect.signature(command).parameters.values()
            if parameter.kind is not parameter.VAR_KEYWORD
        ]

        @wraps(command)
        def called(**values: Any) -> Any:
            given = {
                name: spec.parse(values[name])
                for name, spec in options.items()
                if values[name] not in (None, (), [])
            }
            return command(**{parameter.name: values[parameter.name] for parameter in own}, **given)

        parameters = [*own, *(make_parameter(spec, default_of[name]) for name, spec in options.items())]
        called.former_flags = former_flags(options.values())  # type: ignore[attr-defined]
        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return called

    return add


def former_flags(specs: Iterable[OptionSpec]) -> dict[str, str]:
    """Return the present flags of options by their former ones."""
    return {format_flag(alias): format_flag(spec.name) for spec in specs for alias in spec.option.aliases}


def replace_former_flags(args: Sequence[str], former: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Replace former names of options in a command line. Return the new one, and a note about each name."""
    replaced, notes = list[str](), dict[str, None]()
    for position, word in enumerate(args):
        if word == "--":
            return [*replaced, *args[position:]], [*notes]
        flag, equals, value = word.partition("=")
        if flag in former:
            notes[f"{flag} is now called {former[flag]}"] = None
            word = former[flag] + equals + value
        replaced.append(word)
    return replaced, [*notes]


def make_parameter(spec: OptionSpec, default: Any) -> inspect.Parameter:
    """Return an option as a parameter for typer.

    Its value is a text, which the option checks, or None if it was not given.
    """
    flag, sentence = format_flag(spec.name), spec.option.sentence
    short = [f"-{spec.option.short}"] if spec.option.short else []
    kind: Any = bool if spec.kind is bool else list[Any] | None if spec.repeated else Any
    is_auto = spec.kind is bool and spec.optional and default is None
    default_text = "auto" if is_auto else format_default(default)
    settings: dict[str, Any] = {
        "rich_help_panel": spec.panel,
        "show_default": default_text,
        "hidden": spec.option.hidden,
    }
    if spec.kind is bool:
        flag = f"{flag}/--no-{flag.lstrip('-')}"
    else:
        settings |= {"metavar": spec.unit, "parser": identity}
    if spec.choices:
        settings["autocompletion"] = lambda: list(spec.choices)
        sentence += f" One of {', '.join(spec.choices)}." if spec.option.unit else ""
    return inspect.Parameter(
        spec.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if default is MISSING else None,
        annotation=Annotated[kind, typer.Option(flag, *short, help=sentence, **settings)],
    )


def identity(value: Any) -> Any:
    """Return a value as it is."""
    return value


def format_default(default: Any) -> str | bool:
    """Return a default for the help, or False if there is nothing to show."""
    if default is MISSING or default is None or default is False or default in ("", ()):
        return False
    return "on" if default is True else f"{default:g}" if isinstance(default, float) else str(default)
