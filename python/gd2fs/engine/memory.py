"""The engine's own resident memory."""

from __future__ import annotations

import os
from pathlib import Path


def rss_mib() -> float:
    """Resident memory of this process in MiB; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0.0
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)
