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
from typing import Any, AnyStr

import jinja2

from llamatrain.data.chat.jinja_template import EMPTY, PROBE, JinjaTemplate
from llamatrain.data.chat.limits import START, seconds_for
from llamatrain.data.chat.server_messages import words_of

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

MORE = b"more\n"  # the request for what is left of a chat
ANSWER = 1 << 20  # bytes, beyond which renderings wait for the next request
ALL = 2 * 10**9  # bytes that the renderings of one chat may have in all
LONGEST = 8 * 10**6  # bytes of one of them, besides twice those of the request
TURNS, LAST, WHOLE, PROMPT = "turns", "last", "whole", "prompt"  # what can be wanted of a chat
THOUGHTS = "reasoning_content"
HELLO = {"role": "user", "content": "hi"}
SIGN = PROBE + os.urandom(8).hex()  # which no data holds
MARKED = re.compile(SIGN + r"q[0-9]+q")


class RenderTooLong(Exception):
    """Renderings of more bytes than there may be."""


class Conversation:
    """What a server would ask before each answer of a chat, and that answer."""

    def __init__(self, template: JinjaTemplate, request: dict[str, Any], size: int) -> None:
        self.template, self.tools, self.want = template, request.get("tools"), request["want"]
        self.notes = set[str]()
        untrained = [message.pop("untrained", False) for message in request["messages"]]
        self.messages = self.as_taken(request["messages"])
        spoken = zip(self.messages, untrained[-len(self.messages) :], strict=True)
        turns = [
            number
            for number, (message, not_it) in enumerate(spoken)
            if message["role"] == "assistant" and not not_it
        ]
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
                messages[0] = {**messages[0], "content": f"{words_of(first)}\n{words_of(messages[0])}"}
        if self.template.keeps:
            return [thoughtful(message) for message in messages]
        if not self.template.shows_thoughts and any(THOUGHTS in message for message in messages):
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
            text = (
                self.opening()
                if self.answering and not at
                else self.render(self.messages[:at], self.want != WHOLE)
            )
            answer, ended = self.answer(text, at) if self.answering else ("", False)
            prompt, spoken = to_bytes(text), to_bytes(answer)
            same, goes_on = common(self.prompt, prompt), bool(self.asked) and prompt.startswith(self.asked)
            told.append([same, len(prompt) - same, len(spoken), goes_on, ended])
            blobs += prompt[same:], spoken
            size += len(blobs[-2]) + len(spoken)
            if self.want == PROMPT and self.template.is_served_with_thoughts:
                self.notes.add("thinks")
            self.prompt, self.asked = prompt, prompt + spoken if ended and self.left else b""
        return told, blobs

    def render(self, messages: list[Any], answer_next: bool = False) -> str:
        if self.template.keeps:
            text = self.kept(messages, answer_next)
        else:
            text = self.template.render(messages, self.tools, answer_next)
        self.room -= len(text)
        if len(text) > self.longest or self.room < 0:
            raise RenderTooLong
        return text

    def kept(self, messages: list[Any], answer_next: bool) -> str:
        """With the thoughts of older turns, which templates leave out: their words are put in afterwards."""
        count = len(messages) if answer_next or not self.template.thinks else len(messages) - 1
        text = self.with_thoughts(messages, count, answer_next)
        last = messages[-1].get(THOUGHTS) if messages else None
        return (
            self.with_thoughts(messages, len(messages), False)
            if self.want == WHOLE and last and last not in text
            else text
        )

    def with_thoughts(self, messages: list[Any], count: int, answer_next: bool) -> str:
        """In the first `count` messages."""
        words, shown = dict[str, str](), list[Any]()
        for number, message in enumerate(messages):
            if number < count and THOUGHTS in message:
                words[mark := f"{SIGN}q{number}q"] = (
                    f"<think>\n{message[THOUGHTS]}\n</think>\n\n{words_of(message)}"
                )
                message = {key: value for key, value in message.items() if key != THOUGHTS} | {
                    "content": mark
                }
            shown.append(message)
        text = self.template.render(shown, self.tools, answer_next)
        return MARKED.sub(lambda mark: words.get(mark[0], mark[0]), text) if words else text

    def answer(self, prompt: str, at: int) -> tuple[str, bool]:
        """Write an answer as the model is to give it behind a prompt, and tell whether it has an end."""
        message = self.messages[at]
        content = words_of(message)
        if "calls" in self.notes and not content and "tool_calls" in message:
            return "", True
        try:
            made = self.answered(self.messages[: at + 1], prompt)
        except (
            jinja2.TemplateError,
            TypeError,
        ) as error:  # as of a chat that goes on otherwise than templates like it
            try:
                made = self.answered([HELLO, message], self.render([HELLO], True))
            except Exception:
                raise error from None
        return self.template.end_of(made, content, calls="tool_calls" in message)

    def answered(self, messages: list[Any], prompt: str) -> str:
        """Write the last message behind the prompt that asks for it.

        That is what the template itself writes there. Where it writes an old answer otherwise than it asks for a new one, the
        answer is put together: its thoughts, its words, and what the template puts around words.
        """
        message, whole = messages[-1], self.render(messages)
        thoughts = message.get(THOUGHTS, "") if self.template.shows_thoughts or self.template.keeps else ""
        written = thoughts or words_of(message).rpartition("</think>")[0].removeprefix("<think>")
        if not whole.startswith(prompt) or written.strip() not in whole[len(prompt) :]:
            return self.composed(prompt, messages, whole, thoughts)
        made = whole[len(prompt) :]
        return self.thought(self.template.thought_opened(prompt, len(prompt)), "", made) + made

    def composed(self, prompt: str, messages: list[Any], whole: str, thoughts: str) -> str:
        """Put an answer together from its thoughts, its words and what the template puts around words."""
        *before, message = messages
        shared = common(prompt, whole)
        if (closed := EMPTY.search(prompt[-64:])) and shared >= (begin := len(prompt) - len(closed[0])):
            return whole[begin:]  # behind an empty thought that the prompt has and old answers have not
        head, found, tail = self.render([*before, {"role": message["role"], "content": PROBE}]).rpartition(
            PROBE
        )
        base = head.rstrip()
        if "tool_calls" in message and not whole.startswith(
            base
        ):  # some templates put calls elsewhere than words
            head = base = self.render(before)
        if not found or ("tool_calls" in message and not whole.startswith(base)):
            raise jinja2.TemplateError("its answers cannot be told from its prompts")
        opened = self.template.thought_opened(prompt, shared)
        space = "" if prompt[-1:].isspace() or opened else head[len(base) :]
        if opened and whole.startswith(prompt[: -len(opened)]) and "tool_calls" in message:
            words = whole[len(prompt) - len(opened) :]
        elif "tool_calls" in message:
            words = whole[len(base) :] if space else whole[len(base) :].removeprefix(head[len(base) :])
        else:
            words = words_of(message)
            shown = (
                whole[len(head) : len(whole) - len(tail)]
                if whole.startswith(head) and whole.endswith(tail)
                else ""
            )
            words = (shown if not thoughts and shown.strip() == words.strip() else words) + tail
        if opened and words.lstrip().startswith(opened.strip()):  # a thought that the words bring along
            words = words.lstrip()[len(opened.strip()) :].lstrip("\n" if opened[-1:].isspace() else "")
        return space + self.thought(opened, thoughts, words) + words

    def thought(self, opened: str, thoughts: str, words: str) -> str:
        """Write what stands before words: their thoughts, or an empty thought where the prompt has opened one."""
        if thoughts:
            return ("" if opened else "<think>\n") + thoughts + self.template.end_of_thoughts(opened)
        if not opened or self.template.end_of_thoughts(opened).strip() in words:
            return ""
        self.notes.add("thoughts")
        return self.template.empty_thought(opened)

    def opening(self) -> str:
        """What stands before the words of a first message."""
        try:
            return self.render([], True)
        except Exception:  # templates refuse a chat of no messages
            return self.render([{"role": "assistant", "content": PROBE}]).partition(PROBE)[0]


def thoughtful(message: dict[str, Any]) -> dict[str, Any]:
    """With its thoughts apart from its words, if it has any."""
    words = words_of(message)
    before, end, content = words.rpartition("</think>")
    thoughts = message.get(THOUGHTS, "") or before.lstrip().removeprefix("<think>")
    if message["role"] != "assistant" or not thoughts.strip():
        return message
    return {**message, THOUGHTS: thoughts.strip("\n"), "content": content.lstrip("\n") if end else words}


def common(a: AnyStr, b: AnyStr) -> int:
    """Count what two texts have in common at their beginning."""
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


class RenderServer:
    def __init__(self, memory: int, seconds: float) -> None:
        self.memory, self.seconds, self.left = memory, seconds, seconds
        self.template: JinjaTemplate | None = None
        self.chat: Conversation | None = None

    def serve(self, line: bytes) -> bool:
        """Answer a request, and hold no more of it than what comes needs; False where there is none."""
        if not line:
            return False
        clock(
            self.left
            if line == MORE
            else min(START, self.seconds)
            if self.template is None
            else seconds_for(line, self.seconds)
        )
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
                taken = (request[key] for key in ("template", "values", "ends", "keeps", "day"))
                template = JinjaTemplate(*taken)
                if request["new"]:
                    self.small_chat(template)
                self.template = template
                return {}, []
            assert self.template is not None
            self.chat = Conversation(self.template, request, size)
        assert self.chat is not None
        turns, blobs = self.chat.next()
        answer = {
            "turns": turns,
            "size": sum(map(len, blobs)),
            "more": bool(self.chat.left),
            "notes": sorted(self.chat.notes),
        }
        self.chat = self.chat if answer["more"] else None  # its memory is wanted where it is tokenized
        return answer, blobs

    def small_chat(self, template: JinjaTemplate) -> None:
        """Render a small chat, so that a template that never ends is found at once."""
        try:
            template.render([HELLO, {"role": "assistant", "content": "hi"}])
        except MemoryError:
            raise
        except Exception:  # it may want another chat than this one
            return

    def refusal(self, error: Exception) -> dict[str, Any]:
        """Whatever a template does wrong is told to the parent."""
        self.chat = None
        if isinstance(error, MemoryError | RenderTooLong):
            return {"much": "too much memory" if isinstance(error, MemoryError) else "too much text"}
        if isinstance(error, RecursionError):
            return {"error": "it nests too deeply"}
        return {"error": (" ".join(str(error).split()) or type(error).__name__)[:300]}


def main(memory: str, seconds: str, *pipes: str) -> None:
    for each in pipes:
        end_with(int(each))
    server = RenderServer(int(memory), float(seconds))
    while server.serve(sys.stdin.buffer.readline()):
        pass
