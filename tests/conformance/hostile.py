"""What a hostile or broken client sends: bytes of one connection each, drawn from a seeded generator."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

COMPLETIONS = "/v1/completions"
PATHS = (
    COMPLETIONS,
    "/v1/chat/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/generate",
    "/tokenize",
)
VALID: dict[str, object] = {
    "prompt": "Once upon a time",
    "messages": [{"role": "user", "content": "Hello"}],
    "input": "Hello",
    "max_tokens": 3,
    "temperature": 0.5,
    "stop": ["a", "b"],
    "logit_bias": {"5": 1.5},
    "seed": 7,
}

Draw = Callable[[Random], bytes]


def post(path: str, body: bytes, *headers: str, length: str | None = None) -> bytes:
    """A whole request; `length` stands in for the true Content-Length, "" for none."""
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    if length != "":
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join(lines).encode("utf-8", "surrogateescape") + b"\r\n\r\n" + body


def noise(draw: Random, most: int) -> bytes:
    return draw.randbytes(draw.randrange(most))


def request_line(draw: Random) -> bytes:
    """Something where the request line belongs."""
    long = "a" * draw.randrange(1, 100_000)
    lines = (
        noise(draw, 300),
        b"\r\n" * draw.randrange(1, 50) + b"GET /health HTTP/1.1\r\nHost: x",
        f"GET /{long} HTTP/1.1\r\nHost: x".encode(),
        f"{long[:40_000]} / HTTP/1.1\r\nHost: x".encode(),
        b"GET /health",
        b"GET  /health  HTTP/1.1\r\nHost: x",
        b"get /health HTTP/1.1\r\nHost: x",
        b"GET /health HTTP/%d.%d\r\nHost: x" % (draw.randrange(12), draw.randrange(12)),
        b"GET /health HTTP/1.1 extra\r\nHost: x",
        b"PRI * HTTP/2.0\r\n\r\nSM",
        b"CONNECT example.org:443 HTTP/1.1\r\nHost: x",
        b"OPTIONS * HTTP/1.1\r\nHost: x",
        b"GET http://example.org/v1/models HTTP/1.1\r\nHost: x",
        b"GET /%00%ff%zz/../..//v1/models?%%%=\xff HTTP/1.1\r\nHost: x",
        b"GET /v1/models\x00 HTTP/1.1\r\nHost: x",
        b"GET /\xf0\x9f\x98\x80 HTTP/1.1\r\nHost: x",
        b"\x16\x03\x01" + noise(draw, 200),
        b"GET /health HTTP/1.1\nHost: x",
    )
    return draw.choice(lines) + b"\r\n\r\n"


def headers(draw: Random) -> bytes:
    """Headers that are too many, too long, or none."""
    bombs = (
        b"".join(b"x-%d: y\r\n" % number for number in range(draw.randrange(100, 20_000))),
        b"x-long: " + b"z" * draw.randrange(1000, 300_000) + b"\r\n",
        noise(draw, 500) + b"\r\n",
        b"no colon here\r\n",
        b"space : before\r\n",
        b" folded: first\r\n",
        b"a: b\r\n  folded\r\n",
        b": no name\r\n",
        b"na\xffme: v\xffalue\r\n",
        b"nul: a\x00b\r\n",
        b"cr: a\rb\r\n",
        b"Host: a\r\nHost: b\r\n",
        b"Expect: 100-continue\r\n",
        b"Connection: upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: eA==\r\nSec-WebSocket-Version: 13\r\n",
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n",
        b"Authorization: Bearer " + noise(draw, 100).replace(b"\n", b"") + b"\r\n",
        b"X-Request-Id: " + noise(draw, 200).replace(b"\n", b"") + b"\r\n",
        b"Accept-Encoding: gzip;q=\xff, *;q=NaN\r\nRange: bytes=0-0,-1\r\n",
    )
    return b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + draw.choice(bombs) + b"\r\n"


def length(draw: Random) -> bytes:
    """A body whose length is not what it says."""
    body = json.dumps(VALID).encode()
    wrong = (
        str(len(body) + draw.randrange(1, 1000)),
        str(draw.randrange(len(body))),
        *("-1", "+5", "0x10", "1e3", "", "a", "18446744073709551616", "9" * 400, f"{len(body)}, {len(body)}"),
        f"{len(body)}\r\nContent-Length: {len(body) + 1}",
        f"{len(body)}\r\nTransfer-Encoding: chunked",
    )
    return post(draw.choice(PATHS), body, length=draw.choice(wrong))


def chunks(draw: Random) -> bytes:
    """A chunked body with something wrong in its framing."""
    body = json.dumps(VALID).encode()
    good = b"%x\r\n%b\r\n" % (len(body), body)
    wrong = (
        good,  # never ended
        good + b"0\r\n",
        b"%x\r\n" % (len(body) + draw.randrange(1, 50)) + body + b"\r\n0\r\n\r\n",
        b"%x\r\n" % draw.randrange(1, len(body)) + body + b"\r\n0\r\n\r\n",
        b"zz\r\n" + good,
        b"-5\r\n" + good,
        b"ffffffffffffffff\r\n" + good,
        b"%x;%b\r\n%b\r\n0\r\n\r\n" % (len(body), b"e" * draw.randrange(100_000), body),
        good + b"0\r\n" + b"trailer: x\r\n" * draw.randrange(1, 5000) + b"\r\n",
        b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n",  # fine, but one byte at a time
        b"\r\n" + good + b"0\r\n\r\n",
        good.replace(b"\r\n", b"\n") + b"0\n\n",
        noise(draw, 500),
    )
    coding = draw.choice(("chunked", "chunked, chunked", "gzip, chunked", "xchunked", "identity", "chunked\r\nTE: x"))
    return post(draw.choice(PATHS), draw.choice(wrong), f"Transfer-Encoding: {coding}", length="")


def json_text(draw: Random) -> bytes:
    """A body that is no JSON, or JSON that asks too much."""
    valid = json.dumps(VALID).encode()
    depth = draw.randrange(1000, 200_000)
    key = draw.choice(list(VALID)).encode()
    flipped = bytearray(valid)
    for _ in range(draw.randrange(1, 6)):
        flipped[draw.randrange(len(flipped))] = draw.randrange(256)
    bodies = (
        valid[: draw.randrange(len(valid))],
        bytes(flipped),
        b"[" * depth + b"]" * draw.choice((0, depth)),
        b'{"a":' * depth,
        b'{"prompt": ' + b"[" * depth + b"]" * depth + b"}",
        b'{"messages": [{"role": "user", "content": "a", "extra": ' + b'{"a":' * depth + b"1" + b"}" * depth + b"}]}",
        b'{"prompt": "a", "%b": %b}'
        % (key, draw.choice((b"1e400", b"-1e400", b"9" * 5000, b"1" + b"0" * 400 + b".5"))),
        b'{"prompt": "a", "%b": %b}'
        % (key, draw.choice((b"NaN", b"Infinity", b"-Infinity", b"nul", b"'a'", b"0x1", b"01"))),
        b'{"prompt": "a", "prompt": [1, 2], "prompt": {"b": 1}, "max_tokens": 1, "max_tokens": "x"}',
        b'{"prompt": "\xff\xfe\xc0\xaf\xed\xa0\x80", "max_tokens": 1}',
        rb'{"prompt": "\ud800 \udc00\ud800 \u0000", "max_tokens": 1}',
        rb'{"messages": [{"role": "user", "content": "\udfff"}], "max_tokens": 1}',
        b"\xef\xbb\xbf" + valid,
        valid.decode().encode("utf-16"),
        valid + b"\x00" + valid,
        b'{"%b": 1, "prompt": "a"}' % (b"k" * draw.randrange(1, 500_000)),
        json.dumps({f"field{number}": number for number in range(draw.randrange(1, 20_000))} | VALID).encode(),
        json.dumps({"prompt": "a " * draw.randrange(1, 400_000), "max_tokens": 1}).encode(),
        json.dumps({"prompt": ["a"] * draw.randrange(1, 100_000)}).encode(),
        json.dumps({"prompt": "a", "stop": ["s" * 2000] * draw.randrange(1, 5000)}).encode(),
        json.dumps({"prompt": "a", "logit_bias": {str(n): 1 for n in range(draw.randrange(1, 60_000))}}).encode(),
        json.dumps({"prompt": list(range(draw.randrange(1, 200_000))), "max_tokens": 1}).encode(),
        json.dumps(
            {"input": draw.choice(("", [], [[]], ["", ""], [""] * 3000, [-1], [2**40], [True], [1.5]))}
        ).encode(),
        json.dumps(draw.choice((None, True, 7, "text", [], [VALID]))).encode(),
    )
    kinds = (
        "application/json",
        "application/json; charset=utf-16",
        "APPLICATION/JSON",
        "application/x+json",
        "text/json",
    )
    return post(draw.choice(PATHS), draw.choice(bodies)).replace(b"application/json", draw.choice(kinds).encode(), 1)


KINDS: dict[str, Draw] = {
    "request line": request_line,
    "headers": headers,
    "length": length,
    "chunks": chunks,
    "json": json_text,
}
