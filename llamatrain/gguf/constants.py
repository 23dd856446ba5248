"""Constants of GGUF and ggml's types, from the `gguf` package.

Only its module of constants is loaded: `import gguf` also loads its reader, its writer and YAML, which takes
five times the time and memory.
"""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING


def _load_constants() -> ModuleType:
    package = importlib.util.find_spec("gguf")
    assert package and package.origin
    spec = importlib.util.spec_from_file_location(
        "gguf.constants", Path(package.origin).with_name("constants.py")
    )
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if TYPE_CHECKING:
    from gguf import constants
    from gguf.constants import GGUFValueType, LlamaFileType, TokenType
else:
    constants = _load_constants()
    GGUFValueType = constants.GGUFValueType
    LlamaFileType = constants.LlamaFileType
    TokenType = constants.TokenType

__all__ = [
    "ALIGNMENT",
    "BLOCK_LAYOUTS",
    "MAGIC",
    "QUANT_VERSION",
    "VERSION",
    "GGUFValueType",
    "LlamaFileType",
    "TokenType",
]

MAGIC: bytes = constants.GGUF_MAGIC.to_bytes(4, "little")
VERSION: int = constants.GGUF_VERSION
ALIGNMENT: int = constants.GGUF_DEFAULT_ALIGNMENT  # the default alignment
QUANT_VERSION: int = constants.GGML_QUANT_VERSION
# For each tensor type: name, number, elements in a block, bytes of a block.
BLOCK_LAYOUTS: list[tuple[str, int, int, int]] = [
    (kind.name, int(kind), block, size) for kind, (block, size) in constants.GGML_QUANT_SIZES.items()
]
