"""A plan that meets a commit under way waits for it, for a bounded time; and it renews its session's life."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gd2fs import errors
from gd2fs.control.layouts import CAPABILITY_LIFE_S
from gd2fs.control.plans import COMMIT_WAIT_S
from tests.control_api import ControlApi, control


@pytest.fixture
def api(tmp_path: Path) -> Iterator[ControlApi]:
    with control(tmp_path) as api:
        api.start_node("n1")
        yield api


@pytest.fixture
def sealing(api: ControlApi) -> Iterator[dict[str, Any]]:
    """The second turn of a session, whose commit hangs in the seal until `release` is set."""
    session = api.session()
    api.turn(session, range(10), [1, 2], "r1")
    prompt = [*range(10), 1, 50]
    begun, release = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        assert release.wait(10)

    body = api.write(api.plan(session, prompt, "r2"), [*prompt, 51])
    refused: list[errors.Gd2fsError] = []

    def commit() -> None:
        try:
            api.commit(body)
        except errors.Gd2fsError as error:
            refused.append(error)

    api.nodes.before_seal = hang
    thread = threading.Thread(target=commit)
    thread.start()
    assert begun.wait(10)
    yield {
        "session": session,
        "stored": [*prompt, 51],
        "release": release,
        "thread": thread,
        "refused": refused,
    }
    release.set()
    thread.join(10)
    assert not thread.is_alive()


def test_a_plan_waits_for_the_commit_that_it_meets(api: ControlApi, sealing: dict[str, Any]) -> None:
    threading.Timer(0.1, sealing["release"].set).start()
    plan = api.plan(sealing["session"], [*sealing["stored"], 60], "r3")
    assert plan["cached_tokens"] == plan["stored_tokens"] == len(sealing["stored"])


def test_a_commit_that_hangs_is_waited_for_no_longer_than_half_a_second(
    api: ControlApi, sealing: dict[str, Any]
) -> None:
    started = time.monotonic()
    plan = api.plan(sealing["session"], [*sealing["stored"], 60], "r3")
    assert COMMIT_WAIT_S <= time.monotonic() - started < COMMIT_WAIT_S + 1.0
    assert plan["cached_tokens"] == 11, "the last good prefix"
    api.clock.now += COMMIT_WAIT_S
    started = time.monotonic()
    api.plan(sealing["session"], [*sealing["stored"], 60], "r4")
    assert time.monotonic() - started < COMMIT_WAIT_S, "one that began long ago is not waited for"


def test_a_retry_does_not_wait_for_its_predecessor(api: ControlApi, sealing: dict[str, Any]) -> None:
    started = time.monotonic()
    api.plan(sealing["session"], sealing["stored"], "r2")
    assert time.monotonic() - started < COMMIT_WAIT_S
    sealing["release"].set()
    sealing["thread"].join(10)
    assert isinstance(sealing["refused"][0], errors.PlanSuperseded), "it took the plan over"


def test_a_plan_renews_the_life_of_its_session(api: ControlApi) -> None:
    session = api.session(ttl_s=1000)
    api.turn(session, range(10), [1, 2], "r1")
    api.clock.now += 990
    api.start_node("n2")
    plan = api.plan(session, range(10), "r2")
    body = api.write(plan, range(10))
    api.clock.now += 100
    api.heartbeat("n1")
    api.heartbeat("n2")
    api.service.reclaimer.sweep()
    assert api.commit(body)["version"] == 2, "it did not end under the turn that it served"
    api.clock.now += 1001
    api.service.reclaimer.sweep()
    with pytest.raises(errors.NotFound):
        api.get(session)


def test_a_plan_never_outlives_what_its_capabilities_may_live(tmp_path: Path) -> None:
    with (
        pytest.raises(errors.Invalid, match="plan_ttl_s"),
        control(tmp_path, plan_ttl_s=CAPABILITY_LIFE_S + 1),
    ):
        pass
