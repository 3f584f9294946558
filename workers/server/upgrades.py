"""uvicorn's protocol for clients that offer another protocol with their request.

For example, the JDK's HTTP client asks each plain server for HTTP/2 (`Upgrade: h2c`), with a request that has
a body. A server may ignore the offer (RFC 9110, 7.8). But httptools treats the data after the head as the
other protocol's, so the body would be lost. The only other protocol here is WebSocket.
"""

from __future__ import annotations

import sys
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# Headers about the connection's other protocol.
_OF_UPGRADES = frozenset({b"upgrade", b"http2-settings"})


class IgnoredUpgrades(HttpToolsProtocol):
    """Answers a request as if it had offered no other protocol."""

    _received = b""  # the data being parsed

    def __init__(self, *its: Any, **named: Any) -> None:
        super().__init__(*its, **named)
        self.parser = self._new_parser()

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(_Callbacks(self))
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        return parser

    def data_received(self, data: bytes) -> None:
        self._received = data
        try:
            super().data_received(data)
        finally:
            self._received = b""

    def offers_another(self) -> bool:
        """Whether the head that was just read offers a protocol that this server does not speak."""
        return self.parser.should_upgrade() and not self._should_upgrade()

    def _unsupported_upgrade_warning(self) -> None:
        """Parse again without the offer. uvicorn calls this where httptools has stopped, after such a
        head.
        """
        stopped = sys.exc_info()[1]
        assert isinstance(stopped, httptools.HttpParserUpgrade)
        rest = self._received[stopped.args[0] :]
        version = self.parser.get_http_version().encode()
        head = [b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, version)]
        head += (b"%b: %b\r\n" % header for header in _without_upgrade(self.headers))
        self.parser = self._new_parser()
        IgnoredUpgrades.data_received(self, b"%b\r\n%b" % (b"".join(head), rest))


class _Callbacks:
    """The callbacks for httptools: all of the protocol's, except for a request that will be parsed again."""

    def __init__(self, protocol: IgnoredUpgrades) -> None:
        self._protocol = protocol
        self.on_message_begin = protocol.on_message_begin
        self.on_url = protocol.on_url
        self.on_header = protocol.on_header
        self.on_body = protocol.on_body

    def on_headers_complete(self) -> None:
        if not self._protocol.offers_another():
            self._protocol.on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._protocol.offers_another():
            self._protocol.on_message_complete()


def _without_upgrade(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers without an upgrade; `connection` is dropped if it had only upgrade tokens."""
    kept = [(name, value) for name, value in headers if name not in _OF_UPGRADES | {b"connection"}]
    named = b",".join(value for name, value in headers if name == b"connection").split(b",")
    others = [token.strip() for token in named if token.strip().lower() not in _OF_UPGRADES | {b""}]
    return [*kept, (b"connection", b", ".join(others))] if others else kept
