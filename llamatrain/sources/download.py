"""Downloads files over HTTPS into the cache. A download that was cut continues where it ended.

A file has a folder of its own in the cache, named by its address: the file or its first bytes, and a record of what the
server said about it. A server is asked whether a file has changed before it is used again; if the server cannot be
reached, the file in the cache is used.
"""

import hashlib
import http.client
import ipaddress
import json
import os
import re
import shutil
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from email.message import Message
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlsplit

from llamatrain.config.messages import quote
from llamatrain.config.remote_names import Use
from llamatrain.config.units import Size
from llamatrain.errors import FileError, LlamatrainError, MissingError, UsageError, wrap_os_errors
from llamatrain.io.atomic_write import AtomicFile
from llamatrain.platform.cache_dir import writable_cache_dir
from llamatrain.platform.locks import lock
from llamatrain.platform.terminal import log_if_slow, log_line, progress_bar
from llamatrain.sources.checksums import verify

CHUNK_BYTES = 1 << 16  # bytes that are read at a time
TIMEOUT = 30.0  # seconds without a byte
SLOWEST, SLOW_FOR = 1024, 60.0  # bytes per second, and the seconds over which they are measured
TRIES = 3  # connections that are made before an error
MAX_REDIRECTS = 5
CHECKSUM = re.compile(r"sha256=([0-9a-fA-F]{64})")
HUB_PAGE = re.compile(
    r"https://(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<repository>(?:datasets/)?[\w.-]+/[\w.-]+)"
    r"(?:/(?:tree/.*|blob/(?P<revision>[^/]+)/(?P<file>[^?]+)))?/?"
)
CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-\d{1,18}/(\d{1,18})")
AGAIN = "repeat the command to continue"
# A ValueError is that of a host's name or an address in a redirect that is invalid.
UNREADABLE = (urllib.error.URLError, http.client.HTTPException, OSError, ValueError, OverflowError)
PROXY_HEADER = "Proxy-authorization"  # as urllib spells it


class CutError(Exception):
    """A connection ended before the file was complete."""


@dataclass(frozen=True)
class Record:
    """The facts that a server stated about a file."""

    url: str = ""
    etag: str = ""
    modified: str = ""
    size: int | None = None

    @property
    def version(self) -> str:
        """The mark by which two versions differ, or an empty text. A weak ETag does not promise the same bytes."""
        return self.modified if self.etag.startswith("W/") or not self.etag else self.etag

    @classmethod
    def read(cls, path: Path) -> "Record":
        """Read a record; a missing or damaged one is empty."""
        try:
            fields = json.loads(path.read_bytes())
            return cls(**fields) if all(isinstance(fields[key], str) for key in ("url", "etag")) else cls()
        except (OSError, ValueError, TypeError, KeyError):
            return cls()


def download(name: str, use: Use) -> Path:
    """Return the file at an address, which may end in #sha256=<hexadecimal digits>."""
    url, sha256 = parse_address(name)
    root = writable_cache_dir("downloads")
    if root is None:
        raise FileError(
            f"{name}: there is no folder to download to; set LLAMATRAIN_CACHE to one", code="no-cache"
        )
    folder = root / hashlib.sha256(url.encode()).hexdigest()[:16]
    with wrap_os_errors(folder, "cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        with log_if_slow(f"waiting for another process that downloads {url}"):
            held.enter_context(lock(folder))
        fetched = Download(url, folder / file_name(url), use)
        if not (sha256 and fetched.file.exists()):
            fetched.update()
        if sha256:
            try:
                verify(fetched.file, sha256, url)
            except FileError:
                fetched.file.unlink()
                raise
    return fetched.file


def parse_address(name: str) -> tuple[str, str]:
    """Return the URL and the checksum of an address; raise UsageError if it is invalid."""
    url, _, fragment = name.partition("#")
    match = CHECKSUM.fullmatch(fragment)
    if "@" in re.split(r"[/?]", url.partition("://")[2])[0]:
        raise UsageError(
            "an address must not contain a user's name or a password, since it is stored with a run",
            code="invalid-name",
        )
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises ValueError for what is not a number
        is_valid = bool(parts.hostname and parts.hostname.encode("idna"))
    except ValueError:
        is_valid = False
    if not is_valid or not url.isascii() or not url.isprintable() or " " in url:
        raise UsageError(
            f"invalid address (got {quote(name)}); write it as https://HOST/FILE", code="invalid-name"
        )
    if fragment and not match:
        raise UsageError(
            f"{url}: what follows # must be sha256= and 64 hexadecimal digits (got {quote(fragment)})",
            code="invalid-name",
        )
    if not is_allowed(url):
        raise UsageError(
            f"{url}: http is not encrypted, and accepted from this machine only; write https",
            code="not-https",
        )
    if page := HUB_PAGE.fullmatch(url):
        file = f"/{page['file']}@{page['revision']}" if page["file"] else ""
        raise UsageError(f"{url}: this is a web page; write hf:{page['repository']}{file}", code="web-page")
    return url, match[1].lower() if match else ""


def is_allowed(url: str) -> bool:
    """Return True if an address is of HTTPS, or of HTTP on this machine."""
    parts = urlsplit(url)
    return parts.scheme == "https" or (parts.scheme == "http" and is_this_machine(parts.hostname))


def is_this_machine(host: str | None) -> bool:
    """Return True for the names and addresses by which a machine calls itself."""
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def file_name(url: str) -> str:
    """Return the name of the downloaded file, whose ending states its format."""
    last = unquote(urlsplit(url).path).rpartition("/")[2]
    return re.sub(r"[^A-Za-z0-9._-]", "_", last).lstrip(".")[-120:] or "file"


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a few redirects: none to another scheme, and none to this machine from another one."""

    max_redirections = max_repeats = MAX_REDIRECTS

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        """Return the request that follows, with the same headers, except those for a proxy."""
        host, target = urlsplit(req.full_url).hostname, urlsplit(newurl).hostname
        if not is_allowed(newurl) or (is_this_machine(target) and not is_this_machine(host)):
            raise FileError(
                f"{req.full_url}: the server redirects to {quote(newurl)}, which is not https or on this machine",
                code="redirect",
            )
        kept = {name: value for name, value in req.headers.items() if name != PROXY_HEADER}
        return urllib.request.Request(newurl, headers=kept, origin_req_host=req.origin_req_host)

    def http_error_302(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any) -> Any:
        """Follow a redirect without reading its body, which may have no end."""
        fp.close()
        return super().http_error_302(req, fp, code, msg, headers)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


def make_opener() -> urllib.request.OpenerDirector:
    """Return an opener that knows HTTP and HTTPS only: neither file: nor ftp: nor data:."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.UnknownHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
        Redirects(),
    ):
        opener.add_handler(handler)
    return opener


class Download:
    """One file in the cache, and how it is brought up to date."""

    def __init__(self, url: str, file: Path, use: Use) -> None:
        self.url, self.file, self.use = url, file, use
        self.record_file = file.with_name(f"{file.name}.json")
        self.partial, self.partial_record = file.with_name(".partial"), file.with_name(".partial.json")

    def update(self) -> None:
        """Download the file if it is missing or has changed."""
        has_file = self.file.exists()
        for attempt in range(TRIES):
            before = self.partial_size
            try:
                self._try_once()
                return
            except urllib.error.HTTPError as error:
                error.close()
                if error.code == 304 and has_file:
                    return
                if error.code == 416 and self.partial_size:  # the file has become shorter
                    self.partial.unlink()
                    continue
                raise self._http_error(error) from None
            except (CutError, *UNREADABLE) as error:
                if has_file and not self.partial_size:
                    log_line(
                        f"note: {self.url} cannot be reached ({reason(error)}); using the file in the cache"
                    )
                    return
                if attempt == TRIES - 1 or self.partial_size == before:
                    raise self._cut_error(error) from None
        raise FileError(
            f"{self.url}: the server denies the rest of the file; {AGAIN}", code="download-failed"
        )

    @property
    def partial_size(self) -> int:
        """The bytes that a cut download left."""
        return self.partial.stat().st_size if self.partial.exists() else 0

    def _try_once(self) -> None:
        known, start = Record.read(self.partial_record), self.partial_size
        headers = {"User-Agent": "llamatrain", "Accept-Encoding": "identity"}
        if start and known.version:
            headers |= {"Range": f"bytes={start}-", "If-Range": known.version}
        elif self.file.exists():
            complete = Record.read(self.record_file)
            conditions = {"If-None-Match": complete.etag, "If-Modified-Since": complete.modified}
            headers |= {name: value for name, value in conditions.items() if value}
        with make_opener().open(
            urllib.request.Request(self.url, headers=headers), timeout=TIMEOUT
        ) as response:
            self._receive(response, known, start)

    def _receive(self, response: Any, known: Record, start: int) -> None:
        """Write the body of a response behind the bytes that are there, or in place of them."""
        head: Message = response.headers
        size, continues = parse_length(head), False
        found = Record(self.url, head.get("ETag") or "", head.get("Last-Modified") or "", size)
        if response.status == 206:
            match = CONTENT_RANGE.fullmatch(head.get("Content-Range", ""))
            if not match or int(match[1]) != start or found.version != known.version:
                self.partial.unlink(missing_ok=True)
                raise CutError("the server sent another part of the file than was asked for")
            found, continues = Record(self.url, found.etag, found.modified, int(match[2])), True
        self._check_head(head, found.size, start if continues else 0)
        with wrap_os_errors(self.file.parent, "cannot be written"), AtomicFile(self.partial_record) as record:
            record.write(json.dumps(asdict(found)).encode())
        with wrap_os_errors(self.partial, "cannot be written"):
            stream = self.partial.open("ab" if continues else "wb")
        with stream:
            self._copy(response, stream, found.size, start if continues else 0)
            stream.flush()
            os.fsync(stream.fileno())
        if found.size is not None and self.partial_size != found.size:
            raise CutError(f"{self.partial_size:,} of {found.size:,} bytes arrived")
        with wrap_os_errors(self.file, "cannot be written"):
            self.partial.replace(self.file)
            self.partial_record.replace(self.record_file)

    def _check_head(self, head: Message, size: int | None, start: int) -> None:
        """Raise FileError for a page, an encoded body, or a file that is larger than the free space."""
        if self.use != "data" and head.get_content_type() == "text/html":
            hint = "; write /resolve/ in place of /blob/" if "/blob/" in self.url else ""
            raise FileError(f"{self.url}: this is a web page, and not a file{hint}", code="web-page")
        if head.get("Content-Encoding", "identity") != "identity":
            raise FileError(
                f"{self.url}: the server compresses the file; download it yourself", code="encoded"
            )
        free = shutil.disk_usage(self.file.parent).free
        if size is not None and size - start > free:
            raise FileError(
                f"{self.url}: {Size(size - start).text} are needed in {self.file.parent} and {Size(free).text} are free; set "
                "LLAMATRAIN_CACHE to another folder",
                code="disk-full",
            )
        whole = f" ({Size(size).text})" if size is not None else ""
        log_line(f"{'continuing to download' if start else 'downloading'} {self.url}{whole} to {self.file}")

    def _copy(self, response: Any, stream: IO[bytes], size: int | None, start: int) -> None:
        """Copy the body; raise CutError if it ends early or arrives too slowly."""
        mark, received = time.monotonic(), 0
        with progress_bar(self.file.name, total=size, unit="B", unit_scale=True) as bar:
            bar.update(start)
            while block := read_block(response):
                with wrap_os_errors(self.partial, "cannot be written"):
                    stream.write(block)
                bar.update(len(block))
                received += len(block)
                if (waited := time.monotonic() - mark) > SLOW_FOR:
                    if received < SLOWEST * waited:
                        raise CutError(f"the server sent {received} bytes in {waited:.0f} s")
                    mark, received = time.monotonic(), 0

    def _http_error(self, error: urllib.error.HTTPError) -> LlamatrainError:
        """Return the error for a status."""
        if error.code in (404, 410):
            return MissingError(
                f"{self.url}: the server has no such file (HTTP {error.code})", code="no-such-file"
            )
        if error.code in (401, 403):
            return FileError(
                f"{self.url}: the server denies access (HTTP {error.code}); download the file yourself, and name it",
                code="access-denied",
            )
        if 300 <= error.code < 400:
            return FileError(
                f"{self.url}: the server redirects more than {MAX_REDIRECTS} times, in a circle, or to no file",
                code="redirect",
            )
        return FileError(f"{self.url}: the server reports HTTP {error.code}; {AGAIN}", code="download-failed")

    def _cut_error(self, error: Exception) -> FileError:
        """Return the error for a connection that failed."""
        arrived = f", {Size(self.partial_size).text} are in the cache" if self.partial_size else ""
        return FileError(
            f"{self.url}: the download failed: {reason(error)}{arrived}; {AGAIN}", code="download-failed"
        )


def read_block(response: Any) -> bytes:
    """Return the next bytes of a body as soon as some arrive, so that a slow server is noticed."""
    block: bytes = response.read1(CHUNK_BYTES)
    return block


def parse_length(head: Message) -> int | None:
    """Return the length that a response states, or None."""
    text = head.get("Content-Length", "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else None


def reason(error: Exception) -> str:
    """Return why a connection failed, in a few words."""
    inner = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(inner, TimeoutError):
        return f"nothing arrived for {TIMEOUT:.0f} s"
    return str(getattr(inner, "strerror", None) or inner) or type(inner).__name__
