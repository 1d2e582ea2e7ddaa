from __future__ import annotations

import platform

import onnxruntime
import pytest

from tapeout.errors import FingerprintError
from tapeout.fingerprint import FEATURES, Fingerprint, cpu_features, current, require_match

BUILT = Fingerprint(machine="x86_64", features=("avx2", "fma"), libraries={"onnxruntime": "1.31.1"})


def test_this_machine_matches_itself() -> None:
    here = current(("onnxruntime",))
    assert here.machine == platform.machine()
    assert here.libraries == {"onnxruntime": onnxruntime.__version__}
    assert set(cpu_features()) <= set(FEATURES)
    assert require_match((here,), current(("onnxruntime",)), "bundle") == here


@pytest.mark.parametrize(
    ("here", "reason"),
    [
        ({"machine": "aarch64"}, "machine is aarch64, not x86_64"),
        ({"features": ("avx2",)}, "this CPU lacks fma"),
        ({"features": ("avx2", "fma", "avx512_vnni")}, "this CPU also has avx512_vnni"),
        ({"libraries": {"onnxruntime": "1.32.0"}}, "onnxruntime is 1.32.0, not 1.31.1"),
        ({"libraries": {}}, "onnxruntime is not installed, not 1.31.1"),
    ],
)
def test_every_difference_is_a_refusal_that_says_what_to_do(here: dict[str, object], reason: str) -> None:
    with pytest.raises(FingerprintError) as caught:
        require_match((BUILT,), BUILT.model_copy(update=here), "some/bundle")
    assert reason in caught.value.found and caught.value.found.startswith("some/bundle was built for other")
    assert "dvc repro" in caught.value.remedy


def test_all_differences_are_told_at_once() -> None:
    here = Fingerprint(machine="aarch64", features=("i8mm",), libraries={"onnxruntime": "1.0"})
    with pytest.raises(FingerprintError) as caught:
        require_match((BUILT,), here, "bundle")
    assert caught.value.found.count(";") == 3


LIBRARIES = {"onnxruntime": "1.31.1"}
LEVELS = tuple(
    Fingerprint(machine=machine, features=features, libraries=LIBRARIES, level=level, more_features=True)
    for level, machine, features in (
        ("best", "x86_64", ("avx512_vnni",)),
        ("least", "x86_64", ("avx2",)),
        ("other", "aarch64", ("asimddp",)),
    )
)


def processor(*features: str, machine: str = "x86_64", level: str = "") -> Fingerprint:
    return Fingerprint(machine=machine, features=features, libraries=LIBRARIES, level=level)


@pytest.mark.parametrize(
    ("here", "level"),
    [
        (processor("avx2", "avx512_vnni", "avx_ne_convert"), "best"),  # of a feature that selects no kernel of ours
        (processor("avx2", "fma"), "least"),
        (processor("asimddp", "sve", machine="aarch64"), "other"),
        (processor("avx2", "avx512_vnni", level="least"), "least"),
    ],
)
def test_a_bundle_runs_at_the_best_level_that_the_processor_has(here: Fingerprint, level: str) -> None:
    assert require_match(LEVELS, here, "bundle").level == level


@pytest.mark.parametrize(
    ("here", "reason"),
    [
        (processor("avx"), "best: this CPU lacks avx512_vnni; least: this CPU lacks avx2"),
        (processor("avx2", level="best"), "best: this CPU lacks avx512_vnni"),
        (processor("avx2", level="none"), "it has kernels for best, least, other, not for none"),
        (processor("avx2", machine="riscv64"), "it has kernels for best, least, other, not for riscv64"),
        (processor("asimdhp", machine="aarch64"), "other: this CPU lacks asimddp"),
        (processor("avx2").model_copy(update={"libraries": {}}), "onnxruntime is not installed, not 1.31.1"),
    ],
)
def test_a_processor_without_a_level_is_told_what_each_needs(here: Fingerprint, reason: str) -> None:
    with pytest.raises(FingerprintError) as caught:
        require_match(LEVELS, here, "bundle")
    assert reason in caught.value.found
