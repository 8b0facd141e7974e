"""`gd2fs bench tiers`: memory and log together, beside fio on the same disk, and beside a node without a log.

- `plan`: the parts, and how much each moves;
- `stage`: control and one node as processes; `traffic`: requests to it, whose bytes are checked;
- `fio`: the disk without GD2FS;
- `cold`, `writes`, `full`, `turn`, `recovery`, `resident`, `torture`: the parts;
- `run`: one after the other; `figures`: what comes out; `show`: the same for people.
"""
