"""The negative control: a copy of the stored KV cache, once exact and once shifted by one token, through
public calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gd2fs.demo.conversation import Conversation
from gd2fs.demo.talk import Score
from gd2fs.kv import ids_to_bytes

if TYPE_CHECKING:
    from gd2fs.client import Client


def differences(
    conversation: Conversation, scores: list[Score | None], kv_identity: str, bytes_per_token: int
) -> tuple[float, float]:
    """(exact copy, shifted copy): the largest difference in log-probability of the ids that were computed
    after it.

    scores: of the same ids, recomputed without GD2FS.

    Both copies pass the check of token ids, since their ids are right; only the bytes of one belong to the
    next token.
    """
    last = conversation.turns[-1]
    # The copy holds one token less than the conversation had stored, so that there is a next one to shift in.
    tokens = last.stored_tokens - 1
    kv = _stored_bytes(conversation, tokens + 1, bytes_per_token)
    found = []
    for name, shift in (("exact", 0), ("shifted", 1)):
        part = kv[shift * bytes_per_token : (tokens + shift) * bytes_per_token]
        uri = _publish(conversation, f"/demo/{name}.kv", part, last.prompt_ids[:tokens], kv_identity)
        found.append(_difference(conversation, scores, uri, tokens, len(part)))
    return found[0], found[1]


def _stored_bytes(conversation: Conversation, tokens: int, bytes_per_token: int) -> np.ndarray[Any, Any]:
    """The session's KV cache of its first `tokens` tokens, read from its files."""
    kv = np.empty(tokens * bytes_per_token, dtype=np.uint8)
    for segment in conversation.session["stored_kv_cache"]:
        start = segment["token_start"] * bytes_per_token
        end = min(start + segment["kv_length"], len(kv))
        if start < end:
            path = _path(segment["kv_uri"])
            conversation.client.read_into(path, segment["kv_start"], kv[start:end])
    return kv


def _publish(
    conversation: Conversation, path: str, kv: np.ndarray[Any, Any], ids: list[int], kv_identity: str
) -> str:
    client: Client = conversation.client
    client.mkdir("/demo")
    for name in (path, path + ".tokens"):
        client.control("POST", "/v1/fs/create", {"path": name, "kv_identity": kv_identity})
    client.write(path + ".tokens", 0, ids_to_bytes(ids))
    client.write(path, 0, kv)
    return f"gd2fs://{client.cluster}{path}"


def _difference(
    conversation: Conversation, scores: list[Score | None], uri: str, tokens: int, length: int
) -> float:
    segment = {"token_start": 0, "token_length": tokens, "kv_uri": uri, "kv_start": 0, "kv_length": length}
    params = {"id": "negative-control", "stored_kvcache": [segment], "fresh_kvcache": [], "load_threshold": 0}
    url = conversation.stage.serving[0].url
    with_copy, report = conversation.talker.score(url, conversation.all_ids, params)
    if report["cached_tokens"] != tokens:
        raise RuntimeError(
            f"{uri}: the engine used {report['cached_tokens']} of {tokens} tokens ({report['miss']})"
        )
    pairs = [
        (a.own, b.own) for a, b in zip(with_copy, scores, strict=True) if a is not None and b is not None
    ]
    if len(pairs) != len(scores) - tokens - 1:
        raise RuntimeError(f"{uri}: {len(pairs)} ids have scores, expected {len(scores) - tokens - 1}")
    return max(abs(a - b) for a, b in pairs)


def _path(uri: str) -> str:
    """The path in a gd2fs://CLUSTER/path URI."""
    return "/" + uri.removeprefix("gd2fs://").partition("/")[2]
