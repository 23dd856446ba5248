"""Chat templates, rendered in a child process with limits of time and memory; `renderer.py` is the child.

One child serves all renderings of a template. One that takes too long is killed, and the next rendering starts another.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from llamatrain.data.json_values import TooMuch
from llamatrain.data.messages import Message
from llamatrain.errors import DataError
from llamatrain.machine.memory import give_back

SECONDS = 5.0  # of a processor, for the renderings of one conversation
MEMORY = 108 * 10**6  # address space of the child, interpreter included
WAIT = 60.0  # a child may have to wait long for a processor
LONGEST = 64 * 10**6  # bytes of an answer
LARGE = 1 << 22  # bytes of a text whose memory is given back when it is done with
LOST = 3  # conversations without an answer that are no reason yet to give the template up; and one for each WORKED others
WORKED = 50
MORE = b"more"
ROOT = Path(__file__).resolve().parent.parent.parent
CHILD = (  # what it needs of others comes first: nothing that lies beside the package shadows it
    "import sys, json, re, jinja2.ext, jinja2.sandbox; sys.path.insert(0, sys.argv[1]); "
    "from llamatrain.data.renderer import main; del sys.path[0]; main(*sys.argv[2:])"
)
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# For new models, to whose vocabulary ChatML's end mark is mere text: an answer ends with a token that a model can stop at.
CHATML_WITH_EOS = CHATML.replace("'<|im_end|>\n'", "(eos_token if message['role'] == 'assistant' else '<|im_end|>') + '\n'")
SMALL: list[Message] = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hi"}]


class TemplateError(DataError):
    """A template that refuses, fails or is stopped."""


class Turn(NamedTuple):
    """An answer, and the prompt that a server makes of all that stands before it."""

    same: int  # bytes that the prompt shares with the one before
    rest: memoryview
    answer: memoryview
    goes_on: bool  # the prompt begins with that of the last turn, and its answer
    ended: bool  # by a token at which models stop


class ChatTemplate:
    """A template with the texts of its vocabulary's begin and end tokens, and of all that end an answer."""

    def __init__(self, source: str, bos: str = "", eos: str = "", ends: Iterable[str] = ()) -> None:
        self.source = source
        self.constants = {"bos_token": bos, "eos_token": eos}
        self.ends = sorted(filter(None, {eos, *ends}), key=len, reverse=True)
        self.notes = set[str]()  # what was done otherwise than the template would have it
        self.worked = self.lost = 0
        self._child: Child | None = None
        self._lock = threading.Lock()

    def render(self, messages: list[Message], answer_next: bool = False, tools: list[Any] | None = None) -> bytes:
        want = "prompt" if answer_next else "whole"
        return b"".join(turn.rest for turn in self._turns({"messages": messages, "tools": tools, "want": want}))

    def turns(self, messages: list[Message], tools: list[Any] | None = None) -> Generator[Turn, None, None]:
        """Those of a conversation, one after the other: a few are held. Others wait until they are through."""
        return self._turns({"messages": messages, "tools": tools, "want": "turns"})

    def _turns(self, request: dict[str, Any]) -> Generator[Turn, None, None]:
        with ExitStack() as held:
            held.enter_context(self._lock)
            answer, texts = self._ask(request)
            while True:
                if not answer["more"]:
                    self.worked += 1
                    self.notes |= {*answer["notes"]}
                    held.close()  # nothing more is asked: other threads go on while these are tokenized
                at = 0
                for same, rest, spoken, goes_on, ended in answer["turns"]:
                    end = at + rest + spoken
                    yield Turn(same, texts[at : at + rest], texts[at + rest : end], bool(goes_on), bool(ended))
                    at = end
                if not answer["more"]:
                    return
                give_back()  # texts that grow leave holes of their size
                answer, texts = self._ask(None)

    def _ask(self, request: dict[str, Any] | None) -> "Answer":
        if self._child is None:
            self._child = Child(self.source, self.constants, self.ends)
        try:
            return self._child.ask(request, patience())
        except Lost:
            self.close()
            raise self._gone(f"more than {SECONDS:g} s or too much memory") from None
        except TooMuch as error:
            raise self._gone(str(error)) from None

    def _gone(self, why: str) -> DataError:
        """What a conversation without an answer means: that it is too much, or that the template is."""
        self.lost += 1
        if self.lost > LOST + self.worked // WORKED:
            return TemplateError(f"the chat template was stopped: it takes {why}, as for {self.lost - 1} chats before")
        return TooMuch(f"the chat template takes {why} for this chat")

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None

    def __enter__(self) -> "ChatTemplate":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def patience() -> float:
    """The child's own clock, where it has one, counts its work alone."""
    return WAIT if hasattr(signal, "setitimer") else SECONDS


class Lost(Exception):
    """The child did not answer: it hung, died or said too much."""


Answer = tuple[dict[str, Any], memoryview]


class Child:
    def __init__(self, source: str, values: dict[str, Any], ends: Iterable[str] = ()) -> None:
        pipe, held = os.pipe()
        self.lifeline = os.fdopen(held, "wb")  # the child ends when nobody holds it any more
        passed = [pipe] if os.name == "posix" else []
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", CHILD, str(ROOT), str(MEMORY), str(SECONDS), *map(str, passed)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(LARGE)},  # GNU's library gives back at once what is larger
                pass_fds=passed,
            )
        finally:
            os.close(pipe)
        try:
            self._begin(source, values, list(ends))
        except TemplateError:
            self.kill()
            raise

    def _begin(self, source: str, values: dict[str, Any], ends: list[str]) -> None:
        try:
            self.ask({"template": source, "values": {"documents": None, **values}, "ends": ends}, WAIT)
        except (Lost, TemplateError, TooMuch) as error:
            reasons = {Lost: "it cannot be compiled", TooMuch: f"it takes {error}"}
            reason = reasons.get(type(error), str(error).partition(": ")[2])
            raise TemplateError(f"the chat template is no template: {reason}") from None
        try:
            self.ask({"messages": SMALL, "want": "whole"}, patience())
        except Lost:
            why = f"it takes more than {SECONDS:g} s or too much memory"
            raise TemplateError(f"the chat template was stopped: {why}, be a chat never so small") from None
        except TooMuch as error:
            raise TemplateError(f"the chat template was stopped: it takes {error}, be a chat never so small") from None
        except TemplateError:  # it may want another chat than this one
            return

    def ask(self, request: dict[str, Any] | None, seconds: float) -> Answer:
        """None asks for what is left of the last answer."""
        try:
            self._send(request)
            answer, rests = self._answer(time.monotonic() + seconds)
        except (OSError, ValueError):
            raise Lost from None
        if "error" in answer:
            raise TemplateError(f"the chat template refuses it: {answer['error']}")
        if "much" in answer:
            raise TooMuch(answer["much"])
        return answer, rests

    def _send(self, request: dict[str, Any] | None) -> None:
        assert self.process.stdin is not None
        text = MORE if request is None else json.dumps(request).encode()
        self.process.stdin.write(text)
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()
        if len(text) > LARGE:
            del text
            give_back()

    def _answer(self, deadline: float) -> Answer:
        assert self.process.stdout is not None
        pipe, got, answer = self.process.stdout.fileno(), bytearray(), dict[str, Any]()
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while not answer or len(got) < answer["size"]:
                if len(got) > LONGEST or not selector.select(max(0.0, deadline - time.monotonic())):
                    raise Lost
                block = os.read(pipe, 1 << 20)
                if not block:
                    raise Lost
                got += block
                if not answer and (end := got.find(b"\n")) >= 0:
                    answer = {"size": 0, **json.loads(got[:end])}
                    del got[: end + 1]
        return answer, memoryview(got)

    def kill(self) -> None:
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout, self.lifeline):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:  # what was left to write has no reader any more
                    continue
        self.process.wait()
