"""Writes llamatrain/data/tokenizer/unicode_classes.py's table from llama.cpp's version of Unicode.

python scripts/unicode_classes.py        prints the lines of RUNS

Python 3.13 has that version, 15.1, and so has the package unicodedata2==15.1.0, which is used if installed.
"""

import base64
import sys
import textwrap
import zlib
from importlib import import_module
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from llamatrain.data.tokenizer.unicode_classes import CODE_POINTS, KINDS, VERSION

SPACES = {*range(0x09, 0x0E), 0x85}  # control characters that count as spaces


def classify(unicode: object, code: int) -> str:
    """Return the class of a code point."""
    letter = unicode.category(chr(code))[0]  # type: ignore[attr-defined]
    return "Z" if code in SPACES else letter if letter in KINDS else KINDS[0]


def main() -> None:
    """Print the lines of RUNS."""
    unicode = import_module("unicodedata2" if find_spec("unicodedata2") else "unicodedata")
    if unicode.unidata_version != VERSION:
        sys.exit(
            f"error: Unicode {VERSION} is needed (got {unicode.unidata_version}); "
            f"pip install unicodedata2=={VERSION}"
        )
    runs = groupby(classify(unicode, code) for code in range(CODE_POINTS))
    text = "".join(f"{letter}{len(list(run)):x}" for letter, run in runs)
    packed = base64.b85encode(zlib.compress(text.encode(), 9)).decode()
    for line in textwrap.wrap(packed, 120, break_on_hyphens=False):
        print(f'    "{line}"')


if __name__ == "__main__":
    main()
