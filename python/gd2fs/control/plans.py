"""Planning a request: what of the session serves it, and where its fresh KV cache goes."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial

from sqlalchemy import Connection, RowMapping, bindparam, delete, insert, select, update

from gd2fs import errors
from gd2fs.control import files, nodes, plan_rules, requests, sessions
from gd2fs.control import schema as t
from gd2fs.control.database import Database
from gd2fs.control.files import FileView
from gd2fs.control.layouts import CAPABILITY_LIFE_S, layout
from gd2fs.control.node_link import NodeLink
from gd2fs.control.paths import session_directory, tokens_path
from gd2fs.control.pins import Pinned, Pins
from gd2fs.control.placement import place
from gd2fs.control.plan_rules import Agreement, Prefix, Target
from gd2fs.control.sessions import SessionView, StoredSegment
from gd2fs.kv import ID_BYTES, Ids, KvFormat, Segment, as_ids, cut
from gd2fs.signing import Keys, PlanToken

PLAN_TTL_S = 600
PLANS_MAX = 64
"""Live plans of one session: so many turns of one conversation at the same time are a fault of the caller."""
COMMIT_WAIT_S = 0.5
"""How long a plan waits for another request's commit that has begun, and how old such a beginning may be:
then it plans on the last good prefix."""
_COMMIT_POLL_S = 0.02
_TRIES_MAX = 4
"""A plan starts again when a commit came in between; a conversation has one turn at a time, as a rule."""

# Built once, as in sessions.
_LIVE = select(t.plans).where(t.plans.c.session == bindparam("session"))
_COMMITTING = select(t.plans.c.plan).where(
    t.plans.c.session == bindparam("session"),
    t.plans.c.request_id != bindparam("request"),
    t.plans.c.commit_began_at > bindparam("since"),
)
_GRANTS = select(t.files.c.file, t.files.c.sealed, t.files.c.write_grant).where(
    t.files.c.session == bindparam("session"), ~t.files.c.is_dir
)
_RENEW = update(t.sessions).where(t.sessions.c.session == bindparam("id")).values(expires_at=bindparam("at"))
_RAISE_GRANT = update(t.files).where(t.files.c.file == bindparam("id")).values(write_grant=bindparam("grant"))


@dataclass(frozen=True, slots=True)
class Fresh:
    """Where a plan writes: the file and its token ids, the first byte, and the grant."""

    kv: FileView
    tokens: FileView
    kv_start: int
    grant: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """What of the session serves a prompt."""

    view: SessionView
    prompt_tokens: int
    max_tokens: int
    prefix: Prefix
    cached: list[Segment]


@dataclass(frozen=True, slots=True)
class Plan(Forecast):
    """A recorded plan: everything its answer says."""

    plan: str
    request_id: str
    kv_identity: str
    kv_format: KvFormat
    fresh: Fresh | None
    expires_at: int
    best_effort: bool


@dataclass(frozen=True, slots=True)
class _Draft:
    """A plan before it is written down: its id, what it reuses, and what the nodes said of that."""

    plan: str
    view: SessionView
    body: requests.Plan
    prefix: Prefix
    digest: str
    cached: list[Segment]
    pinned: Pinned

    @property
    def closed(self) -> set[str]:
        """Files that are not written on: something in them is missing, or their node did not answer."""
        silent = self.pinned.silent
        return self.pinned.shrunken | {
            file
            for file, view in self.view.files.items()
            if any(column.node in silent for column in view.columns)
        }


class Planner:
    """Makes plans and ends them."""

    def __init__(
        self,
        database: Database,
        link: NodeLink,
        pins: Pins,
        keys: Keys,
        cluster: str,
        plan_ttl_s: int = PLAN_TTL_S,
    ) -> None:
        self._database = database
        self._link = link
        self._pins = pins
        self._keys = keys
        self._cluster = cluster
        if not 1 <= plan_ttl_s <= CAPABILITY_LIFE_S:
            # A plan carries capabilities, and none may outlive the tombstones of its files.
            raise errors.Invalid(f"plan_ttl_s: {plan_ttl_s} is not in 1..{CAPABILITY_LIFE_S}")
        self._plan_ttl_s = plan_ttl_s

    def plan(self, tenant: str, session: str, body: requests.Plan) -> Plan:
        """Plans one request. Raises NotFound, Invalid, Overloaded, Conflict (commits kept coming in
        between)."""
        ids = as_ids(body.token_ids)
        plan = files.new_id()
        settled_by = time.monotonic() + COMMIT_WAIT_S
        for _ in range(_TRIES_MAX):
            view = self._load_settled(tenant, session, body.request_id, settled_by)
            # Outside any transaction: this may hash megabytes and read from a node.
            agreement = plan_rules.agree(view, ids, body.kv_identity, self._reader(view))
            prefix = plan_rules.usable_prefix(view, agreement, ids.size, body.kv_identity)
            draft = self._draft(plan, view, body, agreement, prefix)
            try:
                made = self._database.write(partial(self._record, draft))
            except errors.Gd2fsError:
                self._drop([plan], draft)
                raise
            if made is not None:
                recorded, ended = made
                self._drop(ended, draft)
                return recorded
        self._drop([plan], draft)
        raise errors.Conflict(f"session {session}: commits kept coming in between; plan again")

    def estimate(self, tenant: str, session: str, body: requests.Estimate) -> Forecast:
        """What a plan would say now, as far as control knows; pins and records nothing. Raises NotFound."""
        ids = as_ids(body.token_ids)
        view = self._load(tenant, session)
        agreement = plan_rules.agree(view, ids, body.kv_identity, self._reader(view))
        prefix = plan_rules.usable_prefix(view, agreement, ids.size, body.kv_identity)
        cached = cut(view.stored, prefix.cached, view.kv_format)
        return Forecast(view, ids.size, body.max_tokens, prefix, cached)

    def _draft(
        self, plan: str, view: SessionView, body: requests.Plan, agreement: Agreement, prefix: Prefix
    ) -> _Draft:
        """Pins what the plan reuses, and leaves out what is not there any more."""
        cached = cut(view.stored, prefix.cached, view.kv_format)
        pinned = self._pins.hold(plan, view, cached, self._plan_ttl_s)
        prefix = plan_rules.shortened(prefix, pinned)
        cached = cut(view.stored, prefix.cached, view.kv_format)
        return _Draft(plan, view, body, prefix, agreement.digest_at(prefix.cached), cached, pinned)

    def _drop(self, plans: Collection[str], draft: _Draft) -> None:
        if draft.view.segments:
            self._pins.drop(plans, [draft.view.files[stored.file] for stored in draft.view.segments])

    def token_ids(self, tenant: str, session: str) -> list[int]:
        """The ids of a session whose KV cache is there, from its beginning on, read from its `.tokens` files.
        Raises NotFound, Lost, Disconnected…"""
        view = self._load(tenant, session)
        read = self._reader(view)
        end, _ = view.reachable()
        tokens: list[int] = []
        for segment, stored in zip(cut(view.stored, end, view.kv_format), view.segments, strict=False):
            count, _ = plan_rules.readable_ids(view, stored, segment.token_start, segment.token_length)
            tokens += read(stored, segment.token_start, count).tolist() if count else []
            if count < segment.token_length:
                break
        return tokens

    def abort(self, token: PlanToken) -> bool:
        """Ends a plan; what it wrote beyond the seal is dropped with the next grant. Whether it was still
        live."""

        def work(connection: Connection) -> tuple[bool, list[FileView]]:
            sessions.lock(connection, token.tenant, token.session)
            now = self._database.time.now()
            read = sessions.read_files(connection, now, token.session)
            ended = connection.execute(
                delete(t.plans).where(t.plans.c.plan == token.plan, t.plans.c.session == token.session)
            )
            sessions.release_unused(connection, now, token.session)
            return ended.rowcount > 0, read

        ended, read = self._database.write(work)
        if ended:
            self._pins.drop([token.plan], read)
        return ended

    def _load_settled(self, tenant: str, session: str, request_id: str, deadline: float) -> SessionView:
        """The session once no commit of another request is under way, or as it is at `deadline` (monotonic).

        Who sends the next turn before the answer's end has come would else recompute what is about to be
        stored. A retry does not wait for its predecessor: it takes it over.
        """

        def work(connection: Connection) -> tuple[SessionView, bool]:
            now = self._database.time.now()
            view = sessions.load(connection, now, tenant, session, self._cluster)
            wanted = {"session": session, "request": request_id, "since": now - COMMIT_WAIT_S}
            return view, connection.execute(_COMMITTING, wanted).first() is not None

        while True:
            view, committing = self._database.read(work)
            if not committing or time.monotonic() >= deadline:
                return view
            time.sleep(_COMMIT_POLL_S)

    def _load(self, tenant: str, session: str) -> SessionView:
        return self._database.read(
            lambda c: sessions.load(c, self._database.time.now(), tenant, session, self._cluster)
        )

    def _reader(self, view: SessionView) -> plan_rules.ReadIds:
        expires_at = int(view.now) + CAPABILITY_LIFE_S

        def read(stored: StoredSegment, token: int, count: int) -> Ids:
            first = stored.segment.token_index(view.kv_format, token)
            allowed = layout(
                self._keys,
                view.tokens_file(stored.file),
                rights=["read"],
                ranges=[(first * ID_BYTES, (first + count) * ID_BYTES)],
                expires_at=expires_at,
                travels=True,
            )
            return self._link.read_ids(allowed, first, count)

        return read

    def _record(self, draft: _Draft, connection: Connection) -> tuple[Plan, set[str]] | None:
        """Writes the plan down; None if the session has moved on since it was read. Also says which plans
        ended with it."""
        view, body, prefix, cached = draft.view, draft.body, draft.prefix, draft.cached
        row = sessions.lock(connection, view.row["tenant"], view.session)
        if row["version"] != view.row["version"]:
            return None
        now = self._database.time.now()
        live = connection.execute(_LIVE, {"session": view.session}).mappings().all()
        # A retry of the same request takes its former plan's grant over: the former plan ends here.
        former = [plan for plan in live if plan["request_id"] == body.request_id]
        ended = {plan["plan"] for plan in live if plan["expires_at"] <= now}
        ended |= {plan["plan"] for plan in former}
        others = [plan for plan in live if plan["plan"] not in ended]
        if len(others) >= PLANS_MAX:
            raise errors.Overloaded(
                f"session {view.session} has {PLANS_MAX} live plans; commit or abort some"
            )
        kv_format = _format_of(view, body)
        prompt_tokens = len(body.token_ids)
        current = _with_grants(connection, view)
        bytes_needed = kv_format.bytes_of(prompt_tokens - prefix.cached)
        target = plan_rules.target(
            current,
            [(segment, stored.file) for segment, stored in zip(cached, view.segments, strict=False)],
            held={plan["file"] for plan in others},
            closed=draft.closed,
            taken_over=[
                plan["file"] for plan in former if plan["file"] and plan["kv_identity"] == body.kv_identity
            ],
            kv_format=kv_format,
            bytes_needed=bytes_needed,
        )
        fresh = (
            _go_on(connection, view, current, target)
            if target
            else self._new_file(connection, now, row, draft, bytes_needed)
        )
        made = Plan(
            plan=draft.plan,
            view=view,
            request_id=body.request_id,
            kv_identity=body.kv_identity,
            kv_format=kv_format,
            prompt_tokens=prompt_tokens,
            max_tokens=body.max_tokens,
            prefix=prefix,
            cached=cached,
            fresh=fresh,
            expires_at=int(now) + self._plan_ttl_s,
            best_effort=draft.pinned.best_effort,
        )
        _insert(connection, made, draft.digest)
        if row["ttl_s"] is not None:
            # Renewed by use: a session must not end under a turn that it serves.
            renewed = max(now + row["ttl_s"], made.expires_at)
            connection.execute(_RENEW, {"id": view.session, "at": renewed})
        if ended:
            connection.execute(delete(t.plans).where(t.plans.c.plan.in_(ended)))
            sessions.release_unused(connection, now, view.session)
        return made, ended

    def _new_file(
        self, connection: Connection, now: float, row: RowMapping, draft: _Draft, bytes_needed: int
    ) -> Fresh | None:
        """A new pair of files on one node with room; None where there is no such node: then nothing is
        saved."""
        file = files.new_id()
        living = [one for one in nodes.candidates(connection, now) if one.node not in draft.pinned.silent]
        on = place(file, living, 1, bytes_needed)
        if not on:
            return None
        number = row["next_number"]
        connection.execute(
            update(t.sessions).where(t.sessions.c.session == row["session"]).values(next_number=number + 1)
        )
        path = f"{session_directory(row['session'])}/{number}.kv"
        for name, id, ids_of in ((path, file, None), (tokens_path(path), files.new_id(), file)):
            files.add(
                connection,
                now,
                row["tenant"],
                name,
                file=id,
                on=on,
                kv_identity=draft.body.kv_identity,
                session=row["session"],
                ids_of=ids_of,
                grant=1,
            )
        own = (t.files.c.session == row["session"]) & t.files.c.path.in_([path, tokens_path(path)])
        # In path order: "1.kv" comes before "1.kv.tokens".
        kv, tokens = files.load(connection, now, own)
        return Fresh(kv, tokens, 0, 1)


def _format_of(view: SessionView, body: requests.Plan) -> KvFormat:
    if body.kv_format is None:
        return view.kv_format
    kv_format = body.kv_format.value()
    if body.kv_identity == view.row["kv_identity"] and kv_format != view.kv_format:
        raise errors.Invalid(f"kv_format: session {view.session} has {view.kv_format} under this kv_identity")
    return kv_format


def _with_grants(connection: Connection, view: SessionView) -> dict[str, FileView]:
    """The session's own files with seals and grants as they are now: other plans raise them without a new
    version. What belongs to another session is not written."""
    rows = connection.execute(_GRANTS, {"session": view.session})
    return {
        row.file: replace(view.files[row.file], sealed=row.sealed, grant=row.write_grant)
        for row in rows
        if row.file in view.files
    }


def _go_on(
    connection: Connection, view: SessionView, current: Mapping[str, FileView], target: Target
) -> Fresh:
    kv, tokens = current[target.file], current[view.tokens_file(target.file).file]
    grant = max(kv.grant, tokens.grant) + 1
    connection.execute(_RAISE_GRANT, [{"id": kv.file, "grant": grant}, {"id": tokens.file, "grant": grant}])
    return Fresh(kv, tokens, target.kv_start, grant)


def _insert(connection: Connection, made: Plan, digest: str) -> None:
    connection.execute(
        insert(t.plans),
        {
            "plan": made.plan,
            "session": made.view.session,
            "request_id": made.request_id,
            "version": made.view.row["version"],
            "prompt_tokens": made.prompt_tokens,
            "max_tokens": made.max_tokens,
            "cached_tokens": made.prefix.cached,
            "cached_digest": digest,
            "file": made.fresh.kv.file if made.fresh else None,
            "kv_start": made.fresh.kv_start if made.fresh else 0,
            "write_grant": made.fresh.grant if made.fresh else 0,
            "kv_identity": made.kv_identity,
            "format_name": made.kv_format.name,
            "bytes_per_token": made.kv_format.bytes_per_token,
            "granule": made.kv_format.granule,
            "expires_at": made.expires_at,
        },
    )
