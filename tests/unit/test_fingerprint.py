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
    require_match(here, current(("onnxruntime",)), "bundle")


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
        require_match(BUILT, BUILT.model_copy(update=here), "some/bundle")
    assert reason in caught.value.found and caught.value.found.startswith("some/bundle was built for other")
    assert "dvc repro" in caught.value.remedy


def test_all_differences_are_told_at_once() -> None:
    here = Fingerprint(machine="aarch64", features=("i8mm",), libraries={"onnxruntime": "1.0"})
    with pytest.raises(FingerprintError) as caught:
        require_match(BUILT, here, "bundle")
    assert caught.value.found.count(";") == 3
