"""Texts of others on the terminal."""


def make_printable(text: str, encoding: str, keep: str = "") -> str:
    """A text from a file, without what would move the cursor or colour the terminal, in signs that the output has."""
    visible = "".join(
        character if character.isprintable() or character in keep else ascii(character)[1:-1]
        for character in text
    )
    return visible.encode(encoding, "backslashreplace").decode(encoding)
