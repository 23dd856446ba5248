"""Renders chat templates in a child process with limits of time and memory; `worker.py` is the child.

One child serves all renderings of a template. It is killed if it takes too long; the next rendering starts
another.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from llamatrain.data.chat.limits import (
    BYTES_PER_SECOND,
    LAST,
    PROMPT,
    START_SECONDS,
    TURNS,
    WHOLE,
    time_limit,
)
from llamatrain.data.chat.messages import Message
from llamatrain.data.json_values import RecordTooLarge
from llamatrain.errors import DataError, UsageError
from llamatrain.platform.child_limits import HAS_TIMER
from llamatrain.platform.memory import trim_heap
from llamatrain.platform.processes import put_into_job, read_pipe

MAX_SECONDS = 5.0  # CPU time for the renderings of one conversation
MAX_MEMORY = 108 * 10**6  # address space of the child, including the interpreter
MAX_WAIT = 60.0  # seconds; a child may wait long for a CPU
MAX_ANSWER_BYTES = 64 * 10**6  # bytes of an answer
LARGE_TEXT = 1 << 22  # bytes of a text whose memory is returned to the system after use
ALLOWED_FAILURES = 3  # failed conversations before the template is given up, plus one per ANSWERS_PER_FAILURE
ANSWERS_PER_FAILURE = 50
MORE = b"more"
RENDER_MODES = {"completion": TURNS, "last": LAST, "all": WHOLE}  # by --train-on
ROOT = Path(__file__).resolve().parents[3]
CHILD = (  # other packages are imported first, so that no file next to ours shadows them
    "import sys, json, re, jinja2.ext, jinja2.sandbox; sys.path.insert(0, sys.argv[1]); "
    "from llamatrain.data.chat.worker import main; del sys.path[0]; main(*sys.argv[2:])"
)
PREFETCH_BYTES = 1 << 14  # bytes of requests sent at once; a pipe buffers them even if the reader is busy
PREFETCHED_BYTES = 1 << 20  # bytes of answers kept for later
Answer = tuple[dict[str, Any], memoryview]
ChatRequest = tuple[list[Message], list[Any] | None, str]  # a chat, its tools, and the render mode
REQUEST_KEYS = ("messages", "tools", "mode")  # keys of a ChatRequest


class TemplateError(DataError):
    """A template rejected a chat, or failed."""


class TemplateStopped(TemplateError):
    """A template is invalid, or took too much time or memory; it is not used again."""


class Turn(NamedTuple):
    """An answer, and the prompt that a server makes of the messages before it."""

    shared_bytes: int  # bytes that the prompt shares with the previous one
    rest: memoryview
    answer: memoryview
    is_continuation: bool  # the prompt begins with the previous prompt and its answer
    has_end: bool  # it ends with a token at which models stop


class PrefetchedAnswers(threading.local):
    """The answers rendered ahead for a thread, keyed by the identity of the messages."""

    def __init__(self) -> None:
        self.answers = dict[tuple[int, str], tuple[list[Message], Answer | Exception]]()


class ChatTemplate:
    """A chat template with the begin, end and turn-end texts of its vocabulary."""

    def __init__(
        self,
        source: str,
        bos: str = "",
        eos: str = "",
        ends: Iterable[str] = (),
        keep_reasoning: bool = False,
        day: str = "",
        think: bool | None = None,
    ) -> None:
        self.source = source
        self.keep_reasoning = keep_reasoning  # of older turns
        self.day = day  # the date that templates see; "" for today
        self.think = think  # switches thinking on or off; None: as llama-server does
        self.constants = {"bos_token": bos, "eos_token": eos}
        self.ends = sorted(filter(None, {eos, *ends}), key=len, reverse=True)
        self.notes = set[str]()  # what was changed for the template
        self.answered = self.failures = 0
        self._process: RendererProcess | None = None
        self._error: TemplateError | None = None
        self._has_compiled = False
        self._lock = threading.Lock()
        self._prefetched = PrefetchedAnswers()
        self._one_by_one = False  # True after a small conversation had a large answer

    def render(
        self, messages: list[Message], answer_next: bool = False, tools: list[Any] | None = None
    ) -> bytes:
        """Render a whole chat, or with `answer_next` the prompt for its next answer."""
        mode = PROMPT if answer_next else WHOLE
        return b"".join(turn.rest for turn in self.turns(messages, tools, mode))

    def turns(
        self, messages: list[Message], tools: list[Any] | None = None, mode: str = TURNS
    ) -> Generator[Turn, None, None]:
        """Yield the turns of a conversation; few are held at once, and other threads wait."""
        prefetched = self._prefetched.answers.pop((id(messages), mode), None)
        with ExitStack() as locked:
            if not prefetched:
                locked.enter_context(self._lock)
            request = dict(zip(REQUEST_KEYS, (messages, tools, mode), strict=True))
            answer, texts = self._request(request, prefetched and prefetched[1])
            while True:
                if not answer["more"]:
                    self.answered += 1
                    self.notes |= {*answer["notes"]}
                    locked.close()  # all is received: other threads may proceed while this is tokenized
                begin = 0
                for shared, prompt_size, answer_size, is_continuation, has_end in answer["turns"]:
                    end = begin + prompt_size + answer_size
                    yield Turn(
                        shared,
                        texts[begin : begin + prompt_size],
                        texts[begin + prompt_size : end],
                        bool(is_continuation),
                        bool(has_end),
                    )
                    begin = end
                if not answer["more"]:
                    return
                trim_heap()  # growing texts fragment the heap
                answer, texts = self._request(None)

    def check_switch(self, option: str) -> None:
        """Raise if `option` is to switch thinking on or off, and the template has no switch."""
        if self.think is None or self._get_process().has_switch:
            return
        self.close()
        raise UsageError(
            f"the chat template has no switch for thinking (enable_thinking), so {option} has no effect; "
            "leave it out",
            code="no-thinking-switch",
        )

    def prefetch(self, chats: Iterable[ChatRequest]) -> None:
        """Render the small chats that this thread needs next in one request, which is faster."""
        self._prefetched.answers.clear()
        requests = [] if self._one_by_one else list(encode_requests(chats))
        with self._lock, suppress(TemplateError):  # an invalid template is reported with the first chat
            if not self.answered and requests:  # try one first, to see whether the template works at all
                if not self._request_all(requests[:1]):
                    self.failures += 2
                requests = requests[1:]
            if requests and not self._one_by_one:
                self._request_all(requests)

    def _request_all(self, requests: list[tuple[ChatRequest, str]]) -> bool:
        """Send several requests and keep the answers while they are small; return False if one was lost."""
        bytes_left = PREFETCHED_BYTES
        answers = self._get_process().request_all([text for _, text in requests], wait_limit(MAX_SECONDS))
        for ((messages, _, mode), _), answer in zip(requests, answers, strict=False):
            if isinstance(answer, RendererDied):
                self._one_by_one = True
                self.close()
                return False
            if not isinstance(answer, Exception):
                bytes_left -= len(answer[1])
                self._one_by_one |= bytes_left < 0 or answer[0]["more"]
            if not self._one_by_one:
                self._prefetched.answers[id(messages), mode] = messages, answer
        return True

    def _request(
        self, request: dict[str, Any] | None, prefetched: Answer | Exception | None = None
    ) -> Answer:
        try:
            answer = prefetched or self._get_process().request(request, wait_limit(MAX_SECONDS))
            if isinstance(answer, Exception):
                raise answer
            return answer
        except RendererDied:
            self.close()
            text = json.dumps(request).encode()
            raise self._describe_failure(
                f"more than {time_limit(text, MAX_SECONDS):.2g} s or too much memory", len(text)
            ) from None
        except RecordTooLarge as error:
            raise self._describe_failure(str(error)) from None

    def _get_process(self) -> "RendererProcess":
        if self._error:
            raise self._error
        if self._process is None:
            try:
                self._process = RendererProcess(
                    self.source,
                    self.constants,
                    self.ends,
                    self.keep_reasoning,
                    self.day,
                    self.think,
                    new=not self._has_compiled,
                )
                self._has_compiled = True
            except TemplateError as error:
                self._error = error
                raise
        return self._process

    def _describe_failure(self, why: str, size: int = BYTES_PER_SECOND) -> DataError:
        """Return the error for a chat without an answer.

        Either the chat was too large, or the template is broken.
        """
        self.failures += 1 if size >= BYTES_PER_SECOND else 2  # small ones are more suspicious
        if self.failures > ALLOWED_FAILURES + self.answered // ANSWERS_PER_FAILURE:
            return TemplateStopped(
                f"the chat template was stopped: it takes {why}, also for other chats",
                code="template-stopped",
            )
        return RecordTooLarge(f"the chat template takes {why} for this chat", code="row-too-large")

    def close(self) -> None:
        """Kill the child process."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def __enter__(self) -> "ChatTemplate":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def encode_requests(chats: Iterable[ChatRequest]) -> Iterator[tuple[ChatRequest, str]]:
    """Yield chats with their requests, up to PREFETCH_BYTES."""
    bytes_left = PREFETCH_BYTES
    for chat in chats:
        bytes_left -= len(text := json.dumps(dict(zip(REQUEST_KEYS, chat, strict=True))))
        if bytes_left < 0:
            return
        yield chat, text


def wait_limit(seconds: float) -> float:
    """Return how long to wait for an answer.

    The child's own timer, if it has one, counts only its own work.
    """
    return MAX_WAIT if HAS_TIMER else seconds


class RendererDied(Exception):
    """The child did not answer: it hung, died or sent too much."""


class RendererProcess:
    """The child process that renders one template."""

    def __init__(
        self,
        source: str,
        values: dict[str, Any],
        ends: Iterable[str] = (),
        keep_reasoning: bool = False,
        day: str = "",
        think: bool | None = None,
        new: bool = True,
    ) -> None:
        read_end, write_end = os.pipe()
        self.received = bytearray()  # bytes of answers
        self.lifeline = os.fdopen(write_end, "wb")  # the child exits when it is closed
        pipes = [read_end] if HAS_TIMER else []
        try:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-c",
                    CHILD,
                    str(ROOT),
                    str(MAX_MEMORY),
                    str(MAX_SECONDS),
                    *map(str, pipes),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                # glibc returns larger blocks to the system at once.
                env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(LARGE_TEXT)},
                pass_fds=pipes,
            )
        finally:
            os.close(read_end)
        self.job = put_into_job(self.process, MAX_MEMORY)
        try:
            answer = self._compile(
                {
                    "template": source,
                    "values": {"documents": None, **values},
                    "ends": [*ends],
                    "keep_reasoning": keep_reasoning,
                    "day": day,
                    "think": think,
                    "new": new,
                }
            )
            self.has_switch: bool = answer["has_switch"]
        except TemplateError:
            self.kill()
            raise

    def _compile(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return self.request(request, wait_limit(START_SECONDS))[0]
        except RendererDied:
            limit = f"more than {min(START_SECONDS, MAX_SECONDS):g} s or too much memory"
            raise TemplateStopped(
                f"the chat template was stopped: it takes {limit}, even for a small chat",
                code="template-stopped",
            ) from None
        except RecordTooLarge as error:
            raise TemplateStopped(
                f"the chat template was stopped: it takes {error}, even for a small chat",
                code="template-stopped",
            ) from None
        except TemplateError as error:
            raise TemplateStopped(
                f"the chat template is not valid Jinja: {str(error).partition(': ')[2]}", code="bad-template"
            ) from None

    def request(self, request: dict[str, Any] | None, seconds: float) -> Answer:
        """Send a request and return its answer; None requests the rest of the last one."""
        try:
            self._send(request)
            result = self._read_result(time.monotonic() + seconds)
        except (OSError, ValueError):
            raise RendererDied from None
        if isinstance(result, Exception):
            raise result
        return result

    def _send(self, request: dict[str, Any] | None) -> None:
        text = MORE if request is None else json.dumps(request).encode()
        self._write(text)
        if len(text) > LARGE_TEXT:
            del text
            trim_heap()

    def request_all(self, requests: list[str], seconds: float) -> Iterator[Answer | Exception]:
        """Yield the answer or error of each request; nothing follows a lost one."""
        *first_ones, last = requests
        try:
            self._write(
                "".join(f'{request[:-1]}, "is_followed": true}}\n' for request in first_ones).encode()
                + last.encode()
            )
            for _ in requests:
                yield self._read_result(time.monotonic() + seconds)
        except (RendererDied, OSError, ValueError):
            yield RendererDied()

    def _write(self, text: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text)
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def _read_result(self, deadline: float) -> Answer | Exception:
        answer, texts = self._read_answer(deadline)
        if "error" in answer:
            return TemplateError(
                f"the chat template refuses it: {answer['error']}", code="refused-by-template"
            )
        return (
            RecordTooLarge(answer["too_large"], code="row-too-large")
            if "too_large" in answer
            else (answer, texts)
        )

    def _read_answer(self, deadline: float) -> Answer:
        answer = dict[str, Any]()
        while not answer or len(self.received) < answer["size"]:
            if not answer and (end := self.received.find(b"\n")) >= 0:
                answer = {"size": 0, **json.loads(self.received[:end])}
                del self.received[: end + 1]
            elif len(self.received) > MAX_ANSWER_BYTES:
                raise RendererDied
            else:
                self._read_block(deadline)
        if len(self.received) == answer["size"]:
            texts = self.received
            self.received = bytearray()
        else:
            texts = self.received[: answer["size"]]
            del self.received[: answer["size"]]
        return answer, memoryview(texts)

    def _read_block(self, deadline: float) -> None:
        assert self.process.stdout is not None
        pipe = self.process.stdout.fileno()
        if not (block := read_pipe(pipe, 1 << 20, deadline - time.monotonic())):
            raise RendererDied
        self.received += block

    def kill(self) -> None:
        """Kill the process and close its pipes."""
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout, self.lifeline):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:  # unwritten data has no reader
                    continue
        self.process.wait()
