"""Text from files and users in a page or a picture: it is shown, and never read as markup."""

from html import escape

from llamatrain.platform.escape import printable


def marked(text: object, lines: bool = False) -> str:
    """Escaped, and without signs that XML forbids; `lines` and tabs stay where they are asked for."""
    return escape(printable(str(text), "utf-8", keep="\n\t" if lines else ""))
