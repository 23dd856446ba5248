"""A web server on this machine that sends files as a test says, also badly."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

from tests.helpers.http_server import listening


@dataclass
class Served:
    """What the server sends for one path."""

    body: bytes = b""
    etag: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    redirect: str = ""
    status: int = 200
    cut_at: int | None = None  # the connection ends after this many bytes
    length: int | None = None  # what is promised, if it is not the truth
    ranges: bool = True
    delay: float = 0.0  # seconds between bytes


class FileServer:
    """The paths that are served, and the requests that came."""

    def __init__(self) -> None:
        self.files: dict[str, Served] = {}
        self.requests: list[dict[str, str]] = []
        self.url = ""


@contextmanager
def serve_files() -> Iterator[FileServer]:
    """Serve until the block ends."""
    server = FileServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:
            server.requests.append(
                {"path": self.path, **{key.title(): text for key, text in self.headers.items()}}
            )
            served = server.files.get(self.path)
            self.close_connection = True
            if served is None:
                self.send_error(404)
                return
            self.answer(served)

        def answer(self, served: Served) -> None:
            status, start, headers = served.status, 0, dict(served.headers)
            if served.etag:
                headers["ETag"] = served.etag
            if served.redirect:
                status, headers["Location"] = 302, served.redirect
            wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
            if served.etag and self.headers.get("If-None-Match") == served.etag:
                status, served = 304, Served()
            elif wanted and served.ranges and self.headers.get("If-Range", served.etag) == served.etag:
                start = int(wanted[1])
                if start >= len(served.body):
                    status, served = 416, Served()
                else:
                    status = 206
                    headers["Content-Range"] = f"bytes {start}-{len(served.body) - 1}/{len(served.body)}"
            body = served.body[start:]
            headers["Content-Length"] = str(len(body) if served.length is None else served.length)
            self.send_response(status)
            for key, text in headers.items():
                self.send_header(key, text)
            self.end_headers()
            body = body if served.cut_at is None else body[: max(0, served.cut_at - start)]
            for first in range(0, len(body), 1 if served.delay else max(1, len(body))):
                self.wfile.write(body[first : first + 1] if served.delay else body)
                self.wfile.flush()
                time.sleep(served.delay)

        def do_HEAD(self) -> None:
            self.do_GET()

    with listening(Handler) as server.url:
        yield server
