"""How long a chat template may take, agreed between the process that asks and the child that renders."""

START = 1.0  # seconds of the processor to compile a template and render a first small chat
LEAST = 0.5  # seconds for any conversation
BYTES = 20_000  # of a request, for another second
SQUARE = 15e-6  # seconds, times the square of the messages: each answer asks for a rendering of all before it


def seconds_for(request: bytes, most: float) -> float:
    """Allow a conversation the seconds that its length is worth: a hostile template is not to take long for a small one."""
    messages = request.count(b'"role"')
    return min(most, LEAST + len(request) / BYTES + SQUARE * messages**2)
