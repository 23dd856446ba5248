"""A headless chromium that tests drive over its DevTools protocol, with a WebSocket of the standard library."""

import base64
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-extensions"),
    *("--disable-dev-shm-usage", "--remote-debugging-port=0"),
)
KEYS = {"Tab": 9, "Enter": 13, " ": 32, "ArrowDown": 40}
SECONDS = 60.0


class WebSocket:
    """The client's end of a WebSocket (RFC 6455): text messages, unmasked from the server, masked to it."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.socket = socket.create_connection((parts.hostname, parts.port), timeout=SECONDS)
        key = base64.b64encode(os.urandom(16)).decode()
        self.socket.sendall(
            f"GET {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        self.file = self.socket.makefile("rb")
        assert b" 101 " in self.file.readline()
        while self.file.readline().strip():
            pass

    def send(self, text: str) -> None:
        data, mask = text.encode(), os.urandom(4)
        size = len(data)
        head = (
            bytes([size | 128])
            if size < 126
            else b"\xfe" + struct.pack("!H", size)
            if size < 1 << 16
            else b"\xff" + struct.pack("!Q", size)
        )
        masked = bytes(byte ^ mask[index % 4] for index, byte in enumerate(data))
        self.socket.sendall(b"\x81" + head + mask + masked)

    def receive(self) -> str:
        message = b""
        while True:
            first, size = self.file.read(2)
            if size in (126, 127):
                (size,) = struct.unpack(
                    "!H" if size == 126 else "!Q", self.file.read(2 if size == 126 else 8)
                )
            data = self.file.read(size)
            if first & 15 in (0, 1):
                message += data
                if first & 128:
                    return message.decode()

    def close(self) -> None:
        self.file.close()
        self.socket.close()


class Page:
    """A tab."""

    def __init__(self, url: str) -> None:
        self.socket, self.count = WebSocket(url), 0
        self.events = list[dict[str, Any]]()
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.count += 1
        self.socket.send(json.dumps({"id": self.count, "method": method, "params": parameters}))
        while True:
            answer: dict[str, Any] = json.loads(self.socket.receive())
            if answer.get("id") == self.count:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of a script; of a promise, what it is kept with."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str, seconds: float = SECONDS) -> None:
        end = time.monotonic() + seconds
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < end, (
                f"it did not come about: {condition}\n{self.run('document.body.innerText')}"
            )
            time.sleep(0.05)

    def show(self, width: int, height: int = 900, scheme: str = "light") -> None:
        """Set the size of the window and the color scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def key(self, key: str) -> None:
        text = {"Enter": "\r", " ": " "}.get(key)
        more = {"text": text} if text else {}
        number = {"windowsVirtualKeyCode": KEYS[key]}
        self.call(
            "Input.dispatchKeyEvent", type="keyDown", key=key, code=key.strip() or "Space", **number, **more
        )
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key.strip() or "Space", **number)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def picture(self, path: Path, whole: bool = True) -> None:
        """Save a picture, of the whole page or of the window."""
        data = self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def errors(self) -> list[str]:
        """What the console and the network complained about."""
        self.run("0")
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(event) for event in self.events if event.get("method") in kinds]


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A browser with one tab, which does not outlive the block."""
    assert CHROMIUM
    command = [CHROMIUM, *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr
            found = next(filter(None, (re.search(r"ws://([^/]+)/", line) for line in process.stderr)))
            with urlopen(f"http://{found[1]}/json/list", timeout=SECONDS) as answer:
                tab = next(tab for tab in json.load(answer) if tab["type"] == "page")
            page = Page(tab["webSocketDebuggerUrl"])
            try:
                yield page
            finally:
                page.call("Browser.close")
                page.socket.close()
                process.wait(SECONDS)
        finally:
            process.kill()
