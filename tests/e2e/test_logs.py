"""Nodes with logs, as processes: what comes back when one was killed, and when one was stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

import gd2fs
from gd2fs import errors
from tests.e2e.test_turns import Stack, first_turn, report_of, same_answer
from tests.fleet import fleet

pytestmark = pytest.mark.timeout(300)

MIB = 1 << 20


def test_a_killed_node_serves_what_was_flushed(tmp_path: Path) -> None:
    kept, lost = bytes(range(256)) * 40_000, b"gone" * MIB
    with fleet(tmp_path, nodes=1, memory="64MiB", log="256MiB") as running:
        client = gd2fs.connect(running.control)
        for path in ("/kept", "/lost"):
            client.create(path)
        client.write("/kept", 0, kept)
        client.flush("/kept")
        client.write("/lost", 0, lost)
        running.kill("node-1")
        running.start_node(1)
        # A new client: the node has another port now, which an old one looks for only after a while.
        client.close()
        client = gd2fs.connect(running.control)
        assert [extent.tier for extent in client.where("/kept")] == ["nvme"]
        assert client.read("/kept") == kept
        assert client.stat("/kept").length == len(kept)
        with pytest.raises(errors.Lost):
            client.read("/lost")
        assert client.warm("/kept", [(0, len(kept))]).missing == 0
        client.delete("/kept")
        client.delete("/lost")
        with pytest.raises(FileNotFoundError):
            client.read("/kept")
        client.close()


def test_a_session_goes_on_after_its_node_was_stopped_and_shrinks_after_it_was_killed(tmp_path: Path) -> None:
    # Nothing reaches the log by itself while this test runs, only with the end of the node.
    unhurried = {"GD2FS_NODE_FLUSH_DELAY_MS": "60000"}
    with fleet(tmp_path, nodes=1, log="1GiB", environment=unhurried) as running:
        stack = Stack(running)
        session, history = first_turn(stack)
        running.stop("node-1")
        running.start_node(1)
        prompt = [*history, 198]
        plan = stack.plan(session, prompt, "second")
        assert (plan["cached_tokens"], plan["miss"]) == (len(history), None)
        answer = stack.turn(1, prompt, plan)
        assert report_of(answer)["cached_tokens"] == len(history), report_of(answer)
        assert report_of(answer)["committed"], report_of(answer)
        same_answer(answer, stack.turn(0, prompt, None))
        following = [*prompt, *report_of(answer)["token_ids"], 198]
        running.kill("node-1")
        running.start_node(1)
        plan = stack.plan(session, following, "third")
        assert plan["cached_tokens"] == len(history), "the second turn was in memory only"
        assert plan["miss"] == "lost", plan
        answer = stack.turn(0, following, plan)
        assert report_of(answer)["cached_tokens"] == plan["cached_tokens"], report_of(answer)
        same_answer(answer, stack.turn(1, following, None))
        stack.client.close()
