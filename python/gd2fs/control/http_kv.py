"""Routes of sessions, plans and commits."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from gd2fs import errors
from gd2fs.control import requests, sessions
from gd2fs.control.http_edge import Caller, Control
from gd2fs.control.plan_answer import answer, counts
from gd2fs.control.service import Service
from gd2fs.signing import PlanToken

router = APIRouter(prefix="/v1/kv")


@router.post("/sessions")
def create(control: Control, caller: Caller, body: requests.CreateSession) -> dict[str, Any]:
    """A new session: empty, or a fork, which refers to what its parent has and adds no bytes."""
    caller.require("client")

    def work(connection: Any, now: float) -> dict[str, Any]:
        session = sessions.create(connection, now, caller.tenant, body, control.cluster)
        return _describe(control, connection, now, caller.tenant, session)

    return control.write(work)


@router.get("/sessions")
def listing(
    control: Control,
    caller: Caller,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str, Query(max_length=64)] = "",
    model: Annotated[str | None, Query(max_length=256)] = None,
    kv_identity: Annotated[str | None, Query(max_length=256)] = None,
) -> dict[str, Any]:
    """A page of the tenant's sessions in id order, those of one model or kv_identity; `next` is the `after`
    of the following page, null at the end."""
    caller.require("client")

    def work(connection: Any, now: float) -> dict[str, Any]:
        ids = sessions.list_ids(
            connection, caller.tenant, limit + 1, after, model=model, kv_identity=kv_identity
        )
        page = [_describe(control, connection, now, caller.tenant, session) for session in ids[:limit]]
        return {"sessions": page, "next": ids[limit - 1] if len(ids) > limit else None}

    return control.read(work)


@router.get("/sessions/{session}")
def get(control: Control, caller: Caller, session: str) -> dict[str, Any]:
    caller.require("client")
    return control.read(lambda connection, now: _describe(control, connection, now, caller.tenant, session))


@router.patch("/sessions/{session}")
def extend(control: Control, caller: Caller, session: str, body: requests.Extend) -> dict[str, Any]:
    """Changes how long, and how dearly, the session is kept; its time to live begins anew."""
    caller.require("client")

    def work(connection: Any, now: float) -> dict[str, Any]:
        row = sessions.lock(connection, caller.tenant, session)
        sessions.extend(connection, now, row, body)
        return _describe(control, connection, now, caller.tenant, session)

    return control.write(work)


@router.delete("/sessions/{session}")
def delete(control: Control, caller: Caller, session: str) -> dict[str, Any]:
    """Deletes the session and frees its bytes at once; where a node is away, as soon as it is back."""
    caller.require("client")

    def work(connection: Any, now: float) -> list[str]:
        sessions.lock(connection, caller.tenant, session)
        return sessions.remove(connection, now, session)

    files = control.write(work)
    return {"deleted_files": len(files), "freed_bytes": control.reclaimer.free_now(files)}


@router.get("/sessions/{session}/tokens")
def token_ids(control: Control, caller: Caller, session: str) -> dict[str, Any]:
    """The ids whose KV cache is stored."""
    caller.require("client")
    return {"token_ids": control.planner.token_ids(caller.tenant, session)}


@router.post("/sessions/{session}/estimate")
def estimate(control: Control, caller: Caller, session: str, body: requests.Estimate) -> dict[str, Any]:
    """What a plan for this prompt would say now. Pins and records nothing."""
    caller.require("client")
    return counts(control.planner.estimate(caller.tenant, session, body))


@router.post("/sessions/{session}/plan")
def plan(
    control: Control, caller: Caller, session: str, body: requests.Plan, request: Request
) -> dict[str, Any]:
    """What of the session serves this prompt, where its fresh KV cache goes, and what that will cost."""
    caller.require("client")
    made = control.planner.plan(caller.tenant, session, body)
    control.metrics.plans.labels(made.prefix.miss or "none").inc()
    for kind, tokens in (
        ("prompt", made.prompt_tokens),
        ("stored", made.view.tokens),
        ("reusable", made.prefix.reusable),
        ("cached", made.prefix.cached),
    ):
        control.metrics.plan_tokens.labels(kind).inc(tokens)
    here = control.advertise or [str(request.base_url).rstrip("/")]
    return answer(made, caller.tenant, control.keys, control.cluster, here)


@router.post("/commit")
def commit(control: Control, body: requests.Commit) -> dict[str, Any]:
    """Stores what a plan's engine has written. The plan token is the credential."""
    result = "fault"
    try:
        stored = control.committer.commit(control.keys.verify_ever(body.plan_token, PlanToken), body)
        result = "stored"
    except errors.Gd2fsError as error:
        result = error.name.lower()
        raise
    finally:
        control.metrics.commits.labels(result).inc()
    control.reclaimer.wake()
    return stored


@router.post("/abort")
def abort(control: Control, body: requests.Abort) -> dict[str, Any]:
    """Ends a plan without storing anything. The plan token is the credential."""
    token = control.keys.verify_ever(body.plan_token, PlanToken)
    aborted = control.planner.abort(token)
    control.reclaimer.wake()
    return {"session": token.session, "aborted": aborted}


def _describe(control: Service, connection: Any, now: float, tenant: str, session: str) -> dict[str, Any]:
    return sessions.describe(connection, sessions.load(connection, now, tenant, session, control.cluster))
