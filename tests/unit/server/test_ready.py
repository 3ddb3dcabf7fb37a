"""The ready line: an address that one can connect to, a command that works in a shell, and its own reader."""

import json
import shlex

import pytest

from paceline.server.ready import ready_line, ready_url
from paceline.server.run import bind_socket

ADDRESSES = [("0.0.0.0", "http://127.0.0.1:"), ("127.0.0.1", "http://127.0.0.1:"), ("::1", "http://[::1]:"), ("::", "http://[::1]:")]


@pytest.mark.parametrize(("host", "shown"), ADDRESSES)
def test_the_address_and_the_command(host: str, shown: str) -> None:
    body = {"model": "it's", "messages": [{"role": "user", "content": 'é "x"'}]}
    with bind_socket("127.0.0.1", 0) as listener:
        line = ready_line(listener, host, "/v1/chat/completions", body)
        url = f"{shown}{listener.getsockname()[1]}"
    assert ready_url(line + "\n") == url
    command = shlex.split(line.split("try: ")[1])
    assert command[1] == f"{url}/v1/chat/completions"
    assert json.loads(command[-1]) == body


@pytest.mark.parametrize("line", ["", "model     tiny: llama", "see: Paceline is ready on http://x"])
def test_other_lines_are_no_ready_lines(line: str) -> None:
    assert ready_url(line) is None
