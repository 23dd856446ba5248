"""Chat templates, rendered in a child process with limits of time and memory; `renderer.py` is the child.

One child serves all renderings of a template. One that takes too long is killed, and the next rendering starts another.
"""

import json
import os
import selectors
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from llamatrain.errors import DataError

SECONDS = 5  # for the renderings of one conversation
MEMORY = 256 * 10**6  # address space of the child, interpreter included
START = 60.0  # a child may have to wait long for a processor before it is there at all
LONGEST = 64 * 10**6  # bytes of an answer
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# For a vocabulary to which ChatML's end mark is mere text: an answer ends with a token that a model can stop at.
CHATML_WITH_EOS = CHATML.replace("'<|im_end|>\n'", "(eos_token if message['role'] == 'assistant' else '<|im_end|>') + '\n'")


class TemplateError(DataError):
    """A template that refuses, fails or is stopped."""


class ChatTemplate:
    """A template with the texts of its vocabulary's begin and end tokens."""

    def __init__(self, source: str, bos: str = "", eos: str = "") -> None:
        self.source = source
        self.constants = {"bos_token": bos, "eos_token": eos, "tools": None, "documents": None}
        self._child: Child | None = None
        self._lock = threading.Lock()

    def render(self, *requests: tuple[list[dict[str, Any]], bool]) -> list[str]:
        """A text for each list of messages, with or without the opening of the assistant's answer after it."""
        renderings = [
            {**self.constants, "messages": messages, "add_generation_prompt": answer_next} for messages, answer_next in requests
        ]
        with self._lock:
            if self._child is None:
                self._child = Child(self.source)
            try:
                return self._child.ask({"renderings": renderings}, SECONDS)["texts"]
            except Lost:
                self.close()
                raise TemplateError(f"the chat template was stopped: it takes more than {SECONDS} s or too much memory") from None

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None

    def __enter__(self) -> "ChatTemplate":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Lost(Exception):
    """The child did not answer: it hung, died or said too much."""


class Child:
    def __init__(self, source: str) -> None:
        script = str(Path(__file__).with_name("renderer.py"))
        self.process = subprocess.Popen(
            [sys.executable, "-P", script, str(MEMORY), str(SECONDS + 1)],  # -P: this folder's modules shadow nothing there
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        try:
            self.ask({"template": source}, START)
        except (Lost, TemplateError) as error:
            self.kill()
            reason = "it cannot be compiled" if isinstance(error, Lost) else str(error).partition(": ")[2]
            raise TemplateError(f"the chat template is no template: {reason}") from None

    def ask(self, request: dict[str, Any], seconds: float) -> Any:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
            answer = json.loads(self._line(time.monotonic() + seconds))
        except (OSError, ValueError):
            raise Lost from None
        if "error" in answer:
            raise TemplateError(f"the chat template refuses it: {answer['error']}")
        return answer

    def _line(self, deadline: float) -> bytes:
        assert self.process.stdout is not None
        pipe, parts, size = self.process.stdout.fileno(), list[bytes](), 0
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while not parts or not parts[-1].endswith(b"\n"):
                if size > LONGEST or not selector.select(max(0.0, deadline - time.monotonic())):
                    raise Lost
                parts.append(os.read(pipe, 1 << 20))
                size += len(parts[-1])
                if not parts[-1]:
                    raise Lost
        return b"".join(parts)

    def kill(self) -> None:
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:  # what was left to write has no reader any more
                    continue
        self.process.wait()
