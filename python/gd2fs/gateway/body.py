"""What a user may send: read once, and checked for all that the gateway itself looks at or passes on."""

from __future__ import annotations

import json
import re
from typing import Any

# KV metadata says whose bytes are read; it comes from the plan only, never from a user.
DROPPED_KEYS = (
    "kv_transfer_params",
    "kvcache_params",
    "session_params",
    "cache_salt",
    "kv_hints",
    "session_id",
)
# What may stand in a path and in a header.
_SESSION = re.compile(r"[A-Za-z0-9._-]{1,128}")


class BadRequest(Exception):
    """The body cannot be used; the message names the field."""


def read_body(data: bytes | bytearray) -> tuple[dict[str, Any], str | None]:
    """The user's body without KV metadata, and the session it names. Raises BadRequest."""
    try:
        body = json.loads(data)
        # Python reads NaN and half surrogate pairs, which no engine could be sent.
        json.dumps(body, allow_nan=False, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    if not isinstance(body.get("messages"), list) or not body["messages"]:
        raise BadRequest("messages: a list of at least one message is needed")
    for name, kind, wanted in (
        ("model", str, "text"),
        ("stream", bool, "true or false"),
        ("stream_options", dict, "an object"),
    ):
        if not isinstance(body.get(name), kind | None):
            raise BadRequest(f"{name}: {wanted} is needed, not {body[name]!r:.80}")
    for name in ("max_tokens", "max_completion_tokens"):
        value = body.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise BadRequest(f"{name}: a whole number from 1 on is needed, not {value!r:.80}")
    session = body.get("session_id")
    if session is not None and not (isinstance(session, str) and _SESSION.fullmatch(session)):
        raise BadRequest("session_id: 1 to 128 of the letters A-Z a-z 0-9 . _ - are needed")
    return {key: value for key, value in body.items() if key not in DROPPED_KEYS}, session
