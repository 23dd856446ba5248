"""The chat template of models that have none: ChatML's, as llama-server falls back to it."""

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# For new models, to whose vocabulary ChatML's end mark is mere text: an answer ends with a token that a model can stop at.
CHATML_WITH_EOS = CHATML.replace(
    "'<|im_end|>\n'", "(eos_token if message['role'] == 'assistant' else '<|im_end|>') + '\n'"
)
