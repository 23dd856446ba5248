"""Chat templates as models bring them along, each with the tokens that its vocabulary has for it, in the layout of each model."""

from collections.abc import Mapping
from dataclasses import dataclass

from llamatrain.data.chat.builtin import TEMPLATES
from llamatrain.data.tokenizer import Tokenizer, load
from llamatrain.gguf.constants import TokenType
from llamatrain.gguf.reader import Metadata
from llamatrain.gguf.values import Kind, Value, boolean, numbers, string, strings, u32

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ALTERNATE = (
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
    "{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}"
    "{% set system_message = false %}{% endif %}{% for message in loop_messages %}"
    + ALTERNATE
    + "{% if loop.index0 == 0 and system_message != false %}"
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim"
    " + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA32 = r"""
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- set ns = namespace(rest=messages, system="") %}
{%- if messages[0]["role"] == "system" %}
    {%- set ns.system = messages[0]["content"] | trim %}
    {%- set ns.rest = messages[1:] %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{%- if tools %}
    {{- "Environment: ipython\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\n\n" + ns.system + "<|eot_id|>" }}
{%- if tools %}
    {{- "<|start_header_id|>user<|end_header_id|>\n\nRespond with JSON for a function call.\n\n" }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) + "\n\n" }}
    {%- endfor %}
    {{- ns.rest[0]["content"] | trim + "<|eot_id|>" }}
    {%- set ns.rest = ns.rest[1:] %}
{%- endif %}
{%- for message in ns.rest %}
    {%- if "tool_calls" in message %}
        {%- set call = message.tool_calls[0].function %}
        {{- "<|start_header_id|>assistant<|end_header_id|>\n\n" }}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + "}<|eot_id|>" }}
    {%- elif message.role == "tool" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>" + message["role"] + "<|end_header_id|>\n\n" + message["content"] | trim + "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|start_header_id|>assistant<|end_header_id|>\n\n" }}
{%- endif %}
"""
ZEPHYR = (
    "{% for message in messages %}\n"
    "{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
MISTRAL01 = (
    "{{ bos_token }}{% for message in messages %}" + ALTERNATE + "{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token + ' ' }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
# System prompt and tools stand before the last message of the user; `NEMO` has no spaces where this one has.
MISTRAL03 = r"""
{%- set system = messages[0]["content"] if messages[0]["role"] == "system" else none %}
{%- set talk = messages if system is none else messages[1:] %}
{%- set asked = talk | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for message in talk %}
    {%- if not (message.role == "tool" or message.tool_calls is defined) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("After the optional system message, conversation roles must alternate") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in talk %}
    {%- if message["role"] == "user" %}
        {%- if tools and message == asked[-1] %}
            {{- "[AVAILABLE_TOOLS] " + (tools | tojson) + "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system is not none %}
            {{- "[INST] " + system + "\n\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for call in message.tool_calls %}
            {%- if not call.id is defined or call.id | length != 9 %}
                {{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}
            {%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + ("]" + eos_token if loop.last else ", ") }}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ", " }}
        {{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported") }}
    {%- endif %}
{%- endfor %}
"""
NEMO = MISTRAL03.replace('"[INST] "', '"[INST]"').replace(
    '" " + message["content"] | trim', 'message["content"]'
)
NEMO = (
    NEMO.replace("[AVAILABLE_TOOLS] ", "[AVAILABLE_TOOLS]")
    .replace("[TOOL_CALLS] ", "[TOOL_CALLS]")
    .replace("S] {", "S]{")
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    + ALTERNATE
    + "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
    "{% else %}{% set role = message['role'] %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)
SMOLLM = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN25 = r"""
{{- '<|im_start|>system\n' }}
{%- if messages[0]['role'] == 'system' %}
    {{- messages[0]['content'] }}
{%- else %}
    {{- 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}
{%- endif %}
{%- if tools %}
    {{- "\n\n# Tools\n\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>" }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or
           (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}
            {{- '\n' + message.content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '\n<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
# Only what follows the last question of the user keeps its thoughts, and has some, be they empty.
QWEN3 = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- "# Tools\n\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == "user" %}
        {%- set ns.last = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set thoughts = '' %}
        {%- if message.reasoning_content is string %}
            {%- set thoughts = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or thoughts) %}
            {{- '<|im_start|>' + message.role + '\n<think>\n' + thoughts.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if (loop.first and content) or (not loop.first) %}
                {{- '\n' }}
            {%- endif %}
            {{- '<tool_call>\n{"name": "' + tool_call.function.name + '", "arguments": ' }}
            {%- if tool_call.function.arguments is string %}
                {{- tool_call.function.arguments }}
            {%- else %}
                {{- tool_call.function.arguments | tojson }}
            {%- endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""
# The prompt opens a thought; an answer that was given loses its own; only the first call of all stands behind the mark.
R1_DISTILL = (
    "{% set ns = namespace(is_tool=false, called=false, system_prompt='') %}"
    "{%- for message in messages %}{%- if message['role'] == 'system' %}{% set ns.system_prompt = message['content'] %}"
    "{%- endif %}{%- endfor %}{{bos_token}}{{ns.system_prompt}}{%- for message in messages %}"
    "{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}{{'<｜User｜>' + message['content']}}{%- endif %}"
    "{%- if message['role'] == 'assistant' and message['tool_calls'] %}"
    "{%- for tool in message['tool_calls'] %}{{- '\\n' if ns.called else '<｜Assistant｜>' }}{%- set ns.called = true %}"
    "{{- '<｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>' + tool['function']['arguments'] }}"
    "{{- '<｜tool▁call▁end｜>' }}{%- endfor %}{{- '<｜end▁of▁sentence｜>' }}{%- endif %}"
    "{%- if message['role'] == 'assistant' and message['content'] is not none %}{% set content = message['content'] %}"
    "{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}"
    "{%- if ns.is_tool %}{{'<｜tool▁outputs▁end｜>' + content + '<｜end▁of▁sentence｜>'}}{%- set ns.is_tool = false -%}"
    "{%- else %}{{'<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>'}}{%- endif %}{%- endif %}"
    "{%- if message['role'] == 'tool' %}{%- set ns.is_tool = true -%}"
    "{{'<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>'}}{%- endif %}{%- endfor -%}"
    "{% if ns.is_tool %}{{'<｜tool▁outputs▁end｜>'}}{% endif %}"
    "{% if add_generation_prompt and not ns.is_tool %}{{'<｜Assistant｜><think>\\n'}}{% endif %}"
)


@dataclass(frozen=True)
class Layout:
    template: str | None
    bos: str
    eos: str
    marks: tuple[str, ...] = ()
    byte_level: bool = False
    add_bos: bool = True
    name: str = "model"
    merges: tuple[tuple[str, str], ...] = (("]", '"'), ("Ġ", "a"), ("i", "s"))

    def vocabulary(self) -> dict[str, Value]:
        """Bytes, a few words with a space, and the marks as control tokens."""
        controls = list(dict.fromkeys([self.bos, self.eos, *self.marks]))
        return self._bytes(controls) if self.byte_level else self._pieces(controls)

    def _pieces(self, controls: list[str]) -> dict[str, Value]:
        words = ["▁", "▁a", "▁the", ']"', "[/", "is", "▁is"]
        tokens = ["<unk>", *controls, *(f"<0x{i:02X}>" for i in range(256)), *words]
        kinds = [
            TokenType.UNKNOWN,
            *[TokenType.CONTROL] * len(controls),
            *[TokenType.BYTE] * 256,
            *[TokenType.NORMAL] * len(words),
        ]
        letters = [chr(i) for i in range(33, 127) if chr(i) not in tokens]
        tokens, kinds = tokens + letters, kinds + [TokenType.NORMAL] * len(letters)
        scores = [0.0] * (len(tokens) - len(letters)) + [-9.0] * len(letters)
        return self._told("llama", tokens, kinds) | {"tokenizer.ggml.scores": numbers(Kind.FLOAT32, scores)}

    def _bytes(self, controls: list[str]) -> dict[str, Value]:
        from llamatrain.data.tokenizer.bpe_tables import ALPHABET

        merges = self.merges
        tokens = [*ALPHABET, *("".join(pair) for pair in merges), *controls]
        kinds = [TokenType.NORMAL] * (len(tokens) - len(controls)) + [TokenType.CONTROL] * len(controls)
        more = {
            "tokenizer.ggml.pre": string("llama-bpe"),
            "tokenizer.ggml.merges": strings(map(" ".join, merges)),
        }
        return self._told("gpt2", tokens, kinds) | more

    def _told(self, model: str, tokens: list[str], kinds: list[TokenType]) -> dict[str, Value]:
        return {
            "general.name": string(self.name),
            "tokenizer.ggml.model": string(model),
            "tokenizer.ggml.tokens": strings(tokens),
            "tokenizer.ggml.token_type": numbers(Kind.INT32, kinds),
            "tokenizer.ggml.bos_token_id": u32(tokens.index(self.bos)),
            "tokenizer.ggml.eos_token_id": u32(tokens.index(self.eos)),
            "tokenizer.ggml.add_bos_token": boolean(self.add_bos),
            **({} if self.template is None else {"tokenizer.chat_template": string(self.template)}),
        }

    def tokenizer(self) -> Tokenizer:
        return load(dict(Metadata(self.vocabulary())))


HEADERS = ("<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>", "<|eom_id|>")
INSTRUCTIONS = (
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)
DEEP = (
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁output▁begin｜>",
)
ROLES = ("<|start_of_role|>", "<|end_of_role|>")
PHI = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
IM = ("<|im_start|>", "<|endoftext|>")

LAYOUTS: Mapping[str, Layout] = {
    "llama 2": Layout(LLAMA2, "<s>", "</s>"),
    "llama 3": Layout(LLAMA3, "<|begin_of_text|>", "<|eot_id|>", HEADERS, byte_level=True),
    "llama 3.2": Layout(LLAMA32, "<|begin_of_text|>", "<|eot_id|>", HEADERS, byte_level=True),
    "chatml": Layout(CHATML, "<s>", "<|im_end|>", ("<|im_start|>", "</s>")),
    "zephyr": Layout(ZEPHYR, "<s>", "</s>"),
    "mistral v0.1": Layout(MISTRAL01, "<s>", "</s>"),
    "mistral v0.3": Layout(MISTRAL03, "<s>", "</s>", INSTRUCTIONS),
    "nemo": Layout(NEMO, "<s>", "</s>", INSTRUCTIONS, byte_level=True),
    "gemma": Layout(GEMMA, "<bos>", "<eos>", ("<start_of_turn>", "<end_of_turn>")),
    "smollm": Layout(
        SMOLLM, "<|im_start|>", "<|im_end|>", ("<|endoftext|>",), byte_level=True, add_bos=False
    ),
    "qwen 2.5": Layout(
        QWEN25, "<|endoftext|>", "<|im_end|>", ("<|im_start|>",), byte_level=True, add_bos=False
    ),
    "qwen 3": Layout(QWEN3, "<|endoftext|>", "<|im_end|>", ("<|im_start|>",), byte_level=True, add_bos=False),
    "r1 distill": Layout(
        R1_DISTILL, "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", DEEP, byte_level=True
    ),
    "gemma 3": Layout(TEMPLATES["gemma"], "<bos>", "<eos>", ("<start_of_turn>", "<end_of_turn>")),
    "granite": Layout(
        TEMPLATES["granite"], "<|end_of_text|>", "<|end_of_text|>", ROLES, byte_level=True, add_bos=False
    ),
    "olmo 2": Layout(
        TEMPLATES["olmo2"], "<|endoftext|>", "<|endoftext|>", (), byte_level=True, add_bos=False
    ),
    "phi 3": Layout(TEMPLATES["phi3"], "<s>", "<|endoftext|>", (*PHI, "</s>"), name="Phi-3"),
    "phi 4": Layout(TEMPLATES["phi4"], "<|endoftext|>", "<|im_end|>", (*IM, "<|im_sep|>"), byte_level=True),
    "phi 4 mini": Layout(
        TEMPLATES["phi4-mini"], "<|endoftext|>", "<|endoftext|>", PHI, byte_level=True, add_bos=False
    ),
    "none": Layout(None, "<s>", "</s>"),
}
