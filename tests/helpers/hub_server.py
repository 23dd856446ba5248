"""A server on this machine that answers like the part of Hugging Face's API that downloads files."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.helpers.http_server import listening

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ERRORS = {  # HTTP status and code of an error, by what is wrong
    "gated": (403, "GatedRepo"),
    "private": (401, "RepoNotFound"),
    "missing": (404, "RepoNotFound"),
    "revision": (404, "RevisionNotFound"),
    "file": (404, "EntryNotFound"),
}


@dataclass
class Repository:
    """The files of a repository, and how it misbehaves."""

    files: dict[str, bytes] = field(default_factory=dict)
    problem: str = ""  # a key of ERRORS
    cut_at: int | None = None  # the connection ends after this many bytes of a file
    cuts: int = 99  # times that this happens
    damaged: bool = False  # other bytes are sent than were stored
    token: str = ""  # is needed to read it
    private: bool = False
    denied: bool = False  # no commit is accepted


class HubServer:
    """The repositories, and the requests that came."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[tuple[str, str, str]] = []  # method, path and range
        self.url = ""
        self.token = ""  # is needed to write


class HubHandler(BaseHTTPRequestHandler):
    """Answers requests; a class of its own has the server that is meant."""

    hub: HubServer

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        self.hub.requests.append((self.command, self.path, self.headers.get("Range", "")))
        path = self.path.partition("?")[0]
        api = re.fullmatch(r"/api/(?:models|datasets)/([^/]+/[^/]+)(?:/(?:tree|revision)/(.+))?", path)
        file = re.fullmatch(r"/(?:datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        match = api or file
        repository = self.hub.repositories.get(match[1]) if match else None
        if repository is None or match is None:
            self.fail("missing")
        elif repository.problem:
            self.fail(repository.problem)
        elif repository.token and self.headers.get("Authorization") != f"Bearer {repository.token}":
            self.fail("private")
        elif match[2] not in (None, "main", COMMIT):
            self.fail("revision")
        elif api:
            self.send_json(repository, "/tree/" in path)
        elif file and file[3] in repository.files:
            self.send_file(repository, repository.files[file[3]])
        else:
            self.fail("file")

    def do_HEAD(self) -> None:
        self.do_GET()

    def fail(self, problem: str) -> None:
        status, code = ERRORS[problem]
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", problem)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send_json(self, repository: Repository, is_tree: bool) -> None:
        tree = [
            {"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()}
            for name, body in repository.files.items()
        ]
        siblings = [{"rfilename": name} for name in repository.files]
        info = {"id": "a/b", "sha": COMMIT, "private": repository.private, "siblings": siblings}
        self.send_answer(tree if is_tree else info)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.hub.requests.append((self.command, self.path, ""))
        path = self.path.partition("?")[0]
        action = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit)/main", path)
        if self.hub.token and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            self.send_answer({"error": "Unauthorized"}, 401)
        elif self.path == "/api/repos/create":
            wanted = json.loads(body)
            known = f"{wanted.get('organization') or 'me'}/{wanted['name']}"
            status = 409 if known in self.hub.repositories else 200
            self.hub.repositories.setdefault(
                known,
                Repository(
                    private="private" in (wanted.get("visibility"), wanted.get("private") and "private")
                ),
            )
            self.send_answer({"url": f"{self.hub.url}/{known}"}, status)
        elif action and self.hub.repositories[action[1]].denied:
            self.send_answer({"error": "Forbidden"}, 403)
        elif action and action[2] == "preupload":
            files = json.loads(body)["files"]
            modes = [{**file, "uploadMode": "regular", "shouldIgnore": False} for file in files]
            self.send_answer({"files": modes})
        elif action:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.hub.repositories[action[1]].files[line["value"]["path"]] = content
            url = f"{self.hub.url}/{action[1]}/commit/{COMMIT}"
            self.send_answer({"commitUrl": url, "commitOid": COMMIT})
        else:  # the check of a model card
            self.send_answer({"errors": [], "warnings": []})

    def send_answer(self, answer: Any, status: int = 200) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_file(self, repository: Repository, body: bytes) -> None:
        etag = hashlib.sha256(body).hexdigest()
        wanted = re.fullmatch(r"bytes=(\d+)-.*", self.headers.get("Range", ""))
        start = int(wanted[1]) if wanted else 0
        self.send_response(206 if wanted else 200)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Linked-Etag", f'"{etag}"')
        self.send_header("X-Linked-Size", str(len(body)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body) - start))
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        self.end_headers()
        if self.command == "GET":
            sent = bytes(len(body)) if repository.damaged else body
            repository.cuts -= 1
            self.wfile.write(sent[start : repository.cut_at if repository.cuts >= 0 else None])


@contextmanager
def serve_hub() -> Iterator[HubServer]:
    """Serve until the block ends."""

    class Handler(HubHandler):
        hub = HubServer()

    with listening(Handler) as Handler.hub.url:
        yield Handler.hub
