"""HTTP for sources: only public addresses, each redirect checked, credentials for their own host only."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self
from urllib.request import getproxies, proxy_bypass

import httpx

from workers.fetching.messages import DENIED, NOT_ALLOWED, NOT_FOUND, UNREADABLE, FetchError, Interrupted

MAX_REDIRECTS = 5
TIMEOUT = httpx.Timeout(30.0, connect=10.0)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


@dataclass(frozen=True)
class SourceClient:
    """`trusted` hosts may have private addresses. `tokens` are bearer tokens by origin (`origin_of`)."""

    trusted: frozenset[str]
    tokens: dict[str, str] = field(default_factory=dict, repr=False)
    client: httpx.Client = field(init=False, repr=False)

    def __post_init__(self) -> None:
        transport = _CheckedTransport(self.trusted)
        client = httpx.Client(
            transport=transport, mounts=_proxies(self.trusted), timeout=TIMEOUT, trust_env=False
        )
        object.__setattr__(self, "client", client)

    @classmethod
    def of(cls, trusted: tuple[str, ...], tokens: dict[str, str] | None = None) -> Self:
        return cls(frozenset(host.lower() for host in trusted), tokens or {})

    @contextmanager
    def get(self, url: str, start: int = 0, method: str = "GET") -> Iterator[httpx.Response]:
        """The answer, with status 200 or 206, after redirects. Errors: FetchError, Interrupted."""
        target = httpx.URL(url)
        for _ in range(MAX_REDIRECTS):
            headers = {"Accept-Encoding": "identity", "User-Agent": "ostinato"}
            if start:
                headers["Range"] = f"bytes={start}-"
            if token := self.tokens.get(origin_of(target)):
                headers["Authorization"] = f"Bearer {token}"
            with self._sent(method, target, headers) as response:
                if response.is_redirect and "Location" in response.headers:
                    target = self._next(target, response.headers["Location"])
                    continue
                _require_good(response)
                yield response
                return
        raise FetchError(UNREADABLE, f"{_shown(httpx.URL(url))} redirects more than {MAX_REDIRECTS} times")

    @contextmanager
    def _sent(self, method: str, target: httpx.URL, headers: dict[str, str]) -> Iterator[httpx.Response]:
        try:
            with self.client.stream(method, target, headers=headers, follow_redirects=False) as response:
                yield response
        except httpx.HTTPError as e:
            raise Interrupted(f"{_shown(target)}: {type(e).__name__}") from e

    def _next(self, target: httpx.URL, location: str) -> httpx.URL:
        try:
            following = target.join(location)
        except httpx.InvalidURL as e:
            raise FetchError(UNREADABLE, f"{_shown(target)} redirects to a URL that cannot be read") from e
        plain = following.scheme == "http" and following.host.lower() not in self.trusted
        if following.scheme not in ("http", "https") or plain:
            raise FetchError(
                NOT_ALLOWED,
                f"{_shown(target)} redirects to {_shown(following)}; expected https://, or a host of "
                "OSTINATO_SOURCE_PRIVATE_HOSTS",
            )
        return following


def parts_of(response: httpx.Response) -> Iterator[bytes]:
    """The body. Errors: Interrupted."""
    try:
        yield from response.iter_raw()
    except httpx.HTTPError as e:
        raise Interrupted(f"the connection broke off: {type(e).__name__}") from e


def origin_of(url: httpx.URL) -> str:
    return f"{url.scheme}://{url.netloc.decode().lower()}"


def _shown(url: httpx.URL) -> str:
    """A URL without what may be secret: signatures are in queries."""
    return str(url.copy_with(username=None, password=None, query=None, fragment=None))


def _require_good(response: httpx.Response) -> None:
    status, where = response.status_code, _shown(response.request.url)
    if status in (200, 206):
        return
    if status in (401, 403):
        raise FetchError(
            DENIED, f"{where} refuses access (status {status}); give credentials that may read it"
        )
    if status in (404, 410):
        raise FetchError(NOT_FOUND, f"{where} does not exist (status {status}); check the name")
    if status in (408, 425, 429) or status >= 500:
        raise Interrupted(f"{where} answers with status {status}")
    raise FetchError(UNREADABLE, f"{where} answers with status {status}; expected 200")


class _CheckedTransport(httpx.HTTPTransport):
    """Connects to the address that was checked: a second look-up of the name could give another one."""

    def __init__(self, trusted: frozenset[str]) -> None:
        # No connection is used twice: it would be chosen by its address, whose certificate names one host.
        super().__init__(limits=httpx.Limits(max_keepalive_connections=0))
        self._trusted = trusted

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        if host.lower() not in self._trusted:
            address = public_address(host, request.url.port or (443 if request.url.scheme == "https" else 80))
            request.extensions = {**request.extensions, "sni_hostname": host}
            request.url = request.url.copy_with(host=address)
        return super().handle_request(request)


def public_address(host: str, port: int) -> str:
    """An address of the host. Errors: FetchError unless all its addresses are public; httpx.ConnectError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
    except OSError as e:
        raise httpx.ConnectError(f"no address of {host} is known") from e
    addresses = [str(info[4][0]) for info in found]
    if not addresses or not all(map(is_public, addresses)):
        raise FetchError(
            NOT_ALLOWED,
            f"'{host}' has an address that is not public; an operator can allow the host with "
            "OSTINATO_SOURCE_PRIVATE_HOSTS",
        )
    return addresses[0]


def is_public(text: str) -> bool:
    """Whether an address belongs to the public internet, also if it contains an address of version 4."""
    address = ipaddress.ip_address(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if address in _NAT64:
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
    return address.is_global and not address.is_multicast


def _proxies(trusted: frozenset[str]) -> dict[str, httpx.BaseTransport | None]:
    """The operator's proxies, which check addresses themselves. Hosts of `no_proxy` are reached directly."""
    transports: dict[str, httpx.BaseTransport | None] = {}
    for scheme, proxy in getproxies().items():
        if scheme in ("http", "https") and "://" in proxy:
            transports[f"{scheme}://"] = _AroundProxy(proxy, trusted)
    return transports


class _AroundProxy(httpx.HTTPTransport):
    """Through a proxy, except to hosts that the operator reaches directly."""

    def __init__(self, proxy: str, trusted: frozenset[str]) -> None:
        super().__init__(proxy=proxy)
        self._trusted = trusted
        self._direct = _CheckedTransport(trusted)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        host = request.url.host
        if proxy_bypass(host):
            return self._direct.handle_request(request)
        if host.lower() not in self._trusted and _is_private_literal(host):
            raise FetchError(NOT_ALLOWED, f"'{host}' is not a public address; name a public host")
        return super().handle_request(request)


def _is_private_literal(host: str) -> bool:
    try:
        return not is_public(host)
    except ValueError:
        return host.lower().rstrip(".") == "localhost"
