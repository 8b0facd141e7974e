"""The engine as a process."""

from __future__ import annotations

from pathlib import Path

from gd2fs.client import Client
from gd2fs.config.listen import Listen, bind, bound
from gd2fs.config.serving import announce
from gd2fs.config.serving import serve as serve_app
from gd2fs.engine.app import create_app
from gd2fs.engine.loaded import load_model


def serve(
    host: str = "127.0.0.1",
    port: int = 8100,
    *,
    model_path: str | Path | None = None,
    client: Client | None = None,
    keep_local: bool = False,
    queue_max: int = 32,
    connections_max: int | None = None,
    announce_path: str | Path | None = None,
) -> None:
    """Serve one model until SIGTERM or SIGINT; returns after a clean end.

    `client` is the engine's own way to GD2FS, closed by the caller; without one, requests whose KV metadata
    brings no plan are misses, and plans still work. `announce_path` gets the real address as JSON once
    requests are taken. Beyond `connections_max` connections requests are answered 503.
    Raises ValueError for an address beyond loopback: the engine itself authenticates nobody, so only a
    gateway or a proxy on the same host may reach it. Raises FileNotFoundError or GgufError when the model
    can't be read.
    """
    listen = Listen(host, port)
    if not listen.loopback:
        raise ValueError(
            f"the engine can't listen on {host}: it authenticates nobody; listen on 127.0.0.1 and put the "
            "gateway or an authenticating proxy on the same host in front of it"
        )
    # First the address, which may be taken, then the model, which takes a second.
    with bind(listen) as listener:
        model = load_model(Path(model_path) if model_path else None)
        app = create_app(model, client, keep_local=keep_local, queue_max=queue_max)
        facts = {"url": bound(listener).url, "model": model.name, "kv_identity": model.kv_identity}
        announce(announce_path, facts)
        serve_app(app, listener, connections_max=connections_max)
