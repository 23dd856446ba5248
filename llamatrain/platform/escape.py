"""Texts of others on the terminal."""


def printable(text: str, encoding: str, keep: str = "") -> str:
    """A text from a file, without what would move the cursor or colour the terminal, in signs that the output has."""
    visible = "".join(sign if sign.isprintable() or sign in keep else ascii(sign)[1:-1] for sign in text)
    return visible.encode(encoding, "backslashreplace").decode(encoding)
