"""The probes of `gd2fs doctor`: each tries the real thing, and none changes anything."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from gd2fs.config.units import format_bytes

_SYS_IO_URING_SETUP = 425
_IO_URING_PARAMS_BYTES = 120
# Registered memory is pinned; less than this does not hold one engine's bounce buffers.
MEMLOCK_BYTES_MIN = 1 << 30
# For CRC-32C: hardware instruction, carry-less multiplication, and its wide form.
CPU_FLAGS = ("sse4_2", "pclmulqdq", "avx2", "avx512f", "vpclmulqdq")

Status = Literal["ok", "limited", "missing"]


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `remedy` is empty if there is nothing to do."""

    name: str
    status: Status
    found: str
    remedy: str = ""

    def describe(self) -> dict[str, Any]:
        return asdict(self)


def examine() -> list[Finding]:
    """Every probe, in the order they are shown. A probe that fails is a finding, too."""
    findings = []
    for probe in (cpu, huge_pages, shared_memory, memlock, io_uring, rdma, cuda, fuse):
        try:
            findings.append(probe())
        except OSError as error:
            findings.append(Finding(probe.__name__, "missing", f"could not be looked at: {error}"))
    return findings


def cpu() -> Finding:
    flags: set[str] = set()
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith(("flags", "Features")):
            flags.update(line.partition(":")[2].split())
            break
    have = [flag for flag in CPU_FLAGS if flag in flags] + (["crc32"] if "crc32" in flags else [])
    found = f"{os.cpu_count()} CPUs; {' '.join(have) or 'none of the checksum instructions'}"
    if "crc32" in flags or {"sse4_2", "pclmulqdq"} <= flags:
        return Finding("cpu", "ok", found)
    return Finding(
        "cpu",
        "limited",
        found,
        "checksums run in software here; expose SSE 4.2 and PCLMULQDQ to this virtual machine",
    )


def huge_pages() -> Finding:
    counts = dict(
        (key, int(value.split()[0]))
        for key, _, value in (line.partition(":") for line in _read("/proc/meminfo").splitlines())
        if key in ("HugePages_Total", "HugePages_Free", "Hugepagesize")
    )
    total, free = counts.get("HugePages_Total", 0), counts.get("HugePages_Free", 0)
    transparent = _chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    size = format_bytes(counts.get("Hugepagesize", 0) * 1024)
    found = (
        f"{free} of {total} reserved pages of {size} free; "
        f"transparent for shared memory: {transparent or 'unknown'}"
    )
    if free or transparent in ("always", "within_size", "advise", "force"):
        return Finding("huge_pages", "ok", found)
    remedy = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled, or sysctl vm.nr_hugepages=N"
    return Finding("huge_pages", "limited", found, f"fewer TLB misses on big arenas: {remedy}")


def shared_memory() -> Finding:
    fd = os.memfd_create("gd2fs-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 4096)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    finally:
        os.close(fd)
    try:
        space = os.statvfs("/dev/shm")
        size = f"/dev/shm has {format_bytes(space.f_bavail * space.f_frsize)} free"
    except OSError:
        size = "no /dev/shm (not needed)"
    return Finding("shared_memory", "ok", f"memfd with size seals works; {size}")


def memlock() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = f"soft {_limit(soft)}, hard {_limit(hard)}"
    if soft == resource.RLIM_INFINITY or soft >= MEMLOCK_BYTES_MIN:
        return Finding("memlock", "ok", found)
    return Finding(
        "memlock", "limited", found, "RDMA pins memory: ulimit -l unlimited (systemd: LimitMEMLOCK=infinity)"
    )


def io_uring() -> Finding:
    params = ctypes.create_string_buffer(_IO_URING_PARAMS_BYTES)
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(_SYS_IO_URING_SETUP, 1, params)
    if fd >= 0:
        os.close(fd)
        return Finding("io_uring", "ok", "a ring can be set up")
    number = ctypes.get_errno()
    found = f"io_uring_setup: {os.strerror(number)}"
    if number == errno.ENOSYS:
        return Finding(
            "io_uring", "missing", found, "Linux 5.10 or newer is needed; a thread pool serves instead"
        )
    if number in (errno.EPERM, errno.EACCES):
        return Finding(
            "io_uring",
            "missing",
            found,
            "forbidden by seccomp or kernel.io_uring_disabled; allow it, or a thread pool serves",
        )
    return Finding("io_uring", "missing", found, "raise the memlock limit, or a thread pool serves instead")


def rdma() -> Finding:
    root = Path("/sys/class/infiniband")
    devices = sorted(entry.name for entry in root.iterdir()) if root.is_dir() else []
    if not devices:
        return Finding(
            "rdma",
            "missing",
            "no RDMA device",
            "several TCP streams serve instead; with an RDMA NIC: load its driver",
        )
    states = []
    for device in devices:
        ports = sorted((root / device / "ports").glob("*"))
        active = [port.name for port in ports if "ACTIVE" in _read(port / "state")]
        states.append(f"{device} ({len(active)} of {len(ports)} ports active)")
    working = any("(0 of" not in state for state in states)
    remedy = "" if working else "no port is active: check cable, link and switch (ibv_devinfo)"
    return Finding("rdma", "ok" if working else "limited", ", ".join(states), remedy)


def cuda() -> Finding:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Finding(
            "cuda",
            "missing",
            "no libcuda.so.1",
            "with an NVIDIA GPU: install its driver, or pass it into the container",
        )
    code = driver.cuInit(0)
    if code != 0:
        return Finding(
            "cuda", "limited", f"cuInit failed with code {code}", "check nvidia-smi and the driver's version"
        )
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    names = []
    for ordinal in range(count.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
        if driver.cuDeviceGet(ctypes.byref(device), ordinal) == 0:
            driver.cuDeviceGetName(name, 256, device)
            names.append(name.value.decode(errors="replace"))
    if not names:
        return Finding(
            "cuda", "limited", "a driver but no GPU", "check CUDA_VISIBLE_DEVICES and the container's devices"
        )
    return Finding("cuda", "ok", f"{len(names)} GPU(s): {', '.join(names)}")


def fuse() -> Finding:
    helper = shutil.which("fusermount3")
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return Finding(
            "fuse",
            "missing",
            f"/dev/fuse: {error.strerror}",
            "modprobe fuse; in a container: --device /dev/fuse",
        )
    if helper is None:
        return Finding(
            "fuse",
            "limited",
            "/dev/fuse opens, no fusermount3",
            "install the package fuse3 to mount as a user",
        )
    return Finding("fuse", "ok", f"/dev/fuse opens, {helper}")


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else format_bytes(value)


def _chosen(path: str) -> str:
    """The word in brackets of a sysfs choice such as "always [never]"; empty if it cannot be read."""
    text = _read(path)
    return text.partition("[")[2].partition("]")[0]


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
