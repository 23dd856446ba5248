"""Files at addresses are downloaded once, continue where they were cut, and are checked."""

import hashlib
import shutil
from collections import namedtuple
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from urllib.request import Request

import pytest

from llamatrain.errors import LlamatrainError
from llamatrain.platform import terminal
from llamatrain.platform.locks import HAS_LOCKS, lock
from llamatrain.platform.terminal import show_log
from llamatrain.sources import download as downloads
from llamatrain.sources.download import download
from tests.helpers.errors import raises
from tests.helpers.file_server import FileServer, Served, serve_files

BODY = bytes(range(256)) * 40


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setenv("LLAMATRAIN_CACHE", str(tmp_path / "cache"))
    with serve_files() as server:
        yield server


def test_a_file_is_downloaded_once(server: FileServer) -> None:
    server.files["/a/rows.jsonl?x=1"] = Served(BODY, etag='"1"')
    file = download(f"{server.url}/a/rows.jsonl?x=1", "data")
    assert file.name == "rows.jsonl" and file.read_bytes() == BODY
    assert download(f"{server.url}/a/rows.jsonl?x=1", "data") == file
    assert [request.get("If-None-Match") for request in server.requests] == [None, '"1"']
    assert {path.name for path in file.parent.iterdir()} == {"rows.jsonl", "rows.jsonl.json"}


@pytest.mark.skipif(not HAS_LOCKS, reason="this system has no locks on folders")
def test_a_second_process_waits_and_says_so(
    server: FileServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "SLOW_AFTER", 0.05)
    server.files["/x.txt"] = Served(BODY, etag='"1"')
    folder = download(f"{server.url}/x.txt", "data").parent
    with show_log(), ThreadPoolExecutor() as pool:
        with lock(folder):
            second = pool.submit(download, f"{server.url}/x.txt", "data")
            with pytest.raises(TimeoutError):
                second.result(0.5)
            assert len(server.requests) == 1
        assert second.result(30).read_bytes() == BODY
    assert "waiting for another process" in capsys.readouterr().err


def test_a_file_that_changed_is_downloaded_again(server: FileServer) -> None:
    server.files["/x.txt"] = Served(BODY, etag='"1"')
    download(f"{server.url}/x.txt", "data")
    server.files["/x.txt"] = Served(b"new", etag='"2"')
    assert download(f"{server.url}/x.txt", "data").read_bytes() == b"new"


def test_without_a_network_the_file_in_the_cache_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMATRAIN_CACHE", str(tmp_path))
    with serve_files() as server:
        server.files["/x.txt"] = Served(BODY, etag='"1"')
        file = download(f"{server.url}/x.txt", "data")
    assert download(f"{server.url}/x.txt", "data") == file and file.read_bytes() == BODY
    with raises("download-failed"):
        download(f"{server.url}/y.txt", "data")


@pytest.mark.parametrize("ranges", [True, False])
def test_a_download_that_was_cut_continues(server: FileServer, ranges: bool) -> None:
    server.files["/x.bin"] = Served(BODY, etag='"1"', cut_at=5000)
    with raises("download-failed", match="repeat the command"):
        download(f"{server.url}/x.bin", "model")
    server.files["/x.bin"] = Served(BODY, etag='"1"', ranges=ranges)
    assert download(f"{server.url}/x.bin", "model").read_bytes() == BODY
    assert server.requests[-1]["Range"] == "bytes=5000-" and server.requests[-1]["If-Range"] == '"1"'


@pytest.mark.parametrize("etag", ['"2"', 'W/"1"', ""])
def test_two_versions_are_not_joined(server: FileServer, etag: str) -> None:
    server.files["/x.bin"] = Served(BODY, etag='"1"' if etag == '"2"' else etag, cut_at=5000)
    with raises("download-failed"):
        download(f"{server.url}/x.bin", "model")
    new = b"n" * len(BODY)
    server.files["/x.bin"] = Served(new, etag=etag)
    assert download(f"{server.url}/x.bin", "model").read_bytes() == new


def test_an_update_that_was_cut_keeps_the_old_file(server: FileServer) -> None:
    server.files["/x.bin"] = Served(BODY, etag='"1"')
    file = download(f"{server.url}/x.bin", "model")
    server.files["/x.bin"] = Served(b"n" * 9000, etag='"2"', cut_at=0)
    assert download(f"{server.url}/x.bin", "model") == file and file.read_bytes() == BODY
    server.files["/x.bin"] = Served(b"n" * 9000, etag='"2"')
    assert download(f"{server.url}/x.bin", "model").read_bytes() == b"n" * 9000


def test_a_file_that_became_shorter_is_downloaded_whole(server: FileServer) -> None:
    server.files["/x.bin"] = Served(BODY, etag='"1"', cut_at=5000)
    with raises("download-failed"):
        download(f"{server.url}/x.bin", "model")
    server.files["/x.bin"] = Served(BODY[:3000], etag='"1"')
    assert download(f"{server.url}/x.bin", "model").read_bytes() == BODY[:3000]


def test_a_body_shorter_than_promised_is_an_error(server: FileServer) -> None:
    server.files["/x.bin"] = Served(BODY, length=len(BODY) + 10)
    with raises("download-failed", match="bytes arrived"):
        download(f"{server.url}/x.bin", "model")


def test_no_more_is_read_than_promised(server: FileServer) -> None:
    server.files["/x.bin"] = Served(BODY, length=100)
    assert download(f"{server.url}/x.bin", "model").read_bytes() == BODY[:100]


def test_a_checksum_is_compared(server: FileServer) -> None:
    digest = hashlib.sha256(BODY).hexdigest()
    server.files["/x.bin"] = Served(BODY)
    file = download(f"{server.url}/x.bin#sha256={digest.upper()}", "model")
    assert download(f"{server.url}/x.bin#sha256={digest}", "model") == file and len(server.requests) == 1
    with raises("wrong-checksum"):
        download(f"{server.url}/x.bin#sha256={'0' * 64}", "model")
    assert not file.exists()


@pytest.mark.parametrize(
    "target", ["file:///etc/passwd", "ftp://127.0.0.1/x", "http://example.com/x", "data:,x"]
)
def test_redirects_lead_to_no_other_scheme(server: FileServer, target: str) -> None:
    server.files["/x.bin"] = Served(redirect=target)
    with raises("redirect"):
        download(f"{server.url}/x.bin", "model")


def test_other_headers_that_redirect_are_checked(server: FileServer) -> None:
    server.files["/x.bin"] = Served(status=302, headers={"URI": "http://example.com/x"})
    with raises("redirect"):
        download(f"{server.url}/x.bin", "model")


@pytest.mark.parametrize("target", ["http://127.0.0.1:9/x", "https://localhost/x", "https://[::1]/x"])
def test_another_machine_does_not_lead_to_this_one(target: str) -> None:
    request = Request("https://example.com/x", headers={"Range": "bytes=1-", "Proxy-Authorization": "secret"})
    with raises("redirect"):
        downloads.Redirects().redirect_request(request, BytesIO(), 302, "", {}, target)
    followed = downloads.Redirects().redirect_request(
        request, BytesIO(), 302, "", {}, "https://example.org/x"
    )
    assert followed and followed.headers == {"Range": "bytes=1-"}


@pytest.mark.parametrize(
    "target", ["https://[::1", "https://a..b/x", "http://127.0.0.1:99999999999999999999/x"]
)
def test_invalid_redirects_are_errors(server: FileServer, target: str) -> None:
    server.files["/x.bin"] = Served(redirect=target)
    with raises("download-failed"):
        download(f"{server.url}/x.bin", "model")


def test_the_body_of_a_redirect_is_not_read(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "TIMEOUT", 1.0)
    server.files |= {"/a.bin": Served(redirect="/b", length=10**9), "/b": Served(BODY)}
    assert download(f"{server.url}/a.bin", "model").read_bytes() == BODY


def test_a_range_of_many_digits_is_an_error(server: FileServer) -> None:
    server.files["/x.bin"] = Served(BODY, status=206, headers={"Content-Range": f"bytes {'9' * 5000}-1/2"})
    with raises("download-failed"):
        download(f"{server.url}/x.bin", "model")


def test_a_circle_of_redirects_ends(server: FileServer) -> None:
    server.files |= {"/a": Served(redirect="/b"), "/b": Served(redirect="/a")}
    with raises("redirect"):
        download(f"{server.url}/a", "model")
    assert len(server.requests) < 20


def test_a_redirect_is_followed_with_the_range(server: FileServer) -> None:
    server.files |= {"/a.bin": Served(redirect="/b"), "/b": Served(BODY, etag='"1"', cut_at=10)}
    with raises("download-failed"):
        download(f"{server.url}/a.bin", "model")
    server.files["/b"] = Served(BODY, etag='"1"')
    assert download(f"{server.url}/a.bin", "model").read_bytes() == BODY
    assert server.requests[-1]["Range"] == "bytes=10-"


def test_a_stalled_server_is_given_up(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "TIMEOUT", 0.2)
    server.files["/x.bin"] = Served(BODY[:2], delay=1.0)
    with raises("download-failed", match="nothing arrived"):
        download(f"{server.url}/x.bin", "model")


def test_a_server_that_drips_is_given_up(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "SLOW_FOR", 0.3)
    monkeypatch.setattr(downloads, "TRIES", 1)
    server.files["/x.bin"] = Served(BODY[:100], delay=0.05)
    with raises("download-failed", match="bytes in"):
        download(f"{server.url}/x.bin", "model")


@pytest.mark.parametrize(
    ("status", "code"), [(404, "no-such-file"), (403, "access-denied"), (500, "download-failed")]
)
def test_statuses_are_explained(server: FileServer, status: int, code: str) -> None:
    server.files["/x.bin"] = Served(status=status)
    with raises(code):
        download(f"{server.url}/x.bin", "model")


def test_a_page_is_no_model(server: FileServer) -> None:
    server.files["/blob/x.gguf"] = Served(b"<html>", headers={"Content-Type": "text/html; charset=utf-8"})
    with raises("web-page", match="/resolve/"):
        download(f"{server.url}/blob/x.gguf", "model")


def test_free_space_is_checked_first(server: FileServer, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(9, 9, 1000))
    server.files["/x.bin"] = Served(BODY)
    with raises("disk-full"):
        download(f"{server.url}/x.bin", "model")


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("http://example.com/x", "not-https"),
        ("http://127.0.0.1.example.com/x", "not-https"),
        ("https://", "invalid-name"),
        ("https://user:secret@host/x", "invalid-name"),
        ("https://host:port/x", "invalid-name"),
        ("https://[::1/x", "invalid-name"),
        ("https://host/x y", "invalid-name"),
        ("https://user:secret@host/x y", "invalid-name"),
        ("https://user:secret@host/x#part", "invalid-name"),
        ("https://user:secret@[::1/x", "invalid-name"),
        ("https://\x1b[31m[/x", "invalid-name"),
        ("https://a..b/x", "invalid-name"),
        (f"https://{'a' * 70}.com/x", "invalid-name"),
        ("https://host/x\r\nHost: y", "invalid-name"),
        ("https://host/x#sha256=12", "invalid-name"),
        ("https://host/x#part", "invalid-name"),
        ("https://huggingface.co/datasets/a/b", "web-page"),
        ("https://huggingface.co/a/b/blob/main/x.gguf", "web-page"),
    ],
)
def test_addresses_are_checked(name: str, code: str) -> None:
    with pytest.raises(LlamatrainError) as caught:
        download(name, "model")
    assert caught.value.code == code and "secret" not in str(caught.value) and str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("https://h/a/b.gguf?download=true", "b.gguf"),
        ("https://h/%2e%2e%2fx", "x"),
        ("https://h/", "file"),
        ("https://h/..", "file"),
        ("https://h/.partial", "partial"),
        ("https://h/a%00b", "a_b"),
    ],
)
def test_file_names_stay_in_their_folder(url: str, name: str) -> None:
    assert downloads.file_name(url) == name
