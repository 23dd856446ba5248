"""The child that renders chat templates: a script of its own, started by data/templates.py, that imports nothing of the package.

A template comes with a model file and may be hostile. The sandbox stops attribute access, but neither endless loops nor
'a' * 10**10: this process has a limit of memory and an alarm that ends it. One JSON object a line, in and out.
"""

import json
import os
import select
import signal
import sys
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]


class GenerationTag(Extension):
    """Hugging Face's mark around what the assistant says: only its body counts here."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    made.filters["tojson"] = to_json
    made.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return made


def limit_memory(size: int) -> None:
    try:
        import resource
    except ImportError:  # not a Unix: the parent's clock remains
        return
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def input_ends_it(on: bool) -> None:
    """While a request is worked on nothing comes in but the end of whoever asked: then a signal ends this process, too, in the
    middle of a C function. (A thread would wait for the end of that.)"""
    if fcntl is None or not hasattr(os, "O_ASYNC"):
        return
    how = fcntl.fcntl(0, fcntl.F_GETFL)
    if not on:
        fcntl.fcntl(0, fcntl.F_SETFL, how & ~os.O_ASYNC)
        return
    fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(0, fcntl.F_SETFL, how | os.O_ASYNC)
    if select.select([0], [], [], 0)[0]:  # it came before
        os._exit(1)


def serve(memory: int, seconds: int) -> None:
    template = None
    while line := sys.stdin.buffer.readline():
        input_ends_it(True)
        if hasattr(signal, "alarm"):
            signal.alarm(seconds)  # unhandled, it ends the process even in the middle of a C function
        try:
            request = json.loads(line)
            if "template" in request:
                limit_memory(memory)  # before: constants are folded when a template is compiled
                template = environment().from_string(request["template"])
                answer: dict[str, Any] = {"ready": True}
            else:
                assert template is not None
                answer = {"texts": [template.render(**values) for values in request["renderings"]]}
            out = json.dumps(answer)
        except MemoryError:
            out = '{"error": "it takes too much memory"}'
        except RecursionError:
            out = '{"error": "it nests too deeply"}'
        except Exception as error:  # whatever a template does wrong is told to the parent
            text = " ".join(str(error).split()) or type(error).__name__
            out = json.dumps({"error": text[:300]})
        if hasattr(signal, "alarm"):
            signal.alarm(0)
        input_ends_it(False)
        sys.stdout.write(out + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
