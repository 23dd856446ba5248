"""The child that renders chat templates, started by data/templates.py: it imports nothing of the package but compiled.py.

A template comes with a model file and may be hostile. The sandbox stops attribute access, but neither endless loops nor
'a' * 10**10: this process has a limit of memory and a clock that ends it. A request is one JSON object in a line; an answer
is another, and behind it the bytes it speaks of.
"""

import json
import os
import re
import signal
import sys
from typing import Any

import jinja2

from llamatrain.data.compiled import PROBE, JinjaTemplate

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

MORE = b"more\n"  # the request for what is left of a chat
ANSWER = 1 << 20  # bytes, beyond which renderings wait for the next request
ALL = 2 * 10**9  # bytes that the renderings of one chat may have in all
LONGEST = 8 * 10**6  # bytes of one of them, besides twice those of the request
TURNS, LAST, WHOLE = "turns", "last", "whole"  # what can be wanted of a chat, besides its next prompt
THOUGHTS = "reasoning_content"
SIGN = PROBE + os.urandom(8).hex()  # which no data holds
MARKED = re.compile(SIGN + r"q[0-9]+q")
OPENED = re.compile(r"(<[A-Za-z_]+>)(\s*)$")  # what a prompt may open for its answer


class TooLong(Exception):
    """Renderings of more bytes than there may be."""


class Conversation:
    """What a server would ask before each answer of a chat, and that answer."""

    def __init__(self, template: JinjaTemplate, request: dict[str, Any], size: int) -> None:
        self.template, self.tools, self.want = template, request.get("tools"), request["want"]
        self.notes = set[str]()
        untrained = [message.pop("untrained", False) for message in request["messages"]]
        self.messages = self.as_taken(request["messages"])
        spoken = zip(self.messages, untrained[-len(self.messages) :], strict=True)
        turns = [number for number, (message, not_it) in enumerate(spoken) if message["role"] == "assistant" and not not_it]
        turns = turns[-1:] if self.want == LAST else turns
        self.answering = self.want in (TURNS, LAST)
        self.left = turns[::-1] if self.answering else [len(self.messages)]
        self.longest, self.room = LONGEST + 2 * size, ALL
        self.prompt, self.asked = b"", b""  # the last one; with its answer, where that has an end

    def as_taken(self, messages: list[Any]) -> list[Any]:
        if any("tool_calls" in message for message in messages):
            messages = [self.called(message) for message in messages]
        if messages[0]["role"] == "system" and not self.template.takes_system:
            self.notes.add("system")
            first, *messages = messages
            if messages and messages[0]["role"] != "assistant":
                messages[0] = {**messages[0], "content": f"{first['content']}\n{messages[0]['content']}"}
        if self.template.keeps:
            return [thoughtful(message) for message in messages]
        if not self.template.thinks and any(THOUGHTS in message for message in messages):
            self.notes.add("unthought")
        return messages

    def called(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message with its calls, in the form that the template takes."""
        written = message.get("written")
        if "tool_calls" not in message:
            return message
        message = {key: value for key, value in message.items() if key != "written"}
        if not self.template.takes_calls:
            if written is None:
                self.notes.add("calls")
                return message
            return {"role": message["role"], "content": written}
        calls = [{**call, "function": self.function(call["function"])} for call in message["tool_calls"]]
        return {**message, "content": message["content"] if written is None else "", "tool_calls": calls}

    def function(self, function: dict[str, Any]) -> dict[str, Any]:
        arguments = function["arguments"]
        if self.template.takes_objects and isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                raise jinja2.TemplateError("the arguments of a call are no JSON") from None
        elif not self.template.takes_objects and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
        return {**function, "arguments": arguments}

    def next(self) -> tuple[list[list[int]], list[bytes]]:
        """Of each turn: the bytes that its prompt shares with the one before, and has besides; those of its answer; whether it
        goes on from the turn before; whether the answer has an end."""
        told, blobs, size = list[list[int]](), list[bytes](), 0
        while self.left and size < ANSWER:
            at = self.left.pop()
            text = self.opening() if self.answering and not at else self.render(self.messages[:at], self.want != WHOLE)
            answer, ended = self.answer(text, at) if self.answering else ("", False)
            prompt, spoken = to_bytes(text), to_bytes(answer)
            same, goes_on = common(self.prompt, prompt), bool(self.asked) and prompt.startswith(self.asked)
            told.append([same, len(prompt) - same, len(spoken), goes_on, ended])
            blobs += prompt[same:], spoken
            size += len(blobs[-2]) + len(spoken)
            self.prompt, self.asked = prompt, prompt + spoken if ended and self.left else b""
        return told, blobs

    def render(self, messages: list[Any], answer_next: bool = False) -> str:
        if self.template.keeps:
            text = self.kept(messages, answer_next)
        else:
            text = self.template.render(messages, self.tools, answer_next)
        self.room -= len(text)
        if len(text) > self.longest or self.room < 0:
            raise TooLong
        return text

    def kept(self, messages: list[Any], answer_next: bool) -> str:
        """With the thoughts of older turns, which templates leave out: their words are put in afterwards."""
        count = len(messages) if answer_next or not self.template.thinks else len(messages) - 1
        text = self.with_thoughts(messages, count, answer_next)
        last = messages[-1].get(THOUGHTS) if messages else None
        return self.with_thoughts(messages, len(messages), False) if self.want == WHOLE and last and last not in text else text

    def with_thoughts(self, messages: list[Any], count: int, answer_next: bool) -> str:
        """In the first `count` messages."""
        words, shown = dict[str, str](), list[Any]()
        for number, message in enumerate(messages):
            if number < count and THOUGHTS in message:
                words[mark := f"{SIGN}q{number}q"] = f"<think>\n{message[THOUGHTS]}\n</think>\n\n{message['content']}"
                message = {key: value for key, value in message.items() if key != THOUGHTS} | {"content": mark}
            shown.append(message)
        text = self.template.render(shown, self.tools, answer_next)
        return MARKED.sub(lambda mark: words.get(mark[0], mark[0]), text) if words else text

    def answer(self, prompt: str, at: int) -> tuple[str, bool]:
        """What the template writes behind the prompt; where it writes another one then, the answer as it is in the data."""
        message, whole = self.messages[at], self.render(self.messages[: at + 1])
        content = message["content"]
        if "calls" in self.notes and not content and "tool_calls" in message:
            return "", True
        thoughts = message.get(THOUGHTS, "") if self.template.thinks or self.template.keeps else ""
        written = thoughts or content.rpartition("</think>")[0].removeprefix("<think>")
        made = whole[len(prompt) :] if whole.startswith(prompt) else None
        if made is None or written.strip() not in made:
            made = self.given(prompt, message, at, whole, thoughts)
        if opened := OPENED.search(prompt):  # a thought, mostly
            begun = made.lstrip()
            if begun.startswith(opened[1]):
                made = begun[len(opened[1]) :].lstrip("\n") if opened[2] else begun[len(opened[1]) :]
            elif opened[1] == "<think>" and "</think>" not in made:
                self.notes.add("thoughts")
        return self.template.end_of(made, content)

    def given(self, prompt: str, message: dict[str, Any], at: int, whole: str, thoughts: str) -> str:
        """An answer with its thoughts, and with what the template puts around it."""
        bare = {"role": message["role"], "content": PROBE}
        head, found, tail = self.render([*self.messages[:at], bare]).rpartition(PROBE)
        base = head.rstrip()
        if "tool_calls" in message and not whole.startswith(base):  # some templates put calls elsewhere than words
            head = base = self.render(self.messages[:at])
        if not found or ("tool_calls" in message and not whole.startswith(base)):
            raise jinja2.TemplateError("its answers cannot be told from its prompts")
        space = "" if prompt[-1:].isspace() else head[len(base) :]
        if "tool_calls" in message:
            return whole[len(base) :] if space else whole[len(base) :].removeprefix(head[len(base) :])
        content = message["content"]
        shown = whole[len(head) : len(whole) - len(tail)] if whole.startswith(head) and whole.endswith(tail) else ""
        if not thoughts and shown.strip() == content.strip():
            return space + shown + tail
        return space + (f"<think>\n{thoughts}\n</think>\n\n" if thoughts else "") + content + tail

    def opening(self) -> str:
        """What stands before the words of a first message."""
        try:
            return self.render([], True)
        except Exception:  # templates refuse a chat of no messages
            return self.render([{"role": "assistant", "content": PROBE}]).partition(PROBE)[0]


def thoughtful(message: dict[str, Any]) -> dict[str, Any]:
    """With its thoughts apart from its words, if it has any."""
    before, end, content = message["content"].rpartition("</think>")
    thoughts = message.get(THOUGHTS, "") or before.lstrip().removeprefix("<think>")
    if message["role"] != "assistant" or not thoughts.strip():
        return message
    return {**message, THOUGHTS: thoughts.strip("\n"), "content": content.lstrip("\n") if end else message["content"]}


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
        self.template: JinjaTemplate | None = None
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
                self.template = JinjaTemplate(request["template"], request["values"], request["ends"], request["keeps"])
                return {}, []
            assert self.template is not None
            self.chat = Conversation(self.template, request, size)
        assert self.chat is not None
        turns, blobs = self.chat.next()
        answer = {"turns": turns, "size": sum(map(len, blobs)), "more": bool(self.chat.left), "notes": sorted(self.chat.notes)}
        self.chat = self.chat if answer["more"] else None  # its memory is wanted where it is tokenized
        return answer, blobs

    def refusal(self, error: Exception) -> dict[str, Any]:
        """Whatever a template does wrong is told to the parent."""
        self.chat = None
        if isinstance(error, MemoryError | TooLong):
            return {"much": "too much memory" if isinstance(error, MemoryError) else "too much text"}
        if isinstance(error, RecursionError):
            return {"error": "it nests too deeply"}
        return {"error": (" ".join(str(error).split()) or type(error).__name__)[:300]}


def main(memory: str, seconds: str, *pipes: str) -> None:
    for each in pipes:
        end_with(int(each))
    server = Server(int(memory), float(seconds))
    while server.serve(sys.stdin.buffer.readline()):
        pass
