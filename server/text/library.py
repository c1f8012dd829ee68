"""The tokenizers library's errors: it raises plain Exception, and where its Rust code panics a class that derives from
BaseException and cannot be imported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


def is_panic(error: BaseException) -> bool:
    """Whether Rust code has panicked."""
    return type(error).__name__ == "PanicException"


@contextmanager
def library_errors(kind: type[Exception], what: str) -> Iterator[None]:
    """Everything that the library raises within becomes a `kind` saying "what: reason"; a `kind` passes as it is."""
    try:
        yield
    except kind:
        raise
    except BaseException as error:
        if isinstance(error, Exception) or is_panic(error):
            raise kind(f"{what}: {error}") from error
        raise
