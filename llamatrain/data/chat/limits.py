"""The render modes and time limits that the parent and the child process agree on."""

# What to render of a chat:
TURNS = "turns"  # each answer and its prompt
LAST = "last"  # the last answer and its prompt
WHOLE = "whole"  # the whole chat
PROMPT = "prompt"  # the prompt for the next answer

START_SECONDS = 1.0  # CPU seconds to compile a template and render a first small chat
MIN_SECONDS = 0.5  # for any conversation
BYTES_PER_SECOND = 20_000  # bytes of a request per further second
# times the square of the message count: each answer renders all messages before it
SECONDS_PER_SQUARE = 15e-6


def time_limit(request: bytes, max_seconds: float) -> float:
    """Return the seconds allowed for a request, by its length.

    A hostile template must not be slow on a short chat.
    """
    messages = request.count(b'"role"')
    return min(max_seconds, MIN_SECONDS + len(request) / BYTES_PER_SECOND + SECONDS_PER_SQUARE * messages**2)
