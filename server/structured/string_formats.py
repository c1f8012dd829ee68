"""`format` of JSON Schema: what each says of a value, as far as a grammar can hold it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from server.protocol.common import JsonObject

_ENFORCED_FORMATS: Final = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)
# What the grammar takes and readers do not: days that a year has not, the year 0, leap seconds in every minute, names
# that are too long or encode other alphabets.
_LEAP_YEAR: Final = r"([0-9]{2}(0[48]|[2468][048]|[13579][26])|(0[48]|[2468][048]|[13579][26])00)"
_DAY: Final = rf"^([0-9]{{4}}-(0[13-9]|1[0-2])-|[0-9]{{4}}-02-([01][0-9]|2[0-8])|{_LEAP_YEAR}-02-29)"
_YEAR: Final = r"^[0-9]{0,3}[1-9][0-9]{0,3}-"
_SECONDS: Final = r"^([^:]*:){2}[0-5]"
_LABEL: Final = r"([^.]{1,2}|[^.]{2}[^.-][^.]*|[^.]{2}-([^.-][^.]*)?)"
_FORMAT_PATTERNS: Final[Mapping[str, tuple[str, ...]]] = {
    "date": (_YEAR, _DAY),
    "time": (_SECONDS,),
    "date-time": (_YEAR, _DAY, _SECONDS),
    "email": (r"^[^@]{1,64}@[^@]{1,253}$",),
    "hostname": (r"^.{1,253}$", rf"^{_LABEL}(\.{_LABEL})*$"),
}
# Formats that every value of their type has: they are there for people and for forms.
_FREE_FORMATS: Final = frozenset(
    {"password", "path", "file-path", "directory-path", "binary", "float", "double", "decimal", "number", "multi-line"}
)
_BOUNDED_FORMATS: Final[Mapping[str, tuple[int, int]]] = {
    "int32": (-(2**31), 2**31 - 1),
    "uint32": (0, 2**32 - 1),
    "int64": (-(2**53), 2**53),  # as far as JSON numbers are exact
}


def settle_format(schema: JsonObject) -> None:
    """Formats become what they say of the value, in place. Raises ValueError, fit for the client, for one
    that cannot be enforced."""
    name = schema.get("format")
    if patterns := _FORMAT_PATTERNS.get(name or ""):
        schema["allOf"] = [*schema.get("allOf", ()), *({"pattern": pattern} for pattern in patterns)]
    if name is None or name in _ENFORCED_FORMATS:
        return
    if name in _BOUNDED_FORMATS:
        low, high = _BOUNDED_FORMATS[name]
        schema["minimum"] = max(low, schema.get("minimum", low))
        schema["maximum"] = min(high, schema.get("maximum", high))
    elif name not in _FREE_FORMATS:
        known = ", ".join(sorted(_ENFORCED_FORMATS))
        raise ValueError(f"'format' {name[:60]!r} cannot be enforced; these can: {known}")
    del schema["format"]
