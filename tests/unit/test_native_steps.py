"""Native operators that follow each other run as one node: with the same results, to the bit, as node by node."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.kernels import cpu as native
from engines.kernels.cpu.kernel_set import CpuKernels
from engines.kernels.operators import DOMAIN
from engines.passes.onnxruntime import block_linears
from engines.sessions import cpu_options, open_session
from engines.targets.ort_cpu import library
from tapeout.schemes import Scheme
from tests.lowering import model_of, named, parameter, value
from tests.native import Array, gather_session, linear_session
from tests.random_linears import random_linear
from tests.sanitizers import build

pytestmark = pytest.mark.skipif(native.level() is None, reason=native.unsupported())
WIDTH = 64
EIGHT = Scheme(bits=8, group_size=32, symmetric=True)
WEIGHTS = {name: random_linear(WIDTH, WIDTH, EIGHT, seed=seed) for seed, name in enumerate("abcde")}
NORM = np.linspace(0.5, 2, WIDTH, dtype=np.float32)
OUTPUTS = ("first", "sum", "last")
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")


def graph() -> bytes:
    """Nodes a to d are one step, in which values live for different times; behind a node of others, e is another."""
    x, holder = value("x", ["tokens", "width"]), model_of([], [])

    def linear(kind: str, name: str, *inputs: ir.Value) -> ir.Node:
        codes, scales, _ = block_linears.stacked(holder, CpuKernels(), name, lambda: [WEIGHTS[name]])
        known = {"N": WIDTH} | block_linears.attributes(WEIGHTS[name], scales)
        norm = [parameter(f"{name}.norm", NORM)] if kind == "ResidualNormLinear" else []
        for weights in (codes, scales):
            holder.graph.initializers.pop(weights.name or "", None)
        rest = [*norm, codes, scales]
        node = ir.node(kind, [*inputs, *rest], attributes=known, domain=DOMAIN, num_outputs=1 + len(norm))
        for number, output in enumerate(node.outputs):
            output.name, output.type = f"{name}.{number}", ir.TensorType(ir.DataType.FLOAT)
        return node

    a = linear("BlockLinear", "a", x)
    b = linear("BlockLinear", "b", a.outputs[0])
    c = linear("BlockLinear", "c", b.outputs[0])
    d = linear("ResidualNormLinear", "d", c.outputs[0], b.outputs[0])
    total = ir.node("Add", [d.outputs[0], x])
    total.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    e = linear("BlockLinear", "e", total.outputs[0])
    results = (a.outputs[0], d.outputs[1], e.outputs[0])
    model = model_of([x], [named(name, result) for name, result in zip(OUTPUTS, results, strict=True)])
    model.opset_imports[DOMAIN] = 1
    return ir.to_proto(model).SerializeToString()


def session(of: Path | None = None, threads: int = 1) -> ort.InferenceSession:
    options = cpu_options(threads, of or library(), ["BlockLinear"] if threads > 1 else [])
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    return open_session(graph(), options)


def node_by_node(x: Array) -> tuple[Array, Array, Array]:
    def run(kind: str, name: str, *inputs: Array) -> list[Array]:
        weight = NORM if kind == "ResidualNormLinear" else None
        return linear_session(kind, WEIGHTS[name], weight=weight)(*inputs)

    (a,) = run("BlockLinear", "a", x)
    (b,) = run("BlockLinear", "b", a)
    (c,) = run("BlockLinear", "c", b)
    d, residual = run("ResidualNormLinear", "d", c, b)
    (e,) = run("BlockLinear", "e", d + x)
    return a, residual, e


def tokens(count: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((count, WIDTH)).astype(np.float32)


def same(found: list[Array], expected: tuple[Array, ...]) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


def test_operators_that_follow_each_other_are_one_step() -> None:
    steps = [
        sorted(node.op_type for node in subgraph.get_nodes())
        for subgraph in session().get_provider_graph_assignment_info()
        if subgraph.ep_name.startswith("tapeout")
    ]
    assert sorted(steps, key=len) == [["BlockLinear"], ["BlockLinear"] * 3 + ["ResidualNormLinear"]]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 2, 7, 40, 300]), min_size=1, max_size=8))
def test_runs_of_any_shapes_give_the_results_of_single_nodes(counts: list[int]) -> None:
    """Memory of a run is used again by the next, whether that needs more or less."""
    own, expected = _shared()
    for count in counts:
        assert same(own.run(OUTPUTS, {"x": tokens(300)[:count]}), tuple(array[:count] for array in expected))


@functools.cache
def _shared() -> tuple[ort.InferenceSession, tuple[Array, ...]]:
    return session(threads=2), node_by_node(tokens(300))


@pytest.mark.skipif(not HUGE_PAGES.is_dir(), reason="this Linux has no huge pages that programs can ask for")
def test_large_values_of_a_step_lie_in_huge_pages() -> None:
    """What a long prompt writes; a few tokens take no more memory than they need."""
    own, x = session(), tokens(4000)
    expected, taken = node_by_node(x), [advised_bytes()]
    for count in (40, 4000):
        assert same(own.run(OUTPUTS, {"x": x[:count]}), tuple(array[:count] for array in expected))
        taken.append(advised_bytes())
    assert taken[0] == taken[1] < taken[2]


def advised_bytes() -> int:
    """Of this process, for which huge pages were asked (``hg`` among the flags of a mapping)."""
    sizes = re.findall(
        r"^Size: +(\d+) kB$.*?^VmFlags:([a-z ]*)$", Path("/proc/self/smaps").read_text(), re.MULTILINE | re.DOTALL
    )
    return sum(1024 * int(size) for size, flags in sizes if "hg" in flags.split())


def test_runs_beside_each_other_do_not_share_memory() -> None:
    own, x = session(), [tokens(count, count) for count in (1, 9, 33, 200)]
    expected, wrong = [node_by_node(given_tokens) for given_tokens in x], list[int]()

    def run(number: int) -> None:
        for _ in range(100):
            if not same(own.run(OUTPUTS, {"x": x[number]}), expected[number]):
                wrong.append(number)

    callers = [threading.Thread(target=run, args=(number,)) for number in range(len(x))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_a_step_that_failed_runs_again() -> None:
    own, x = session(), tokens(3)
    with pytest.raises(Exception, match="does not have K columns"):
        own.run(OUTPUTS, {"x": np.zeros((3, WIDTH + 1), np.float32)})
    assert same(own.run(OUTPUTS, {"x": x}), node_by_node(x))


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_embedding_is_part_of_a_step(tied: bool) -> None:
    """What lm_head holds in memory is not read from the file as well. An embedding of its own stays there."""
    table = random_linear(80, WIDTH, EIGHT, seed=7)
    head = table if tied else random_linear(80, WIDTH, EIGHT, seed=8)
    ids, holder, known = value("ids", ["tokens"], ir.DataType.INT64), model_of([], []), list[list[ir.Value]]()
    for name, weights in (("embedding", table), ("lm_head", head)):
        codes, scales, _ = block_linears.stacked(holder, CpuKernels(), name, lambda weights=weights: [weights])
        known.append([codes, scales])
    holder.graph.initializers.clear()
    attributes = {"N": 80} | block_linears.attributes(table, known[0][1])
    gather = ir.node("BlockGather", [ids, *known[0]], attributes=attributes, domain=DOMAIN)
    linear = ir.node("BlockLinear", [gather.outputs[0], *known[1]], attributes=attributes, domain=DOMAIN)
    for node in (gather, linear):
        node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    model = model_of([ids], [named("rows", gather.outputs[0]), named("y", linear.outputs[0])])
    model.opset_imports[DOMAIN] = 1
    options = cpu_options(1, library(), ["BlockGather", "BlockLinear"])
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    own = open_session(ir.to_proto(model).SerializeToString(), options)
    steps = [
        [node.op_type for node in subgraph.get_nodes()]
        for subgraph in own.get_provider_graph_assignment_info()
        if subgraph.ep_name.startswith("tapeout")
    ]
    assert steps == [["BlockGather", "BlockLinear"] if tied else ["BlockLinear"]]
    some = np.array([3, 79, 0, 3, 41])
    (rows,) = gather_session(table)(some[None])
    (y,) = linear_session("BlockLinear", head)(rows[0])
    assert same(own.run(["rows", "y"], {"ids": some}), (rows[0], y))


def with_steps(count: int, *, names: int = 1, outputs: int = 4096) -> ir.Model:
    """Each of one linear, all with the same weights of ``4096 * outputs`` bytes; a node of others follows each.

    The weights are initializers of so many ``names``.
    """
    x, holder, weights = value("x", ["tokens", 4096]), model_of([], []), random_linear(outputs, 4096, EIGHT)
    known = [block_linears.stacked(holder, CpuKernels(), f"w{name}", lambda: [weights])[:2] for name in range(names)]
    attributes = {"N": outputs} | block_linears.attributes(weights, known[0][1])
    holder.graph.initializers.clear()
    last = x
    for number in range(count):
        node = ir.node("BlockLinear", [last, *known[number % names]], attributes=attributes, domain=DOMAIN)
        other = ir.node("Neg", [node.outputs[0]])
        last = other.outputs[0]
        for output in (node.outputs[0], last):
            output.type = ir.TensorType(ir.DataType.FLOAT)
    model = model_of([x], [named("y", last)])
    model.opset_imports[DOMAIN] = 1
    return model


@pytest.mark.parametrize("names", [1, 3])
def test_steps_share_equal_initializers(names: int, tmp_path: Path) -> None:
    """As attention of all layers shares the tables of RoPE, where other nodes lie between them."""
    one, three = (memory_of("anonymous", with_steps(count, names=names), tmp_path) for count in (1, 3))
    assert three - one < 16 << 20


def test_a_large_initializer_and_its_copy_are_not_in_memory_together(tmp_path: Path) -> None:
    small, large = (memory_of("most", with_steps(1, outputs=outputs), tmp_path) for outputs in (16, 16384))
    assert 64 << 20 < large - small < 96 << 20


LAYERS, HIDDEN, WIDE, VOCABULARY, PROMPT = 24, 128, 2048, 248320, 256


def with_layers() -> ir.Model:
    """Each a step of a wide and a narrow linear, with a node of others behind it; then lm_head of the last token."""
    x, holder = value("x", ["tokens", HIDDEN]), model_of([], [])
    last, nodes = x, list[ir.Node]()

    def linear(name: str, outputs: int, inputs: int) -> None:
        nonlocal last
        weights = random_linear(outputs, inputs, EIGHT)
        known = block_linears.stacked(holder, CpuKernels(), name, lambda: [weights])[:2]
        attributes = {"N": outputs} | block_linears.attributes(weights, known[1])
        nodes.append(ir.node("BlockLinear", [last, *known], attributes=attributes, domain=DOMAIN))
        last = nodes[-1].outputs[0]
        last.type = ir.TensorType(ir.DataType.FLOAT)

    def other(kind: str, *inputs: ir.Value) -> None:
        nonlocal last
        nodes.append(ir.node(kind, [last, *inputs]))
        last = nodes[-1].outputs[0]
        last.type = ir.TensorType(ir.DataType.FLOAT)

    for layer in range(LAYERS):
        linear(f"{layer}.up", WIDE, HIDDEN)
        linear(f"{layer}.down", HIDDEN, WIDE)
        other("Tanh")
    other("Gather", parameter("wanted", np.array([-1], np.int64)))
    linear("head", VOCABULARY, HIDDEN)
    holder.graph.initializers.clear()
    model = model_of([x], [named("y", last)])
    model.opset_imports[DOMAIN] = 1
    return model


def test_a_prompt_takes_a_tenth_of_the_weights_at_most(tmp_path: Path) -> None:
    """Of memory that stays, with the vocabulary and as many steps as Qwen3.5 has: each needs 4 % of the weights."""
    assert memory_of("prompt", with_layers(), tmp_path) < least_weights() // 10


def test_steps_that_keep_memory_of_their_own_are_found(tmp_path: Path) -> None:
    shared, own = "c->step.workspaces = &p->workspaces;", "c->step.workspaces = calloc(1, sizeof p->workspaces);"
    planted = with_defect(tmp_path, (shared, own))
    assert memory_of("prompt", with_layers(), tmp_path, planted) > least_weights() // 2


def least_weights() -> int:
    """Bytes of the codes of :func:`with_layers`."""
    return (VOCABULARY + 2 * LAYERS * WIDE) * HIDDEN


def prompt_bytes(opened: Callable[[], ort.InferenceSession]) -> int:
    """That a step of a prompt adds to those after one of a single token."""
    own = opened()
    own.run(None, {"x": np.ones((1, HIDDEN), np.float32)})
    before = _status("RssAnon")
    own.run(None, {"x": np.ones((PROMPT, HIDDEN), np.float32)})
    return _status("RssAnon") - before


def memory_of(kind: str, model: ir.Model, folder: Path, of: Path | None = None) -> int:
    """Bytes that a process with one session holds, or the ``most`` that it held while it opened the session.

    In a process that has freed memory before, a session takes some of that. ``of``: the library, if another.
    """
    ir.save(model, folder / "model.onnx", external_data="weights.bin")
    code = f"""
from pathlib import Path
from tests.unit import test_native_steps as own
options = own.cpu_options(1, Path({str(of or library())!r}))
print(own.{kind}_bytes(lambda: own.open_session({str(folder / "model.onnx")!r}, options)))
"""
    root = Path(__file__).parents[2]
    found = subprocess.run([sys.executable, "-c", code], cwd=root, check=True, capture_output=True, text=True)
    return int(found.stdout)


def anonymous_bytes(opened: Callable[[], object]) -> int:
    kept = opened()
    found = _status("RssAnon")
    del kept
    return found


def most_bytes(opened: Callable[[], object]) -> int:
    """The system's own peak leaves out pages that were paged out in between."""
    found, done = [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            found.append(_status("VmRSS"))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    kept = opened()
    found.append(_status("VmRSS"))  # what it holds in the end, however seldom the watcher had a core
    done.set()
    watcher.join()
    del kept
    return max(found)


def _status(name: str) -> int:
    (found,) = re.findall(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found) << 10


def test_a_value_that_is_given_away_before_its_last_reader_is_found(tmp_path: Path) -> None:
    x, reads = tokens(300), "if (part->inputs[j] != NONE) last[part->inputs[j]] = (int)i;"
    planted = with_defect(tmp_path, (reads, "(void)0;"))
    assert not same(session(planted).run(OUTPUTS, {"x": x}), node_by_node(x))


def with_defect(folder: Path, *changes: tuple[str, str]) -> Path:
    """A library whose provider has another text, quickly compiled."""
    best = native.level()
    assert best
    return build.library(best, build.plant(folder, "provider.c", *changes), "provider.c", folder / "kernels.so")


def test_without_optimizations_nothing_is_found(tmp_path: Path) -> None:
    planted, x = with_defect(tmp_path), tokens(300)
    assert same(session(planted).run(OUTPUTS, {"x": x}), node_by_node(x))
    assert memory_of("prompt", with_layers(), tmp_path, planted) < least_weights() // 10
