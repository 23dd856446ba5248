"""A server of the page, and a client that has its token."""

import http.client
import json
import re
import threading
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamatrain.ui.server import Server
from tests.helpers.cli import started, until

Json = dict[str, Any]


@dataclass
class Reply:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Json:
        found: Json = json.loads(self.body)
        return found

    @property
    def lines(self) -> list[Json]:
        return [json.loads(line) for line in self.body.splitlines()]


class Client:
    """What the page asks for, without a browser."""

    def __init__(self, url: str) -> None:
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\?token=([\w-]{43})", url)
        assert found
        self.url, self.port, self.token = url, int(found[1]), found[2]
        self.origin = f"http://127.0.0.1:{self.port}"
        self.cookie = f"llamatrain-{self.port}={self.token}"

    def send(self, method: str, path: str, body: bytes | None = None, **headers: str | None) -> Reply:
        """Send a request; a header that is None is left out."""
        all_headers: dict[str, str | None] = {"Cookie": self.cookie, "Origin": self.origin}
        if body is not None:
            all_headers["Content-Type"] = "application/json"
        all_headers |= {name.replace("_", "-"): value for name, value in headers.items()}
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            given = {name: value for name, value in all_headers.items() if value is not None}
            link.request(method, path, body, given)
            answer = link.getresponse()
            return Reply(answer.status, answer.headers, answer.read())
        finally:
            link.close()

    def get(self, path: str) -> Json:
        reply = self.send("GET", path)
        assert reply.status == 200, reply.body
        return reply.json

    def post(self, path: str, **body: Any) -> Json:
        reply = self.send("POST", path, json.dumps(body).encode())
        assert reply.status == 200, reply.body
        return reply.json

    def refused(self, path: str, **body: Any) -> Json:
        """The error of a request that the server understood."""
        reply = self.send("POST", path, json.dumps(body).encode())
        assert reply.status == 400, reply.body
        return reply.json

    def run(self, folder: str) -> Json:
        return self.get(f"/api/run?folder={folder}")

    def reach(self, folder: str, *states: str) -> Json:
        """Wait for a state of a run."""
        until(lambda: self.run(folder)["state"] in states)
        return self.run(folder)


@contextmanager
def served(root: Path) -> Iterator[Client]:
    """A server in this process, whose run does not outlive the block."""
    with chdir(root), Server(root, 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield Client(server.guard.url)
        finally:
            server.shutdown()
            thread.join()
            for child in server.app.runs.close():
                child.process.kill()
                child.process.wait()
            for child in server.app.runs.children:
                child.log.close()


@contextmanager
def served_by_command(root: Path) -> Iterator[tuple[Client, Any]]:
    """The command in a process of its own."""
    with started("ui", "--no-browser", "--folder", root) as process:
        assert process.stderr
        line = process.stderr.readline()
        found = re.search(r"http://\S+", line)
        assert found, line
        yield Client(found[0]), process
