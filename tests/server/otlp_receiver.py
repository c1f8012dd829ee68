"""A collector of traces for tests: a real HTTP server that takes OTLP protobuf and keeps the spans in memory."""

from __future__ import annotations

import contextlib
import gzip
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span


def attributes(span: Span) -> dict[str, Any]:
    """Plain values of a span's attributes."""

    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        found = getattr(value, kind)
        return [plain(each) for each in found.values] if kind == "array_value" else found

    return {attribute.key: plain(attribute.value) for attribute in span.attributes}


@dataclass(eq=False)
class Receiver:
    """What has arrived."""

    url: str = ""
    spans: list[Span] = field(default_factory=list)
    resource: dict[str, Any] = field(default_factory=dict)

    def named(self, name: str) -> list[Span]:
        """In order of their begins."""
        return sorted((span for span in self.spans if span.name == name), key=lambda span: span.start_time_unix_nano)

    def one(self, name: str) -> Span:
        [span] = self.named(name)
        return span


@contextlib.contextmanager
def receiving() -> Iterator[Receiver]:
    """A receiver on a free port of this machine."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            assert self.headers["content-type"] == "application/x-protobuf"
            request = ExportTraceServiceRequest()
            request.ParseFromString(gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body)
            for resource_spans in request.resource_spans:
                receiver.resource = {a.key: a.value.string_value for a in resource_spans.resource.attributes}
                receiver.spans += [span for scope in resource_spans.scope_spans for span in scope.spans]
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *arguments: Any) -> None:
            """Nothing on stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
