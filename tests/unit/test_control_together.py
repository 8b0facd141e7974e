"""Several control processes over one database: nothing is lost, nothing is left (I12)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from gd2fs import errors
from gd2fs.control import schema
from gd2fs.signing import Keys
from tests import postgres
from tests.control_api import ControlApi, control
from tests.control_fakes import FakeNodes

STEPS = 60
EXPECTED = (errors.NotFound, errors.Deleted, errors.Conflict, errors.PlanSuperseded, errors.Overloaded)
"""What one caller learns of what the others do."""


@pytest.fixture
def both(tmp_path: Path) -> Iterator[list[ControlApi]]:
    nodes = FakeNodes(Keys.development())
    with ExitStack() as stack:
        apis = [stack.enter_context(control(tmp_path, nodes=nodes)) for _ in range(2)]
        apis[0].start_node("n1")
        yield apis


class Walk:
    """One caller's random life with sessions that all callers share."""

    def __init__(self, api: ControlApi, seed: int, family: list[str]) -> None:
        self.api, self.dice, self.family, self.seed = api, random.Random(seed), family, seed

    def run(self) -> int:
        done = 0
        for step in range(STEPS):
            try:
                self.step(step)
                done += 1
            except EXPECTED:
                pass
        return done

    def step(self, step: int) -> None:
        dice, family = self.dice, self.family
        chosen = dice.choice(family) if family else None
        kind = dice.randrange(10)
        if chosen is None or kind == 0:
            family.append(self.api.session())
        elif kind <= 3:
            tokens = dice.randrange(self.api.get(chosen)["tokens"] + 1)
            body = {"fork": {"session": chosen, "tokens": tokens}}
            try:
                family.append(self.api.call("POST", "/v1/kv/sessions", body)["session"])
            except errors.Invalid as error:
                assert "fork.tokens" in str(error), "it was longer a moment ago"
        elif kind <= 7:
            ids = self.api.call("GET", f"/v1/kv/sessions/{chosen}/tokens")["token_ids"]
            kept = ids[: dice.choice([len(ids), dice.randrange(len(ids) + 1)])]
            new = [1000 * self.seed + step] * dice.randrange(1, 20)
            self.api.turn(chosen, kept + new, [1, 2], f"{self.seed}-{step}")
        else:
            family.remove(chosen)
            self.api.call("DELETE", f"/v1/kv/sessions/{chosen}")


@pytest.mark.parametrize("seed", range(2))
def test_whatever_happens_at_once_bytes_are_those_that_sessions_name(
    both: list[ControlApi], seed: int
) -> None:
    family: list[str] = []
    walks = [Walk(both[number % 2], 10 * seed + number, family) for number in range(4)]
    with ThreadPoolExecutor(len(walks)) as threads:
        done = list(threads.map(Walk.run, walks))
    assert min(done) > STEPS / 4, done
    api = both[0]
    _settle(api)
    kept = {file for file, _ in api.nodes.node("n1").columns}
    assert kept & _files(api, schema.files.c.file, schema.files.c.ids_of.is_(None)) == _files(
        api, schema.segments.c.file
    ) | (kept & _files(api, schema.plans.c.file))
    for session in family:
        ids = api.call("GET", f"/v1/kv/sessions/{session}/tokens")["token_ids"]
        assert len(ids) == api.get(session)["tokens"]
        plan = api.plan(session, [*ids, 7], "last")
        assert plan["cached_tokens"] == plan["stored_tokens"] == len(ids), plan["miss"]
        api.call("POST", "/v1/kv/abort", {"plan_token": plan["kv_transfer"]["plan"]["token"]})
    for session in family:
        api.call("DELETE", f"/v1/kv/sessions/{session}")
    _settle(api)
    assert (api.rows(schema.files), api.rows(schema.file_columns), api.rows(schema.reclaims)) == (1, 0, 0)
    assert api.nodes.node("n1").used_bytes() == 0


@pytest.mark.skipif(
    not postgres.wanted(), reason="the suite on SQLite; `make test` runs it on PostgreSQL, too"
)
def test_the_database_goes_and_comes_back(tmp_path: Path) -> None:
    server = postgres.Postgres()
    (tmp_path / "control.url").write_text(server.database())
    try:
        with control(tmp_path) as api:
            api.start_node("n1")
            session = api.session()
            api.turn(session, range(50), [1, 2], "r1")
            plan = api.plan(session, [*range(50), 1, 3], "r2")
            body = api.write(plan, [*range(50), 1, 3])
            server.halt()
            for call in (lambda: api.get(session), lambda: api.commit(body), api.session):
                with pytest.raises(errors.Unavailable, match="try again"):
                    call()
            server.start()
            assert api.commit(body)["version"] == 2, "what was written before is stored after"
            assert api.plan(session, range(9), "r3")["cached_tokens"] == 8
    finally:
        server.stop()


def _settle(api: ControlApi) -> None:
    while api.service.reclaimer.sweep():
        pass


def _files(api: ControlApi, column: Any, *where: Any) -> set[str]:
    return set(api.service.database.read(lambda c: list(c.scalars(select(column).where(*where)))))
