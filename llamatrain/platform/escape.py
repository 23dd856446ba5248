"""Escaping of untrusted text for the terminal."""


def make_printable(text: str, encoding: str, keep: str = "") -> str:
    """Escape characters of a text that would move the cursor, set colors, or cannot be encoded."""
    visible = "".join(
        character if character.isprintable() or character in keep else ascii(character)[1:-1]
        for character in text
    )
    return visible.encode(encoding, "backslashreplace").decode(encoding)
