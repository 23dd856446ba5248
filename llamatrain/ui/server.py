"""The server of the page: HTTP on 127.0.0.1, for the browser that has the token."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from llamatrain.errors import FileError, LlamatrainError, UsageError
from llamatrain.report.html_style import STYLE
from llamatrain.ui.app import App, find_field, format_error
from llamatrain.ui.files import resolve_inside
from llamatrain.ui.guard import ADDRESS, HEADERS, Guard

MAX_BODY = 1 << 20  # bytes of a request
SECONDS = 30  # a client may be silent for while it sends or receives
NO_TOKEN = (
    "open the address that `llamatrain ui` has printed; its token is missing here or is of another server"
)
REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"
HTML, CSS, SCRIPT, JSON, LINES = (
    "text/html; charset=utf-8",
    "text/css; charset=utf-8",
    "text/javascript; charset=utf-8",
    "application/json",
    "application/x-ndjson",
)


class Refusal(Exception):
    """A request that is answered with an error of HTTP."""

    def __init__(self, status: HTTPStatus, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers


class Server(ThreadingHTTPServer):
    """A server on a port of this machine; each connection has a thread, so a slow one delays no other."""

    daemon_threads = True
    allow_reuse_address = sys.platform != "win32"  # there, two servers could share a port

    def __init__(self, root: Path, port: int) -> None:
        try:
            super().__init__((ADDRESS, port), Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or "there is no such port"
            raise UsageError(
                f"--port {port} cannot be used: {reason}; choose another, or leave it out", code="port-in-use"
            ) from None
        self.app, self.guard = App(root), Guard(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that have left; other errors are bugs, and are printed."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def read_asset(name: str) -> bytes:
    """Return a file of the page."""
    return files("llamatrain.ui").joinpath(name).read_bytes()


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of a connection."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "llamatrain", ""
    timeout = SECONDS

    # ---- which requests are answered ---------------------------------------

    def do_GET(self) -> None:
        """Answer a request that changes nothing."""
        self._answer("GET")

    def do_POST(self) -> None:
        """Answer a request that does something."""
        self._answer("POST")

    def _answer(self, method: str) -> None:
        """Check a request, and answer it."""
        given: dict[str, Any] = {}
        self._has_begun = False
        try:
            self._check()
            path = urlsplit(self.path).path
            route = ROUTES.get((method, path))
            if route is None:
                allowed = [other for other, known in ROUTES if known == path]
                if allowed:
                    raise Refusal(
                        HTTPStatus.METHOD_NOT_ALLOWED, "this method is not allowed", Allow=", ".join(allowed)
                    )
                raise Refusal(HTTPStatus.NOT_FOUND, "there is no such page")
            given = self._read_json() if method == "POST" else self.query
            route(self, given)
        except Refusal as error:
            self.close_connection = True  # a body may not have been read
            self._send_json({"error": str(error)}, error.status, error.headers)
        except (ConnectionError, TimeoutError):
            self.close_connection = True
        except (LlamatrainError, OSError, MemoryError) as error:
            if self._has_begun:
                self.close_connection = True
                return
            message = format_error(error)
            self._send_json({"error": message, "field": find_field(message, given)}, HTTPStatus.BAD_REQUEST)

    def _check(self) -> None:
        """Raise if a request does not come from the page."""
        guard = self.server.guard
        if not guard.is_host(self.headers.get("Host")):
            raise Refusal(HTTPStatus.FORBIDDEN, "this server has another name")
        origin = self.headers.get("Origin")
        if (self.command != "GET" or origin is not None) and not guard.is_origin(origin):
            raise Refusal(HTTPStatus.FORBIDDEN, "this request comes from another site")
        if not guard.has_cookie(self.headers.get("Cookie")) and not self._brings_token():
            raise Refusal(HTTPStatus.FORBIDDEN, NO_TOKEN)

    def _brings_token(self) -> bool:
        """Return True if the page itself is opened, with the token in its address."""
        return (
            self.command == "GET"
            and urlsplit(self.path).path == "/"
            and self.server.guard.is_token(self.query.get("token", ""))
        )

    @property
    def query(self) -> dict[str, str]:
        """The parameters in the address."""
        try:
            return {name: values[-1] for name, values in parse_qs(urlsplit(self.path).query).items()}
        except ValueError:
            raise Refusal(HTTPStatus.BAD_REQUEST, "the address is invalid") from None

    def _read_json(self) -> dict[str, Any]:
        """Return the object in the body of a request."""
        if self.headers.get_content_type() != JSON:
            raise Refusal(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"the body must be {JSON}")
        length = self.headers.get("Content-Length")
        if length is None:
            raise Refusal(HTTPStatus.LENGTH_REQUIRED, "the length of the body is missing")
        if not (length.isascii() and length.isdigit()):
            raise Refusal(HTTPStatus.BAD_REQUEST, "the length of the body is invalid")
        if len(length) > 18 or int(length) > MAX_BODY:
            raise Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body is larger than {MAX_BODY} bytes")
        try:
            value = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            raise Refusal(HTTPStatus.BAD_REQUEST, "the body is not JSON") from None
        if not isinstance(value, dict):
            raise Refusal(HTTPStatus.BAD_REQUEST, "the body must be a JSON object")
        return value

    # ---- answers -----------------------------------------------------------

    def send_page(self, given: dict[str, Any]) -> None:
        """Send the page. The cookie replaces the token in the address."""
        cookie = {"Set-Cookie": self.server.guard.cookie} if "token" in given else {}
        self._send(read_asset("page.html"), HTML, headers=cookie)

    def send_style(self, given: dict[str, Any]) -> None:
        """Send the style of all pages of runs, with that of this page."""
        self._send(STYLE.encode() + read_asset("style.css"), CSS)

    def send_script(self, given: dict[str, Any]) -> None:
        """Send the script of the page."""
        self._send(read_asset("page.js"), SCRIPT)

    def send_icon(self, given: dict[str, Any]) -> None:
        """Send the icon of the page."""
        self._send(read_asset("icon.svg"), "image/svg+xml")

    def send_report(self, given: dict[str, Any]) -> None:
        """Send the page of a run, as it is in report.html."""
        page = self.server.app.runs.draw_page(given.get("folder", ""))
        self._send(page.encode(), HTML, headers={"Content-Security-Policy": REPORT_POLICY})

    def send_file(self, given: dict[str, Any]) -> None:
        """Send a file of the folder for the user to save."""
        place = given.get("path", "")
        path = resolve_inside(self.server.app.root, place)
        if not path.is_file():
            raise FileError(f"{place}: no such file", code="no-such-file")
        with path.open("rb") as file:
            self._begin(
                HTTPStatus.OK,
                {
                    "Content-Type": "application/octet-stream",
                    "Content-Length": str(os.fstat(file.fileno()).st_size),
                    "Content-Disposition": f"attachment; filename*=UTF-8''{quote(path.name, safe='')}",
                },
            )
            shutil.copyfileobj(file, self.wfile, 1 << 20)

    def send_lines(self, lines: Iterable[Any]) -> None:
        """Send JSON lines, each as soon as it is known."""
        self._begin(HTTPStatus.OK, {"Content-Type": LINES, "Transfer-Encoding": "chunked"})
        for line in lines:
            data = json.dumps(line).encode() + b"\n"
            self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.wfile.write(b"0\r\n\r\n")

    def _send_json(
        self, value: Any, status: HTTPStatus = HTTPStatus.OK, headers: dict[str, str] | None = None
    ) -> None:
        self._send(json.dumps(value, allow_nan=False).encode(), JSON, status, headers)

    def _send(
        self,
        data: bytes,
        kind: str,
        status: HTTPStatus = HTTPStatus.OK,
        headers: dict[str, str] | None = None,
    ) -> None:
        with suppress(ConnectionError, TimeoutError):
            self._begin(status, {"Content-Type": kind, "Content-Length": str(len(data)), **(headers or {})})
            if self.command != "HEAD":
                self.wfile.write(data)

    def _begin(self, status: HTTPStatus, headers: dict[str, str]) -> None:
        """Send the head of an answer."""
        self._has_begun = True
        self.send_response(status)
        if self.close_connection:
            headers = {**headers, "Connection": "close"}
        for name, value in {**HEADERS, **headers}.items():
            self.send_header(name, value)
        self.end_headers()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that is not HTTP, or has another method."""
        self.close_connection = True
        status = HTTPStatus.METHOD_NOT_ALLOWED if code == HTTPStatus.NOT_IMPLEMENTED else HTTPStatus(code)
        self._send_json({"error": message or status.phrase}, status)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing about requests."""


def answer(function: Callable[[App, dict[str, Any]], Any]) -> Callable[[Handler, dict[str, Any]], None]:
    """Return a route that sends the result of a function as JSON."""
    return lambda handler, given: handler._send_json(function(handler.server.app, given))


ROUTES: dict[tuple[str, str], Callable[[Handler, dict[str, Any]], None]] = {
    ("GET", "/"): Handler.send_page,
    ("GET", "/style.css"): Handler.send_style,
    ("GET", "/page.js"): Handler.send_script,
    ("GET", "/icon.svg"): Handler.send_icon,
    ("GET", "/report"): Handler.send_report,
    ("GET", "/download"): Handler.send_file,
    ("GET", "/api/files"): answer(lambda app, given: app.list_files(given.get("folder", ""))),
    ("GET", "/api/fields"): answer(lambda app, given: app.list_fields(given.get("command", ""))),
    ("GET", "/api/runs"): answer(lambda app, given: {"runs": app.runs.list()}),
    ("GET", "/api/run"): answer(lambda app, given: app.runs.describe(given.get("folder", ""))),
    ("POST", "/api/preview"): answer(App.preview),
    ("POST", "/api/plan"): answer(App.plan),
    ("POST", "/api/start"): answer(App.start),
    ("POST", "/api/stop"): answer(App.stop),
    ("POST", "/api/resume"): answer(App.resume),
    ("POST", "/api/export"): answer(App.export),
    ("POST", "/api/chat"): lambda handler, given: handler.send_lines(handler.server.app.chat(given)),
}
