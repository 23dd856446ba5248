"""`push` uploads a run's result with a card that says nothing private."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import llamatrain
from tests.helpers.cli import Done, environment, ran, run, text
from tests.helpers.errors import raises
from tests.helpers.hub_server import HubServer, Repository, serve_hub
from tests.helpers.small_models import small, weights, written

SHORT = ("--iters", 2, "--batch", 2, "--ctx", 16, "--quiet")


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run."""
    monkeypatch.chdir(tmp_path)
    h = small()
    written(Path("secret-base.gguf"), h, weights(h))
    Path("secret.txt").write_text(text(4000))
    ran("finetune", "secret-base.gguf", "secret.txt", "--val-split", "0.2", "--lora-r", 2, *SHORT,
        "--note", "a secret note", "--out", "r")  # fmt: skip
    return Path("r")


@pytest.fixture
def hub() -> Iterator[HubServer]:
    pytest.importorskip("huggingface_hub")
    with serve_hub() as server:
        server.token = "hf_token"
        yield server


def pushed(hub: HubServer, *words: str, token: str = "hf_token") -> Done:
    """The command in a process of its own, as the library reads its settings when it is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "llamatrain", "push", *words],
        env=environment(HF_ENDPOINT=hub.url, HF_TOKEN=token, HF_HOME=str(Path("hf").absolute())),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def front_matter(card: str) -> list[str]:
    head, _, _ = card.removeprefix("---\n").partition("\n---\n")
    return head.splitlines()


def test_a_dry_run_writes_what_would_be_uploaded(trained: Path) -> None:
    shown = ran("push", trained, "hf:me/mine", "--dry-run", "out").out
    names = {"adapter.gguf", "README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert {path.name for path in Path("out").iterdir()} == names and all(name in shown for name in names)
    card = Path("out/README.md").read_text()
    facts = [
        "library_name: peft",
        "pipeline_tag: text-generation",
        "tags:",
        "- lora",
        "- gguf",
        "- llamatrain",
    ]
    assert front_matter(card) == facts
    assert "| lora-r | 2 |" in card and "validation loss" in card and "--iters 2" in card
    everything = b"".join(path.read_bytes() for path in Path("out").iterdir())
    assert b"secret" not in everything and str(Path.cwd()).encode() not in everything


def test_python_pushes_likewise(trained: Path) -> None:
    pushed = llamatrain.push(trained, "hf:me/mine", dry_run="out")
    assert not pushed.uploaded and pushed.url == "https://huggingface.co/me/mine"
    assert pushed.files["adapter.gguf"] == Path("out/adapter.gguf").stat().st_size
    with raises("invalid-name"):
        llamatrain.push(trained, "me/mine")


def test_files_are_uploaded_in_one_commit(trained: Path, hub: HubServer) -> None:
    done = pushed(hub, "r", "hf:me/mine", "--private")
    assert done.code == 0, done.err
    repository = hub.repositories["me/mine"]
    assert repository.private and sum("/commit/" in path for _, path, _ in hub.requests) == 1
    assert repository.files["adapter.gguf"] == (trained / "best.gguf").read_bytes()
    assert json.loads(repository.files["adapter_config.json"])["r"] == 2
    assert pushed(hub, "r", "hf:me/mine").code == 0  # another commit


def test_a_file_alone_is_uploaded(trained: Path, hub: HubServer) -> None:
    done = pushed(hub, "secret-base.gguf", "hf:me/base")
    assert done.code == 0, done.err
    assert {*hub.repositories["me/base"].files} == {"README.md", "model.gguf"}


def test_refusals_are_one_line(trained: Path, hub: HubServer) -> None:
    done = pushed(hub, "r", "hf:me/mine", token="")
    assert done.code == 2 and "[no-token]" in done.err and "hf auth login" in done.err
    done = pushed(hub, "r", "hf:me/mine", token="hf_wrong")
    assert done.code != 0 and "hf auth login" in done.errors[0] and len(done.errors) == 1
    hub.repositories["me/mine"] = Repository(denied=True)
    done = pushed(hub, "r", "hf:me/mine")
    assert done.code == 1 and len(done.errors) == 1 and "403" in done.errors[0]
    done = pushed(hub, "r", "hf:me/mine", "--private")
    assert done.code == 1 and "[public-repository]" in done.err and not hub.repositories["me/mine"].files


@pytest.mark.parametrize(
    "name", ["me/mine", "hf:mine", "hf:me/mine/x.gguf", "hf:datasets/me/mine/x", "hf:me/mine@main"]
)
def test_repositories_are_checked_first(tmp_path: Path, name: str) -> None:
    done = run("push", tmp_path, name, "--dry-run", tmp_path / "out")
    assert done.code == 2 and "[invalid-name]" in done.err and not (tmp_path / "out").exists()


def test_other_inputs_are_refused(trained: Path) -> None:
    Path("out").mkdir()
    checkpoint = next(trained.glob("checkpoint-[0-9]*.gguf"))
    for path, code in (
        ("none", "no-such-file"),
        ("secret.txt", "not-gguf"),
        (trained, "output-exists"),
        (checkpoint, "wrong-kind"),
        (".", "no-result"),
    ):
        done = run("push", path, "hf:me/mine", "--dry-run", "out")
        assert done.code and f"[{code}]" in done.err, done.err


def test_the_card_repeats_no_addresses_and_no_markdown(trained: Path) -> None:
    config = (
        'base = "https://host/secret.gguf?token=secret"\n'
        'data = ["hf:datasets/a/b/c`|\\n\\n# secret", "ollama:$(secret)", "hf:datasets/a/b/rows.jsonl"]\n'
    )
    (trained / "config.toml").write_text(config)
    (trained / "metrics.jsonl").write_text(f'{{"step": 1, "loss": {"9" * 400}, "val_loss": {"9" * 400}}}\n')
    ran("push", trained, "hf:me/mine", "--dry-run", "out")
    card = Path("out/README.md").read_text()
    assert "secret" not in card and "hf:datasets/a/b/rows.jsonl" in card and "generate BASE.gguf" in card


def test_a_file_that_is_no_result_takes_nothing_from_its_folder(trained: Path) -> None:
    (trained / "best.gguf").rename(trained / "other.gguf")
    ran("push", trained / "other.gguf", "hf:me/mine", "--dry-run", "out", "--base", "secret-base.gguf")
    assert "## Training" not in Path("out/README.md").read_text()


def test_a_damaged_config_is_left_out(trained: Path) -> None:
    config = 'objective = [1]\nlr = "x\\n---\\ny: z"\nbase = 3\ndata = 4\nbatch = 2\n'
    (trained / "config.toml").write_text(config)
    ran("push", trained, "hf:me/mine", "--dry-run", "out", "--base", "secret-base.gguf")
    card = Path("out/README.md").read_text()
    assert "| batch | 2 |" in card and "y: z" not in card
