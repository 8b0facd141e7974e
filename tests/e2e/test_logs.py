"""Nodes with logs, as processes: what comes back when one was killed, and when one was stopped."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import gd2fs
from gd2fs import errors
from gd2fs.cli.app import main
from gd2fs.client import Extent
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


def by_path(client: gd2fs.Client, path: str, local: Path) -> list[bytes | None]:
    """The whole file, read and copied; None where that is refused as lost."""

    def copied() -> bytes:
        client.download(path, local)
        return local.read_bytes()

    found: list[bytes | None] = []
    for ask in (lambda: client.read(path), copied):
        local.unlink(missing_ok=True)
        try:
            found.append(ask())
        except errors.Lost as lost:
            assert "write it again" in str(lost), lost
            assert not local.exists()
            found.append(None)
    return found


def test_no_file_is_shorter_than_it_was_without_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, local = bytes(range(256)) * 20_000, tmp_path / "copy"
    with fleet(tmp_path, nodes=1, memory="64MiB", log="256MiB") as running:

        def connected() -> gd2fs.Client:
            # A new client: the node has another port now, which an old one looks for only after a while.
            return gd2fs.connect(running.control)

        client = connected()
        for path in ("/whole", "/tail", "/never"):
            client.create(path)
        client.write("/whole", 0, data)
        client.flush("/whole")
        client.write("/tail", 0, data)
        client.flush("/tail")
        client.write("/tail", len(data), data)
        client.write("/never", 0, b"x")
        running.kill("node-1")
        running.start_node(1)
        client.close()
        client = connected()
        assert by_path(client, "/whole", local) == [data, data]
        assert client.read("/whole", 0, len(data) + 99) == data, "it is known where it ends"
        assert client.where("/whole", [(0, 1 << 62)])[-1] == Extent(len(data), 1 << 62, "hole")
        for path in ("/tail", "/never"):
            info = client.stat(path)
            assert info.length is None and (info.lost, info.end_lost) == (path == "/never", path == "/tail")
            assert by_path(client, path, local) == [None, None]
            for ask in (client.where, client.warm):
                with pytest.raises(errors.Lost, match="write it again"):
                    ask(path)
        assert client.read("/tail", 0, len(data)) == data, "what is named is there"
        # In order: the end of what grew since is known again, without a flush by anybody.
        client.write("/whole", len(data), b"more")
        client.create("/plain")
        client.write("/plain", 0, b"plain")
        running.signal("node-1", signal.SIGTERM)
        assert running.children["node-1"].popen.wait(30) == 0
        running.start_node(1)
        client.close()
        client = connected()
        assert by_path(client, "/whole", local) == [data + b"more"] * 2
        assert by_path(client, "/plain", local) == [b"plain"] * 2
        assert client.stat("/tail").end_lost, "what nobody knows stays unknown"
        for path, code in (("/whole", 0), ("/tail", 1), ("/never", 1)):
            with pytest.raises(SystemExit) as ended:
                main(["flush", path, "--control", running.control])
            told = capsys.readouterr()
            assert (ended.value.code or 0) == code and ("durable" in told.out) == (code == 0), told
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
