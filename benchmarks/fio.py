"""fio, asked for one load: its bandwidth and processor time.

Owns fio's command line and what its answer means. Does not know who is compared with it. Guarantees that a run that
failed is a `FioError` with fio's own last word.

Huge pages
----------
`swap.AlignedBuffer` asks for transparent huge pages, which makes direct I/O cheaper: there are fewer pages to hold.
fio's `--iomem=mmaphuge` needs pages that an administrator has set aside, but its ordinary `--iomem=malloc` takes
transparent ones where the C library is told to ask for them (glibc 2.35 and later): `huge_pages`.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
_PATTERN = {"read": "read", "write": "write", "mixed": "rw"}


class FioError(Exception):
    """fio did not do it."""


@dataclass(frozen=True, slots=True)
class Load:
    """What is moved and how; `depth` requests in flight: threads for psync, requests of one thread for the others.

    `offset` and `nbytes`: the part of the file, which has to be there unless `lay_out`.
    """

    pattern: str
    engine: str
    block_size: int
    depth: int
    seconds: float
    nbytes: int
    offset: int = 0
    huge_pages: bool = True
    direct: bool = True
    lay_out: bool = False

    def __str__(self) -> str:
        pages = ", huge pages" if self.huge_pages else ""
        return f"fio, {self.engine}, {self.block_size >> 20} MiB{pages}, {self.pattern}, {self.depth} in flight"


def run(program: str, path: Path, load: Load) -> tuple[float, float]:
    """Return GB/s, reads and writes together, and how many cores were busy with it. Raises FioError."""
    jobs = load.depth if load.engine == "psync" else 1
    share = load.nbytes // jobs // load.block_size * load.block_size
    command = [
        program, "--name=beside", f"--filename={path}", f"--ioengine={load.engine}", "--thread",
        f"--rw={_PATTERN[load.pattern]}", "--rwmixread=50", f"--bs={load.block_size}",
        f"--direct={load.direct:d}", "--scramble_buffers=0",
        f"--numjobs={jobs}", f"--iodepth={load.depth // jobs}", f"--offset={load.offset}", f"--size={share}",
        f"--offset_increment={share}", "--time_based", f"--runtime={round(load.seconds * 1000)}ms",
        f"--ramp_time={min(500, round(load.seconds * 150))}ms", "--group_reporting",
        f"--allow_file_create={load.lay_out:d}", "--output-format=json",
    ]  # fmt: skip
    surroundings = os.environ | (_HUGE_PAGES if load.huge_pages else {})
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=surroundings)
    if done.returncode != 0:
        raise FioError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    (job,) = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    rate = sum(job[way]["bw_bytes"] for way in ("read", "write")) / 1e9
    # fio divides the CPU time of all threads by the running time of all threads.
    return rate, (job["usr_cpu"] + job["sys_cpu"]) / 100 * jobs
