"""What Nsight Compute counts of three kernels: shares of the memory's and the tensor cores' rates."""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys

from benchmarks.gpu.parts.kernels import ROOT
from benchmarks.gpu.place import LeftOutError, Place, Record

TOOL = "ncu"
METRICS = (
    "gpu__time_duration.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
)
# By the part that launches them.
SKIPPED = {"linears": 10, "attention": 2}  # launches; of linears those of the check, which are small
KERNELS = {
    "attention": ("attention_parts_Int8_128",),
    "linears": ("linear_few_F16_4_plain_1", "linear_whole_F16_4_plain_8"),
}


def run(place: Place, record: Record) -> None:
    program = shutil.which(TOOL)
    if program is None:
        raise LeftOutError(f"{TOOL} is not installed")
    for part, names in KERNELS.items():
        for name in names:
            command = [program, "--csv", "--clock-control", "none", "--metrics", ",".join(METRICS), "--kill", "yes",
                       "--kernel-name", name, "--launch-skip", str(SKIPPED[part]), "--launch-count", "1",
                       sys.executable, "-m", "benchmarks.gpu.part", part, str(place.kernels),
                       str(place.scratch / f"profile-{name}"), place.level]  # fmt: skip
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
            rows = list(csv.DictReader(lines))
            if not rows:
                record(name, does_not_run=(done.stdout + done.stderr).strip()[-300:])
            for row in rows:
                record(name, metric=row["Metric Name"], unit=row["Metric Unit"], value=row["Metric Value"])
