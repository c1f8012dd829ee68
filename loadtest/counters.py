"""How many tokens a text has: exactly, by the server or its tokenizer file, or roughly, by its words."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import httpx
from tokenizers import Tokenizer

from loadtest.errors import BenchError


class TokenCounter(Protocol):
    """Counts as the server will: special tokens that it puts in front included."""

    @property
    def name(self) -> str:
        """Where the counts come from, for the report."""

    def count(self, text: str) -> int:
        """Tokens of `text`."""

    def close(self) -> None:
        """Lets go of connections; nothing is counted afterwards."""


class WordCounter:
    """One word, one token: close to true for the bundled words in most vocabularies, exact in none."""

    name = "words (one token each assumed)"

    def count(self, text: str) -> int:
        return len(text.split())

    def close(self) -> None:
        return None


class FileCounter:
    """Counts with a tokenizer.json."""

    def __init__(self, path: Path) -> None:
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for a missing and for a malformed file
            raise BenchError(f"cannot read the tokenizer file {path}: {error}") from error
        self.name = f"tokenizer file {path.name}"

    def count(self, text: str) -> int:
        return len(self._tokenizer.encode(text).ids)

    def close(self) -> None:
        return None


class ServerCounter:
    """Counts with the server's own /tokenize (vLLM's, SGLang's, llama.cpp's and Octavo's shapes).

    Raises BenchError from the constructor if the server has no such route.
    """

    name = "the server's /tokenize"

    def __init__(self, base_url: str, headers: dict[str, str] | None = None, model: str | None = None) -> None:
        self._url = f"{base_url.rstrip('/')}/tokenize"
        self._client = httpx.Client(headers=headers, timeout=30.0, trust_env=False)
        self._model = model
        try:
            self.count("word")
        except BenchError:
            self.close()
            raise

    def count(self, text: str) -> int:
        # "content" is llama.cpp's name of the field, "prompt" everyone else's; each ignores the other's
        body: dict[str, object] = {"prompt": text, "content": text, "add_special": True}
        if self._model is not None:
            body["model"] = self._model
        try:
            response = self._client.post(self._url, json=body)
            response.raise_for_status()
            return len(response.json()["tokens"])
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise BenchError(f"{self._url} does not count tokens: {error}") from error

    def close(self) -> None:
        self._client.close()


def make_counter(
    choice: str, base_url: str, headers: dict[str, str] | None = None, model: str | None = None
) -> TokenCounter:
    """The counter for `--tokenizer`: auto (the server's, else words), server, words, or a path."""
    match choice:
        case "words":
            return WordCounter()
        case "server":
            return ServerCounter(base_url, headers, model)
        case "auto":
            try:
                return ServerCounter(base_url, headers, model)
            except BenchError:
                return WordCounter()
        case path:
            return FileCounter(Path(path))
