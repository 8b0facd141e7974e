"""Starting the HTTP services of a configuration: control, engine, gateway. (A node starts itself:
gd2fs.node.)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from gd2fs.config import Listen, Loaded, bind, require_authentication
from gd2fs.config.listen import bound
from gd2fs.config.serving import announce, serve

# Beyond this many connections requests are answered 503; what is worked on has bounds of its own.
CONNECTIONS_MAX = 4096

Clock = Callable[[], float]


def run_control(loaded: Loaded, announce_path: Path | None, clock: Clock | None = None) -> None:
    """`clock` (unix seconds) replaces the database's: tests set it."""
    from gd2fs.control import create_app
    from gd2fs.control.clock import ClusterTime
    from gd2fs.control.node_link import NativeNodeLink
    from gd2fs.signing import Keys

    settings = loaded.settings
    listen = Listen.parse(settings.control.listen)
    require_authentication("control", [listen], settings.cluster.keys, "set GD2FS_CLUSTER_KEYS")
    keys = Keys.parse(settings.cluster.keys)
    with bind(listen) as listener:
        app = create_app(
            settings.control.database or _sqlite(Path(settings.control.data_dir)),
            keys,
            lambda cluster, clock: NativeNodeLink(cluster, keys, clock),
            settings.cluster.id,
            plan_ttl_s=settings.control.plan_ttl_s,
            advertise=settings.control.advertise,
            time=ClusterTime(clock),
        )
        announce(announce_path, {"url": bound(listener).url, "cluster": settings.cluster.id})
        serve(app, listener, connections_max=CONNECTIONS_MAX)


def _sqlite(directory: Path) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{directory.resolve() / 'control.sqlite'}"


def run_engine(loaded: Loaded, announce_path: Path | None) -> None:
    from gd2fs.cli.connection import connect_loaded
    from gd2fs.engine import serve as serve_engine

    settings = loaded.settings
    listen = Listen.parse(settings.engine.listen)
    if settings.engine.model and not Path(settings.engine.model).is_file():
        raise FileNotFoundError(f"engine.model: {settings.engine.model} is not a file; name a GGUF file")
    # Lazily: an engine also answers while storage is away.
    with connect_loaded(loaded, lazily=True) if settings.engine.storage else nullcontext() as client:
        serve_engine(
            listen.host,
            listen.port,
            model_path=settings.engine.model or None,
            client=client,
            keep_local=settings.engine.keep_local,
            queue_max=settings.engine.queue_max,
            connections_max=CONNECTIONS_MAX,
            announce_path=announce_path,
        )


def run_gateway(loaded: Loaded, announce_path: Path | None) -> None:
    from gd2fs.cli.connection import connect_loaded
    from gd2fs.gateway import create_app

    settings = loaded.settings
    listen = Listen.parse(settings.gateway.listen)
    keys = ",".join(settings.gateway.api_keys)
    require_authentication("the gateway", [listen], keys, "set GD2FS_GATEWAY_API_KEYS")
    with bind(listen) as listener, connect_loaded(loaded, lazily=True) as client:
        app = create_app(settings.gateway.engines, client, settings.gateway)
        announce(announce_path, {"url": bound(listener).url, "engines": settings.gateway.engines})
        serve(app, listener, connections_max=CONNECTIONS_MAX)
