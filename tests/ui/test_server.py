"""Who is answered, and what hostile requests meet. No browser and no training is needed."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llamatrain.ui.server import MAX_BODY, ROUTES, SECONDS
from tests.helpers.cli import run
from tests.helpers.ui_client import Client, served

GETS = [path for method, path in ROUTES if method == "GET"]
POSTS = [path for method, path in ROUTES if method == "POST"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("ui")
    outside, folder = place / "outside", place / "folder"
    outside.mkdir()
    (outside / "secret.txt").write_text("secret")
    (folder / "below").mkdir(parents=True)
    (folder / ".hidden").write_text("x")
    (folder / "text.txt").write_text("some text\n")
    (folder / "chats.jsonl").write_text("{}\n")
    (folder / "letter.pdf").write_text("%PDF-")
    (folder / "broken.gguf").write_text("GGUF")
    (folder / "to-folder").symlink_to(outside)
    (folder / "to-file.txt").symlink_to(outside / "secret.txt")
    (folder / "circle").symlink_to(folder / "circle")
    (folder / "inside.txt").symlink_to(folder / "text.txt")
    return folder


@pytest.fixture(scope="module")
def client(root: Path) -> Iterator[Client]:
    with served(root) as found:
        yield found


# ---- who is answered --------------------------------------------------------


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("cookie", [None, "", "llamatrain-1=x", "{cookie}x", "{name}=", "{name}=é", '"\\'])
def test_without_the_token_nothing_is_answered(
    client: Client, method: str, path: str, cookie: str | None
) -> None:
    given = cookie and cookie.replace("{cookie}", client.cookie).replace(
        "{name}", f"llamatrain-{client.port}"
    )
    reply = client.send(method, path, b"{}" if method == "POST" else None, Cookie=given)
    assert reply.status == 403 and "token is missing" in reply.json["error"]
    assert client.token.encode() not in reply.body


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(
    "host", ["", "evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "[::1]:{port}"]
)
def test_another_host_is_refused(client: Client, method: str, path: str, host: str) -> None:
    """Such as a name that its owner made to point to this machine."""
    reply = client.send(method, path, b"{}" if method == "POST" else None, Host=host.format(port=client.port))
    assert reply.status == 403 and "another name" in reply.json["error"]


@pytest.mark.parametrize(
    "origin",
    [
        None,
        "null",
        "",
        "http://evil.example",
        "http://127.0.0.1:1",
        "https://127.0.0.1:{port}",
        "127.0.0.1:{port}",
    ],
)
@pytest.mark.parametrize("path", POSTS)
def test_posts_of_other_origins_are_refused(client: Client, path: str, origin: str | None) -> None:
    reply = client.send("POST", path, b"{}", Origin=origin and origin.format(port=client.port))
    assert reply.status == 403 and "another site" in reply.json["error"]


def test_pages_of_other_origins_cannot_read(client: Client) -> None:
    assert client.send("GET", "/api/files", Origin="http://evil.example").status == 403
    assert client.send("GET", "/api/files", Origin=None).status == 200
    assert client.send("GET", "/api/files", Host=f"localhost:{client.port}", Origin=None).status == 200


def test_the_token_in_the_address_becomes_a_cookie(client: Client) -> None:
    reply = client.send("GET", f"/?token={client.token}", Cookie=None, Origin=None)
    assert reply.status == 200 and b"<main>" in reply.body
    cookie = reply.headers["Set-Cookie"]
    assert cookie.startswith(client.cookie + ";") and "HttpOnly" in cookie and "SameSite=Strict" in cookie
    assert "Set-Cookie" not in client.send("GET", "/").headers
    for wrong in (
        f"/?token={client.token[:-1]}",
        "/?token=",
        f"/api/files?token={client.token}",
        "/?token=%ff",
    ):
        assert client.send("GET", wrong, Cookie=None).status == 403, wrong


def test_answers_forbid_other_sources(client: Client) -> None:
    for path in ("/", "/page.js", "/style.css", "/api/runs", "/nothing"):
        headers = client.send("GET", path).headers
        policy = headers["Content-Security-Policy"]
        assert (
            policy.startswith("default-src 'none'")
            and "http" not in policy
            and "frame-ancestors 'none'" in policy
        )
        assert headers["X-Content-Type-Options"] == "nosniff" and headers["Referrer-Policy"] == "no-referrer"
        assert headers["Cache-Control"] == "no-store" and "Access-Control-Allow-Origin" not in headers


def test_the_files_of_the_page_name_no_other_host(client: Client) -> None:
    for path in ("/", "/page.js", "/style.css"):
        text = client.send("GET", path).body.decode()
        assert "://" not in text.replace("http://www.w3.org/", ""), path


def test_only_this_machine_can_connect(client: Client) -> None:
    """Every address of the machine but one refuses."""
    found = socket.getaddrinfo(socket.gethostname(), client.port, socket.AF_INET, socket.SOCK_STREAM)
    others = {address[0] for *_, address in found if address[0] != "127.0.0.1"} | {"127.0.0.2"}
    for other in others:
        with pytest.raises(OSError, match=r"."), socket.create_connection((other, client.port), timeout=5):
            pass
    table = Path("/proc/net/tcp")
    if table.exists():
        mine = [line.split()[1] for line in table.read_text().splitlines() if line.split()[3] == "0A"]
        assert [name for name in mine if name.endswith(f":{client.port:04X}")] == [
            f"0100007F:{client.port:04X}"
        ]


# ---- hostile requests -------------------------------------------------------


@pytest.mark.parametrize("method", ["HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"])
def test_other_methods_are_not_allowed(client: Client, method: str) -> None:
    assert client.send(method, "/").status == 405


def test_methods_belong_to_their_routes(client: Client) -> None:
    reply = client.send("GET", "/api/start")
    assert (reply.status, reply.headers["Allow"]) == (405, "POST")
    assert client.send("POST", "/api/runs", b"{}").headers["Allow"] == "GET"
    assert client.send("GET", "/nothing").status == 404
    assert client.send("GET", "//evil.example/").status == 404


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"1", b'"x"', b"\xff", b"[" * 100_000, b'{"a":' * 50_000]
)
def test_a_body_that_is_no_object_is_refused(client: Client, body: bytes) -> None:
    reply = client.send("POST", "/api/plan", body)
    assert reply.status == 400 and "JSON" in reply.json["error"]


def test_a_body_is_limited_and_must_be_json(client: Client) -> None:
    assert client.send("POST", "/api/plan", b"{}", Content_Type="text/plain").status == 415
    assert (
        client.send("POST", "/api/plan", None, Content_Type="application/json", Content_Length="x").status
        == 400
    )
    assert (
        client.send("POST", "/api/plan", None, Content_Type="application/json", Content_Length="-1").status
        == 400
    )
    for size in (MAX_BODY + 1, 10**17, 10**30):  # nothing of it is read
        length = str(size)
        reply = client.send("POST", "/api/plan", None, Content_Type="application/json", Content_Length=length)
        assert reply.status == 413


@pytest.mark.parametrize(
    "line", [b"\0\0\0\0", b"GET / HTTP/9.9", b"GET /" + b"a" * 70_000 + b" HTTP/1.1", b"GET"]
)
def test_requests_that_are_no_http(client: Client, line: bytes) -> None:
    with socket.create_connection(("127.0.0.1", client.port), timeout=30) as link:
        link.sendall(line + b"\r\n\r\n")
        assert b" 200 " not in link.recv(1 << 16)


WRONG = [1, None, [], {}, True, "\0", "x\0y"]


@pytest.mark.parametrize("value", WRONG)
@pytest.mark.parametrize("path", ["/api/preview", "/api/plan", "/api/start"])
@pytest.mark.parametrize("name", ["command", "base", "data", "options"])
def test_values_of_other_types_are_refused(client: Client, path: str, name: str, value: object) -> None:
    body = {"command": "finetune", "base": "b.gguf", "data": "d.txt", "options": {}} | {name: value}
    if (name, value) == ("options", {}):
        body["base"] = "missing.gguf"
    assert client.refused(path, **body)["error"]


@pytest.mark.parametrize("value", [1, True, ["a"], {"a": 1}, "x\n--resume=y"])
def test_values_of_options_are_checked(client: Client, value: object) -> None:
    """No value can become another option of the command line."""
    for name in ("iters", "lora_scaled", "full", "out", "lr"):
        body = {"command": "finetune", "base": "b.gguf", "data": "d.txt", "options": {name: value}}
        assert client.refused("/api/start", **body)["error"]


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ({"lr": "fast"}, "lr", "lr must be a number (got 'fast')"),
        ({"iters": "-1"}, "iters", "iters must be 0 or more"),
        ({"val_split": "2"}, "val_split", "val_split must be"),
        ({"memory": "6 parsecs"}, "memory", "memory: '6 parsecs' is not a size"),
        ({"resume": "runs/x"}, "", "there is no such option"),
        ({"lora_scaled": "a.gguf"}, "lora_scaled", "lora_scaled must be FILE SCALE in each line"),
        ({"full": "perhaps"}, "full", "full must be on or off"),
    ],
)
def test_an_error_names_its_field(client: Client, options: dict[str, str], field: str, words: str) -> None:
    error = client.refused("/api/start", command="finetune", base="b.gguf", data="d.txt", options=options)
    assert error["field"] == field and error["error"].startswith(words if field else next(iter(options)))
    assert "\n" not in error["error"]


def test_missing_and_wrong_sources(client: Client) -> None:
    for path in ("/api/preview", "/api/plan", "/api/start"):
        assert client.refused(path, command="finetune", data="text.txt")["field"] == "base"
        assert client.refused(path, command="bake")["error"]
        error = client.refused(path, command="finetune", base="text.txt", data="-")
        assert error["field"] == "data" and "standard input" in error["error"]
    assert client.refused("/api/preview", command="from-scratch", data="text.txt")["field"] == "tokens_of"
    assert (
        client.refused("/api/plan", command="finetune", base="missing.gguf", data="text.txt")["field"]
        == "base"
    )
    assert client.refused("/api/chat", name="x", sources=[], prompt="x")["field"] == "prompt"
    assert client.refused("/api/chat", name="x", sources=[{"model": 1, "lora": ""}], prompt="x")["error"]
    assert client.refused("/api/export", model="", out="x")["error"]
    assert client.refused("/api/stop", folder="../outside")["error"]
    assert client.refused("/api/resume", folder="below")["error"]
    chat = client.send(
        "POST",
        "/api/chat",
        json.dumps({"name": "x", "sources": [{"model": "no.gguf", "lora": ""}], "prompt": "a"}).encode(),
    )
    assert chat.status == 200 and "no.gguf" in chat.lines[0]["error"]


# ---- files ------------------------------------------------------------------


def test_the_list_of_files(client: Client, root: Path) -> None:
    found = client.get("/api/files")
    assert found["root"] == str(root) and found["parent"] is None
    kinds = {entry["name"]: entry["kind"] for entry in found["entries"]}
    assert kinds == {
        "below": "folder",
        "broken.gguf": "damaged",
        "chats.jsonl": "data",
        "circle": "link out of the folder",
        "inside.txt": "data",
        "letter.pdf": "",
        "text.txt": "data",
        "to-file.txt": "link out of the folder",
        "to-folder": "link out of the folder",
    }
    assert client.get("/api/files?folder=below") | {"root": ""} == {
        "root": "",
        "folder": "below",
        "parent": "",
        "entries": [],
    }


OUTSIDE = [
    "..",
    "../outside",
    "below/../../outside",
    "/etc",
    "to-folder",
    "to-folder/secret.txt",
    "%2e%2e",
    "..%2foutside",
    "circle",
    "x%00y",
]


@pytest.mark.parametrize("place", OUTSIDE)
def test_paths_do_not_lead_out_of_the_folder(client: Client, place: str) -> None:
    for path in (
        f"/api/files?folder={place}",
        f"/download?path={place}",
        f"/api/run?folder={place}",
        f"/report?folder={place}",
    ):
        reply = client.send("GET", path)
        assert reply.status == 400 and b"secret" not in reply.body.replace(b"secret.txt", b""), path


def test_downloads(client: Client) -> None:
    reply = client.send("GET", "/download?path=text.txt")
    assert reply.body == b"some text\n" and "attachment" in reply.headers["Content-Disposition"]
    assert reply.headers["Content-Type"] == "application/octet-stream"
    assert client.send("GET", "/download?path=below").status == 400
    assert client.send("GET", "/download?path=to-file.txt").status == 400


# ---- slow clients, and the command -------------------------------------------


def test_slow_clients_delay_nobody(client: Client) -> None:
    assert SECONDS <= 60
    links = [socket.create_connection(("127.0.0.1", client.port)) for _ in range(20)]
    try:
        for link in links:
            link.sendall(b"POST /api/plan HTTP/1.1\r\nHost:")
        begin = time.monotonic()
        assert client.get("/api/runs") == {"runs": []}
        assert time.monotonic() - begin < 5
    finally:
        for link in links:
            link.close()


def test_many_tabs_at_once(client: Client) -> None:
    found = list[int]()
    threads = [
        threading.Thread(
            target=lambda: found.append(client.send("GET", "/api/fields?command=finetune").status)
        )
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [200] * 8


def test_fields_have_the_words_of_their_options(client: Client) -> None:
    fields = {field["name"]: field for field in client.get("/api/fields?command=finetune")["fields"]}
    assert fields["lr"]["default"] == "" and "2 / the width" in fields["lr"]["sentence"]
    assert fields["lr"]["basic"] and fields["batch"]["default"] == "4"
    assert (
        fields["full"]["kind"] == "switch"
        and fields["optimizer"]["choices"]
        and fields["lora"]["kind"] == "lines"
    )
    assert all(field["sentence"] and "--" not in field["sentence"] for field in fields.values())
    assert "resume" not in fields and "quiet" not in fields
    scratch = [
        field["name"] for field in client.get("/api/fields?command=from-scratch")["fields"] if field["basic"]
    ]
    assert scratch[:2] == ["iters", "lr"] and "size" in scratch and "lora_r" not in scratch


def test_wrong_options_of_the_command(client: Client, root: Path) -> None:
    done = run("ui", "--no-browser", "--folder", root, "--port", client.port)
    assert done.code == 2 and len(done.errors) == 1 and "choose another" in done.err, done.err
    assert run("ui", "--port", 70000).code == 2
    assert run("ui", "--folder", root / "nothing").code == 1
    assert run("ui", "--folder", root / "text.txt").code == 1
