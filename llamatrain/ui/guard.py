"""Decides which requests the server answers: those of the browser that was given the token, and no others.

A page of another site may send requests to this machine, but it does not have the cookie (SameSite=Strict), cannot
name this origin, and, if its own name was made to point to this machine, has another Host.
"""

import hmac
import secrets
from http.cookies import CookieError, SimpleCookie

ADDRESS = "127.0.0.1"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; style-src-attr 'unsafe-inline'; "
        "connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Guard:
    """The token of a server, and the names that the server has."""

    def __init__(self, port: int) -> None:
        self.token = secrets.token_urlsafe(32)
        self.hosts = frozenset({f"{ADDRESS}:{port}", f"localhost:{port}"})
        self.cookie_name = f"llamatrain-{port}"  # browsers share cookies among the ports of a machine
        self.url = f"http://{ADDRESS}:{port}/?token={self.token}"

    @property
    def cookie(self) -> str:
        """The value of the header Set-Cookie."""
        return f"{self.cookie_name}={self.token}; Path=/; HttpOnly; SameSite=Strict"

    def is_host(self, host: str | None) -> bool:
        """Return True if a request was sent to a name of this server."""
        return host is not None and host.lower() in self.hosts

    def is_origin(self, origin: str | None) -> bool:
        """Return True if a request comes from a page of this server."""
        return origin is not None and origin.removeprefix("http://") in self.hosts and "://" in origin

    def is_token(self, token: str) -> bool:
        """Return True if a text is the token."""
        return hmac.compare_digest(token.encode("utf-8", "replace"), self.token.encode())

    def has_cookie(self, header: str | None) -> bool:
        """Return True if the cookies of a request include the token."""
        try:
            cookies = SimpleCookie(header or "")
        except CookieError:
            return False
        return self.cookie_name in cookies and self.is_token(cookies[self.cookie_name].value)
