"""What new users get wrong: what they type, the line or two that come, and the exit code, before anything is trained."""

import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamatrain.compiler.cache import code_cache
from llamatrain.compiler.declare import Function
from llamatrain.data.file_kind import find_structure
from llamatrain.platform.cache_prune import STAMP
from tests.helpers.cli import TINY, environment, ran, run, text_file
from tests.helpers.lora_runs import base, random_adapter
from tests.helpers.small_models import small

LOG = "".join(
    f"2024-05-01 12:00:{each:02},123 INFO server: request {each} took {each * 7 % 50} ms\n"
    for each in range(60)
)
TABLE = "id,name,price\n" + "".join(f"{each},thing {each},{each * 1.5}\n" for each in range(60))
PAGE = "<!DOCTYPE html>\n<html><body>" + "<p>Some words here.</p>\n" * 20 + "</body></html>"
BOXED = b"\x10\0\0\0\0\0\0\0" + b'{"a": 1}        '
FILES: dict[str, str | bytes] = {
    "hf/config.json": "{}",
    "hf/model.safetensors": BOXED,
    "model.safetensors": BOXED,
    "pytorch_model.bin": b"PK\3\4" + bytes(99),
    "pictures/a.png": b"\x89PNG",
    "tables.toml": "[training]\nlr = 1e-4\n",
    "unknown.toml": "learning_rate = 1e-4\n",
    "wrong.toml": 'lr = "fast"\n',
    "pairs.jsonl": json.dumps({"prompt": "a", "completion": "b"}) + "\n",
    "preferred.jsonl": json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n",
    "falling.jsonl": "".join(
        json.dumps({"prompt": "a" * (1 if each % 4 == 0 else 500), "chosen": "bcd", "rejected": "c"}) + "\n"
        for each in range(40)
    ),
    "empty.txt": "",
    "paper.pdf": b"%PDF-1.4 words",
    "prices.csv": TABLE,
    "prices.txt": TABLE,
    "page.txt": PAGE,
    "latin.txt": ("Das ist für Öl und Äpfel.\n" * 50).encode("latin-1"),
    "server.log": LOG,
    "lines.txt": json.dumps({"text": "abc"}) + "\n",
    "packed.gz": "no gzip at all",
    "packed.txt": gzip.compress(b"words " * 999),
    "conf.yaml": "lr: 1e-4\n",
    "run2/metrics.jsonl": "",
    "run2/report.html": "",
    "run2/best-3.gguf": "GGUF",
    "run2/model.gguf": "GGUF",
    "run3/adapter.gguf": "GGUF",
    "run3/checkpoint-3.gguf": "GGUF",
    "rows.parquet": "no parquet",
}
# What is typed, the exit code, and what is printed: a pattern, and the code of the error.
MISTAKES = [
    ("fintune M.gguf text.txt", 2, "no such command 'fintune'; did you mean finetune?"),
    (
        "train M.gguf text.txt",
        2,
        "no such command 'train'; .*from-scratch for a new model, finetune for an existing one [unknown-command]",
    ),
    (
        "plan text.txt",
        2,
        "no such command 'text.txt', which is a file; .*: llamatrain plan .* [unknown-command]",
    ),
    (
        "--iters 5 from-scratch text.txt",
        2,
        "--iters .*: llamatrain from-scratch ... --iters [option-before-command]",
    ),
    ("from-scratch text.txt --no-shufle", 2, "no such option --no-shufle; did you mean --no-shuffle?"),
    ("from-scratch text.txt -iters 5", 2, "no such option -iters; did you mean --iters?"),
    (
        "from-scratch text.txt –-iters 5",
        2,
        ".*: no such file or folder; .*two plain hyphens, -- [no-such-file]",
    ),
    ("from-scratch text.txt iters=5", 2, ".*: no such file or folder; .*--iters 5 [no-such-file]"),
    (
        "from-scratch 'text.txt --iters 5'",
        2,
        ".*: no such file or folder; a quote before it .*too late [no-such-file]",
    ),
    (
        "from-scratch text.txt --shuffle false",
        2,
        ".*false: .*takes no value, .*--no-shuffle [no-such-file]",
    ),
    (
        "finetune M.gguf text.txt --warmup_ratio 0.1",
        2,
        "no such option --warmup_ratio; --warmup takes a number of steps",
    ),
    ("finetune M.gguf text.txt --fp16", 2, "no such option --fp16; --precision takes f32 or bf16"),
    (
        "finetune M.gguf text.txt --rank 8",
        2,
        "--lora-rank-of must be .*attn_q=16 .*'8'.* [invalid-option]",
    ),
    ("from-scratch text.txt --lr 1e-4x", 2, "--lr must be a number .*'1e-4x'.* [invalid-option]"),
    ("from-scratch text.txt --lr 1.2.3", 2, "--lr must be a number .*'1.2.3'.* [invalid-option]"),
    (
        "from-scratch text.txt --lr 0,001",
        2,
        "--lr must be a number .*'0,001'.*; write 0.001 [invalid-option]",
    ),
    (
        "from-scratch text.txt --ctx 4k",
        2,
        "--ctx must be a whole number .*'4k'.*; write 4096 [invalid-option]",
    ),
    (
        "from-scratch text.txt --iters 1,000",
        2,
        "--iters must be a whole number .*'1,000'.*; write 1000 [invalid-option]",
    ),
    (
        "from-scratch text.txt --val-split 5%",
        2,
        "--val-split must be a number .*'5%'.*; write 0.05 [invalid-option]",
    ),
    ("from-scratch text.txt --iters -5", 2, "--iters must be 0 or more.* -5.* [invalid-option]"),
    ("from-scratch text.txt --memory 6", 2, "--memory must be a size, such as 6GB .* 6.* [invalid-option]"),
    (
        "from-scratch text.txt --optimizer Adam",
        2,
        "--optimizer must be adamuon, adamw, .*'Adam'.*; did you mean adamw? [invalid-option]",
    ),
    ("from-scratch text.txt --lr", 2, "option '--lr' requires an argument"),
    (
        "generate M.gguf hello world",
        2,
        "got unexpected extra argument.*; .*--prompt 'TEXT'",
    ),
    (
        "finetune text.txt M.gguf",
        2,
        ".*text.txt.*: llamatrain finetune M.gguf text.txt [model-first]",
    ),
    (
        "finetune meta-llama/Llama-3.2-1B text.txt",
        2,
        "meta-llama/Llama-3.2-1B: no such file; hf:.*Hugging Face .*GGUF.*hf:.*safetensors.* [no-such-file]",
    ),
    (
        "finetune hf.co/bartowski/Llama-3.2-1B-GGUF:Q4_K_M text.txt",
        2,
        ".*: no such file; hf:bartowski/Llama-3.2-1B-GGUF:Q4_K_M downloads .* [no-such-file]",
    ),
    (
        "generate unsloth/Qwen3-0.6B-GGUF:Q4",
        2,
        ".*: no such file; hf:unsloth/Qwen3-0.6B-GGUF:Q4 downloads .* [no-such-file]",
    ),
    (
        "finetune https://huggingface.co/Qwen/Qwen3-0.6B-GGUF text.txt",
        2,
        ".*; write hf:Qwen/Qwen3-0.6B-GGUF [web-page]",
    ),
    (
        "finetune M.gguf tatsu-lab/alpaca",
        2,
        "tatsu-lab/alpaca: no such file or folder; hf:datasets/tatsu-lab/alpaca/FILE .* [no-such-file]",
    ),
    (
        "finetune M.gguf text.txt --early-stopping",
        2,
        "no such option --early-stopping; .*--patience 3 .*three valid",
    ),
    ("finetune M.gguf -f text.txt", 2, "no such option -f; name data files without an option"),
    ("evaluate M.gguf -f text.txt", 2, "no such option -f; name data files without an option"),
    ("from-scratch text.txt --batch 1000000", 2, "--batch must be 1 to 65536 .*1000000.* [invalid-option]"),
    (
        "from-scratch text.txt --ctx 64 --grad-acc 2000000",
        1,
        ".*tokens .*16,000,000 rows of 64 tokens .*; .*--batch, --grad-acc or --ctx [out-of-memory]",
    ),
    (
        "finetune hf text.txt",
        1,
        ".*hf/model.safetensors: 'a' needs a dtype, .* [invalid-tensor-entry]",
    ),
    ("finetune model.safetensors text.txt", 1, ".*: weights in safetensors; a GGUF file is needed: "),
    ("finetune pytorch_model.bin text.txt", 1, ".*: weights as PyTorch saves them; a GGUF file is needed: "),
    ("finetune models text.txt", 1, "models: this is a folder; a GGUF file is needed, such as models/B.gguf"),
    (
        "finetune M.gguf.gz text.txt",
        1,
        ".*: a packed file; a GGUF file is needed: unpack it first, as with `gzip -d`",
    ),
    ("finetune A.gguf text.txt", 1, ".*A.gguf: an adapter, not a model; a model is needed"),
    ("generate M.gguf --lora M.gguf", 1, "M.gguf: no adapter but a model; .* [not-an-adapter]"),
    ("finetune N.gguf text.txt", 2, "N.gguf: No such file or directory; did you mean M.gguf?"),
    ("from-scratch txet.txt", 2, ".*txet.txt: no such file or folder; did you mean .*text.txt?"),
    (
        "from-scratch M.gguf",
        1,
        ".*M.gguf: a GGUF file, .*data; .*--checkpoint-in.* [model-as-data]",
    ),
    ("finetune M.gguf", 2, "no data .*M.gguf.*; name files.* [no-data]"),
    (
        "from-scratch text.txt --config tables.toml",
        2,
        r"tables.toml: .*tables.*\[training\].* [invalid-toml]",
    ),
    (
        "from-scratch text.txt --config unknown.toml",
        2,
        "unknown.toml: unknown option 'learning_rate'; it is called lr here [unknown-option]",
    ),
    (
        "from-scratch text.txt --config wrong.toml",
        2,
        "wrong.toml: lr must be a number .*'fast'.* [invalid-option]",
    ),
    ("from-scratch packed.gz", 1, ".*: the compressed data is damaged"),
    ("from-scratch rows.parquet", 1, ".*: not a Parquet file|.*pyarrow"),
    ("from-scratch empty.txt", 1, ".*: the file is empty"),
    ("from-scratch paper.pdf", 1, ".*: a document, not the text in it .*save it as text"),
    ("from-scratch prices.csv", 1, '.*: no known columns .*"id", "name", "price"'),
    ("from-scratch prices.txt", 1, ".*: seems to be a table .*--as text"),
    ("from-scratch page.txt", 1, ".*: markup, not the text in it .*--as text"),
    ("from-scratch latin.txt", 1, ".*: not UTF-8 .*iconv.*--as text"),
    ("from-scratch server.log", 1, ".*: seems to be a log .*--as text"),
    ("from-scratch lines.txt", 1, ".*: seems to be JSON lines .*rename it to .jsonl, or use --as text"),
    (
        "finetune M.gguf preferred.jsonl",
        1,
        ".*: the row has preferences .*--objective orpo, dpo, simpo or kto",
    ),
    (
        "finetune M.gguf pairs.jsonl --objective dpo",
        1,
        '.*: nothing to compare .*{"prompt", "chosen", "rejected"}',
    ),
    (
        "finetune M.gguf falling.jsonl --objective dpo --ctx 32",
        1,
        "30 of 40 rows .*32 .*--ctx.*--as rest.* [most-rows-skipped]",
    ),
    ("finetune M.gguf pictures", 1, ".*: .*no usable file .*it holds 1 .png.* [no-data]"),
    ("from-scratch text.txt --out text.txt", 1, "text.txt: the folder cannot be created: .* [folder-error]"),
    (
        "from-scratch text.txt --out run",
        1,
        "run: the folder already contains a run .*--resume run, replace it with --overwrite",
    ),
    ("from-scratch --resume nowhere", 2, "nowhere: No such file or directory"),
    (
        "from-scratch text.txt --gpu",
        2,
        "no such option --gpu; leave it out: all work is done by the processor",
    ),
    ("from-scratch text.txt --stream", 2, "no such option --stream; see llamatrain from-scratch --help"),
    (
        "from-scratch text.txt --dry-run",
        2,
        "no such option --dry-run; llamatrain plan shows what a run takes, .* preview ",
    ),
    ("from-scratch text.txt --model M.gguf", 2, "no such option --model; .*from-scratch .*--checkpoint-in"),
    ("evaluate M.gguf --data text.txt", 2, "no such option --data; name it without an option"),
    (
        "evaluate text.txt M.gguf",
        2,
        ".*text.txt.*: llamatrain evaluate M.gguf text.txt [model-first]",
    ),
    (
        "export-lora M.gguf A.gguf --out x.gguf",
        2,
        "got unexpected extra argument.*; name an adapter with --lora",
    ),
    (
        "preview M.gguf text.txt",
        2,
        "missing option '--model'; .*: llamatrain preview DATA --model MODEL",
    ),
    (
        "serve M.gguf",
        2,
        "no such command 'serve'; .*llama.cpp's llama-server [unknown-command]",
    ),
    (
        "models",
        2,
        "no such command 'models', which is a folder; .*: llamatrain finetune ... [unknown-command]",
    ),
    (
        "generate M.gguf --lora A.gguf:0.5",
        2,
        "A.gguf:0.5: No such file .*; .*--lora-scaled A.gguf 0.5 [no-such-file]",
    ),
    ("generate K.gguf --prompt x", 1, "K.gguf: a checkpoint of an adapter, not a model; .*--only-write-lora"),
    (
        "finetune llama3.2:1b text.txt",
        2,
        "llama3.2:1b: No such file or directory; .*GGUF file [no-such-file]",
    ),
    (
        "finetune s3://host/m.gguf text.txt",
        2,
        "s3://host/m.gguf: .*not downloaded; .*https://.* [url]",
    ),
    (
        "from-scratch http://host/t.txt",
        2,
        "http://host/t.txt: http is not encrypted, .*; write https [not-https]",
    ),
    ("from-scratch ''", 2, "no data .*empty path.* [no-data]"),
    (
        "finetune M.gguf text.txt --target q_proj,v_proj",
        2,
        "--target q_proj: no such weight; its name is attn_q",
    ),
    (
        "finetune M.gguf text.txt --target all-linear",
        2,
        "--target all-linear: .*; without --target, all linear .* [unknown-target]",
    ),
    ("generate run2 --prompt x", 1, "run2: this is a folder; a GGUF file is needed, such as run2/model.gguf"),
    (
        "finetune run3 text.txt",
        1,
        "run3: the folder of a run, whose adapter .*; a GGUF file .*--lora run3/adapter.gguf",
    ),
    ("inspect run2", 1, "run2: this is a folder; a GGUF file .*such as run2/model.gguf"),
    ("report nowhere", 2, "nowhere: no such folder; give the folder of a run"),
    ("report rum2", 2, "rum2: no such folder; give the folder of a run; did you mean run2?"),
    (
        "report run2/report.html",
        1,
        "run2/report.html: this is a file; give the folder of a run, which is run2",
    ),
    ("report run2 --out nodir/a.html", 2, "nodir/a.html: the folder does not exist"),
    ("plan from-scratch --svg nodir/a.svg", 2, "nodir/a.svg: the folder does not exist"),
    (
        "export-lora M.gguf --lora A.gguf --out nodir/a.gguf",
        2,
        "nodir/a.gguf: its folder does not exist [missing-folder]",
    ),
    (
        "generate M.gguf --chat --chat-template nope",
        2,
        "nope: No such file or directory; built-in templates are chatml, ",
    ),
    ("from-scratch text.txt --config conf.yaml", 2, "conf.yaml: invalid TOML: .*lr = 1e-4 [invalid-toml]"),
    ("from-scratch packed.txt", 1, ".*packed.txt: seems to be compressed; rename it to packed.txt.gz"),
]
UNDERSTOOD = [
    ("--learning_rate 1e-4", "--learning-rate is --lr"),
    ("--num_train_epochs 1", "--num-train-epochs is --epochs"),
    ("--batch-size 2", "--batch-size is --batch"),
    ("--max-seq-length 16", "--max-seq-length is --ctx"),
    ("--gradient_accumulation_steps 1", "--gradient-accumulation-steps is --grad-acc"),
    ("--output_dir other", "--output-dir is --out"),
]
SHAPES = (
    "--text text.txt --n-layer 1 --hidden-size 32 --num-heads 2 --tokenizer M.gguf --n_ctx 16",
    "--text is DATA, --n-layer is --layer, --hidden-size is --embd, --num-heads is --head, --tokenizer is --vocab-from, "
    "--n-ctx is --ctx",
)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("mistakes")
    text_file(place, 3008)
    for name, content in FILES.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    base(place / "M.gguf", small())
    (place / "models").mkdir()
    (place / "models" / "B.gguf").write_bytes((place / "M.gguf").read_bytes())
    (place / "M.gguf.gz").write_bytes(gzip.compress((place / "M.gguf").read_bytes()[:9999]))
    random_adapter(place / "A.gguf", small(), ["blk.0.attn_q.weight"])
    ran("finetune", place / "M.gguf", place / "text.txt", "--iters", 0, "--ctx", 16, "--out", place / "tuned")
    shutil.move(place / "tuned" / "checkpoint-0.gguf", place / "K.gguf")
    shutil.rmtree(place / "tuned")
    (place / "run").mkdir()
    (place / "run" / "checkpoint-3.gguf").write_bytes(b"GGUF")
    return place


@pytest.fixture(autouse=True)
def place(filled: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(filled)
    before = {*filled.rglob("*")}
    yield filled
    for folder in ("runs", "other", "again"):
        shutil.rmtree(filled / folder, ignore_errors=True)
    assert {*filled.rglob("*")} == before


@pytest.mark.parametrize(("typed", "code", "says"), MISTAKES, ids=[typed for typed, _, _ in MISTAKES])
def test_a_mistake_is_told_in_a_line(
    typed: str, code: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(*_: object) -> None:
        raise AssertionError("something is compiled before a mistake is told")

    if "falling" not in typed:  # which takes a tokenizer
        monkeypatch.setattr("llamatrain.compiler.cache.CodeCache.announce", compiled)
    done = run(*shlex.split(typed))
    assert (done.code, done.out) == (code, ""), done
    told = "".join(
        line
        for line in done.err.splitlines(keepends=True)
        if not line.startswith("note: --rank is now called")
        and ("falling" not in typed or not line.startswith("compil"))
    )
    says, _, name = says.partition(" [")
    assert re.fullmatch(f"error: (?:{says.replace('mean ', 'mean .*').rstrip('?')}).*\n", told), told
    assert told.endswith(f" [{name}\n" if name else "\n"), told
    assert not Path("runs").exists()


def test_no_folder_is_left_behind() -> None:
    assert run("from-scratch", "empty.txt", "--out", "new/er/run").code == 1 and not Path("new").exists()


def test_there_are_more_than_forty() -> None:
    assert len({typed for typed, _, _ in MISTAKES}) >= 40


@pytest.mark.parametrize(("said", "told"), UNDERSTOOD)
def test_the_words_of_other_tools_are_understood(said: str, told: str) -> None:
    done = ran("finetune", "--model", "M.gguf", "--data", "text.txt", "--iters", 0, *shlex.split(said))
    assert [line for line in done.err.splitlines() if "other names here" in line] == [
        f"note: other names here: --model is BASE, --data is DATA, {told}"
    ]


def test_the_words_for_shapes_are_understood() -> None:
    said, told = SHAPES
    done = ran("from-scratch", *shlex.split(said), "--iters", 0, "--out", "other")
    assert f"note: other names here: {told}\n" in done.err and "0 steps" in done.err
    assert (
        " 1 step of "
        in ran("from-scratch", "text.txt", "--iters", 1, "--ctx", 16, *TINY, "--out", "again").err
    )


@pytest.mark.parametrize(
    "name", ["prices.csv", "prices.txt", "page.txt", "latin.txt", "server.log", "lines.txt"]
)
def test_what_is_asked_about_is_let_through(name: str) -> None:
    ran("from-scratch", name, "--as", "text", "--iters", 1, "--ctx", 16, *TINY, "--out", "other")
    kept = (Path("other") / "config.toml").read_text()
    assert 'as = "text"' in kept
    again = ran("from-scratch", "--config", "other/config.toml", "--out", "again")
    assert "note" not in again.err


def test_pairs_that_are_left_can_be_trained_on() -> None:
    words = ("--objective", "dpo", "--ctx", 32, "--iters", 1, "--as", "rest", "--out", "other")
    assert "10 pairs" in " ".join(ran("finetune", "M.gguf", "falling.jsonl", *words).err.split())


@pytest.mark.parametrize(
    "text",
    [
        "One, two, three.\nFour, five, six.\nSeven, eight, nine.\nTen, eleven, twelve.\nA, b, c.\nD, e, f.\n",
        "a,b\n1,2\n",
        "".join(f"{each}. And so he went; it was late, and cold.\n" for each in range(9)),
        "def f(a,b):\n    return a,b\n" * 9,
        "2024-05-01 was a Wednesday.\nThe day after was not.\n" * 9,
        "[1] {2}\n" * 9,
    ],
)
def test_prose_is_not_asked_about(text: str) -> None:
    assert find_structure(text.encode()) == ""


def test_one_letter_will_do() -> None:
    assert ran("-V").out == ran("--version").out
    for command in (
        (),
        ("plan",),
        ("plan", "finetune"),
        ("generate",),
        ("inspect",),
        ("evaluate",),
        ("preview",),
        ("export-lora",),
    ):
        assert ran(*command, "-h").out == ran(*command, "--help").out
    ran("from-scratch", "text.txt", "--iters", 0, *TINY, "-o", "other")
    assert (Path("other") / "model.gguf").is_file()


@pytest.mark.parametrize(
    "typed",
    [
        "plan from-scratch text.txt",
        "plan finetune M.gguf text.txt --memory 3GB",
        "preview text.txt --model M.gguf",
        "preview pairs.jsonl --model M.gguf",
        "inspect M.gguf",
    ],
)
def test_what_only_looks_compiles_nothing(typed: str, tmp_path: Path) -> None:
    """With an empty cache; a process that would compile is refused. With a library of kernels, plans measure speed."""
    kept = {"tokens", "speeds"} if os.environ.get("LLAMATRAIN_LIBRARIES") else {"tokens"}
    refused = "import subprocess, sys; begun = subprocess.Popen.__init__\n"
    refused += "def init(self, words, *more, **named):\n    assert 'machine.ahead' not in str(words), words\n"
    refused += "    begun(self, words, *more, **named)\nsubprocess.Popen.__init__ = init\n"
    program = refused + "from llamatrain.__main__ import main; main()"
    env = environment(LLAMATRAIN_CACHE=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", program, *shlex.split(typed)],
        capture_output=True,
        text=True,
        env=env,
        check=False,
    )
    assert done.returncode == 0 and "compil" not in done.stderr, done.stderr
    assert not [
        path
        for path in tmp_path.rglob("*")
        if path.is_file() and kept.isdisjoint(path.parts) and path.name != STAMP
    ]


def test_what_was_not_compiled_then_is_compiled_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[str]()
    monkeypatch.setattr(code_cache, "compile", lambda declared: made.append(declared.qualified_name) or 7)
    monkeypatch.setattr(code_cache, "find", lambda declared: 0)
    monkeypatch.setattr("llamatrain.compiler.parallel.precompile", lambda needed: None)
    declared = Function(find_structure)
    with code_cache.without_compiling():
        assert declared.address == 0 and not made
    assert declared.address == 7 and len(made) == 1


def test_a_quiet_run_says_what_went_wrong_alone() -> None:
    done = ran("from-scratch", "text.txt", "--iters", 1, "--ctx", 16, *TINY, "-q", "--out", "other")
    assert (done.out, done.err) == ("", "") and (Path("other") / "model.gguf").is_file()
    done = run("from-scratch", "text.txt", "--iters", 1, "--ctx", 16, *TINY, "--quiet", "--out", "other")
    assert done.code == 1 and done.err.startswith("error: other: the folder already contains a run")
    assert "loss" in ran("from-scratch", "text.txt", "--iters", 1, "--ctx", 16, *TINY, "--out", "again").err


def test_a_verbose_run_says_each_step_and_each_option() -> None:
    words = ("from-scratch", "text.txt", "--iters", 400, "--batch", 1, "--ctx", 16, *TINY)
    few, every = ran(*words, "--out", "other").err, ran(*words, "-v", "--out", "again").err
    assert few.count("\nstep ") < 150 < every.count("\nstep ") == 400
    told, kept = " ".join(every.split()), tomllib.loads((Path("again") / "config.toml").read_text())
    assert "eval-every" not in few and all(f"{name} = " in told for name in kept) and len(kept) > 50
    assert f'options data = ["{Path("text.txt").resolve()}"], arch = "llama", size = ' in told.replace(
        "/ ", "/"
    )
    assert run(*words, "-v", "-q").code == 2
