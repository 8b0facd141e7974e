"""A Python environment for one peer, with pinned packages, made once and kept in the user's cache.

Peers are never installed beside GD2FS: their libraries (an own UCX, gRPC, glog …) must not meet ours, and
nobody who does not measure should have to download them.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gd2fs.bench.peers.failures import PeerUnavailable

# Up to 130 MB over a slow line; another run that is installing the same is waited for as long.
INSTALL_S = 600.0
PROBE_S = 60.0
LOCK_POLL_S = 0.2
# Of what a failed command printed: enough for the reason, not for its whole log.
REASON_LINES = 3
# Written last: an environment without it was not finished and is made anew.
COMPLETE = "complete.json"


@dataclass(frozen=True)
class Recipe:
    """What a peer needs.

    `packages` are exact (``name==version``) and installed without their dependencies, so that two machines
    measure the same. `debian` are packages whose libraries are laid beside the environment if `probe` (Python
    code that imports the peer) fails without them; the system itself is left as it is.
    """

    name: str
    version: str
    packages: Sequence[str]
    probe: str
    debian: Sequence[str] = ()


@dataclass(frozen=True)
class Environment:
    """A finished one. `library_path` is empty if the system has all libraries."""

    directory: Path
    library_path: str = ""

    @property
    def python(self) -> Path:
        return self.directory / "bin" / "python"

    def variables(self) -> dict[str, str]:
        """Ours, with the libraries in front; for the peer's processes."""
        if not self.library_path:
            return dict(os.environ)
        paths = [self.library_path, os.environ.get("LD_LIBRARY_PATH", "")]
        return {**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, paths))}


def prepare(recipe: Recipe) -> Environment:
    """The environment of this recipe, made if there is none. Raises PeerUnavailable."""
    directory = (
        cache() / f"{recipe.name}-{recipe.version}-py{sys.version_info.major}.{sys.version_info.minor}"
    )
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _locked(directory.parent / f"{directory.name}.lock"):
            marker = directory / COMPLETE
            if not marker.exists():
                shutil.rmtree(directory, ignore_errors=True)
                environment = _make(recipe, directory)
                marker.write_text(json.dumps({"library_path": environment.library_path}))
            return Environment(directory, json.loads(marker.read_text())["library_path"])
    except OSError as error:
        raise PeerUnavailable(f"{directory} can't be made: {error}") from error


def cache() -> Path:
    """Where environments are kept; XDG_CACHE_HOME moves it."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "gd2fs" / "peers"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Two runs at once install once. Raises PeerUnavailable if the other one takes too long."""
    with open(path, "w") as lock:
        deadline = time.monotonic() + INSTALL_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise PeerUnavailable(f"{path} was held for {INSTALL_S:g} s by another run") from None
                time.sleep(LOCK_POLL_S)
        yield


def _make(recipe: Recipe, directory: Path) -> Environment:
    environment = Environment(directory)
    _run(f"a venv for {recipe.name}", [sys.executable, "-m", "venv", str(directory)], INSTALL_S)
    pip = [str(environment.python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
    _run(f"installing {' '.join(recipe.packages)}", [*pip, *recipe.packages], INSTALL_S)
    missing = _probe(recipe, environment)
    if missing and recipe.debian:
        environment = Environment(directory, _fetch_libraries(recipe, directory, missing))
        missing = _probe(recipe, environment)
    if missing:
        raise PeerUnavailable(f"{recipe.name} {recipe.version} does not load here: {missing}")
    return environment


def _probe(recipe: Recipe, environment: Environment) -> str:
    """Why the peer can't be imported; empty if it can."""
    command = [str(environment.python), "-c", recipe.probe]
    try:
        _run("the import", command, PROBE_S, environment.variables())
    except PeerUnavailable as error:
        return error.reason
    return ""


def _fetch_libraries(recipe: Recipe, directory: Path, missing: str) -> str:
    """Unpacks Debian's packages below the environment; returns what LD_LIBRARY_PATH needs."""
    names = " ".join(recipe.debian)
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise PeerUnavailable(f"{missing}; install the libraries of Debian's {names}")
    packages, root = directory / "debian", directory / "libraries"
    packages.mkdir()
    download = ["apt-get", "-q", "download", *recipe.debian]
    try:
        _run(f"apt-get download {names}", download, INSTALL_S, cwd=packages)
    except PeerUnavailable:
        # A machine that never ran it knows no package; only root may run it.
        if os.geteuid() != 0:
            raise
        _run("apt-get update", ["apt-get", "-q", "update"], INSTALL_S)
        _run(f"apt-get download {names}", download, INSTALL_S, cwd=packages)
    for package in sorted(packages.glob("*.deb")):
        _run(f"unpacking {package.name}", ["dpkg-deb", "-x", str(package), str(root)], PROBE_S)
    triplet = f"{platform.machine()}-linux-gnu"
    found = [root / "usr" / "lib" / triplet, root / "lib" / triplet]
    return ":".join(str(path) for path in found if path.is_dir())


def _run(
    what: str,
    command: list[str],
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> None:
    """Raises PeerUnavailable with the end of what the command printed."""
    try:
        done = subprocess.run(
            command,
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise PeerUnavailable(f"{what} took longer than {timeout_s:g} s") from error
    if done.returncode:
        lines = done.stdout.decode(errors="replace").strip().splitlines()[-REASON_LINES:]
        raise PeerUnavailable(f"{what} failed with code {done.returncode}: {' / '.join(lines)}")
