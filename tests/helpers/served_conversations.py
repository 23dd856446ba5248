"""Conversations that every chat template is tried with: what people have in their files, and what templates stumble over."""

from typing import Any

Message = dict[str, Any]
Row = dict[str, Any]

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Say what the weather <is> & will be",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "a city's name"},
                "days": {"type": "integer"},
            },
            "required": ["city"],
        },
    },
}
CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "description": "Tell the time",
        "parameters": {"type": "object", "properties": {}},
    },
}
LONG = "\n\n".join(
    f"Paragraph {number} says that {number} times 2 is {2 * number}." for number in range(1, 25)
)
CODE = "```python\ndef f(x: dict[str, int]) -> None:\n\tprint(f\"{x['a']!r}\", '\\n')\n```"


def user(content: Any, **more: Any) -> Message:
    return {"role": "user", "content": content, **more}


def system(content: Any, **more: Any) -> Message:
    return {"role": "system", "content": content, **more}


def says(content: Any, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


def calls(*named: tuple[str, Any], content: Any = None, **more: Any) -> Message:
    made = [
        {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(named, 1)
    ]
    return {"role": "assistant", "content": content, "tool_calls": made, **more}


def result(content: Any, number: int = 1, **more: Any) -> Message:
    return {"role": "tool", "content": content, "tool_call_id": f"call{number:05}", **more}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


OSLO = ("get_weather", '{"city": "Oslo"}')
CONVERSATIONS: dict[str, Row] = {
    # ---- plain ----
    "one turn": {"messages": [user("say the word"), says("the word")]},
    "two turns": {"messages": [user("hi"), says("hello"), user("and now?"), says("bye")]},
    "four turns": {
        "messages": [each for n in range(4) for each in (user(f"question {n}"), says(f"answer {n}"))]
    },
    "long": {"messages": [user(LONG), says(LONG), user("again"), says("no")]},
    "code": {"messages": [user("write f"), says(CODE), user("and g"), says(CODE.replace("f", "g"))]},
    "signs of HTML": {
        "messages": [
            user("is <b>a</b> & \"b\" > 'c'?"),
            says("<i>yes</i> & no's"),
            user("why &amp; so?"),
            says("&lt;"),
        ]
    },
    "braces": {
        "messages": [
            user("{{ messages }} {% raw %} {# no #}"),
            says("{{ x }}"),
            user("\\n \\\\ \\u0041"),
            says("\\t{}"),
        ]
    },
    "other scripts": {
        "messages": [
            user("¿Qué? 日本語 مرحبا 🧑‍🚀"),
            says("Grüße, 世界 🚀"),
            user("e\u0301 \u200d \ufeff"),
            says("ok"),
        ]
    },
    "space around": {
        "messages": [user("  hi \n"), says("\n hello  "), user("\n\nand?\n\n"), says(" yes\n\n")]
    },
    "lines": {"messages": [user("a\r\nb\n\n\nc\td"), says("1\n2\n\n3"), user("\tx"), says("\ty\n")]},
    "numbers": {"messages": [user("12 * 12?"), says("144"), user("-1e-5"), says("0.00001")]},
    "empty answer": {"messages": [user("say nothing"), says(""), user("and?"), says("that")]},
    "empty question": {"messages": [user(""), says("what?"), user("oh"), says("ah")]},
    "same words": {"messages": [user("a"), says("a"), user("a"), says("a"), user("a"), says("a")]},
    "quotes": {"messages": [user('"'), says("''"), user("`x`"), says('"""')]},
    # ---- system prompts ----
    "system": {"messages": [system("You are the boss."), user("hi"), says("hello")]},
    "system, turns": {
        "messages": [system("Be brief."), user("hi"), says("hello"), user("and?"), says("end")]
    },
    "system, lines": {
        "messages": [
            system("One.\n\nTwo: <x> & 'y'.\n"),
            user("hi"),
            says("hello"),
            user("and?"),
            says("end"),
        ]
    },
    "empty system": {"messages": [system(""), user("hi"), says("hello")]},
    "system of spaces": {"messages": [system("  \n"), user("hi"), says("hello"), user("x"), says("y")]},
    "developer": {
        "messages": [
            {"role": "developer", "content": "Be brief."},
            user("hi"),
            says("hello"),
            user("x"),
            says("y"),
        ]
    },
    "two systems": {"messages": [system("One."), system("Two."), user("hi"), says("hello")]},
    "system later": {"messages": [user("hi"), says("hello"), system("Be rude."), user("hm"), says("grr")]},
    "system only": {"messages": [system("Greet."), says("hello")]},
    # ---- who speaks when ----
    "two questions": {"messages": [user("hi"), user("there"), says("hello")]},
    "assistant first": {"messages": [says("Welcome!"), user("hi"), says("hello")]},
    "names": {
        "messages": [user("hi", name="Ada"), says("hello", name="bot"), user("x", name="Ada"), says("y")]
    },
    # ---- thoughts ----
    "thoughts inside": {
        "messages": [
            user("2+2?"),
            says("<think>\nI add.\n</think>\n\n4"),
            user("3+3?"),
            says("<think>\nAgain.\n</think>\n\n6"),
        ]
    },
    "thoughts beside": {
        "messages": [
            user("2+2?"),
            says("4", reasoning_content="I add."),
            user("3+3?"),
            says("6", reasoning_content="Again."),
        ]
    },
    "thoughts at the end": {
        "messages": [user("2+2?"), says("4"), user("3+3?"), says("6", reasoning_content="Hm.\n\nSix.")]
    },
    "thoughts at the beginning": {
        "messages": [
            user("2+2?"),
            says("4", reasoning_content="Hm."),
            user("3+3?"),
            says("6"),
            user("x"),
            says("y"),
        ]
    },
    "empty thoughts": {
        "messages": [
            user("2+2?"),
            says("<think>\n\n</think>\n\n4"),
            user("3+3?"),
            says("<think>\n\n</think>\n\n6"),
        ]
    },
    "empty thoughts, four turns": {
        "messages": [each for n in range(4) for each in (user(f"{n}?"), says(f"<think>\n\n</think>\n\n{n}!"))]
    },
    "thoughts, system": {
        "messages": [
            system("Think."),
            user("2+2?"),
            says("4", reasoning_content="I add."),
            user("x"),
            says("y"),
        ]
    },
    "half a thought": {"messages": [user("2+2?"), says("I add.\n</think>\n\n4"), user("x"), says("y")]},
    # ---- tools ----
    "tools, none called": {"tools": [WEATHER], "messages": [user("hi"), says("hello"), user("x"), says("y")]},
    "tools, system": {"tools": [WEATHER], "messages": [system("Be brief."), user("hi"), says("hello")]},
    "a call": {
        "tools": [WEATHER],
        "messages": [user("Cold?"), calls(OSLO), result('{"t": -3}'), says("Yes.")],
    },
    "a call, empty words": {
        "tools": [WEATHER],
        "messages": [user("Cold?"), calls(OSLO, content=""), result('{"t": -3}'), says("Yes.")],
    },
    "a call, objects": {
        "tools": [WEATHER],
        "messages": [
            user("Cold?"),
            calls(("get_weather", {"city": "Oslo", "days": 2})),
            result("-3"),
            says("Yes."),
        ],
    },
    "a call with words": {
        "tools": [WEATHER],
        "messages": [user("Cold?"), calls(OSLO, content="I look."), result("-3"), says("Yes.")],
    },
    "a call with thoughts": {
        "tools": [WEATHER],
        "messages": [
            user("Cold?"),
            calls(OSLO, reasoning_content="I ask."),
            result("-3"),
            says("Yes.", reasoning_content="Minus."),
        ],
    },
    "two calls at once": {
        "tools": [WEATHER, CLOCK],
        "messages": [
            user("Cold?"),
            calls(OSLO, ("clock", "{}")),
            result("-3"),
            result("12:00", 2),
            says("Yes."),
        ],
    },
    "call after call": {
        "tools": [WEATHER, CLOCK],
        "messages": [
            user("Cold?"),
            calls(OSLO),
            result("-3"),
            calls(("clock", "{}")),
            result("12:00"),
            says("Yes."),
        ],
    },
    "calls, turns, system": {
        "tools": [WEATHER],
        "messages": [
            system("Be brief."),
            user("Cold?"),
            calls(OSLO),
            result("-3"),
            says("Yes."),
            user("Now?"),
            calls(OSLO),
            result("7"),
            says("No."),
        ],
    },
    "result with a name": {
        "tools": [CLOCK],
        "messages": [
            user("Time?"),
            calls(("clock", "{}")),
            result("noon", name="clock"),
            says("It is noon."),
        ],
    },
    "arguments in Unicode": {
        "tools": [WEATHER],
        "messages": [
            user("?"),
            calls(("get_weather", '{"city": "Zürich <&> \\"x\\"", "days": 1.5}')),
            result("7"),
            says("Mild."),
        ],
    },
    "calls without tools": {
        "messages": [user("Cold?"), calls(OSLO), result('{"t": -3}'), says("Yes."), user("x"), says("y")]
    },
    # ---- parts ----
    "parts": {"messages": [user(parts("one", "two")), says(parts("three", "four")), user("x"), says("y")]},
    "parts of a system": {
        "messages": [
            system(parts("Be", "brief.")),
            user("hi"),
            says("hello"),
            user(parts("a", "b", "c")),
            says("d"),
        ]
    },
    "one part": {"messages": [user(parts("only")), says("one"), user(parts(" two ")), says(parts("three"))]},
}


def answers_in(row: Row) -> list[int]:
    return [number for number, message in enumerate(row["messages"]) if message["role"] == "assistant"]
