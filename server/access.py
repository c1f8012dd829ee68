"""Who may come in: API keys."""

from __future__ import annotations

import hmac
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from server.errors import Unauthorized
from server.settings import Settings, SettingsProblem

ANONYMOUS = "anonymous"
# Exact paths that need no key: probes, and the page, which asks for one itself.
OPEN_PATHS = frozenset({"/health", "/ready", "/", "/ui/style.css", "/ui/app.js", "/ui/live.js"})


@dataclass(frozen=True)
class KeyRing:
    """The accepted keys, as digests, each with the name that logs and limits use."""

    digests: tuple[tuple[str, bytes], ...] = ()

    @classmethod
    def from_settings(cls, settings: Settings) -> KeyRing:
        """Keys from --api-key and --api-key-file. Raises SettingsProblem."""
        lines = [key.get_secret_value() for key in settings.api_key]
        if settings.api_key_file is not None:
            lines += _read_lines(settings.api_key_file)
        named = [_parse(line, f"key-{number}") for number, line in enumerate(lines, 1)]
        names = [name for name, _ in named]
        if len(set(names)) < len(names):
            raise SettingsProblem("--api-key: two keys have the same name")
        return cls(tuple((name, sha256(key.encode()).digest()) for name, key in named))

    def tenant(self, name: str) -> int:
        """The number under which the engine knows the owner of a key; 0 is everybody without one."""
        return next((number for number, (known, _) in enumerate(self.digests, 1) if known == name), 0)

    def identify(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """The name of the key that a request brings; ANONYMOUS where no keys are set. Raises Unauthorized.

        Every stored digest is compared, so that the time taken tells nothing about which one was close.
        """
        if not self.digests:
            return ANONYMOUS
        given = _bearer(headers)
        if given is None:
            raise Unauthorized(
                "This server needs an API key: send it as 'Authorization: Bearer KEY'",
                headers={"www-authenticate": "Bearer"},
            )
        digest = sha256(given).digest()
        found = None
        for name, known in self.digests:
            if hmac.compare_digest(digest, known):
                found = name
        if found is None:
            raise Unauthorized("The API key is not one that this server accepts")
        return found


def _bearer(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """The key out of `Authorization: Bearer`, else out of Anthropic's `x-api-key`."""
    fallback = None
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            return key.strip() if scheme.lower() == b"bearer" else None
        if name == b"x-api-key":
            fallback = value.strip()
    return fallback


def _read_lines(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise SettingsProblem(f"--api-key-file {path}: {error.strerror}") from error
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def _parse(line: str, default_name: str) -> tuple[str, str]:
    name, _, key = line.partition("=")
    if not name.strip() or not key.strip(" ="):  # no name, or the padding of a base64 key
        name, key = default_name, line
    name, key = name.strip(), key.strip()
    if not key or not key.isascii():
        raise SettingsProblem("--api-key: a key is made of ASCII characters")
    return name, key
