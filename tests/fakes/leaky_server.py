"""A chat server that answers at once and keeps something of every request. `python leaky_server.py MIB_PER_REQUEST FILES_PER_REQUEST`

Prints its port when it is ready. It has no /metrics and no /stats.
"""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MIB_PER_REQUEST, FILES_PER_REQUEST = float(sys.argv[1]), int(sys.argv[2])
kept: list[object] = []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"

    def do_GET(self) -> None:
        if self.path != "/v1/models":
            self.send_error(404)
            return
        self._send("application/json", json.dumps({"data": [{"id": "leaky"}]}))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        kept.append(os.urandom(int(MIB_PER_REQUEST * 2**20)))
        kept.extend(os.open("/dev/null", os.O_RDONLY) for _ in range(FILES_PER_REQUEST))
        usage = {"prompt_tokens": 3, "completion_tokens": 1}
        events = [
            {"choices": [{"index": 0, "delta": {"content": "hello"}, "finish_reason": None}]},
            {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
            {"choices": [], "usage": usage},
        ]
        self._send("text/event-stream", "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n")

    def _send(self, kind: str, body: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *args: object) -> None:
        del format, args


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
