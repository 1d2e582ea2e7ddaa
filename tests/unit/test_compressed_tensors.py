from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from quantization.checkpoint_formats.compressed import module_patterns, quantization_config
from quantization.compressed_tensors import CheckpointWriter, open_checkpoint
from tapeout.errors import QuantizationError
from tapeout.quantized import QuantizedWeight, format_of, round_to_nearest
from tapeout.schemes import STATIC_INT8, Scheme
from tests.checkpoints import CONFIG, WEIGHTS, say_schemes
from tests.experts import of_bits
from tests.mutations import MUTATIONS, Mutation

BITS = (4, 5, 6, 8)
FORMATS = [Scheme(bits=b, group_size=g, symmetric=s) for b in BITS for g in (16, 32, 64) for s in (True, False)]


def weight(rows: int = 12, columns: int = 192, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_what_is_written_is_what_is_read(tmp_path: Path, fmt: Scheme) -> None:
    linear = round_to_nearest(weight(rows=13), fmt)
    writer = CheckpointWriter(tmp_path)
    writer.add_linear("a.weight", linear)
    writer.add("norm.weight", np.ones(5, np.float32))
    writer.finish()
    say_schemes(tmp_path, {"a.weight": fmt})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.names() == ("a.weight", "norm.weight")
    read = checkpoint.linear("a.weight")
    assert isinstance(read, QuantizedWeight) and read.scheme == fmt
    np.testing.assert_array_equal(read.codes, linear.codes)
    np.testing.assert_array_equal(read.scales, linear.scales)
    np.testing.assert_array_equal(checkpoint.weight("a.weight"), linear.dequantize())
    assert checkpoint.tensor("norm.weight").tolist() == [1] * 5
    stored = sum(part.nbytes for part in format_of(linear.scheme).encode(linear.coded).values())
    assert checkpoint.stored_bytes("a.weight") == stored


def test_a_linear_with_static_inputs_is_written_read_and_described(tmp_path: Path) -> None:
    fmt = STATIC_INT8
    linear = replace(round_to_nearest(weight(), fmt), input_scale=0.03)
    writer = CheckpointWriter(tmp_path)
    writer.add_linear("a.weight", linear)
    writer.finish()
    say_schemes(tmp_path, {"a.weight": fmt})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.names() == ("a.weight",) and checkpoint.is_quantized("a.weight")
    read = checkpoint.linear("a.weight")
    assert isinstance(read, QuantizedWeight) and read.scheme == fmt
    assert read.input_scale == pytest.approx(0.03, rel=1e-6)
    np.testing.assert_array_equal(read.dequantize(), linear.dequantize())
    config = quantization_config({"a.weight": fmt}, {}, [])["config_groups"]["group_0"]
    assert config["format"] == "int-quantized" and config["weights"]["strategy"] == "channel"
    assert config["input_activations"]["dynamic"] is False


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_the_official_decompressor_decodes_the_same_weight(fmt: Scheme) -> None:
    """Also what transformers cannot load: packed zero points."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    linear = round_to_nearest(weight(), fmt)
    parts = {name: torch.from_numpy(v) for name, v in format_of(linear.scheme).encode(linear.coded).items()}
    parts["weight_scale"] = parts["weight_scale"].float()
    args = QuantizationArgs(num_bits=fmt.bits, symmetric=fmt.symmetric, strategy="group", group_size=fmt.group_size)
    compressor: Any = BaseCompressor.get_value_from_registry("pack-quantized")
    decoded = compressor.decompress(parts, QuantizationScheme(targets=["Linear"], weights=args))["weight"]
    np.testing.assert_array_equal(decoded.numpy(), linear.dequantize())


@pytest.mark.parametrize("columns", [16, 48, 80, 192])  # 80 codes of 6 bits end within a word
@pytest.mark.parametrize("bits", BITS)
def test_words_are_those_the_official_compressor_packs(bits: int, columns: int) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

    linear = round_to_nearest(weight(columns=columns), Scheme(bits=bits, group_size=16, symmetric=True))
    signed = torch.from_numpy(linear.codes.astype(np.int16) - (1 << (bits - 1))).to(torch.int8)
    words = format_of(linear.scheme).encode(linear.coded)["weight_packed"]
    np.testing.assert_array_equal(words, pack_to_int32(signed, bits).numpy())
    read = unpack_from_int32(torch.from_numpy(words), bits, torch.Size(linear.codes.shape))
    np.testing.assert_array_equal(read.numpy(), signed.numpy())


@pytest.mark.parametrize("columns", range(16, 208, 16))
def test_bits_are_told_by_the_config(tmp_path: Path, columns: int) -> None:
    """A checkpoint's tensors do not say how many bits a code has; of few columns several formats make as many words."""
    writer = CheckpointWriter(tmp_path)
    linears = {
        bits: round_to_nearest(weight(columns=columns), Scheme(bits=bits, group_size=16, symmetric=False))
        for bits in BITS
    }
    for bits, linear in linears.items():
        writer.add_linear(f"in{bits}.weight", linear)
    writer.finish()
    config = quantization_config({f"in{bits}.weight": linear.scheme for bits, linear in linears.items()}, {}, [])
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    checkpoint = open_checkpoint(tmp_path)
    for bits, linear in linears.items():
        read = checkpoint.linear(f"in{bits}.weight")
        assert isinstance(read, QuantizedWeight) and read.scheme == linear.scheme
        np.testing.assert_array_equal(read.dequantize(), linear.dequantize())


@pytest.mark.parametrize("bits", BITS)
def test_a_table_is_stored_once_a_byte_a_code_and_its_scales_for_both_names(tmp_path: Path, bits: int) -> None:
    table = round_to_nearest(weight(rows=40), Scheme(bits=bits, group_size=64, symmetric=True))
    writer = CheckpointWriter(tmp_path)
    writer.add_embedding("embed.weight", table, tied_to="lm_head.weight")
    writer.finish()
    config = quantization_config({}, dict.fromkeys(("embed.weight", "lm_head.weight"), table.scheme), [])
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.names() == ("embed.weight",)
    assert not checkpoint.is_quantized("lm_head.weight")
    read = checkpoint.linear("embed.weight")
    assert isinstance(read, QuantizedWeight) and read.scheme == table.scheme
    np.testing.assert_array_equal(read.codes, table.codes)
    np.testing.assert_array_equal(checkpoint.weight("embed.weight"), table.dequantize())
    assert checkpoint.stored_bytes("embed.weight") == 40 * 192 + 40 * 3 * 2


def test_other_bits_than_ours_are_refused(tmp_path: Path) -> None:
    table = round_to_nearest(weight(rows=40), Scheme(bits=8, group_size=64, symmetric=True))
    writer = CheckpointWriter(tmp_path)
    writer.add_embedding("embed.weight", table)
    writer.finish()
    config = quantization_config({}, {"embed.weight": table.scheme}, [])
    config["config_groups"]["group_0"]["weights"]["num_bits"] = 3
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(QuantizationError, match="embed in 3 bits"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("said", [None, {"config_groups": None}, {"config_groups": {}}])
def test_a_config_that_says_nothing_of_a_quantized_weight_is_refused(tmp_path: Path, said: Any) -> None:
    """Its tensors do not say in which groups, and for few columns not in how many bits."""
    table = round_to_nearest(weight(rows=40), Scheme(bits=8, group_size=64, symmetric=True))
    writer = CheckpointWriter(tmp_path)
    writer.add_embedding("embed.weight", table)
    writer.finish()
    for written in (False, True):
        if written:
            (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said}))
        with pytest.raises(QuantizationError, match="does not say how embed is stored"):
            open_checkpoint(tmp_path)


@pytest.mark.parametrize("damage", [{"weights": None}, {"weights": {}}, {"targets": None}])
def test_groups_that_do_not_say_what_they_are_for_are_told(tmp_path: Path, damage: dict[str, Any]) -> None:
    table = round_to_nearest(weight(rows=40), Scheme(bits=8, group_size=64, symmetric=True))
    writer = CheckpointWriter(tmp_path)
    writer.add_embedding("embed.weight", table)
    writer.finish()
    config = quantization_config({}, {"embed.weight": table.scheme}, [])
    config["config_groups"]["group_0"].update(damage)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(QuantizationError, match="a group of quantization_config"):
        open_checkpoint(tmp_path).linear("embed.weight")


def test_a_target_by_name_is_that_module_alone(tmp_path: Path) -> None:
    tables = {
        f"layers.{n}.weight": round_to_nearest(weight(seed=n), Scheme(bits=8, group_size=64, symmetric=True))
        for n in (1, 10)
    }
    writer = CheckpointWriter(tmp_path)
    for name, table in tables.items():
        writer.add_embedding(name, table)
    writer.finish()
    groups = {
        f"group_{bits}": {"targets": [name], "format": "int-quantized", "weights": {"num_bits": bits, "group_size": 64}}
        for name, bits in (("layers.1", 4), ("layers.10", 8))
    }
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"config_groups": groups}}))
    read = open_checkpoint(tmp_path).linear("layers.10.weight")
    assert isinstance(read, QuantizedWeight) and read.scheme.bits == 8


@pytest.mark.parametrize("bits", BITS)
def test_the_official_decompressor_decodes_the_same_table(bits: int) -> None:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    table = round_to_nearest(weight(), Scheme(bits=bits, group_size=64, symmetric=True))
    parts = {name: torch.from_numpy(v) for name, v in format_of(table.scheme).encode_bytes(table.coded).items()}
    parts["weight_scale"] = parts["weight_scale"].float()
    args = QuantizationArgs(num_bits=bits, symmetric=True, strategy="group", group_size=64)
    compressor: Any = BaseCompressor.get_value_from_registry("int-quantized")
    decoded = compressor.decompress(parts, QuantizationScheme(targets=["Embedding"], weights=args))["weight"]
    np.testing.assert_array_equal(decoded.numpy(), table.dequantize())


def test_a_table_with_zero_points_is_refused() -> None:
    with pytest.raises(QuantizationError, match=r"embed\.weight in 8-bit g32 asym"):
        CheckpointWriter(Path()).add_embedding(
            "embed.weight", round_to_nearest(weight(), Scheme(bits=8, group_size=32, symmetric=False))
        )


def test_large_checkpoints_are_sharded_with_an_index(tmp_path: Path) -> None:
    arrays = {f"layer.{n}.weight": weight(seed=n) for n in range(5)}
    writer = CheckpointWriter(tmp_path, shard_bytes=2 * arrays["layer.0.weight"].nbytes)
    for name, array in arrays.items():
        writer.add(name, array)
    writer.finish()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        *(f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)),
        "model.safetensors.index.json",
    ]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in arrays.values())
    checkpoint = open_checkpoint(tmp_path)
    for name, array in arrays.items():
        np.testing.assert_array_equal(checkpoint.tensor(name), array)


def test_scales_beyond_float16_are_stored_in_float32() -> None:
    small = round_to_nearest(weight() * np.float32(1e-9), Scheme(bits=4, group_size=32, symmetric=True))
    assert format_of(small.scheme).encode(small.coded)["weight_scale"].dtype == np.float32
    plain = round_to_nearest(weight(), Scheme(bits=4, group_size=32, symmetric=True))
    assert format_of(plain.scheme).encode(plain.coded)["weight_scale"].dtype == np.float16


def test_damaged_or_missing_tensors_are_named(tmp_path: Path) -> None:
    with pytest.raises(QuantizationError, match="neither"):
        open_checkpoint(tmp_path)
    linear = round_to_nearest(weight(), Scheme(bits=4, group_size=32, symmetric=True))
    parts = {f"a.{part}": array for part, array in format_of(linear.scheme).encode(linear.coded).items()}
    writer = CheckpointWriter(tmp_path)
    for name, array in parts.items():
        writer.add(name, array[:, :3] if name.endswith("packed") else array)
    writer.finish()
    say_schemes(tmp_path, {"a.weight": linear.scheme})
    with pytest.raises(QuantizationError, match=r"a\.weight_packed \(I32 \[12, 3\]\) does not fit"):
        open_checkpoint(tmp_path)
    writer = CheckpointWriter(tmp_path)
    writer.add_linear("a.weight", linear)
    writer.finish()
    with pytest.raises(QuantizationError, match="no tensor 'b'"):
        open_checkpoint(tmp_path).tensor("b")


def test_patterns_match_their_modules_and_no_others() -> None:
    import re

    modules = ["m.layers.1.up", "m.layers.11.up", "head"]
    patterns = [pattern.removeprefix("re:") for pattern in module_patterns(modules)]

    def matches(name: str) -> bool:
        return any(re.match(pattern, name) for pattern in patterns)

    assert all(matches(module) for module in modules)
    assert not any(matches(other) for other in ("m.layers.111.up", "m.layers.1.upper", "xm.layers.1.up", "header"))


def test_the_config_names_one_group_per_format() -> None:
    four, eight = Scheme(bits=4, group_size=32, symmetric=True), Scheme(bits=8, group_size=64, symmetric=True)
    config = quantization_config({"a.weight": four, "b.weight": eight}, {"e.weight": eight}, ["c.weight"])
    assert config["format"] == "mixed-precision"
    assert config["ignore"] == ["re:^c$"]
    found = {
        (g["format"], g["weights"]["num_bits"], g["weights"]["group_size"]): g["targets"]
        for g in config["config_groups"].values()
    }
    assert found == {
        ("int-quantized", 8, 64): ["re:^e$"],
        ("pack-quantized", 4, 32): ["re:^a$"],
        ("pack-quantized", 8, 64): ["re:^b$"],
    }


def test_bits_of_experts_are_those_of_the_config(tmp_path: Path) -> None:
    """Its widest are said there, and a number of bits that no integers have is refused."""
    ours(tmp_path / "ours")
    tensors = load_file(tmp_path / "ours" / WEIGHTS)
    bits = tensors["layers.0.experts.up.weight_bits"]
    for wrong, said in (
        (6, "says 8 bits of layers.0.experts.up, whose experts have up to 6"),
        (7, "an expert in 7 bits"),
    ):
        bits[:] = torch.tensor([4, wrong, 8 if wrong == 7 else 5])
        save_file(tensors, tmp_path / "ours" / WEIGHTS)
        with pytest.raises(QuantizationError, match=said):
            open_checkpoint(tmp_path / "ours")


def test_codes_of_experts_that_differ_in_bits_are_integers(tmp_path: Path) -> None:
    ours(tmp_path / "ours")
    config = json.loads((tmp_path / "ours" / CONFIG).read_text())
    groups = config["quantization_config"]["config_groups"].values()
    next(g for g in groups if g["format"] == "expert-pack-quantized" and g["weights"]["symmetric"])["weights"][
        "type"
    ] = "float"
    (tmp_path / "ours" / CONFIG).write_text(json.dumps(config))
    with pytest.raises(QuantizationError, match="differ in bits, and config"):
        open_checkpoint(tmp_path / "ours")


def test_integers_are_not_read_as_floats_of_as_many_bits(tmp_path: Path) -> None:
    ours(tmp_path / "ours")
    config = json.loads((tmp_path / "ours" / CONFIG).read_text())
    groups = config["quantization_config"]["config_groups"].values()
    next(g for g in groups if "input_activations" in g)["weights"]["type"] = "float"
    (tmp_path / "ours" / CONFIG).write_text(json.dumps(config))
    with pytest.raises(QuantizationError, match=r"says int-quantized of layers\.1\.b, and codes of fp8"):
        open_checkpoint(tmp_path / "ours")


def ours(folder: Path) -> dict[str, QuantizedWeight]:
    """A weight of every way to store one, and a norm."""
    schemes = {
        "layers.0.a.weight": Scheme(bits=4, group_size=32, symmetric=False),
        "layers.0.b.weight": Scheme(bits=6, group_size=16, symmetric=True),
        "layers.1.a.weight": Scheme(bits=5, group_size=64, symmetric=True),
        "layers.1.b.weight": STATIC_INT8,
    }
    table = Scheme(bits=8, group_size=32, symmetric=True)
    linears = {name: round_to_nearest(weight(40, seed=n), scheme) for n, (name, scheme) in enumerate(schemes.items())}
    linears["layers.1.b.weight"] = replace(linears["layers.1.b.weight"], input_scale=0.03125)
    for name, symmetric in (("layers.0.experts.up", True), ("layers.1.experts.up", False)):
        schemes[name] = of_bits(4, 8, 5, symmetric=symmetric)
        experts = np.stack([weight(20, seed=seed) for seed in range(3)])
        linears[name] = round_to_nearest(experts, schemes[name])
    embedding = round_to_nearest(weight(72), table)
    folder.mkdir()
    writer = CheckpointWriter(folder)
    for name, linear in linears.items():
        writer.add_linear(name, linear)
    writer.add_embedding("embed.weight", embedding, tied_to="lm_head.weight")
    writer.add("norm.weight", np.ones(5, np.float32))
    writer.finish()
    say_schemes(folder, schemes, dict.fromkeys(("embed.weight", "lm_head.weight"), table))
    return linears | {"embed.weight": embedding}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_defect_is_refused_or_the_weights_are_exact(mutation: Mutation, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "ours"
        linears = ours(folder)
        tensors = load_file(folder / WEIGHTS)
        config = json.loads((folder / CONFIG).read_text())["quantization_config"]
        quantized = [name for name in sorted(tensors) if name != "norm.weight"]
        mutation(data.draw, tensors, data.draw(st.sampled_from(quantized)), config)
        save_file(tensors, folder / WEIGHTS)
        (folder / CONFIG).write_text(json.dumps({"quantization_config": config}))
        try:
            checkpoint = open_checkpoint(folder)
            read = {name: checkpoint.linear(name) for name in linears}
        except QuantizationError as error:
            assert error.expected or error.remedy
            return
        for name, linear in linears.items():
            found = read[name]
            assert isinstance(found, QuantizedWeight) and found.input_scale == linear.input_scale
            if found.codes.shape != linear.codes.shape:
                return  # by itself it is whole; the proof and QuantizedReference compare it with the model
            np.testing.assert_array_equal(found.dequantize(), linear.dequantize())
