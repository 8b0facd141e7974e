"""gd2fs doctor: what this machine offers, and what to do about what is missing."""

from __future__ import annotations

from gd2fs.cli.output import JsonFlag, print_json, print_table


def doctor(as_json: JsonFlag = False) -> None:
    """Look at what this machine offers (huge pages, io_uring, RDMA, CUDA...) and say what to do about each.

    Nothing here is needed to run GD2FS over TCP with data in memory; it tells what faster paths can be used.
    """
    from gd2fs.cli.probes import examine

    findings = examine()
    if as_json:
        print_json({"findings": [finding.describe() for finding in findings]})
        return
    rows = ((f.name, f.status, f.found, f.remedy or "nothing to do") for f in findings)
    print_table("", ["what", "status", "found here", "what to do"], rows)
