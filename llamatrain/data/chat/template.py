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
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from llamatrain.data.chat.limits import BYTES, START, seconds_for
from llamatrain.data.chat.messages import Message
from llamatrain.data.json_values import RecordTooLarge
from llamatrain.errors import DataError
from llamatrain.platform.memory import trim_heap

SECONDS = 5.0  # of a processor, for the renderings of one conversation
MEMORY = 108 * 10**6  # address space of the child, interpreter included
WAIT = 60.0  # a child may have to wait long for a processor
LONGEST = 64 * 10**6  # bytes of an answer
LARGE = 1 << 22  # bytes of a text whose memory is given back when it is done with
LOST = 3  # conversations without an answer that are no reason yet to give the template up; and one for each WORKED others
WORKED = 50
MORE = b"more"
TURNS, LAST, WHOLE, PROMPT = "turns", "last", "whole", "prompt"  # what can be wanted of a chat
WANTED = {"completion": TURNS, "last": LAST, "all": WHOLE}  # by what is trained
ROOT = Path(__file__).resolve().parents[3]
CHILD = (  # what it needs of others comes first: nothing that lies beside the package shadows it
    "import sys, json, re, jinja2.ext, jinja2.sandbox; sys.path.insert(0, sys.argv[1]); "
    "from llamatrain.data.chat.worker import main; del sys.path[0]; main(*sys.argv[2:])"
)
AHEAD = (
    1 << 14
)  # bytes of requests that are sent at once, which a pipe has room for, be their reader never so busy
ROOM = 1 << 20  # bytes of answers to them that are held
Answer = tuple[dict[str, Any], memoryview]
Asked = tuple[list[Message], list[Any] | None, str]  # a chat, the tools in it, and what is wanted of it
NAMES = ("messages", "tools", "want")  # of that


class TemplateError(DataError):
    """A template refuses a chat, or fails."""


class TemplateStopped(TemplateError):
    """A template takes too long or too much memory, or is none: it is not asked again."""


class Turn(NamedTuple):
    """An answer, and the prompt that a server makes of all that stands before it."""

    same: int  # bytes that the prompt shares with the one before
    rest: memoryview
    answer: memoryview
    goes_on: bool  # the prompt begins with that of the last turn, and its answer
    ended: bool  # by a token at which models stop


class VocabularyMarks(threading.local):
    """What a thread will ask for, with the messages: they are known by where they are, and stay there."""

    def __init__(self) -> None:
        self.found = dict[tuple[int, str], tuple[list[Message], Answer | Exception]]()


class ChatTemplate:
    """A template with the texts of its vocabulary's begin and end tokens, and of all that end an answer."""

    def __init__(
        self,
        source: str,
        bos: str = "",
        eos: str = "",
        ends: Iterable[str] = (),
        keeps: bool = False,
        day: str = "",
    ) -> None:
        self.source, self.keeps, self.day = (
            source,
            keeps,
            day,
        )  # whether older turns keep their thoughts; the day it is, or today
        self.constants = {"bos_token": bos, "eos_token": eos}
        self.ends = sorted(filter(None, {eos, *ends}), key=len, reverse=True)
        self.notes = set[str]()  # what was done otherwise than the template would have it
        self.worked = self.lost = 0
        self._child: RendererProcess | None = None
        self._broken: TemplateError | None = None
        self._begun = False
        self._lock, self._known = threading.Lock(), VocabularyMarks()
        self._apart = (
            False  # whether small conversations are asked for one by one: there was one that took much
        )

    def render(
        self, messages: list[Message], answer_next: bool = False, tools: list[Any] | None = None
    ) -> bytes:
        return b"".join(
            turn.rest for turn in self._turns((messages, tools, PROMPT if answer_next else WHOLE))
        )

    def turns(
        self, messages: list[Message], tools: list[Any] | None = None, want: str = TURNS
    ) -> Generator[Turn, None, None]:
        """Those of a conversation, one after the other: a few are held. Others wait until they are through."""
        return self._turns((messages, tools, want))

    def _turns(self, asked: Asked) -> Generator[Turn, None, None]:
        known = self._known.found.pop((id(asked[0]), asked[2]), None)
        with ExitStack() as held:
            if not known:
                held.enter_context(self._lock)
            answer, texts = self._ask(dict(zip(NAMES, asked, strict=True)), known and known[1])
            while True:
                if not answer["more"]:
                    self.worked += 1
                    self.notes |= {*answer["notes"]}
                    held.close()  # nothing more is asked: other threads go on while these are tokenized
                at = 0
                for same, rest, spoken, goes_on, ended in answer["turns"]:
                    end = at + rest + spoken
                    yield Turn(
                        same, texts[at : at + rest], texts[at + rest : end], bool(goes_on), bool(ended)
                    )
                    at = end
                if not answer["more"]:
                    return
                trim_heap()  # texts that grow leave holes of their size
                answer, texts = self._ask(None)

    def ahead(self, chats: Iterable[Asked]) -> None:
        """Have those rendered at once that this thread asks for next, while they are small: a way to the child takes longer."""
        self._known.found.clear()
        wanted = [] if self._apart else list(few(chats))
        with self._lock, suppress(TemplateError):  # of one that cannot be compiled the first chat will tell
            if not self.worked and wanted:  # whether it works at all is seen by one
                if not self._take(wanted[:1]):
                    self.lost += 2
                wanted = wanted[1:]
            if wanted and not self._apart:
                self._take(wanted)

    def _take(self, wanted: list[tuple[Asked, str]]) -> bool:
        """Hold the answers to some requests, while they are small; False where one is lost, and who asked finds out which."""
        room = ROOM
        answers = self._started().ask_all([text for _, text in wanted], patience(SECONDS))
        for ((messages, _, want), _), found in zip(wanted, answers, strict=False):
            if isinstance(found, RendererDied):
                self._apart = True
                self.close()
                return False
            if not isinstance(found, Exception):
                room -= len(found[1])
                self._apart |= room < 0 or found[0]["more"]
            if not self._apart:
                self._known.found[id(messages), want] = messages, found
        return True

    def _ask(self, request: dict[str, Any] | None, known: Answer | Exception | None = None) -> Answer:
        try:
            found = known or self._started().ask(request, patience(SECONDS))
            if isinstance(found, Exception):
                raise found
            return found
        except RendererDied:
            self.close()
            text = json.dumps(request).encode()
            raise self._gone(
                f"more than {seconds_for(text, SECONDS):.2g} s or too much memory", len(text)
            ) from None
        except RecordTooLarge as error:
            raise self._gone(str(error)) from None

    def _started(self) -> "RendererProcess":
        if self._broken:
            raise self._broken
        if self._child is None:
            try:
                self._child = RendererProcess(
                    self.source, self.constants, self.ends, self.keeps, self.day, new=not self._begun
                )
                self._begun = True
            except TemplateError as error:
                self._broken = error
                raise
        return self._child

    def _gone(self, why: str, size: int = BYTES) -> DataError:
        """Decide what a conversation without an answer means: that it is too much, or that the template is."""
        self.lost += 1 if size >= BYTES else 2  # small ones are more suspicious
        if self.lost > LOST + self.worked // WORKED:
            return TemplateStopped(
                f"the chat template was stopped: it takes {why}, and did so for other chats"
            )
        return RecordTooLarge(f"the chat template takes {why} for this chat")

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child = None

    def __enter__(self) -> "ChatTemplate":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def few(chats: Iterable[Asked]) -> Iterator[tuple[Asked, str]]:
    """As many as are asked for at once, with their requests."""
    room = AHEAD
    for chat in chats:
        room -= len(text := json.dumps(dict(zip(NAMES, chat, strict=True))))
        if room < 0:
            return
        yield chat, text


def patience(seconds: float) -> float:
    """Find how long to wait: the child's own clock, where it has one, counts its work alone."""
    return WAIT if hasattr(signal, "setitimer") else seconds


class RendererDied(Exception):
    """The child did not answer: it hung, died or said too much."""


class RendererProcess:
    def __init__(
        self,
        source: str,
        values: dict[str, Any],
        ends: Iterable[str] = (),
        keeps: bool = False,
        day: str = "",
        new: bool = True,
    ) -> None:
        pipe, held = os.pipe()
        self.got = bytearray()  # of answers
        self.lifeline = os.fdopen(held, "wb")  # the child ends when nobody holds it any more
        passed = [pipe] if os.name == "posix" else []
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", CHILD, str(ROOT), str(MEMORY), str(SECONDS), *map(str, passed)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={
                    **os.environ,
                    "MALLOC_MMAP_THRESHOLD_": str(LARGE),
                },  # GNU's library gives back at once what is larger
                pass_fds=passed,
            )
        finally:
            os.close(pipe)
        try:
            self._begin(
                {
                    "template": source,
                    "values": {"documents": None, **values},
                    "ends": [*ends],
                    "keeps": keeps,
                    "day": day,
                    "new": new,
                }
            )
        except TemplateError:
            self.kill()
            raise

    def _begin(self, request: dict[str, Any]) -> None:
        try:
            self.ask(request, patience(START))
        except RendererDied:
            limit = f"more than {min(START, SECONDS):g} s or too much memory"
            raise TemplateStopped(
                f"the chat template was stopped: it takes {limit}, even for a small chat"
            ) from None
        except RecordTooLarge as error:
            raise TemplateStopped(
                f"the chat template was stopped: it takes {error}, even for a small chat"
            ) from None
        except TemplateError as error:
            raise TemplateStopped(
                f"the chat template is no template: {str(error).partition(': ')[2]}"
            ) from None

    def ask(self, request: dict[str, Any] | None, seconds: float) -> Answer:
        """None asks for what is left of the last answer."""
        try:
            self._send(request)
            found = self._found(time.monotonic() + seconds)
        except (OSError, ValueError):
            raise RendererDied from None
        if isinstance(found, Exception):
            raise found
        return found

    def _send(self, request: dict[str, Any] | None) -> None:
        text = MORE if request is None else json.dumps(request).encode()
        self._write(text)
        if len(text) > LARGE:
            del text
            trim_heap()

    def ask_all(self, requests: list[str], seconds: float) -> Iterator[Answer | Exception]:
        """What comes of each; behind one that is lost there is nothing."""
        *others, last = requests
        try:
            self._write(
                "".join(f'{request[:-1]}, "waits": true}}\n' for request in others).encode() + last.encode()
            )
            for _ in requests:
                yield self._found(time.monotonic() + seconds)
        except (RendererDied, OSError, ValueError):
            yield RendererDied()

    def _write(self, text: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text)
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def _found(self, deadline: float) -> Answer | Exception:
        answer, rests = self._answer(deadline)
        if "error" in answer:
            return TemplateError(f"the chat template refuses it: {answer['error']}")
        return RecordTooLarge(answer["much"]) if "much" in answer else (answer, rests)

    def _answer(self, deadline: float) -> Answer:
        answer = dict[str, Any]()
        while not answer or len(self.got) < answer["size"]:
            if not answer and (end := self.got.find(b"\n")) >= 0:
                answer = {"size": 0, **json.loads(self.got[:end])}
                del self.got[: end + 1]
            elif len(self.got) > LONGEST:
                raise RendererDied
            else:
                self._read(deadline)
        if len(self.got) == answer["size"]:
            rests, self.got = self.got, bytearray()
        else:
            rests = self.got[: answer["size"]]
            del self.got[: answer["size"]]
        return answer, memoryview(rests)

    def _read(self, deadline: float) -> None:
        assert self.process.stdout is not None
        pipe = self.process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise RendererDied
        if not (block := os.read(pipe, 1 << 20)):
            raise RendererDied
        self.got += block

    def kill(self) -> None:
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout, self.lifeline):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:  # what was left to write has no reader any more
                    continue
        self.process.wait()
