"""Events come out the same however the bytes were cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.prove import sse
from paceline.prove.sse import BrokenStreamError, Events

STREAM = (
    b": a comment\n\n"
    b'data: {"a": 1}\n\n'
    b'data:{"b": 2}\r\n\r\n'  # no space, and the other line end
    b"id: 7\nevent: message\ndata: one\ndata: two\n\n"
    b"event: error\ndata: broken\n\n"
    b"event: error\n\n"  # without data: no event
    b"data: fine\n\n"
    b'error: {"code": 500}\n\n'
    b"retry: 10\n\ndata: [DONE]\n\n"
)
EVENTS = [
    (b'{"a": 1}', False), (b'{"b": 2}', False), (b"one\ntwo", False), (b"broken", True), (b"fine", False), (b'{"code": 500}', True),
    (b"[DONE]", False),
]  # fmt: skip


@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_any_cut_gives_the_same_events(cuts: list[int]) -> None:
    events, found = Events(), []
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(STREAM)], strict=True):
        found += events.feed(STREAM[start:end])
    assert found == EVENTS
    assert events.close() == []


def test_the_last_event_of_a_body_without_an_empty_line() -> None:
    events = Events()
    assert events.feed(b"data: x\n\ndata: y") == [(b"x", False)]
    assert events.close() == [(b"y", False)]


def test_an_event_without_an_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    for line_end in (b"", b"\n"):
        events, part = Events(), b"data: " + b"x" * 40 + line_end
        assert [events.feed(part), events.feed(part)] == [[], []]
        with pytest.raises(BrokenStreamError, match="100 bytes"):
            events.feed(part)
