"""gd2fs up: control and storage nodes on this machine, in the foreground."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import typer

from gd2fs.cli.output import console, print_json
from gd2fs.cli.processes import Child, Processes, ProcessFailed, terminate_as_interrupt
from gd2fs.config.serving import alone_in

# Control applies migrations at its first start; a node maps its memory.
READY_S = 30.0
WATCH_S = 0.2
# A node that has drained and flushed still has to end; before it is killed.
STOP_MARGIN_S = 3.0
# The nodes of `up` end with it; nobody runs it for a year.
NODE_TOKEN_S = 365 * 86_400


def start_control(processes: Processes, directory: Path, port: int) -> tuple[Child, str]:
    """Starts control on loopback; returns it and its gd2fs:// address once it serves."""
    child = processes.start(
        "control", ["control", "--listen", f"127.0.0.1:{port}", "--data-dir", str(directory / "control")]
    )
    url = processes.wait_ready(child, READY_S)["url"]
    return child, str(url).replace("http://", "gd2fs://")


def start_node(
    processes: Processes,
    directory: Path,
    number: int,
    memory: str,
    control: str,
    environment: dict[str, str] | None = None,
    log: str | None = None,
    data_dir: Path | None = None,
) -> Child:
    """Starts node NUMBER on loopback with ports of the kernel's choice; wait_ready() it. log: size of its log
    file; None leaves logs to the configuration. data_dir: where it is if not in directory."""
    name = f"node-{number}"
    arguments = ["node", "--id", name, "--listen", "tcp://127.0.0.1:0", "--http", "127.0.0.1:0"]
    arguments += ["--data-dir", str(data_dir or directory / name), "--memory", memory, "--control", control]
    if log is not None:
        arguments += ["--logs", str(_log_file(directory, number)), "--log-bytes", log]
    return processes.start(name, arguments, environment, stop_s=_stop_s(memory, log))


def _log_file(directory: Path, number: int) -> Path:
    return directory / f"node-{number}" / "log"


def _require_logs(directory: Path, nodes: int) -> None:
    """A life of its node without it makes a log stale: nobody is to lose what it holds by an option that was
    forgotten. Raises ValueError.
    """
    logs = [path for number in range(1, nodes + 1) if (path := _log_file(directory, number)).exists()]
    if logs:
        raise ValueError(
            f"--log: {logs[0]} holds what an earlier run has flushed, and a run without it would make that"
            f" stale for good; give --log {logs[0].stat().st_size >> 20}MiB, or another --data-dir, or, if"
            f" nobody needs it, remove {', '.join(map(str, logs))}"
        )


def _stop_s(memory: str, log: str | None) -> float:
    """How long a node may take to stop: it reads the same configuration as we do."""
    from gd2fs.config import load

    given = {"node.memory_bytes": memory}
    if log is not None:
        given |= {"node.logs": "log", "node.log_bytes": log}
    return load(given).settings.node.stop_s + STOP_MARGIN_S


def _node_credentials() -> dict[str, str]:
    """Environment with a token for nodes, if the cluster has keys: whoever has them may sign for its own."""
    from gd2fs.config import load
    from gd2fs.signing import Keys, Token

    keys = Keys.parse(load().settings.cluster.keys)
    if keys.is_development:
        return {}
    return {"GD2FS_TOKEN": keys.sign(Token("default", "node", int(time.time()) + NODE_TOKEN_S))}


def run_cluster(nodes: int, memory: str, log: str | None, port: int, directory: Path, as_json: bool) -> None:
    """Runs until Ctrl-C. Raises ProcessFailed if a process ends by itself, ValueError without --log over
    nodes that have logs.
    """
    directory = directory.resolve()
    environment = _node_credentials()
    serves = False
    with (
        alone_in(directory, "gd2fs up", "--data-dir"),
        terminate_as_interrupt(),
        Processes(directory) as processes,
    ):
        if log is None:
            _require_logs(directory, nodes)
        try:
            _, control = start_control(processes, directory, port)
            children = [
                start_node(processes, directory, n + 1, memory, control, environment, log)
                for n in range(nodes)
            ]
            facts: dict[str, Any] = {"control": control, "data_dir": str(directory)}
            facts["nodes"] = [processes.wait_ready(child, READY_S) for child in children]
            if as_json:
                print_json(facts)
            else:
                _welcome(facts, memory, log)
            serves = True
            while (ended := processes.ended()) is None:
                time.sleep(WATCH_S)
        except KeyboardInterrupt:
            # The way to end it, but a failure of the start.
            if not serves:
                raise
            if not as_json:
                typer.echo("\nstopping", err=True)
            return
        raise ProcessFailed(_ended(ended, log))


def _ended(child: Child, log: str | None) -> str:
    """Why everything ends, and what to do about it."""
    code = child.popen.returncode
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    kept = (
        "what was written is gone with it, since there is no --log"
        if log is None
        else "what was flushed is there again then"
    )
    return (
        f"{child.name} {how}, and all of `gd2fs up` with it; start it again over the same --data-dir: {kept}"
        f" (end of {child.log} above)\n{child.tail()}"
    )


def _welcome(facts: dict[str, Any], memory: str, log: str | None) -> None:
    control = facts["control"]
    out = console()
    out.print(
        f"[bold]GD2FS is up[/bold]: control {control}, {len(facts['nodes'])} node(s) with {memory} each"
    )
    for node in facts["nodes"]:
        out.print(f"  {node['node']}: {' '.join(node['addresses'])}, metrics {node['url']}/metrics")
    out.print(f"  state and logs: {facts['data_dir']}\n")
    out.print("In another terminal:")
    out.print(f"  export GD2FS_CONTROL={control}")
    out.print("  gd2fs status                              the cluster and its nodes")
    out.print("  gd2fs put README.md /notes/readme.md      store a file; gd2fs ls /notes")
    out.print("  gd2fs engine                              a small model on port 8100")
    out.print(
        "  gd2fs gateway                             the OpenAI API on port 8000, with KV cache planned"
    )
    kept = (
        "File data lives in the nodes' memory and ends with them; --log SIZE keeps it."
        if log is None
        else "File data is flushed to the nodes' logs and is there again at the next start."
    )
    out.print(f"\nCtrl-C stops everything. {kept}")
