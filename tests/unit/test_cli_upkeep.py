"""gd2fs fsck, scrub and top over a control that is a function."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from gd2fs import errors
from gd2fs.cli import top, upkeep
from gd2fs.cli.app import main
from gd2fs.cli.top import Meter

Answer = Callable[[str, str, dict[str, Any] | None], dict[str, Any]]
RAN = {"node": "n1", "incarnation": 3, "bytes": 10, "bytes_total": 10, "seconds": 0.1, "rounds": 1}
FINDING = {
    "kind": "orphan",
    "file": "ab" * 16,
    "column": 0,
    "path": None,
    "detail": "5 bytes",
    "repaired": False,
}


class Client:
    """Stands in for gd2fs.client.Client; `asked` holds (method, path, body)."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self.asked: list[tuple[str, str, Any]] = []
        self.nodes = [_node("n1"), _node("n2", state="dead")]

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def control(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        if path == "/v1/nodes":
            return {"nodes": self.nodes}
        self.asked.append((method, path, body))
        return self._answer(method, path, body)


def _node(name: str, state: str = "alive", age_s: float = 0.0, incarnation: int = 3, **stats: Any) -> Any:
    return {
        "node": name,
        "state": state,
        "incarnation": incarnation,
        "last_heartbeat_age_s": age_s,
        "stats": stats,
    }


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """run(answer, "fsck", "--json") → exit code, stdout, client."""
    monkeypatch.setattr(upkeep, "WATCH_S", 0.001)
    monkeypatch.setattr(top, "ONCE_S", 0.01)
    monkeypatch.setattr(top, "POLL_S", 0.001)
    monkeypatch.setattr("gd2fs.cli.output._printed", False)
    monkeypatch.setenv("COLUMNS", "200")

    def call(answer: Answer, *arguments: str, nodes: Any = None) -> tuple[int, str, str, Client]:
        client = Client(answer)
        client.nodes = nodes or client.nodes
        for module in (upkeep, top):
            monkeypatch.setattr(module, "connect", lambda control: client)
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        out, err = capsys.readouterr()
        return int(str(ended.value.code)), out, err, client

    return call


def _pages(*pages: list[dict[str, Any]]) -> Answer:
    left = list(pages)

    def answer(method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        assert (method, path) == ("POST", "/v1/fsck") and body is not None
        findings = left.pop(0)
        following = {"file": "0" * 32, "column": len(left)} if left else None
        return {"columns": 2, "findings": findings, "reclaims": 1, "next": following}

    return answer


def test_fsck_goes_through_all_pages_of_the_living(run: Any) -> None:
    code, out, err, client = run(_pages([], [FINDING]), "fsck", "--json")
    facts = json.loads(out)
    assert code == 1 and facts["ok"] is False and facts["not_asked"] == ["n2"]
    assert facts["findings"] == [{"node": "n1", **FINDING}]
    assert facts["nodes"] == [{"node": "n1", "columns": 4, "reclaims": 2}]
    assert [body["after"] for _, _, body in client.asked] == [None, {"file": "0" * 32, "column": 1}]
    assert "fsck --repair" in err and "n2" in err


def test_fsck_ends_well_when_all_is_well_or_repaired(run: Any) -> None:
    code, out, _, client = run(
        _pages([{**FINDING, "repaired": True}]), "fsck", "--repair", "--node", "n1", "--json"
    )
    assert code == 0 and json.loads(out)["ok"] is True and client.asked[0][2]["repair"] is True


def test_fsck_for_people(run: Any) -> None:
    code, out, _, _ = run(_pages([FINDING]), "fsck", "--node", "n1")
    assert code == 1 and "orphan" in out and "5 bytes" in out
    code, _, err, _ = run(_pages(), "fsck", "--node", "n9")
    assert code == 1 and "n9" in err and "n1, n2" in err


def test_fsck_begins_again_when_a_node_restarts_but_not_for_ever(run: Any) -> None:
    def restarted(method: str, path: str, body: Any) -> dict[str, Any]:
        tries.append(path)
        if len(tries) <= most:
            raise errors.StaleIncarnation("node n1 was started anew")
        return {"columns": 1, "findings": [], "reclaims": 0, "next": None}

    tries: list[str] = []
    most = 2
    assert run(restarted, "fsck", "--node", "n1")[0] == 0
    tries.clear()
    most = 99
    code, _, err, _ = run(restarted, "fsck", "--node", "n1")
    assert (code, len(tries)) == (1, upkeep.TRIES_MAX) and "anew" in err


KILLED = [_node("n1"), _node("n2")]
"""n2 was killed a moment ago: its lease is not over."""


def _without_n2(answer: dict[str, Any], works: int = 0) -> Answer:
    """n2 answers `works` times, then not any more."""
    times = iter(range(works))

    def ask(method: str, path: str, body: Any) -> dict[str, Any]:
        name = body["node"] if body else path.split("/")[3]
        if name == "n2" and next(times, None) is None:
            raise errors.Disconnected("tcp://n2: connection refused")
        return {"node": name, **answer}

    return ask


def test_fsck_of_a_killed_node_does_not_keep_it_from_the_others(run: Any) -> None:
    page = {"columns": 5, "findings": [], "reclaims": 0, "next": None}
    code, out, err, _ = run(_without_n2(page), "fsck", "--json", nodes=KILLED[::-1])
    facts = json.loads(out)
    assert code == 1 and facts["not_asked"] == ["n2"] and facts["ok"] is False
    assert facts["nodes"] == [{"node": "n1", "columns": 5, "reclaims": 0}]
    assert "connection refused" in err and "not asked, since they are not alive: n2" in err


def test_fsck_without_control_blames_no_node(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(method: str, path: str, body: Any) -> dict[str, Any]:
        monkeypatch.setattr(Client, "control", refused)
        raise errors.Disconnected("node or control?")

    def refused(*_: Any) -> Any:
        raise errors.Unavailable("control can't be reached")

    code, _, err, _ = run(away, "fsck")
    assert code == 1 and "control can't be reached" in err and "n1" not in err


@pytest.mark.parametrize("command", ["fsck", "scrub"])
def test_a_node_that_left_in_order_is_named_and_no_fault(run: Any, command: str) -> None:
    answers = {"fsck": {"columns": 5, "findings": [], "reclaims": 0, "next": None}}
    answer = _without_n2(answers.get(command, {**RAN, "running": False, "corrupt_chunks": 0}))
    nodes = [_node("n1"), _node("n2", state="left")]
    code, out, _, _ = run(answer, command, "--json", nodes=nodes)
    facts = json.loads(out)
    assert (code, facts["left"], facts["not_asked"]) == (0, ["n2"], [])
    code, _, err, _ = run(answer, command, nodes=nodes)
    assert code == 0 and "they have left: n2" in err
    assert run(answer, command, "--node", "n2", nodes=nodes)[0] == 1, "whoever names it wants it asked"


@pytest.mark.parametrize("works", [0, 1])
def test_scrub_goes_on_without_a_node_that_is_killed(run: Any, works: int) -> None:
    states = iter([True, False])

    def answer(method: str, path: str, body: Any) -> dict[str, Any]:
        if "n2" in path:
            return n2(method, path, body)
        return {**RAN, "node": "n1", "running": next(states, False), "corrupt_chunks": 0}

    n2 = _without_n2({**RAN, "running": True, "corrupt_chunks": 0}, works)
    code, out, err, _ = run(answer, "scrub", "--wait", "--json", nodes=KILLED)
    facts = json.loads(out)
    assert code == 1 and facts["not_asked"] == ["n2"] and [one["node"] for one in facts["nodes"]] == ["n1"]
    assert "n2" in err


@pytest.mark.parametrize("wait", [[], ["--wait"]])
def test_scrub_says_once_who_was_not_asked(run: Any, wait: list[str]) -> None:
    answer = _without_n2({**RAN, "running": False, "corrupt_chunks": 0})
    code, _, err, _ = run(answer, "scrub", *wait)
    assert code == len(wait) and err.count("not asked, since they are not alive: n2") == 1


def test_scrub_starts_and_waits(run: Any) -> None:
    states = [{"running": True, "corrupt_chunks": 0}] * 2 + [{"running": False, "corrupt_chunks": 2}]

    def answer(method: str, path: str, body: Any) -> dict[str, Any]:
        assert path == "/v1/nodes/n1/scrub"
        return {**RAN, "bytes": 10 - len(states), **states.pop(0)}

    code, out, err, client = run(answer, "scrub", "--wait", "--json", "--node", "n1")
    assert code == 1 and json.loads(out)["corrupt_chunks"] == 2 and "2 chunk(s) were corrupt" in err
    assert [method for method, _, _ in client.asked] == ["POST", "GET", "GET"]


def test_a_scrub_that_could_not_read_says_that_nothing_is_lost(run: Any) -> None:
    done = {**RAN, "running": False, "corrupt_chunks": 0, "unreadable_chunks": 6}
    code, out, err, _ = run(lambda *_: done, "scrub", "--wait", "--json", "--node", "n1")
    facts = json.loads(out)
    assert (code, facts["corrupt_chunks"], facts["unreadable_chunks"]) == (1, 0, 6)
    assert "6 chunk(s) could not be read and were left as they are" in err
    assert "corrupt" not in err and "lost" not in err and "dropped" not in err
    code, _, err, _ = run(lambda *_: {**done, "corrupt_chunks": 2}, "scrub", "--wait", "--node", "n1")
    assert code == 1 and "2 chunk(s) were corrupt" in err and "6 chunk(s) could not be read" in err


def test_scrub_without_waiting_says_how_far_it_is(run: Any) -> None:
    code, out, err, _ = run(lambda *_: {**RAN, "running": True, "corrupt_chunks": 0}, "scrub")
    assert code == 0 and "running" in out and "n2" in err


@pytest.mark.parametrize(
    ("change", "stall_s", "said"), [({"incarnation": 4}, 60.0, "started anew"), ({}, 0.0, "gone on")]
)
def test_a_scrub_that_will_not_end_is_not_waited_for(
    run: Any, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], stall_s: float, said: str
) -> None:
    monkeypatch.setattr(upkeep, "STALL_S", stall_s)

    def answer(method: str, path: str, body: Any) -> dict[str, Any]:
        return {**RAN, "running": True, "corrupt_chunks": 0, **(change if method == "GET" else {})}

    code, _, err, _ = run(answer, "scrub", "--wait", "--node", "n1")
    assert code == 1 and said in err


def test_rates_are_those_between_two_heartbeats() -> None:
    meter = Meter()
    before = {
        "bytes_read": 100,
        "bytes_written": 0,
        "hits_dram": 10,
        "hits_nvme": 0,
        "misses_lost": 0,
        "evicted_dram_bytes": 5,
        "evicted_log_bytes": 5,
        "errors": {"HOLE": 1},
    }
    [row] = meter.observe([_node("n1", age_s=1.0, **before)], 100.0)
    assert row["read_bytes_s"] is None and row["hit_dram"] is None and row["errors"] == 1
    after = {
        **before,
        "bytes_read": 500,
        "hits_dram": 16,
        "hits_nvme": 3,
        "misses_lost": 1,
        "evicted_dram_bytes": 500,
        "evicted_log_bytes": 25,
        "log_total": 9,
        "errors": {"HOLE": 1, "LOST": 4},
        "arena_used": 7,
        "log_capacity": 9,
    }
    [row] = meter.observe([_node("n1", age_s=0.0, **after)], 101.0)
    assert (row["read_bytes_s"], row["written_bytes_s"]) == (200.0, 0.0)
    assert row["evicted_bytes_s"] == 10.0, "what memory gives up, the log has"
    assert (row["hit_dram"], row["hit_nvme"], row["missed"]) == (0.6, 0.3, 0.1)
    assert (row["errors_s"], row["dram_used"], row["nvme_capacity"]) == (2.0, 7, 9)
    assert row["flushed_bytes_s"] is None, "what its node does not say is not known"
    [same] = meter.observe([_node("n1", age_s=0.5, **after)], 101.5)
    assert same == row, "the same heartbeat says the same"
    [restarted] = meter.observe([_node("n1", incarnation=4, **before)], 103.0)
    assert restarted["read_bytes_s"] is None


def test_without_logs_what_memory_gives_up_is_gone() -> None:
    meter = Meter()
    meter.observe([_node("n1", evicted_dram_bytes=0, evicted_log_bytes=0, log_total=0)], 0.0)
    [row] = meter.observe([_node("n1", evicted_dram_bytes=8, evicted_log_bytes=0, log_total=0)], 2.0)
    assert row["evicted_bytes_s"] == 4.0


def test_a_node_that_stands_still_has_no_rates_of_before() -> None:
    meter = Meter()
    meter.observe([_node("n1", bytes_read=1)], 0.0)
    assert meter.observe([_node("n1", bytes_read=5)], 2.0)[0]["read_bytes_s"] == 2.0
    assert meter.observe([_node("n1", age_s=1.0, bytes_read=5)], 20.0)[0]["read_bytes_s"] == 0.0
    meter.observe([_node("n1", bytes_read=9)], 22.0)
    assert meter.observe([_node("n1", state="dead", bytes_read=9)], 22.5)[0]["read_bytes_s"] is None


def test_top_shows_what_is_known_once(run: Any) -> None:
    code, out, _, _ = run(lambda *_: {}, "top", "--once")
    assert code == 0 and "n1" in out and "dead" in out
    code, out, _, _ = run(lambda *_: {}, "top", "--json")
    assert code == 0 and [row["node"] for row in json.loads(out)["nodes"]] == ["n1", "n2"]


def test_cells_for_people() -> None:
    [row] = Meter().observe([_node("n1", arena_used=1 << 20, arena_capacity=2 << 20, flush_lag_ms=1500)], 0.0)
    cells = top._cells(row)
    assert "1.0 MiB / 2.0 MiB" in cells and "1.5 s" in cells and cells.count("-") >= 8
    assert top._cells({**row, "log_failed": 1, "log_trouble": 1})[1] == "LOG FAILED"
    assert top._cells({**row, "log_trouble": 1})[1] == "LOG TROUBLE"
    assert top._cells({**row, "state": "dead", "log_failed": 1})[1] == "dead", "and not only its log"
