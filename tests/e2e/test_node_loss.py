"""I8 with real processes: a node that dies in the middle of a load costs a recomputation, never an answer."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from gd2fs.cli.processes import Processes
from tests.e2e.test_turns import Stack, first_turn, report_of, same_answer
from tests.fleet import READY_S, fleet, post

pytestmark = pytest.mark.timeout(300)


def test_a_node_killed_in_the_middle_of_a_load(tmp_path: Path) -> None:
    with fleet(tmp_path) as running:
        stack = Stack(running)
        session, history = first_turn(stack)
        prompt = [*history, 198]
        plan = stack.plan(session, prompt, "second")
        uri = plan["kv_transfer"]["stored_kvcache"][0]["kv_uri"]
        node = running.node_of(plan["kv_transfer"]["plan"]["layouts"][uri])

        # Stopped, the node accepts the load and never answers: the load is under way when the node dies.
        running.signal(node, signal.SIGSTOP)
        answers: list[dict[str, Any]] = []
        thread = threading.Thread(target=lambda: answers.append(stack.turn(1, prompt, plan)), daemon=True)
        thread.start()
        time.sleep(0.3)
        running.kill(node)
        thread.join(60)
        assert answers, "the turn hung"
        report = report_of(answers[0])
        assert report["cached_tokens"] == 0 and report["miss"] and not report["committed"]
        same_answer(answers[0], stack.turn(0, prompt, None))

        # The node comes back empty under a new incarnation: the loss is reported, the session goes on.
        running.start_node(int(node.removeprefix("node-")))
        plan = stack.plan(session, prompt, "third")
        assert (plan["cached_tokens"], plan["miss"]) == (0, "lost")
        answer = stack.turn(1, prompt, plan)
        assert report_of(answer)["committed"], report_of(answer)
        following = [*prompt, *report_of(answer)["token_ids"], 198]
        assert stack.plan(session, following, "fourth")["cached_tokens"] == len(following) - 2
        stack.client.close()


def test_control_killed_between_plan_and_commit(tmp_path: Path) -> None:
    """I12 for one turn: the planned transfer goes on without control; the commit waits for its return."""
    with fleet(tmp_path, nodes=1) as running:
        stack = Stack(running)
        session, history = first_turn(stack)
        prompt = [*history, 198]
        plan = stack.plan(session, prompt, "second")
        running.kill("control")
        answer = stack.turn(1, prompt, plan)
        report = report_of(answer)
        assert report["cached_tokens"] == len(history) and not report["committed"]
        running.start_again_control()
        deadline = time.monotonic() + 30
        while stack.stored(session)["tokens"] == len(history):
            assert time.monotonic() < deadline, "the commit never arrived"
            time.sleep(0.1)
        assert stack.stored(session)["tokens"] == len(prompt) + len(report["token_ids"]) - 1
        stack.client.close()


def test_an_engine_starts_and_answers_while_control_is_away(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        nowhere = ["--control", "gd2fs://127.0.0.1:1"]
        child = processes.start("engine", ["engine", "--listen", "127.0.0.1:0", *nowhere])
        url = processes.wait_ready(child, READY_S)["url"]
        stored = {"token_start": 0, "token_length": 1, "kv_uri": "gd2fs://local/x.kv", "kv_start": 0}
        body = {
            "prompt": [1, 2, 3],
            "max_tokens": 1,
            "kv_transfer_params": {"stored_kvcache": [stored]},
        }
        answer = post(url + "/v1/completions", body)
        assert report_of(answer)["miss"] == "unavailable" and answer["usage"]["completion_tokens"] == 1
