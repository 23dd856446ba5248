"""llama.cpp's own tokenizer, asked through the C functions in xllamacpp's library: it takes bytes that are no text, too."""

import ctypes
import os
from importlib.util import find_spec
from pathlib import Path

import pytest


class Params(ctypes.Structure):
    """Those of a model, opaque: more room than they take, and they pass through memory."""

    _fields_ = [("room", ctypes.c_uint64 * 64)]


POINTER, INT, BOOL = ctypes.c_void_p, ctypes.c_int32, ctypes.c_bool
SIGNATURES = {
    "llama_backend_init": (None, []),
    "llama_model_default_params": (Params, []),
    "llama_model_load_from_file": (POINTER, [ctypes.c_char_p, Params]),
    "llama_model_free": (None, [POINTER]),
    "llama_model_get_vocab": (POINTER, [POINTER]),
    "llama_vocab_n_tokens": (INT, [POINTER]),
    "llama_vocab_is_eog": (BOOL, [POINTER, INT]),
    "llama_tokenize": (INT, [POINTER, ctypes.c_char_p, INT, POINTER, INT, BOOL, BOOL]),
    "llama_chat_builtin_templates": (INT, [POINTER, ctypes.c_size_t]),
    "llama_chat_apply_template": (
        INT,
        [ctypes.c_char_p, POINTER, ctypes.c_size_t, BOOL, ctypes.c_char_p, INT],
    ),
}


def library() -> ctypes.CDLL:
    pytest.importorskip("xllamacpp")
    spec = find_spec("xllamacpp.xllamacpp")
    assert spec is not None and spec.origin is not None
    found = ctypes.CDLL(spec.origin)
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    found.llama_backend_init()
    return found


def builtin_layouts() -> set[str]:
    """The names of the layouts of chats that it knows."""
    functions = library()
    names = (ctypes.c_char_p * functions.llama_chat_builtin_templates(None, 0))()
    functions.llama_chat_builtin_templates(names, len(names))
    return {name.decode() for name in names}


def laid_out(layout: str, messages: list[tuple[str, str]], answer_next: bool) -> str:
    """A chat as it writes it, without begin token."""
    told = (ctypes.c_char_p * (2 * len(messages)))(
        *(text.encode() for message in messages for text in message)
    )
    made = ctypes.create_string_buffer(1 << 16)
    size = library().llama_chat_apply_template(
        layout.encode(), told, len(messages), answer_next, made, len(made)
    )
    return made.raw[:size].decode()


class Opened:
    """The vocabulary of a whole model's file."""

    def __init__(self, path: Path) -> None:
        self.library = library()
        self.model = self.library.llama_model_load_from_file(
            os.fsencode(path), self.library.llama_model_default_params()
        )
        if not self.model:
            raise ValueError(f"llama.cpp does not open {path}")
        self.vocabulary = self.library.llama_model_get_vocab(self.model)

    def __enter__(self) -> "Opened":
        return self

    def __exit__(self, *error: object) -> None:
        self.library.llama_model_free(self.model)

    def __len__(self) -> int:
        return int(self.library.llama_vocab_n_tokens(self.vocabulary))

    def tokenize(self, text: bytes, *, special: bool, ends: bool = False) -> list[int]:
        tokens = (INT * (len(text) + 16))()
        count = self.library.llama_tokenize(
            self.vocabulary, text, len(text), tokens, len(tokens), ends, special
        )
        return list(tokens[:count])

    def ends(self) -> set[int]:
        """The tokens at which it stops."""
        return {
            token for token in range(len(self)) if self.library.llama_vocab_is_eog(self.vocabulary, token)
        }
