"""The child that renders chat templates: a script of its own, started by data/templates.py, that imports nothing of the package.

A template comes with a model file and may be hostile. The sandbox stops attribute access, but neither endless loops nor
'a' * 10**10: this process has a limit of memory and a clock that ends it. A request is one JSON object in a line; an answer
is another, and behind it the bytes it speaks of.
"""

import json
import os
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

MORE = b"more\n"  # the request for what is left of a chat
ANSWER = 1 << 20  # bytes, beyond which renderings wait for the next request
ALL = 2 * 10**9  # bytes that the renderings of one chat may have in all
LONGEST = 8 * 10**6  # bytes of one of them, besides twice those of the request


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


class TooLong(Exception):
    """Renderings of more bytes than there may be."""


class Conversation:
    """The renderings of parts of a chat, one after the other, each told by what it has in common with the one before."""

    def __init__(self, template: jinja2.Template, request: dict[str, Any], size: int) -> None:
        self.template, self.messages, self.values = template, request["messages"], request["values"]
        self.wanted = request["prefixes"][::-1]
        self.longest, self.left = LONGEST + 2 * size, ALL
        self.text = b""  # the one before
        self.last = 0, b""  # of the last without an opening: what it shares with that, and the rest

    def next(self) -> tuple[list[list[int]], list[bytes]]:
        """Of each how many bytes it shares, how many more it has, and whether it goes on from the last without an opening."""
        told, rests, size = list[list[int]](), list[bytes](), 0
        while self.wanted and size < ANSWER:
            count, answer_next = self.wanted.pop()
            text = to_bytes(self.opening() if answer_next and not count else self.render(self.messages[:count], answer_next))
            self.left -= len(text)
            if len(text) > self.longest or self.left < 0:
                raise TooLong
            same = common(self.text, text)
            shared, ending = self.last if same >= self.last[0] else (same, self.text[same : self.last[0]] + self.last[1])
            told.append([same, len(text) - same, text.startswith(ending, shared)])
            rests.append(text[same:])
            size += len(rests[-1])
            self.text = text
            self.last = (shared, ending) if answer_next else (len(text), b"")
        return told, rests

    def render(self, messages: list[Any], answer_next: bool) -> str:
        return self.template.render(**self.values, messages=messages, add_generation_prompt=answer_next)

    def opening(self) -> str:
        """What stands before the words of a first message."""
        try:
            return self.render([], True)
        except Exception:  # templates refuse a chat of no messages; what a turn shares with another one is what they add
            first = self.messages[0]
            one, other = self.render([first], False), self.render([{**first, "content": "\0"}], False)
            shared = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
            return one[:shared]


def common(a: bytes, b: bytes) -> int:
    """How many bytes two texts have in common at their beginning."""
    if b.startswith(a):
        return len(a)
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def to_bytes(text: str) -> bytes:
    """As the tokenizer has it."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


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


def limit_memory(size: int) -> None:
    try:
        import resource
    except ImportError:  # not a Unix: the parent's clock remains
        return
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


def end_with(pipe: int) -> None:
    """Nothing is ever written into this pipe: when whoever holds its other end is gone, a signal ends this process, too, in the
    midst of a C function. (A thread would wait for the end of that.)"""
    if fcntl is None or not hasattr(os, "O_ASYNC"):
        return
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


def clock(seconds: float) -> float:
    """Wind it up, or stop it with 0; the seconds of the processor that were left. Unhandled, it ends even a C function."""
    if not hasattr(signal, "setitimer"):
        return seconds
    return signal.setitimer(signal.ITIMER_PROF, seconds)[0]


class Server:
    def __init__(self, memory: int, seconds: float) -> None:
        self.memory, self.seconds, self.left = memory, seconds, seconds
        self.template: jinja2.Template | None = None
        self.chat: Conversation | None = None

    def serve(self, line: bytes) -> bool:
        """Answer a request, and hold no more of it than what comes needs; False where there is none."""
        if not line:
            return False
        clock(self.left if line == MORE else self.seconds)
        request, rests, size, waits = None, list[bytes](), len(line), False
        try:
            if line != MORE:
                self.chat = None
                request = json.loads(line)
                waits = "waits" in request
            del line  # as large as all that is rendered of it
            answer, rests = self.answer(request, size)
        except Exception as error:
            answer = self.refusal(error)
        self.left = clock(0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.writelines(rests)
        if not waits:  # for another's
            sys.stdout.buffer.flush()
        return True

    def answer(self, request: dict[str, Any] | None, size: int) -> tuple[dict[str, Any], list[bytes]]:
        if request:
            if "template" in request:
                limit_memory(self.memory)  # before: constants are folded when a template is compiled
                self.template = environment().from_string(request["template"])
                return {}, []
            assert self.template is not None
            self.chat = Conversation(self.template, request, size)
        assert self.chat is not None
        texts, rests = self.chat.next()
        more = bool(self.chat.wanted)
        self.chat = self.chat if more else None  # its memory is wanted where it is tokenized
        return {"texts": texts, "size": sum(map(len, rests)), "more": more}, rests

    def refusal(self, error: Exception) -> dict[str, Any]:
        """Whatever a template does wrong is told to the parent."""
        self.chat = None
        if isinstance(error, MemoryError | TooLong):
            return {"much": "too much memory" if isinstance(error, MemoryError) else "too much text"}
        if isinstance(error, RecursionError):
            return {"error": "it nests too deeply"}
        return {"error": (" ".join(str(error).split()) or type(error).__name__)[:300]}


if __name__ == "__main__":
    server = Server(int(sys.argv[1]), float(sys.argv[2]))
    for each in sys.argv[3:]:
        end_with(int(each))
    while server.serve(sys.stdin.buffer.readline()):
        pass
