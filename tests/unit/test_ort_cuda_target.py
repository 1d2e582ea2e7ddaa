"""``ort-cuda`` on a machine without a GPU: bundles are built, and opening one says what is missing."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engines.kernels.cuda import device
from engines.load import find_target, load, not_executable, runs_here
from engines.targets.ort_cuda import hardware
from pipeline.cli.doctor import Status, ort_cuda
from pipeline.stages.environment import accelerators
from tapeout.errors import FingerprintError
from tests.ort_cuda.bundles import cuda_bundle


class Driver:
    """libcuda of a machine with one GPU."""

    def __init__(
        self, version: int = 13000, capability: tuple[int, int] = (9, 0), count: int = 1, code: int = 0
    ) -> None:
        self.version, self.capability, self.count, self.code = version, capability, count, code

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self.code

    def cuGetErrorString(self, code: int, text: Any) -> int:  # noqa: N802
        text._obj.value = b"no such device"
        return 0

    def cuDriverGetVersion(self, found: Any) -> int:  # noqa: N802
        found._obj.value = self.version
        return 0

    def cuDeviceGetCount(self, found: Any) -> int:  # noqa: N802
        found._obj.value = self.count
        return 0

    def cuDeviceGet(self, found: Any, number: int) -> int:  # noqa: N802
        return 0

    def cuDeviceGetName(self, name: Any, size: int, number: Any) -> int:  # noqa: N802
        name.value = b"a GPU"
        return 0

    def cuDeviceGetAttribute(self, found: Any, name: int, number: Any) -> int:  # noqa: N802
        found._obj.value = self.capability[name - device.MAJOR]
        return 0


def machine(
    patch: pytest.MonkeyPatch, driver: Driver | None, version: str = hardware.VERSION, provider: bool = True
) -> None:
    """A machine with this driver and version of the package; None: no driver is installed."""

    def opened(name: str) -> Driver:
        if driver is None:
            raise OSError(f"{name}: cannot open shared object file")
        return driver

    patch.setattr(device, "ctypes", SimpleNamespace(**vars(ctypes) | {"CDLL": opened}))
    patch.setattr(hardware, "installed", lambda: version)
    patch.setattr(hardware, "_has_provider", lambda: provider)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no package": ({"driver": Driver(), "version": ""}, "onnxruntime-gpu is not installed"),
    "another version": ({"driver": Driver(), "version": "1.30.0"}, "onnxruntime-gpu is 1.30.0"),
    "hidden by onnxruntime": ({"driver": Driver(), "provider": False}, "has no CUDA provider"),
    "no driver": ({"driver": None}, "no driver: libcuda.so.1"),
    "a driver that does not start": ({"driver": Driver(code=100)}, "cuInit gives no such device (100)"),
    "an old driver": ({"driver": Driver(version=12080)}, "the driver is for CUDA 12.8"),
    "no GPU": ({"driver": Driver(count=0)}, "finds no GPU"),
    "a GPU without kernels": ({"driver": Driver(capability=(10, 0))}, "has no kernels for sm100"),
}


@pytest.mark.parametrize(("here", "found"), REFUSED.values(), ids=REFUSED)
def test_opening_says_what_is_missing(
    here: dict[str, Any], found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, **here)
    bundle = cuda_bundle("llama", tmp_path / "bundle")  # building needs none of it
    for ask in (lambda: load(bundle.folder), lambda: runs_here(bundle)):
        with pytest.raises(FingerprintError, match="ort-cuda cannot run here") as refused:
            ask()
        assert found in refused.value.found and refused.value.expected and refused.value.remedy
    assert found in not_executable(bundle) and accelerators(find_target("ort-cuda")) == []
    finding = ort_cuda()
    assert finding.status is Status.ABSENT and found in finding.found


def test_a_machine_with_a_gpu_is_named_in_evidence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, Driver())
    bundle = cuda_bundle("llama", tmp_path / "bundle")
    target = find_target("ort-cuda")
    monkeypatch.setattr(
        "tapeout.fingerprint.metadata",
        SimpleNamespace(version=lambda name: hardware.VERSION, PackageNotFoundError=KeyError),
    )
    assert target.features() == ("sm90",) and runs_here(bundle).features == ("sm90",)
    assert not_executable(bundle) == "" and accelerators(target) == ["sm90"]
    assert ort_cuda().status is Status.OK and "sm90" in ort_cuda().found
    assert find_target("tensorrt-rtx").features() == ("sm90",)
    machine(monkeypatch, None)
    assert find_target("tensorrt-rtx").features() == ()
