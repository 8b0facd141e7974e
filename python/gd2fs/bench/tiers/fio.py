"""fio on a file beside the log: what the disk does without GD2FS."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from gd2fs.bench.debian import PackageUnavailable, ensure_installed
from gd2fs.bench.samples import Sample

RUN_S = 600.0
PROBE_S = 30.0
ENGINES = ("io_uring", "libaio")


class FioUnavailable(Exception):
    """There is no fio to compare with; the message says why and what helps."""


@dataclass(frozen=True)
class Job:
    """``rw`` as fio names it: read, write, randread. ``moved``: bytes, in blocks of ``block``, of a file of
    ``size`` bytes that is there in full, so that no job pays for a first allocation. ``files``: as many by
    turns, so that what lies below the disk, such as a hypervisor's cache, helps it no more than GD2FS.
    ``sync_every``: blocks between two fdatasyncs, 0 for none."""

    rw: str
    size: int
    block: int
    depth: int
    moved: int
    files: int
    sync_every: int = 0


class Fio:
    """fio on files of one directory. Raises FioUnavailable."""

    def __init__(self, directory: Path) -> None:
        try:
            ensure_installed("fio", "fio")
        except PackageUnavailable as error:
            raise FioUnavailable(str(error)) from error
        self._directory, self._runs = directory, 0
        self.engine = next((engine for engine in ENGINES if self._works(engine)), "")
        if not self.engine:
            raise FioUnavailable(f"fio can use none of {', '.join(ENGINES)} in {directory}")

    def run(self, job: Job) -> Sample:
        """One run, measured by fio itself. The first of a file writes it, outside of the time."""
        self._runs += 1
        path = self._directory / f"fio-{job.size}-{self._runs % job.files}"
        fresh = ["--overwrite=1"] if job.rw == "write" else []
        found = self._call(
            f"--filename={path}", f"--rw={job.rw}", f"--size={job.size}", f"--io_size={job.moved}",
            f"--bs={job.block}", f"--iodepth={job.depth}", f"--fdatasync={job.sync_every}",
            # Every run other places, as GD2FS has them.
            "--randrepeat=0", *fresh,
        )  # fmt: skip
        side = found["jobs"][0]["write" if job.rw == "write" else "read"]
        return Sample(int(side["io_bytes"]), int(side["io_bytes"]) / float(side["bw_bytes"]))

    def version(self) -> str:
        done = subprocess.run(
            ["fio", "--version"], capture_output=True, text=True, timeout=PROBE_S, check=True
        )
        return done.stdout.strip()

    def _works(self, engine: str) -> bool:
        self.engine = engine
        try:
            self._call(f"--filename={self._directory / 'fio-probe'}", "--rw=read", "--size=1m", "--bs=64k")
        except FioUnavailable:
            return False
        return True

    def _call(self, *options: str) -> dict[str, list[dict[str, dict[str, float]]]]:
        command = ["fio", "--name=gd2fs", f"--ioengine={self.engine}", "--direct=1", "--output-format=json"]
        done = subprocess.run(
            [*command, *options],
            cwd=self._directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )
        if done.returncode:
            raise FioUnavailable(f"fio {' '.join(options)}: {(done.stderr or done.stdout).strip()[-500:]}")
        # It may say something before the object.
        found: dict[str, list[dict[str, dict[str, float]]]] = json.loads(
            done.stdout[done.stdout.index("{") :]
        )
        return found
