"""Where the load goes, and the refusal to send it to someone else's machine by accident."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from loadtest.errors import BenchError


@dataclass(frozen=True, slots=True)
class Target:
    """One server. `address` is resolved once, so that what was checked is what is loaded."""

    base_url: str  # without /v1 and without a trailing slash
    host: str
    port: int
    address: str
    tls: bool
    path: str  # prefix of every request path, usually ""
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    extra_body: dict[str, Any] = field(default_factory=dict)  # merged over the defaults; None removes a field

    @property
    def headers(self) -> dict[str, str]:
        """Request headers that depend on the target."""
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}


def make_target(
    url: str,
    *,
    allow_remote: bool = False,
    model: str | None = None,
    api_key: str | None = None,
    extra_body: dict[str, Any] | None = None,
) -> Target:
    """Parses and resolves `url`. Raises BenchError for a bad URL, and for one that is not on this machine
    unless `allow_remote`: a load generator pointed at a stranger's server is an attack."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise BenchError(f"bad URL {url!r}: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BenchError(f"bad URL {url!r}: expected something like http://127.0.0.1:8000")
    addresses = _resolve(parts.hostname, port)
    if not allow_remote and not all(ipaddress.ip_address(address).is_loopback for address in addresses):
        raise BenchError(
            f"{parts.hostname} is not this machine ({', '.join(addresses)}). "
            "Load tests of other machines need their owner's consent: pass --allow-remote if you have it."
        )
    path = parts.path.rstrip("/").removesuffix("/v1")
    return Target(
        base_url=f"{parts.scheme}://{parts.netloc}{path}",
        host=parts.hostname,
        port=port,
        address=addresses[0],
        tls=parts.scheme == "https",
        path=path,
        model=model,
        api_key=api_key,
        extra_body=extra_body or {},
    )


def _resolve(host: str, port: int) -> list[str]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise BenchError(f"cannot resolve {host}: {error}") from error
    # IPv4 first: most servers under test listen there alone
    return [str(info[4][0]) for info in sorted(found, key=lambda info: info[0] != socket.AF_INET)]
