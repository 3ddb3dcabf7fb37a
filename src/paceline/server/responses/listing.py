"""`GET /v1/responses/{id}/input_items`: what a response was the answer to, a page at a time."""

from collections.abc import Mapping, Sequence

import msgspec

from paceline.errors import BadInputError
from paceline.server.openai.tool_requests import MAX_ID_CHARS

_DEFAULT_ITEMS = 20  # OpenAI's
_MAX_ITEMS = 100


def input_item_list(turns: Sequence[bytes], query: Mapping[str, str]) -> bytes:
    """The page that the query `limit`, `order` and `after` asks for, the newest items first. Raises BadInputError."""
    items = [item for turn in turns for item in msgspec.json.decode(turn, type=list[dict[str, object]])]
    order, limit, after = query.get("order", "desc"), query.get("limit", str(_DEFAULT_ITEMS)), query.get("after")
    if order not in ("asc", "desc"):
        raise BadInputError("order: must be asc or desc", param="order")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 4 and 1 <= int(limit) <= _MAX_ITEMS):
        raise BadInputError(f"limit: must be a number between 1 and {_MAX_ITEMS}", param="limit")
    if order == "desc":
        items.reverse()
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise BadInputError(f"after: there is no item {after[:MAX_ID_CHARS]!r} here", param="after")
        items = items[ids.index(after) + 1 :]
    page = items[: int(limit)]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return msgspec.json.encode({"object": "list", "data": page, "has_more": len(items) > len(page), **ends})
