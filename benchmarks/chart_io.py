"""Draws the chart of read throughput by request size from a recorded `gd2fs bench io`.

.venv/bin/python benchmarks/record.py io .venv/bin/gd2fs bench io --json
.venv/bin/python benchmarks/chart_io.py benchmarks/results/DATE-io.json docs/io.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gd2fs.bench.plot import chart

if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    source, target = (Path(argument) for argument in sys.argv[1:])
    target.write_text(chart(json.loads(source.read_text())["result"]))
