"""The built-in chat templates, named as in llama.cpp."""

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# For new models, whose vocabulary has no token for ChatML's end mark: answers end with a real end token.
CHATML_WITH_EOS = CHATML.replace(
    "'<|im_end|>\n'", "(eos_token if message['role'] == 'assistant' else '<|im_end|>') + '\n'"
)


EACH = "{% for message in messages %}"
NEXT = "{% if add_generation_prompt %}"
# The system prompt is part of the first question.
GEMMA = (
    "{{ bos_token }}{% set said = namespace(before='') %}"
    + EACH
    + "{% if message.role == 'system' %}{% set said.before = said.before + message.content | trim %}{% else %}"
    "{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}"
    "{% if said.before and message.role != 'assistant' %}{{ said.before + '\n\n' }}{% set said.before "
    "= '' %}{% endif %}"
    "{{ message.content | trim + '<end_of_turn>\n' }}{% endif %}{% endfor %}"
    + NEXT
    + "{{ '<start_of_turn>model\n' }}{% endif %}"
)
GRANITE = (
    EACH
    + "{{ '<|start_of_role|>' + message.role + '<|end_of_role|>' + message.content + '<|end_of_text|>\n' }}{% endfor %}"
    + NEXT
    + "{{ '<|start_of_role|>assistant<|end_of_role|>' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}"
    + EACH
    + "{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}{% endfor %}"
    + NEXT
    + "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}"
    + EACH
    + "{% if message.role == 'system' %}{{ '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}"
    "{% elif message.role == 'assistant' %}{{ message.content + eos_token }}"
    "{% else %}{{ '[INST]' + message.content + '[/INST]' }}{% endif %}{% endfor %}"
)
OLMO2 = (
    "{{ bos_token }}"
    + EACH
    + "{{ '<|' + message.role + '|>\n' + message.content + (eos_token if message.role == 'assistant' else '') }}"
    "{{ '' if loop.last and message.role == 'assistant' else '\n' }}{% endfor %}"
    + NEXT
    + "{{ '<|assistant|>\n' }}{% endif %}"
)
PHI3 = (
    EACH
    + "{{ '<|' + message.role + '|>\n' + message.content + '<|end|>\n' }}{% endfor %}"
    + NEXT
    + "{{ '<|assistant|>\n' }}{% endif %}"
)
PHI4 = (
    EACH
    + "{{ '<|im_start|>' + message.role + '<|im_sep|>' + message.content + '<|im_end|>' }}{% endfor %}"
    + NEXT
    + "{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "gemma": GEMMA,
    "granite": GRANITE,
    "llama3": LLAMA3,
    "mistral-v7-tekken": MISTRAL,
    "olmo2": OLMO2,
    "phi3": PHI3,
    "phi4": PHI4,
    "phi4-mini": PHI3.replace("\n", ""),
}
# Other names of models with these templates.
ALIASES = {
    **dict.fromkeys(("qwen", "qwen2", "qwen2.5", "qwen3", "smollm2", "smollm3", "hermes"), "chatml"),
    **dict.fromkeys(("gemma2", "gemma3"), "gemma"),
    "granite3": "granite",
    **dict.fromkeys(("llama-3", "llama3.1", "llama3.2", "llama3.3"), "llama3"),
    **dict.fromkeys(("mistral", "mistral-small"), "mistral-v7-tekken"),
    **dict.fromkeys(("phi-3", "phi3.5"), "phi3"),
    "phi-4": "phi4",
}


def find_template(name: str) -> str | None:
    """Return the built-in template of this name, or None."""
    return TEMPLATES.get(ALIASES.get(name.lower(), name.lower()))
