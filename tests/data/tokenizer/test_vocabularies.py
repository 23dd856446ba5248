"""Vocabularies that are broken, and those that are learned: refused in a line, or as they should be."""

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamatrain.data.tokenizer import load, new_vocab
from llamatrain.data.tokenizer.pretokenizers import _KNOWN, PRE_TOKENIZERS
from llamatrain.errors import DataError, FileError, LlamatrainError, UsageError
from llamatrain.gguf.reader import Metadata
from tests.data.tokenizer.test_tokenizer import Plain, learned, scored, small, texts
from tests.helpers.mixed_text import CODE

# ---- broken vocabularies ---------------------------------------------------


def gpt2(**changes: object) -> Plain:
    told = {"model": "gpt2", "tokens": list("abcdefghijklm"), "merges": ["a b"]} | changes
    return {f"tokenizer.ggml.{key}": value for key, value in told.items() if value is not None}


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({}, "tokenizer.ggml.model is missing"),
        (scored(model=3), "model is a whole number; expected a text"),
        (scored(model="bart"), "'bart'); supported are llama, gpt2, gemma4, and none"),
        (scored(model="bert"), "'bert': WordPiece, as BERT has it); supported are llama"),
        (scored(model="t5"), "'t5': a unigram model, as T5 has it)"),
        (scored(model="rwkv"), "'rwkv': the longest match first, as RWKV has it)"),
        (scored(model="plamo2"), "'plamo2': a table of suffixes, as PLaMo 2 has it)"),
        (scored(model="gemma4"), "merges is missing; a gemma4 vocabulary needs it"),
        (scored(model="gemma4", merges=["a b"]), "add_bos_token is set, but"),
        (
            scored(model="hybriddna"),
            "'hybriddna': words beside groups of bases, as models of DNA have them)",
        ),
        (scored(model="whitespace"), "'whitespace': whole words between white space)"),
        (scored(tokens=None), "tokens is missing"),
        (scored(tokens=np.zeros(3)), "tokens is not an array of strings"),
        (scored(tokens=["a", 3]), "tokens is not an array of strings"),
        (scored(tokens=["a", "b", "a"]), "tokens 0 and 2 are both 'a'"),
        (scored(scores=np.zeros(5)), "scores has 5 numbers for 280 tokens"),
        (scored(token_type=np.zeros(5, np.int32)), "token_type has 5 numbers"),
        (scored(token_type=np.zeros(280, np.float32)), "not an array of whole numbers"),
        (scored(token_type="abc"), "not an array of whole numbers"),
        (scored(add_bos_token="yes"), "add_bos_token is a text; expected true or false"),
        (scored(tokens=["a"], scores=None, token_type=None), "add_bos_token is set, but"),
        (gpt2(merges=None), "merges is missing"),
        (gpt2(pre="exaone-moe"), "(got 'exaone-moe')"),
    ],
)
def test_broken_vocabularies_are_refused_in_a_line(metadata: Plain, says: str) -> None:
    with pytest.raises(FileError) as caught:
        load(metadata, "a.gguf")
    assert (
        says in str(caught.value)
        and str(caught.value).startswith("a.gguf: ")
        and "\n" not in str(caught.value)
    )


def test_what_llama_cpp_takes_is_taken() -> None:
    odd = gpt2(
        merges=["a b", "ab z", "q r", "nospace", " x y", "a b"], tokens=["", *"abcdefghijklm", "abc", "qrs"]
    )
    encoder = load(odd)
    assert encoder.vocabulary.tokens[0] == "[EMPTY_0]"
    assert texts(encoder, "abc") == ["a", "b", "c"]  # ab is merged, and is no token: its bytes
    assert texts(encoder, "az") == ["a"]  # what has no token is left out
    assert len(load(scored(scores=np.zeros(500, np.float32)))) == 280
    assert texts(
        load(scored(tokens=[text.encode() for text in scored()["tokenizer.ggml.tokens"]])), "abc"
    ) == texts(small(), "abc")


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_vocabulary_opens_or_is_refused(data: st.DataObject) -> None:
    values = (
        st.none()
        | st.integers(-3, 300)
        | st.text(max_size=3)
        | st.lists(st.text(max_size=2) | st.integers(), max_size=5)
    )
    values |= st.booleans() | st.lists(st.integers(-9, 9), min_size=280, max_size=281).map(np.array)
    base: Callable[..., Plain] = data.draw(st.sampled_from([scored, gpt2]))
    names = [
        "tokens",
        "scores",
        "token_type",
        "merges",
        "pre",
        "bos_token_id",
        "eos_token_id",
        "add_bos_token",
        "add_space_prefix",
    ]
    changed = base(**data.draw(st.dictionaries(st.sampled_from(names), values, max_size=3)))
    try:
        load(changed).encode("ab c<s>ü", special=True)
    except LlamatrainError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("texts", "kind", "turn", "more", "kinds"),
    [
        ("<|end|> <|user|>", 1, "<|end|>", "", [3, 1]),
        ("<|end|> <|return|> <|call|>", 3, "<|return|> <|call|>", "", [4, 3, 3]),
        ("<|end|> <|flush|> <|calls|>", 1, "<|flush|> <|calls|>", "", [4, 3, 3]),
        ("<|end|> <|call|>", 3, "<|end|> <|call|>", "", [3, 3]),
        ("<eos> <end_of_turn> </h1>", 4, "<eos> <end_of_turn>", "", [3, 3, 4]),
        ("</s>! <|tool_response>", 4, "<|tool_response>", "", [4, 3]),
        (
            "<|endoftext|> <|im_end|> <|fim_pad|> <|repo_name|> <|file_sep|> <|fim_middle|>",
            4,
            "<|endoftext|> <|im_end|>",
            "<|fim_pad|> <|repo_name|> <|file_sep|>",
            [3, 3, 3, 3, 3, 3],
        ),
        (
            "<|end_of_text|> <|end_of_role|> <fim_pad> <reponame>",
            3,
            "<|end_of_text|>",
            "<fim_pad> <reponame>",
            [3, 3, 3, 3],
        ),
    ],
)
def test_what_ends_a_turn_and_what_stops_besides(
    texts: str, kind: int, turn: str, more: str, kinds: list[int]
) -> None:
    told = scored(tokens=[*scored()["tokenizer.ggml.tokens"], *texts.split()], scores=None, token_type=None)
    told["tokenizer.ggml.token_type"] = np.array([1] * 280 + [kind] * len(texts.split()), np.int32)
    encoder = load(told)
    named = [
        {encoder.vocabulary.tokens[token] for token in ends} - {"</s>"}
        for ends in (encoder.ends.turn, encoder.ends.all)
    ]
    assert named == [set(turn.split()), {*turn.split(), *more.split()}]
    assert encoder.vocabulary.kinds[280:].tolist() == kinds


def test_a_word_struck_out_ends_no_turn() -> None:
    """In a vocabulary that has <|tool_response>, </s> is a mark of text."""
    tokens = [*scored()["tokenizer.ggml.tokens"], "<|tool_response>"]
    encoder = load(scored(tokens=tokens, scores=None, token_type=None))
    assert encoder.ends.all == {280} and encoder.vocabulary.kinds[2] == 1


def gemma4(*more: str, **changes: object) -> Plain:
    words = ["a", "b", "c", "▁", "ab", "▁ab", "▁▁", "\n", "\n\n\n", *more]
    merges = ["a b", "▁ ab", "▁ ▁", "\n \n", "\n ▁", "b c", "x y", "xy z"]
    kinds = np.array([3, 3] + [1] * len(words) + [4], np.int32)
    told = {"tokens": ["<bos>", "<eos>", *words, "<|tool_call>"], "token_type": kinds, "bos_token_id": 0}
    return gpt2(model="gemma4", merges=merges, **told | changes)


def test_merges_of_text_join_characters_of_a_line() -> None:
    encoder = load(gemma4())
    assert texts(encoder, "ab c") == ["ab", "▁", "c"]
    assert texts(encoder, "  ab  ") == ["▁", "▁ab", "▁▁"] and texts(encoder, "▁ab") == ["▁ab"]
    assert texts(encoder, "a\n ab") == ["a", "\n", "▁ab"]
    assert texts(encoder, "a\n\n\nb") == ["a", "\n\n\n", "b"]  # a token, though merges do not make it
    assert texts(encoder, "\n\n") == []  # merged to no token, and newlines have no byte tokens
    assert texts(encoder, "a<|tool_call>b<bos>", special=True) == ["a", "<|tool_call>", "b", "<bos>"]
    assert encoder.decode(encoder.encode(" ab")) == b" ab"


def test_text_without_tokens_is_given_in_bytes_or_left_out() -> None:
    encoder = load(gemma4("<0xC3>", "<0x79>", "xyz"))
    assert texts(encoder, "aéb") == ["a", "<0xC3>", "b"]
    assert texts(encoder, "xy") == ["<0x79>"] and texts(encoder, "xyz") == ["xyz"]


def test_gemma_4_always_begins_with_its_begin_token() -> None:
    assert load(gemma4(add_bos_token=False)).add_bos
    encoder = load(gemma4())
    assert (encoder.bos, encoder.eos) == (0, None) and encoder.vocabulary.pre == "gemma4"


def test_keys_name_what_ends_a_message_and_what_is_filled_in() -> None:
    encoder = load(scored(eom_token_id=259, eot_token_id=260, fim_sep_token_id=261, fim_pre_token_id=262))
    assert encoder.ends.turn == {2, 259, 260} and encoder.ends.all == {2, 259, 260, 261}


# ---- new ones --------------------------------------------------------------


def test_a_learned_vocabulary() -> None:
    encoder = learned()
    assert len(encoder) == 1000 and encoder.bos == 0 and encoder.eos == 1 and encoder.add_bos
    assert len(encoder.encode(CODE)) < len(CODE) / 2
    assert encoder.decode(encoder.encode(CODE)).decode() == CODE


def test_a_text_with_fewer_words_gives_fewer() -> None:
    metadata = Metadata(new_vocab.learn_vocabulary(["hello hello", b" hello\xff"], 4096))
    assert metadata["tokenizer.ggml.tokens"][258:] == ["el", "hel", "lo", "hello", "Ġhello"]
    assert len(load(Metadata(new_vocab.bytes_vocabulary())).encode("é!")) == 3


def test_two_merges_of_one_token_give_it_once() -> None:
    metadata = Metadata(new_vocab.build_metadata([("a", "b"), ("b", "c"), ("ab", "c"), ("a", "bc")]))
    assert metadata["tokenizer.ggml.tokens"][258:] == ["ab", "bc", "abc"]
    assert len(load(metadata).encode("abc")) == 1


def test_learning_gives_the_same_in_another_process() -> None:
    told = "from tests.data.tokenizer.test_tokenizer import learned; print(learned().fingerprint)"
    run = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == learned().fingerprint
    assert learned("gpt-2").fingerprint != learned().fingerprint


def test_vocabularies_that_cannot_be() -> None:
    with pytest.raises(UsageError, match="got 257"):
        new_vocab.learn_vocabulary(["a"], 257)
    with pytest.raises(DataError, match="no text"):
        new_vocab.learn_vocabulary([], 500)
    with pytest.raises(UsageError, match="the vocabulary has no text"):
        load(Metadata(new_vocab.textless_vocabulary(8)))


def test_every_name_has_an_expression() -> None:
    assert all(pre.expressions() or pre.characters for pre in PRE_TOKENIZERS.values())
    assert len(PRE_TOKENIZERS) == sum(len(names.split()) for names in _KNOWN)
