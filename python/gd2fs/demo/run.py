"""The demo from start to end, and its clean-up."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from gd2fs.cli.output import CommandFailed, print_json
from gd2fs.cli.processes import Processes, forget_configuration, terminate_as_interrupt
from gd2fs.client.connect import connect
from gd2fs.demo import checks, shifted
from gd2fs.demo.conversation import KILL_AFTER_TURN, Conversation
from gd2fs.demo.script import Piece, read_script
from gd2fs.demo.show import Show, result
from gd2fs.demo.stage import Stage
from gd2fs.demo.talk import Talker

MAX_TOKENS = 28
# A full recomputation of the longest context takes about 15 s on two slow cores.
ANSWER_S = 120.0


def run_demo(script: Path | None, keep_logs: Path | None, as_json: bool) -> None:
    """Runs the demo. Raises CommandFailed, with the result, if a check fails; whatever happens, nothing is
    left.
    """
    pieces = read_script(script)
    started = time.monotonic()
    show = Show(quiet=as_json)
    with terminate_as_interrupt(), tempfile.TemporaryDirectory(prefix="gd2fs-demo-") as name:
        directory = Path(name)
        forget_configuration(directory)
        try:
            with Processes(directory) as processes:
                data = _perform(processes, directory, pieces, show)
        finally:
            show.end()
            if keep_logs is not None:
                keep_logs.mkdir(parents=True, exist_ok=True)
                for log in directory.glob("*.log"):
                    shutil.copy(log, keep_logs)
    found = [checks.Check(**check) for check in data["checks"]]
    show.checks(found, time.monotonic() - started)
    if not data["ok"]:
        failed = "; ".join(f"{check.name} ({check.detail})" for check in found if not check.ok)
        raise CommandFailed(f"check failed: {failed}", data=data)
    if as_json:
        print_json(data)
    else:
        show.go_on()


def _perform(processes: Processes, directory: Path, pieces: list[Piece], show: Show) -> dict[str, Any]:
    show.step(
        "Starting control, two storage nodes, a gateway, two engines behind it, and two to compare with."
    )
    stage = Stage(processes)
    stage.start(directory)
    assert stage.plain
    talker = Talker(MAX_TOKENS, ANSWER_S)
    health = talker.get(f"{stage.plain.url}/health")
    talker.model = health["model"]
    bytes_per_token = health["kv_format"]["bytes_per_token"]
    show.step(
        f"{talker.model}: {bytes_per_token} bytes of KV cache a token. {len(pieces)} turns of conversation:\n"
    )
    with connect(stage.control) as client:
        conversation = Conversation(stage, talker, client)
        show.begin()
        conversation.hold(pieces, show.turn, show.step)
        show.end()
        show.step("Checking: all token ids in one pass without GD2FS, then with copies of the KV cache.")
        scores, _ = talker.score(stage.plain.url, conversation.all_ids)
        copies = shifted.differences(conversation, scores, health["kv_identity"], bytes_per_token)
        rss_mib = stage.rss_mib(talker)
    talker.close()
    turns, rows = conversation.turns, conversation.session["control_rows"]
    recomputed, largest = checks.equals_recomputed(conversation, scores)
    killed = stage.killed.name if stage.killed else ""
    found = [
        checks.hits(turns),
        checks.bytes_moved(turns, bytes_per_token),
        checks.alternation(turns),
        checks.survived_the_kill(turns, killed),
        checks.loaded_is_saved(turns),
        checks.equals_local(turns),
        recomputed,
        checks.negative_control(*copies),
        checks.control_rows(rows, len(turns)),
        checks.context(turns),
        checks.faster_than_recomputed(turns[-1]),
        checks.as_fast_as_local(turns[-1]),
        checks.small_engines(rss_mib),
    ]
    show.conversation(turns, [piece.question for piece in pieces])
    return result(turns, found, rows, rss_mib, largest, KILL_AFTER_TURN)
