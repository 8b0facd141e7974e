"""Clocks that are set, by hours and days, while control runs and while it does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gd2fs import errors
from gd2fs.control import nodes
from gd2fs.control.clock import JUMP_S, SLEW, ClusterTime
from gd2fs.control.plans import PLAN_TTL_S
from gd2fs.signing import Keys, Token
from tests.control_api import ControlApi, control

HOUR_S, DAY_S = 3600.0, 86_400.0
LOOK_S = 4.0
"""As seldom as is no gap, since each costs a test some milliseconds."""
JUMPS_S = (HOUR_S, -HOUR_S, DAY_S, -DAY_S)
BEAT = {"incarnation": 2, "addresses": ["tcp://a"], "used_bytes": 0, "capacity_bytes": 1}


@dataclass
class Clocks:
    """The database's clock, which can be set, and one that cannot."""

    wall_s: float = 1_800_000_000.0
    steady_s: float = 500.0

    def time(self) -> ClusterTime:
        return ClusterTime(lambda: self.wall_s, lambda: self.steady_s)

    def sleep(self, seconds: float) -> None:
        self.wall_s += seconds
        self.steady_s += seconds


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def api(tmp_path: Path, clocks: Clocks) -> Iterator[ControlApi]:
    with control(tmp_path, time=clocks.time()) as api:
        api.start_node("a")
        yield api


def _watch(api: ControlApi, clocks: Clocks, seconds: float) -> None:
    """Time passes while control and its nodes work."""
    for _ in range(round(seconds / LOOK_S)):
        clocks.sleep(LOOK_S)
        api.heartbeat("a")
        nodes.watch(api.service.database)


def _alive(api: ControlApi) -> bool:
    [node] = api.call("GET", "/v1/nodes")["nodes"]
    return bool(node["state"] == "alive")


@pytest.mark.parametrize("jump", JUMPS_S)
def test_a_clock_that_is_set_ends_no_lease_no_plan_and_no_session(
    api: ControlApi, clocks: Clocks, jump: float
) -> None:
    session = api.session(ttl_s=PLAN_TTL_S)
    api.turn(session, range(100), [1, 2], "r1")
    plan = api.plan(session, [*range(100), 1, 7], "r2")
    before = api.service.database.time.now()
    clocks.wall_s += jump
    for watched in range(3):
        assert _alive(api) and api.get(session)["tokens"] == 101, f"after {watched} looks at the clock"
        api.service.reclaimer.sweep()
        _watch(api, clocks, LOOK_S)
    api.commit(api.write(plan, [*range(100), 1, 7]))
    passed = api.service.database.time.now() - before
    assert passed == pytest.approx(12, rel=SLEW)
    # Set back to what it was: nothing again.
    clocks.wall_s -= jump
    _watch(api, clocks, 4)
    assert api.service.database.time.now() - before == pytest.approx(16, rel=SLEW)
    # It ends when its time is over, whatever the clock says.
    _watch(api, clocks, PLAN_TTL_S * (1 + 2 * SLEW))
    api.service.reclaimer.sweep()
    with pytest.raises(errors.NotFound):
        api.get(session)


@pytest.mark.parametrize("jump", JUMPS_S)
def test_a_node_that_is_gone_is_dead_in_time(api: ControlApi, clocks: Clocks, jump: float) -> None:
    clocks.wall_s += jump
    for _ in range(round(nodes.LEASE_S * (1 + 2 * SLEW) / 2) + 1):
        clocks.sleep(2)
        nodes.watch(api.service.database)
    assert not _alive(api)


@pytest.mark.parametrize("jump", JUMPS_S)
def test_a_clock_that_is_set_while_control_is_down_ends_no_session(
    tmp_path: Path, clocks: Clocks, jump: float
) -> None:
    with control(tmp_path, time=clocks.time()) as api:
        api.start_node("a")
        session = api.session(ttl_s=100)
        api.turn(session, range(100), [1, 2], "r1")
        _watch(api, clocks, 60)
        stored, ended = api.nodes, api.service.database.time.now()
    clocks.sleep(1)
    clocks.wall_s += jump
    with control(tmp_path, nodes=stored, time=clocks.time()) as api:
        assert api.service.database.time.now() >= ended, "what was over stays over"
        assert _alive(api), "nobody could report to a control that was down"
        api.service.reclaimer.sweep()
        assert api.get(session)["tokens"] == 101
        _watch(api, clocks, 30)
        api.service.reclaimer.sweep()
        assert api.get(session)["tokens"] == 101
        _watch(api, clocks, 20)
        api.service.reclaimer.sweep()
        with pytest.raises(errors.NotFound):
            api.get(session)


def test_the_time_comes_back_to_what_the_clock_says(api: ControlApi, clocks: Clocks) -> None:
    time = api.service.database.time
    clocks.wall_s -= 20
    _watch(api, clocks, 4)
    off = time.now() - clocks.wall_s
    assert off == pytest.approx(20, abs=0.21)
    last = time.now()
    for _ in range(10):
        _watch(api, clocks, 40)
        assert time.now() - last == pytest.approx(40, rel=1.01 * SLEW), "never by leaps"
        last = time.now()
    assert abs(time.now() - clocks.wall_s) < JUMP_S
    # What only goes a little wrong is followed at once.
    clocks.wall_s += JUMP_S / 2
    _watch(api, clocks, 16)
    assert time.now() == pytest.approx(clocks.wall_s, abs=0.01)


def test_several_controls_have_one_time(tmp_path: Path, clocks: Clocks) -> None:
    with control(tmp_path, time=clocks.time()) as one, control(tmp_path, time=clocks.time()) as other:
        times = [api.service.database.time for api in (one, other)]
        for jump in JUMPS_S:
            clocks.wall_s += jump
            for api in (one, other, other, one):
                clocks.sleep(1)
                before = [time.now() for time in times]
                nodes.watch(api.service.database)
                after = [time.now() for time in times]
                assert after == pytest.approx(before, abs=2 * SLEW + JUMP_S / 10)
            assert times[0].now() == pytest.approx(times[1].now(), abs=0.5)


def test_steady_clocks_that_go_a_little_wrong_do_not_drift_apart(tmp_path: Path, clocks: Clocks) -> None:
    fast = ClusterTime(lambda: clocks.wall_s, lambda: clocks.steady_s * 1.005)
    slow = ClusterTime(lambda: clocks.wall_s, lambda: clocks.steady_s * 0.995)
    with control(tmp_path, time=fast) as one, control(tmp_path, time=slow) as other:
        for _ in range(60):
            for api in (one, other):
                clocks.sleep(2)
                nodes.watch(api.service.database)
        for time in (fast, slow):
            assert time.now() == pytest.approx(clocks.wall_s, abs=0.1)


@pytest.mark.parametrize("jump", JUMPS_S)
def test_nodes_and_tokens_go_by_the_same_time(tmp_path: Path, clocks: Clocks, jump: float) -> None:
    keys = Keys.parse("1:000102030405060708090a0b0c0d0e0f")
    with control(tmp_path, keys, time=clocks.time()) as api:
        made = int(clocks.wall_s)
        api.headers["Authorization"] = f"Bearer {keys.sign(Token('ops', 'admin', made + 60))}"
        api.register("a")
        clocks.wall_s += jump
        clocks.sleep(50)
        assert api.register("a") == 2
        answer = api.call("POST", "/v1/nodes/a/heartbeat", BEAT)
        assert answer["now"] == pytest.approx(made + 50, abs=1)
        clocks.sleep(11)
        with pytest.raises(errors.Expired, match="ask for a new one"):
            api.call("GET", "/v1/nodes")


def test_a_failed_look_changes_nothing(api: ControlApi, clocks: Clocks) -> None:
    database = api.service.database
    before = database.time.now()
    clocks.wall_s += DAY_S

    def fails(connection: object) -> None:
        database.time.look(connection)  # type: ignore[arg-type]
        raise errors.Internal("rolled back")

    with pytest.raises(errors.Internal):
        database.write(fails)
    assert database.time.now() == before
    nodes.watch(database)
    assert database.time.now() == before, "it was noticed in the second look"
