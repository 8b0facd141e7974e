"""Debian packages that measurements compare with: installed where they are missing and we may."""

from __future__ import annotations

import os
import shutil
import subprocess

INSTALL_S = 180.0


class PackageUnavailable(Exception):
    """A program is missing and can't be installed; the message says why and what helps."""


def ensure_installed(program: str, package: str) -> None:
    """Installs ``package`` if ``program`` is missing and we are root. Raises PackageUnavailable."""
    if shutil.which(program):
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise PackageUnavailable(f"{program} is not installed; apt-get install {package}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in ("update", f"install -y --no-install-recommends {package}"):
        try:
            done = subprocess.run(
                ["apt-get", "-q", *command.split()],
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=INSTALL_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise PackageUnavailable(f"apt-get {command} took longer than {INSTALL_S:g} s") from error
        if done.returncode:
            reason = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise PackageUnavailable(f"apt-get {command} failed: {' '.join(reason)}")
