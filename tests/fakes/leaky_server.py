"""A chat server that answers at once and grows with time, however busy the machine. `python leaky_server.py MIB_PER_S FILES_PER_S`

Prints its port when it is ready. It has no /metrics and no /stats.
"""

import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MIB_PER_S, FILES_PER_S = float(sys.argv[1]), float(sys.argv[2])


def leak() -> None:
    """Keep what is due by now."""
    blocks: list[bytes] = []
    files: list[int] = []
    start_s = time.monotonic()
    while True:
        age_s = time.monotonic() - start_s
        while len(blocks) < MIB_PER_S * age_s:
            blocks.append(b"x" * 2**20)
        while len(files) < FILES_PER_S * age_s:
            files.append(os.open("/dev/null", os.O_RDONLY))
        time.sleep(0.01)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"

    def do_GET(self) -> None:
        if self.path != "/v1/models":
            self.send_error(404)
            return
        self._send("application/json", json.dumps({"data": [{"id": "leaky"}]}))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
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
    threading.Thread(target=leak, daemon=True).start()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
