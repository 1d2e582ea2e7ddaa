"""A target with a set of kernels of its own: it stores all codes in 8 bits, and fuses no norm into a linear."""

from __future__ import annotations

from pathlib import Path

from tests.drills.checkout import Checkout

MODULE = '''"""ONNX Runtime on CPU with plain kernels: codes in bytes, and norms as nodes of their own."""

from __future__ import annotations

from dataclasses import dataclass

from engines.kernels.cpu.kernel_set import CpuKernels
from engines.targets.ort_cpu import OrtCpu
from tapeout.quantized import QuantizedWeight

MISSING = ("NormLinear", "ResidualNormLinear", "NormRows")


@dataclass(frozen=True)
class PlainKernels(CpuKernels):
    def unsupported(self, operator: str) -> str:
        return f"plain kernels have no {operator}" if operator in MISSING else super().unsupported(operator)

    def code_bits(self, weight: QuantizedWeight) -> int:
        return 8


class OrtPlain(OrtCpu):
    name = "ort-plain"

    @property
    def kernels(self) -> PlainKernels:
        return PlainKernels()


TARGET = OrtPlain()
'''
MOST_EDITED = 2


def test_a_target_with_a_set_of_kernels(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path / "checkout")
    checkout.add("engines/targets/ort_plain.py", MODULE)
    checkout.edit("docs/extending.md", "Targets: ", "Targets: `ort-plain`, ")
    checkout.edit("docs/targets.md", "| `ort-cpu` |", "| `ort-plain` | plain kernels |\n| `ort-cpu` |")
    assert len(checkout.edited) <= MOST_EDITED
    plan = {
        "schemes": [{"match": "*", "bits": 4, "group_size": 32}],
        "embeddings": {"bits": 8, "group_size": 32, "symmetric": True},
        "kv_cache": {"dtype": "int8"},
    }
    found = checkout.stages(tmp_path / "project", {"build": {"target": "ort-plain"}, "plan": plan})
    kernels = found["plan"]
    assert all("stored in 8 bits" in kernel for group, kernel in kernels.items() if group.startswith("layers.")), found
    assert {found["checks"][name] for name in ("quantized", "parity_kl", "parity_error")} == {"PASS"}, found
