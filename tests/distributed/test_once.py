"""What several processes need one of them makes: tokens once a machine, a vocabulary once in all, kernels by whoever is first."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llamatrain.data import find_files
from llamatrain.data.find_files import find_sources
from llamatrain.distributed.comm import SingleProcess
from llamatrain.distributed.once import run_on_rank_zero, run_once_per_host
from llamatrain.errors import DataError
from tests.helpers.mpi_programs import needs_mpi, python
from tests.helpers.warm_cache import without_libraries

TOKENS = """
import json, sys, time
from llamatrain.data import token_cache
from llamatrain.data.dataset import open_dataset
from llamatrain.data.options import DataOptions
from llamatrain.distributed.comm import get_comm
from llamatrain.distributed.once import run_once_per_host
from tests.helpers.byte_tokenizer import ByteTokenizer
made, make = [], token_cache._build
token_cache._build = lambda *given: made.append(1) or time.sleep(2) or make(*given)
before = time.process_time()
try:
    corpus, kept = run_once_per_host(lambda: open_dataset(sys.argv[1:], ByteTokenizer(), DataOptions(val_split=0.2), 16, 0))
    took = time.process_time() - before
    print(json.dumps([get_comm().rank, len(made), took, len(corpus), len(kept), corpus.fingerprint]), flush=True)
except Exception as error:
    print(json.dumps([get_comm().rank, len(made), getattr(error, "shared", False), str(error)]), flush=True)
"""

VOCABULARY = """
import os
from llamatrain.data.tokenizer import learn_process
from llamatrain.distributed.comm import get_comm
from llamatrain.distributed.once import run_on_rank_zero
texts = ["so it goes, so it went " * 9]
made = run_on_rank_zero(lambda: print("learns", get_comm().rank, flush=True) or learn_process.learn_merges(texts, 280))
print(made, flush=True)
"""


def told(out: str) -> list[list[object]]:
    return sorted(map(json.loads, out.splitlines()))


@needs_mpi
def test_tokens_are_made_by_one_rank(tmp_path: Path) -> None:
    text, cache = tmp_path / "a.txt", {"LLAMATRAIN_CACHE": str(tmp_path / "cache")}
    text.write_text("so it goes " * 99)
    done = python(3, "-c", TOKENS, text, env=cache)
    first, *others = told(done.out)
    assert first[1] == 1 and [each[1] for each in others] == [0, 0], done.err
    assert [each[3:] for each in others] == [first[3:]] * 2
    # of processor time: two seconds are waited for, and reading the tokens takes a part of one
    assert all(float(str(each[2])) < 1 for each in others), "who waits leaves the processor to it"
    wrong = tmp_path / "a.jsonl"
    wrong.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": 7}\n')
    failed = told(python(3, "-c", TOKENS, wrong, env=cache).out)
    assert [each[:3] for each in failed] == [[0, 1, True], [1, 0, True], [2, 0, True]], (
        "and nobody tries what has failed"
    )
    assert all("line 2" in str(each[3]) for each in failed)


@needs_mpi
def test_a_vocabulary_is_learned_by_one_rank(tmp_path: Path) -> None:
    done = python(2, "-c", VOCABULARY)
    first, *rest = sorted(done.out.splitlines(), reverse=True)
    assert first == "learns 0" and len(rest) == 2 and rest[0] == rest[1], done.err


def test_who_is_alone_makes_all() -> None:
    assert run_on_rank_zero(lambda: 3) == 3 and run_once_per_host(lambda: [4]) == [4]


def test_what_only_one_can_read_is_refused_to_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    several = SingleProcess()
    several.size = 4
    monkeypatch.setattr(find_files, "get_comm", lambda: several)
    os.mkfifo(pipe := tmp_path / "pipe")
    for name, told in (("-", "standard input"), (str(pipe), f"{pipe}, a pipe,")):
        with pytest.raises(DataError) as info:
            find_sources([name])
        assert (
            str(info.value)
            == f"{told} can be read by only one process (got 4 processes); name a file that all of them can read"
        )


COMPILING = """
from llamatrain.compiler import parallel
from llamatrain.compiler.parallel import precompile
from llamatrain.compiler.cache import code_cache
from llamatrain.data.tokenizer.bpe_merge import word_keys
from llamatrain.compiler.thread_pool import open_table, help_leader
made, keep = [], code_cache.save
code_cache.save = lambda name, file: made.append(name) or keep(name, file)
parallel.list_compilables = lambda: [word_keys]  # not all that there are, which takes half a minute
input()
precompile([word_keys, open_table, help_leader])
print(len(made), all(map(code_cache.find, [word_keys, open_table, help_leader])))
"""


def test_kernels_are_compiled_by_whoever_is_first(tmp_path: Path) -> None:
    words, env = [sys.executable, "-c", COMPILING], without_libraries(tmp_path)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    both = [subprocess.Popen(words, env=env, text=True, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    for each in both:
        each.stdin.write("\n")
        each.stdin.flush()
    said = sorted(each.communicate()[0].split() for each in both)
    assert said == [["0", "True"], [str(len(list(tmp_path.rglob("llamatrain.*-*")))), "True"]]
