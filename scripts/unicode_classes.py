"""Writes llamatrain/data/tokenizer/unicode_classes.py's table from the Unicode version that llama.cpp has.

python scripts/unicode_classes.py        prints the lines of RUNS; Python 3.13 has that version, 15.1,
                                         and so has the package unicodedata2==15.1.0 (it is taken where it is)
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

SPACES = {*range(0x09, 0x0E), 0x85}  # what is called space beside the separators


def kind(unicode: object, code: int) -> str:
    letter = unicode.category(chr(code))[0]  # type: ignore[attr-defined]
    return "Z" if code in SPACES else letter if letter in KINDS else KINDS[0]


def main() -> None:
    unicode = import_module("unicodedata2" if find_spec("unicodedata2") else "unicodedata")
    if unicode.unidata_version != VERSION:
        sys.exit(f"this Python knows Unicode {unicode.unidata_version}; {VERSION} is needed")
    runs = groupby(kind(unicode, code) for code in range(CODE_POINTS))
    text = "".join(f"{letter}{len(list(run)):x}" for letter, run in runs)
    packed = base64.b85encode(zlib.compress(text.encode(), 9)).decode()
    for line in textwrap.wrap(packed, 120, break_on_hyphens=False):
        print(f'    "{line}"')


if __name__ == "__main__":
    main()
