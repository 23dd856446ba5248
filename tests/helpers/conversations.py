"""Conversations of all sorts, that templates are tried with."""

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather <there>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Oslo"}'},
}
CALLED: list[dict[str, object]] = [
    {"role": "user", "content": "Is it cold?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": '{"t": -3}', "tool_call_id": "call00001"},
    {"role": "assistant", "content": "It is."},
]
CHATS: dict[str, dict[str, object]] = {
    "plain": {
        "messages": [
            {"role": "user", "content": "say the word"},
            {"role": "assistant", "content": '"Chillax" is a word'},
        ]
    },
    "system": {
        "messages": [
            {"role": "system", "content": "You are the boss."},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "hello"},
        ]
    },
    "turns": {
        "messages": [
            {"role": "system", "content": "You are a b."},
            {"role": "user", "content": " hi "},
            {"role": "assistant", "content": "<think>\nx is\n</think>\n\nhello"},
            {"role": "user", "content": "and?"},
            {"role": "assistant", "content": '"yes"\n'},
            {"role": "user", "content": "the"},
            {"role": "assistant", "content": "end"},
        ]
    },
    "tools": {"tools": [TOOL], "messages": CALLED},
    "no system": {
        "messages": [
            {"role": "user", "content": "hi there"},
            {"role": "assistant", "content": "hello"},
            {"role": "user", "content": "what is a b"},
            {"role": "assistant", "content": "the a is"},
            {"role": "user", "content": "what is a b"},
            {"role": "assistant", "content": "end"},
        ]
    },
    "calls": {
        "tools": [TOOL],
        "messages": [
            *CALLED,
            {"role": "user", "content": "And now?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": '{"t": 7}', "tool_call_id": "call00001"},
            {"role": "assistant", "content": "Not any more."},
        ],
    },
    "lists": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "three"}, {"type": "text", "text": "four"}],
            },
        ]
    },
}


def answers_in(chat: dict[str, object]) -> list[int]:
    messages = chat["messages"]
    assert isinstance(messages, list)
    return [number for number, message in enumerate(messages) if message["role"] == "assistant"]
