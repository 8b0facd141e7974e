"""Conversations whose KV cache is stored: the calls of control under ``/v1/kv``."""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from dataclasses import dataclass, fields
from types import EllipsisType
from typing import Any, Self
from urllib.parse import quote, urlencode

from gd2fs import kv
from gd2fs.client.control import Control


@dataclass(frozen=True, slots=True)
class Session:
    """One conversation. ``tokens`` and ``bytes`` count what is stored; times are unix seconds."""

    session: str
    kv_identity: str
    kv_format: kv.KvFormat
    model: str | None
    version: int
    tokens: int
    bytes: int
    stored: tuple[kv.Segment, ...]
    control_rows: dict[str, int]
    created_at: float
    updated_at: float
    expires_at: float | None

    @classmethod
    def from_json(cls, answer: dict[str, Any]) -> Session:
        form = answer["kv_format"]
        return cls(
            session=answer["session"],
            kv_identity=answer["kv_identity"],
            kv_format=kv.KvFormat(form["name"], form["bytes_per_token"], form["granule"]),
            model=answer.get("model"),
            version=answer["version"],
            tokens=answer["tokens"],
            bytes=answer["bytes"],
            stored=_segments(answer["stored_kv_cache"]),
            control_rows=answer.get("control_rows", {}),
            created_at=answer["created_at"],
            updated_at=answer["updated_at"],
            expires_at=answer["expires_at"],
        )


@dataclass(frozen=True, slots=True)
class Estimate:
    """What of a session serves a prompt, in tokens; ``miss`` says why it is not all that is stored."""

    session: str
    version: int
    prompt_tokens: int
    stored_tokens: int
    reusable_tokens: int
    cached_tokens: int
    miss: str | None
    estimate: dict[str, Any]

    @classmethod
    def from_json(cls, answer: dict[str, Any]) -> Self:
        return cls(**{field.name: answer[field.name] for field in fields(cls)})


@dataclass(frozen=True, slots=True)
class Plan(Estimate):
    """What serves the next request, and ``kv_transfer``, the object that travels to the engine."""

    plan: str
    expires_at: float
    kv_transfer: dict[str, Any]

    @property
    def metadata(self) -> kv.KvMetadata:
        """Stored and fresh segments of ``kv_transfer``."""
        return kv.parse(self.kv_transfer)

    @property
    def token(self) -> str:
        """The right to commit or abort this plan."""
        token: str = self.kv_transfer["plan"]["token"]
        return token


class Sessions:
    """Reached as ``client.sessions``. Every method raises what control answers: NotFound, Invalid,
    StaleWriter, Lost…"""

    def __init__(self, call: Control) -> None:
        self._call = call

    def create(
        self,
        kv_identity: str,
        kv_format: kv.KvFormat,
        *,
        model: str | None = None,
        ttl_s: float | None = None,
        priority: int | None = None,
    ) -> Session:
        """A new, empty session for KV cache of one identity."""
        form = {
            "name": kv_format.name,
            "bytes_per_token": kv_format.bytes_per_token,
            "granule": kv_format.granule,
        }
        body: dict[str, Any] = {"kv_identity": kv_identity, "kv_format": form}
        options = {"model": model, "ttl_s": ttl_s, "priority": priority}
        body |= {name: value for name, value in options.items() if value is not None}
        return Session.from_json(self._call("POST", "/v1/kv/sessions", body))

    def fork(
        self,
        session: str,
        tokens: int | None = None,
        *,
        model: str | None = None,
        ttl_s: float | None = None,
        priority: int | None = None,
    ) -> Session:
        """A new session that begins with the first ``tokens`` tokens of another (None: all of them), in whole
        granules of its kv_format. It refers to the same bytes and adds none; they stay until the last session
        that refers to them is deleted. What is not given is as in the other session.

        Raises NotFound, and Invalid if fewer tokens are stored.
        """
        options = {"model": model, "ttl_s": ttl_s, "priority": priority}
        body: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
        body["fork"] = {"session": session, "tokens": tokens}
        return Session.from_json(self._call("POST", "/v1/kv/sessions", body))

    def get(self, session: str) -> Session:
        return Session.from_json(self._call("GET", _route(session)))

    def list(
        self,
        *,
        limit: int = 100,
        after: str | None = None,
        model: str | None = None,
        kv_identity: str | None = None,
    ) -> list[Session]:
        """At most ``limit`` sessions of the tenant, in the order of their ids, from behind ``after`` on; of
        one model or kv_identity if that is given."""
        wanted = {"limit": limit, "after": after, "model": model, "kv_identity": kv_identity}
        options = {name: value for name, value in wanted.items() if value is not None}
        answer = self._call("GET", f"/v1/kv/sessions?{urlencode(options)}")
        return [Session.from_json(entry) for entry in answer["sessions"]]

    def tokens(self, session: str) -> builtins.list[int]:
        """The ids of the tokens whose KV cache is stored."""
        ids: builtins.list[int] = self._call("GET", _route(session) + "/tokens")["token_ids"]
        return ids

    def extend(
        self, session: str, *, ttl_s: float | EllipsisType | None = ..., priority: int | None = None
    ) -> Session:
        """Lets the session's time to live begin anew. ``ttl_s`` changes it (None: it does not expire), and
        ``priority`` how dearly its bytes are kept (0 to 255)."""
        body: dict[str, Any] = {} if priority is None else {"priority": priority}
        if ttl_s is not ...:
            body["ttl_s"] = ttl_s
        return Session.from_json(self._call("PATCH", _route(session), body))

    def delete(self, session: str) -> None:
        """Forgets the session and frees its bytes at once."""
        self._call("DELETE", _route(session))

    def estimate(
        self, session: str, token_ids: Sequence[int], *, max_tokens: int, kv_identity: str
    ) -> Estimate:
        """What a plan for this prompt would say now. Changes nothing, and pins nothing: what is there may be
        gone a moment later."""
        body = {"token_ids": [*token_ids], "max_tokens": max_tokens, "kv_identity": kv_identity}
        return Estimate.from_json(self._call("POST", _route(session) + "/estimate", body))

    def plan(
        self,
        session: str,
        token_ids: Sequence[int],
        *,
        max_tokens: int,
        request_id: str,
        kv_identity: str,
    ) -> Plan:
        """What of the session serves this prompt, and where its fresh KV cache goes.

        The same ``request_id`` again takes the grant of the earlier plan over.
        """
        body = {
            "token_ids": list(token_ids),
            "max_tokens": max_tokens,
            "request_id": request_id,
            "kv_identity": kv_identity,
        }
        return Plan.from_json(self._call("POST", _route(session) + "/plan", body))

    def commit(
        self,
        plan_token: str,
        fresh: Sequence[kv.Segment],
        digest: str,
        acks: Sequence[dict[str, int]],
    ) -> tuple[int, tuple[kv.Segment, ...]]:
        """Makes what a plan's engine has written stored: the session's new version and segments.

        ``digest`` is SHA-256 in hex of all token ids up to the end of ``fresh``; ``acks`` are ``{"column",
        "epoch", "incarnation"}`` of the columns written.
        """
        body = {
            "plan_token": plan_token,
            "fresh": [kv.segment_to_json(segment) for segment in fresh],
            "digest": digest,
            "acks": list(acks),
        }
        answer = self._call("POST", "/v1/kv/commit", body)
        return answer["version"], _segments(answer["stored_kv_cache"])

    def abort(self, plan_token: str) -> None:
        """Ends a plan without storing anything."""
        self._call("POST", "/v1/kv/abort", {"plan_token": plan_token})


def _segments(entries: Sequence[Any]) -> tuple[kv.Segment, ...]:
    return tuple(kv.segment_from_json(e, f"stored_kv_cache[{index}]") for index, e in enumerate(entries))


def _route(session: str) -> str:
    return f"/v1/kv/sessions/{quote(session, safe='')}"
