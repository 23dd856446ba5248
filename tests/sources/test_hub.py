"""Files of Hugging Face repositories are chosen, downloaded and checked; errors say what to do.

The library reads its settings when it is imported, so downloads run in processes of their own.
"""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from llamatrain.errors import LlamatrainError
from llamatrain.sources.hub import HubBar, HubName, choose_gguf, expand_parts
from tests.helpers.cli import environment
from tests.helpers.errors import raises
from tests.helpers.hub_server import HubServer, Repository, serve_hub

BODY = bytes(range(256)) * 40
PROGRAM = """
import sys
from llamatrain.errors import LlamatrainError
from llamatrain.platform.terminal import show_log
from llamatrain.sources.names import locate
try:
    with show_log():
        print(locate(sys.argv[1], sys.argv[2]))
except LlamatrainError as error:
    print(f"{error} [{error.code}]")
"""


@dataclass
class Hub:
    """A server, and a cache for what it sends."""

    server: HubServer
    folder: Path

    def fetch(self, name: str, use: str = "model", **more: str) -> str:
        """What a process of its own prints: a path, or an error."""
        done = subprocess.run(  # noqa: PLW1510
            [sys.executable, "-c", PROGRAM, name, use],
            env=environment(
                HF_ENDPOINT=self.server.url,
                HF_HOME=str(self.folder / "hf"),
                HF_HUB_DISABLE_XET="1",
                LLAMATRAIN_CACHE=str(self.folder / "cache"),
                **more,
            ),
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("\n") == 1
        return done.stdout.strip()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    pytest.importorskip("huggingface_hub")
    with serve_hub() as server:
        server.repositories["me/tiny"] = Repository({"README.md": b"x", "tiny.gguf": BODY})
        yield Hub(server, tmp_path)


def test_the_only_gguf_file_is_downloaded_once(hub: Hub) -> None:
    path = Path(hub.fetch("hf:me/tiny"))
    assert path.read_bytes() == BODY and path.is_relative_to(hub.folder / "hf")
    sent = sum(method == "GET" and "resolve" in at for method, at, _ in hub.server.requests)
    assert hub.fetch("hf:me/tiny@main") == str(path)
    assert sum(method == "GET" and "resolve" in at for method, at, _ in hub.server.requests) == sent


def test_files_types_and_data_are_named(hub: Hub) -> None:
    files = {"a-Q8_0.gguf": b"8", "a-Q4_K_M.gguf": b"4", "mmproj-a-Q8_0.gguf": b"m", "part/b.gguf": b"b"}
    hub.server.repositories["me/many"] = Repository(files)
    hub.server.repositories["me/rows"] = Repository({"data/rows.jsonl": b"{}"})
    assert Path(hub.fetch("hf:me/many:q8_0")).read_bytes() == b"8"
    assert Path(hub.fetch("hf:me/many")).read_bytes() == b"4"
    assert Path(hub.fetch("hf:me/many/part/b.gguf")).read_bytes() == b"b"
    assert Path(hub.fetch("hf:datasets/me/rows/data/rows.jsonl", "data")).read_bytes() == b"{}"
    assert hub.fetch("hf:datasets/me/rows", "data").endswith("[no-file-named]")
    assert hub.fetch("hf:me/many:q2_k").endswith("[no-file-named]")
    assert hub.fetch("hf:me/many", "data").endswith("[wrong-kind]")


def test_all_parts_of_a_split_model_are_downloaded(hub: Hub) -> None:
    files = {f"big-0000{i}-of-00003.gguf": bytes([i]) for i in (1, 2, 3)}
    hub.server.repositories["me/big"] = Repository(files)
    path = Path(hub.fetch("hf:me/big"))
    assert sorted(each.read_bytes() for each in path.parent.glob("*.gguf")) == [b"\1", b"\2", b"\3"]


def test_an_adapter_of_peft_is_a_folder(hub: Hub) -> None:
    hub.server.repositories["me/lora"] = Repository(
        {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x", "other.bin": b"y"}
    )
    folder = Path(hub.fetch("hf:me/lora", "adapter"))
    assert {path.name for path in folder.iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}


@pytest.mark.parametrize(
    ("problem", "code", "advice"),
    [
        ("gated", "gated", "hf auth login"),
        ("private", "no-such-repository", "hf auth login"),
        ("missing", "no-such-repository", "check the name"),
        ("revision", "no-such-revision", "tree/main"),
        ("file", "no-such-file", "tree/main"),
    ],
)
def test_errors_of_the_server_are_explained(hub: Hub, problem: str, code: str, advice: str) -> None:
    hub.server.repositories["me/bad"] = Repository({"x.gguf": b"x"}, problem=problem)
    told = hub.fetch("hf:me/bad/x.gguf")
    assert told.endswith(f"[{code}]") and advice in told


def test_a_repository_without_gguf_files_is_explained(hub: Hub) -> None:
    hub.server.repositories["me/torch"] = Repository({"config.json": b"{}", "pytorch_model.bin": b"x"})
    assert hub.fetch("hf:me/torch").endswith("[no-gguf]")
    assert not any("pytorch" in path for _, path, _ in hub.server.requests)


def test_a_token_is_sent(hub: Hub) -> None:
    hub.server.repositories["me/own"] = Repository({"x.gguf": b"x"}, token="hf_secret")
    assert hub.fetch("hf:me/own").endswith("[no-such-repository]")
    assert Path(hub.fetch("hf:me/own", HF_TOKEN="hf_secret")).read_bytes() == b"x"


def test_offline_only_the_cache_is_used(hub: Hub) -> None:
    assert hub.fetch("hf:me/tiny", HF_HUB_OFFLINE="1").endswith("[not-cached]")
    assert not hub.server.requests
    path = hub.fetch("hf:me/tiny")
    asked = len(hub.server.requests)
    assert hub.fetch("hf:me/tiny", HF_HUB_OFFLINE="1") == path and len(hub.server.requests) == asked
    hub.server.url = "http://127.0.0.1:9"  # nobody listens
    assert hub.fetch("hf:me/tiny") == path


def test_file_names_of_the_server_stay_inside(hub: Hub) -> None:
    files = {"../../../../x-Q8_0.gguf": b"x", "a\n\x1b[31m.gguf": b"x", "C:\\y.gguf": b"x"}
    hub.server.repositories["me/evil"] = Repository(files)
    told = hub.fetch("hf:me/evil")
    assert told.endswith("[no-gguf]") and "it has none" in told
    hub.server.repositories["me/evil"].files["b.gguf"] = b"b"
    assert Path(hub.fetch("hf:me/evil")).read_bytes() == b"b"
    assert not list(hub.folder.rglob("x-Q8_0.gguf"))


def test_an_invalid_token_is_not_repeated(hub: Hub) -> None:
    told = hub.fetch("hf:me/tiny/tiny.gguf", HF_TOKEN="hf_sécret")
    assert told.endswith("[hub-failed]") and "HF_TOKEN" in told and "cret" not in told


def test_a_connection_that_was_cut_is_tried_again(hub: Hub) -> None:
    repository = hub.server.repositories["me/tiny"]
    repository.cut_at = 5000
    assert hub.fetch("hf:me/tiny").endswith("repeat the command [download-failed]")
    repository.cuts = 1
    assert Path(hub.fetch("hf:me/tiny")).read_bytes() == BODY


def test_wrong_bytes_are_refused(hub: Hub) -> None:
    hub.server.repositories["me/tiny"].damaged = True
    assert hub.fetch("hf:me/tiny").endswith("[wrong-checksum]")
    hub.server.repositories["me/tiny"].damaged = False
    assert Path(hub.fetch("hf:me/tiny")).read_bytes() == BODY


def test_one_bar_serves_both_ways_of_transfer() -> None:
    """Large files come through another library, which reports bytes of the file and of the network."""
    reporting = pytest.importorskip("huggingface_hub.utils._xet_progress_reporting")
    with reporting.XetDownloadProgressReporter(
        reconstruction_desc="x", transfer_desc="x", total=10, log_level=30, tqdm_class=HubBar
    ) as reporter:
        for done in (4, 10):
            reporter.update_progress(
                SimpleNamespace(
                    total_bytes=10,
                    total_bytes_completed=done,
                    total_bytes_completion_rate=1.0,
                    total_transfer_bytes_completed=done // 2,
                    total_transfer_bytes_completion_rate=1.0,
                )
            )
        assert reporter.reconstruction_bar.n == 10 and reporter.transfer_bar is reporter.reconstruction_bar


@pytest.mark.parametrize(
    "text",
    [
        "hf:",
        "hf:a",
        "hf:a/b/../c",
        "hf:a/b//c",
        "hf:a/b/",
        "hf:a/b/./c",
        "hf:a/b/..\\c",
        "hf:a/b/x\ny",
        "hf:a/b@../../x",
        "hf:a b/c",
        "hf:a/b@",
        "hf:a/b:",
        "hf:a/b@x y",
        "hf:/a/b",
    ],
)
def test_invalid_names_are_refused(text: str) -> None:
    with raises("invalid-name"):
        HubName.parse(text)


def test_names_keep_their_parts() -> None:
    name = HubName.parse("hf:datasets/me/rows/data/x.jsonl@refs/pr/1")
    assert (name.repository, name.is_data, name.file, name.revision) == (
        "me/rows",
        True,
        "data/x.jsonl",
        "refs/pr/1",
    )
    assert str(name) == "hf:datasets/me/rows/data/x.jsonl@refs/pr/1"


def test_a_choice_among_equals_is_left_to_the_user() -> None:
    name = HubName.parse("hf:me/two")
    with pytest.raises(LlamatrainError, match=r"a\.gguf, b\.gguf"):
        choose_gguf(name, ["a.gguf", "b.gguf"])
    assert expand_parts("x-00002-of-00002.gguf") == ["x-00002-of-00002.gguf", "x-00001-of-00002.gguf"]


def test_the_package_is_named_if_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from llamatrain.sources import hub

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with raises("missing-package", match=r"llamatrain\[hub\]"):
        hub.fetch("hf:me/tiny", "model")
