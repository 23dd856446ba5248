"""Renders chat templates: the child process that `template.py` starts.

A template comes with a model file and may be hostile. The sandbox prevents attribute access, but neither
endless loops nor 'a' * 10**10: this process has a memory limit and a timer that ends it. A request is a JSON
object in one line; an answer is another, followed by the bytes that it announces. It imports only
`jinja_template`, `limits`, `server_messages` and `platform.child_limits`, which are small.
"""

import json
import os
import re
import sys
from typing import Any, AnyStr

import jinja2

from llamatrain.data.chat.jinja_template import EMPTY_REASONING, PROBE, JinjaTemplate
from llamatrain.data.chat.limits import LAST, PROMPT, START_SECONDS, TURNS, WHOLE, time_limit
from llamatrain.data.chat.server_messages import message_text
from llamatrain.platform.child_limits import exit_with_parent, limit_memory, set_timer

MORE = b"more\n"  # requests the rest of a chat
MAX_ANSWER_BYTES = 1 << 20  # bytes after which renderings wait for the next request
MAX_TOTAL_BYTES = 2 * 10**9  # bytes of all renderings of one chat
MAX_RENDERING_BYTES = 8 * 10**6  # bytes of one rendering, in addition to twice those of the request
REASONING = "reasoning_content"
SETTINGS = ("template", "values", "ends", "keep_reasoning", "day", "think")  # of a JinjaTemplate
HELLO = {"role": "user", "content": "hi"}
MARK = PROBE + os.urandom(8).hex()  # no data contains it
# The mark of a message, and the empty reasoning that some templates put before the text of old answers.
MARKS = re.compile(rf"(?:<([a-z_:]*think[a-z_:]*)>\s*</\1>\s*)?(?P<mark>{MARK}q[0-9]+q)")


class RenderTooLong(Exception):
    """The renderings have more bytes than allowed."""


class Conversation:
    """Renders the prompts that a server would send before each answer of a chat, and the answers."""

    def __init__(self, template: JinjaTemplate, request: dict[str, Any], size: int) -> None:
        self.template = template
        self.tools = request.get("tools")
        self.mode = request["mode"]
        self.notes = set[str]()
        untrained = [message.pop("untrained", False) for message in request["messages"]]
        self.messages = self.adapt_messages(request["messages"])
        flagged_messages = zip(self.messages, untrained[-len(self.messages) :], strict=True)
        turns = [
            number
            for number, (message, is_untrained) in enumerate(flagged_messages)
            if message["role"] == "assistant" and not is_untrained
        ]
        turns = turns[-1:] if self.mode == LAST else turns
        self.per_answer = self.mode in (TURNS, LAST)
        self.turns_left = turns[::-1] if self.per_answer else [len(self.messages)]
        self.max_bytes = MAX_RENDERING_BYTES + 2 * size
        self.bytes_left = MAX_TOTAL_BYTES
        self.prompt = b""
        self.prompt_and_answer = b""  # the previous prompt, alone and with its answer if that has an end

    def adapt_messages(self, messages: list[Any]) -> list[Any]:
        """Rewrite messages into what the template accepts."""
        if any("tool_calls" in message for message in messages):
            messages = [self.adapt_calls(message) for message in messages]
        if messages[0]["role"] == "system" and not self.template.accepts_system:
            self.notes.add("system")
            first, *messages = messages
            if messages and messages[0]["role"] != "assistant":
                messages[0] = {
                    **messages[0],
                    "content": f"{message_text(first)}\n{message_text(messages[0])}",
                }
        if self.template.keep_reasoning:
            return [split_reasoning(message) for message in messages]
        if not self.template.renders_reasoning and any(REASONING in message for message in messages):
            self.notes.add("unthought")
        return messages

    def adapt_calls(self, message: dict[str, Any]) -> dict[str, Any]:
        """Rewrite the tool calls of a message into the form that the template accepts."""
        written_text = message.get("written")
        if "tool_calls" not in message:
            return message
        message = {key: value for key, value in message.items() if key != "written"}
        if not self.template.accepts_calls:
            if written_text is None:
                self.notes.add("calls")
                return message
            return {"role": message["role"], "content": written_text}
        calls = [
            {**call, "function": self.adapt_function(call["function"])} for call in message["tool_calls"]
        ]
        return {**message, "content": message["content"] if written_text is None else "", "tool_calls": calls}

    def adapt_function(self, function: dict[str, Any]) -> dict[str, Any]:
        """Convert the arguments of a call to an object or to JSON."""
        arguments = function["arguments"]
        if self.template.accepts_objects and isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                raise jinja2.TemplateError("the arguments of a tool call are not JSON") from None
        elif not self.template.accepts_objects and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
        return {**function, "arguments": arguments}

    def render_turns(self) -> tuple[list[list[int]], list[bytes]]:
        """Render the next turns, up to MAX_ANSWER_BYTES; return a description and the bytes of each.

        A description has the number of bytes that the prompt shares with the previous one, the number that
        follow, the bytes of the answer, whether the prompt continues the previous turn, and whether the
        answer has an end.
        """
        turns = list[list[int]]()
        blobs = list[bytes]()
        size = 0
        while self.turns_left and size < MAX_ANSWER_BYTES:
            index = self.turns_left.pop()
            if self.per_answer and index == 0:
                text = self.render_opening()
            else:
                text = self.render(self.messages[:index], self.mode != WHOLE)
            answer, has_end = self.render_answer(text, index) if self.per_answer else ("", False)
            prompt = to_bytes(text)
            answer_bytes = to_bytes(answer)
            shared = common_prefix(self.prompt, prompt)
            is_continuation = bool(self.prompt_and_answer) and prompt.startswith(self.prompt_and_answer)
            turns.append([shared, len(prompt) - shared, len(answer_bytes), is_continuation, has_end])
            blobs += prompt[shared:], answer_bytes
            size += len(blobs[-2]) + len(answer_bytes)
            if self.mode == PROMPT and self.template.server_extracts_reasoning:
                self.notes.add("thinks")
            self.prompt = prompt
            self.prompt_and_answer = prompt + answer_bytes if has_end and self.turns_left else b""
        return turns, blobs

    def render(self, messages: list[Any], answer_next: bool = False) -> str:
        """Render messages; raise RenderTooLong beyond the limits."""
        if self.template.keep_reasoning:
            text = self.render_with_reasoning(messages, answer_next)
        else:
            text = self.template.render_chat(messages, self.tools, answer_next)
        self.bytes_left -= len(text)
        if len(text) > self.max_bytes or self.bytes_left < 0:
            raise RenderTooLong
        return text

    def render_with_reasoning(self, messages: list[Any], answer_next: bool) -> str:
        """Render messages with the reasoning of older turns, which templates drop, inserted afterwards."""
        if self.template.keeps_old_reasoning:
            return self.template.render_chat(messages, self.tools, answer_next)
        count = len(messages) if answer_next or not self.template.has_reasoning_mark else len(messages) - 1
        text = self.insert_reasoning(messages, count, answer_next)
        last = messages[-1].get(REASONING) if messages else None
        if self.mode == WHOLE and last and last not in text:
            return self.insert_reasoning(messages, len(messages), False)
        return text

    def insert_reasoning(self, messages: list[Any], count: int, answer_next: bool) -> str:
        """Render messages with the reasoning of the first `count` of them."""
        texts = dict[str, str]()
        shown_messages = list[Any]()
        for index, message in enumerate(messages):
            if index < count and REASONING in message:
                mark = f"{MARK}q{index}q"
                opening, end = self.template.reasoning_marks
                texts[mark] = opening + message[REASONING] + end + message_text(message)
                message = {key: value for key, value in message.items() if key != REASONING}
                message["content"] = mark
            shown_messages.append(message)
        text = self.template.render_chat(shown_messages, self.tools, answer_next)
        return MARKS.sub(lambda mark: texts.get(mark["mark"], mark[0]), text) if texts else text

    def render_answer(self, prompt: str, index: int) -> tuple[str, bool]:
        """Return an answer as the model should give it after a prompt, and whether it has an end."""
        message = self.messages[index]
        content = message_text(message)
        if "calls" in self.notes and not content and "tool_calls" in message:
            return "", True
        try:
            answer = self.extract_answer(self.messages[: index + 1], prompt)
        except (jinja2.TemplateError, TypeError) as error:  # for example turns in an unexpected order
            try:
                answer = self.extract_answer([HELLO, message], self.render([HELLO], True))
            except Exception:
                raise error from None
        return self.template.cut_at_end(answer, content, calls="tool_calls" in message)

    def extract_answer(self, messages: list[Any], prompt: str) -> str:
        """Return the last message as the template writes it after the prompt.

        If the template writes an old answer differently from a new one, compose it of its reasoning, its
        text, and what the template puts around text.
        """
        message = messages[-1]
        rendering = self.render(messages)
        reasoning = ""
        if self.template.renders_reasoning or self.template.keep_reasoning:
            reasoning = message.get(REASONING, "")
        reasoning_text = reasoning or message_text(message).rpartition("</think>")[0].removeprefix("<think>")
        if not rendering.startswith(prompt) or reasoning_text.strip() not in rendering[len(prompt) :]:
            return self.compose_answer(prompt, messages, rendering, reasoning)
        answer = rendering[len(prompt) :]
        opened = self.template.find_opened_reasoning(prompt, len(prompt))
        return self.reasoning_before(opened, "", answer) + answer

    def compose_answer(self, prompt: str, messages: list[Any], rendering: str, reasoning: str) -> str:
        """Compose an answer of its reasoning, its text, and what the template puts around text."""
        *earlier, message = messages
        shared = common_prefix(prompt, rendering)
        if closed := EMPTY_REASONING.search(prompt[-64:]):
            begin = len(prompt) - len(closed[0])
            if shared >= begin:
                return rendering[begin:]  # after empty reasoning that the prompt has but old answers lack
        has_calls = "tool_calls" in message
        probe = {"role": message["role"], "content": PROBE}
        head, mark, tail = self.render([*earlier, probe]).rpartition(PROBE)
        base = head.rstrip()
        if has_calls and not rendering.startswith(base):  # some templates put tool calls elsewhere than text
            head = base = self.render(earlier)
        if not mark or (has_calls and not rendering.startswith(base)):
            raise jinja2.TemplateError("its answers cannot be separated from its prompts")
        opened = self.template.find_opened_reasoning(prompt, shared)
        space = "" if prompt[-1:].isspace() or opened else head[len(base) :]
        if has_calls and opened and rendering.startswith(prompt[: -len(opened)]):
            text = rendering[len(prompt) - len(opened) :]
        elif has_calls:
            text = rendering[len(base) :]
            if not space:
                text = text.removeprefix(head[len(base) :])
        else:
            text = message_text(message)
            rendered_text = ""
            if rendering.startswith(head) and rendering.endswith(tail):
                rendered_text = rendering[len(head) : len(rendering) - len(tail)]
            if not reasoning and rendered_text.strip() == text.strip():
                text = rendered_text
            text += tail
        if opened and text.lstrip().startswith(opened.strip()):  # reasoning inside the content
            text = text.lstrip()[len(opened.strip()) :].lstrip("\n" if opened[-1:].isspace() else "")
        return space + self.reasoning_before(opened, reasoning, text) + text

    def reasoning_before(self, opened: str, reasoning: str, text: str) -> str:
        """Return the reasoning before an answer's content, or the end of reasoning that the prompt opened."""
        if reasoning:
            opening, end = (
                ("", self.template.end_reasoning(opened)) if opened else self.template.reasoning_marks
            )
            return opening + reasoning + end
        if not opened or self.template.end_reasoning(opened).strip() in text:
            return ""
        self.notes.add("thoughts")
        return self.template.end_empty_reasoning(opened)

    def render_opening(self) -> str:
        """Render what precedes the text of a first message."""
        try:
            return self.render([], True)
        except Exception:  # templates reject a chat without messages
            return self.render([{"role": "assistant", "content": PROBE}]).partition(PROBE)[0]


def split_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its reasoning in a separate field, if it has any."""
    text = message_text(message)
    opening, end, content = text.rpartition("</think>")
    reasoning = message.get(REASONING, "") or opening.lstrip().removeprefix("<think>")
    if message["role"] != "assistant" or not reasoning.strip():
        return message
    return {**message, REASONING: reasoning.strip("\n"), "content": content.lstrip("\n") if end else text}


def common_prefix(a: AnyStr, b: AnyStr) -> int:
    """Return the length of the common prefix of two texts."""
    if b.startswith(a):
        return len(a)
    low = 0
    high = min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def to_bytes(text: str) -> bytes:
    """Encode text as the tokenizer does."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


class RenderServer:
    """Answers the requests of the parent."""

    def __init__(self, memory: int, seconds: float) -> None:
        self.memory = memory
        self.seconds = seconds
        self.seconds_left = seconds
        self.template: JinjaTemplate | None = None
        self.chat: Conversation | None = None

    def serve(self, line: bytes) -> bool:
        """Answer one request; return False at the end of the input."""
        if not line:
            return False
        if line == MORE:
            seconds = self.seconds_left
        elif self.template is None:
            seconds = min(START_SECONDS, self.seconds)
        else:
            seconds = time_limit(line, self.seconds)
        set_timer(seconds)
        request = None
        texts = list[bytes]()
        size = len(line)
        is_followed = False
        try:
            if line != MORE:
                self.chat = None
                request = json.loads(line)
                is_followed = "is_followed" in request
            del line  # it is as large as its renderings
            answer, texts = self.answer(request, size)
        except Exception as error:
            answer = self.describe_error(error)
        self.seconds_left = set_timer(0)
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.writelines(texts)
        if not is_followed:  # otherwise the answer to the next request flushes both
            sys.stdout.buffer.flush()
        return True

    def answer(self, request: dict[str, Any] | None, size: int) -> tuple[dict[str, Any], list[bytes]]:
        """Compile a template, or render the next turns of a chat."""
        if request:
            if "template" in request:
                limit_memory(self.memory)  # before compiling, which folds constants
                template = JinjaTemplate(*(request[key] for key in SETTINGS))
                if request["new"]:
                    self.try_small_chat(template)
                self.template = template
                return {"has_switch": request["think"] is not None and template.has_thinking_switch}, []
            assert self.template is not None
            self.chat = Conversation(self.template, request, size)
        assert self.chat is not None
        turns, blobs = self.chat.render_turns()
        answer = {
            "turns": turns,
            "size": sum(map(len, blobs)),
            "more": bool(self.chat.turns_left),
            "notes": sorted(self.chat.notes),
        }
        self.chat = self.chat if answer["more"] else None  # free its memory for the tokenization
        return answer, blobs

    def try_small_chat(self, template: JinjaTemplate) -> None:
        """Render a small chat, so that a template that never ends is detected at once."""
        try:
            template.render([HELLO, {"role": "assistant", "content": "hi"}])
        except MemoryError:
            raise
        except Exception:  # it may expect another chat
            return

    def describe_error(self, error: Exception) -> dict[str, Any]:
        """Return the answer that reports an error of the template to the parent."""
        self.chat = None
        if isinstance(error, MemoryError | RenderTooLong):
            return {"too_large": "too much memory" if isinstance(error, MemoryError) else "too much text"}
        if isinstance(error, RecursionError):
            return {"error": "it nests too deeply"}
        return {"error": (" ".join(str(error).split()) or type(error).__name__)[:300]}


def main(memory: str, seconds: str, *pipes: str) -> None:
    """Serve requests from standard input until it ends."""
    for pipe in pipes:
        exit_with_parent(int(pipe))
    server = RenderServer(int(memory), float(seconds))
    while server.serve(sys.stdin.buffer.readline()):
        pass
