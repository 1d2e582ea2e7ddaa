"""The kernels under sanitizers (address, undefined behavior, threads), on random nodes, valid and malformed.

Longer runs: ``TAPEOUT_FUZZ_CASES=200000 TAPEOUT_FUZZ_SEED=7 pytest tests/sanitizers``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from engines.kernels.cpu import Level, compiler, find_level
from tests.native import least_level
from tests.sanitizers import build

SEED = int(os.environ.get("TAPEOUT_FUZZ_SEED", "1"))
CASES = int(os.environ.get("TAPEOUT_FUZZ_CASES", "1000"))
PLANTED_CASES, PLANTED_RUNS = 300, 50  # at most: the first finding ends a run, but a leak shows only at its end
RACE_CASES, RACE_RUNS = 400, 5


@pytest.fixture(scope="module")
def sanitizers() -> None:
    build.require_sanitizers()


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_a_missing_tool_fails_in_ci_and_skips_elsewhere(
    monkeypatch: pytest.MonkeyPatch, ci: str, outcome: type[BaseException]
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match="gcc is not installed"):
        build.require_sanitizers()


def fuzz(program: Path, seed: int, cases: int, kernel: str = "all") -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, str(seed), str(cases), kernel], capture_output=True, text=True)


def fuzz_until_found(program: Path, cases: int, runs: int, kernel: str = "all") -> subprocess.CompletedProcess[str]:
    """A defect of threads shows only where one is interrupted at the wrong time: another seed, another try."""
    done = fuzz(program, SEED, cases, kernel)
    for seed in range(SEED + 1, SEED + runs):
        if done.returncode:
            break
        done = fuzz(program, seed, cases, kernel)
    return done


@pytest.mark.usefixtures("sanitizers")
def test_random_nodes_are_computed_or_refused(level: Level, tmp_path: Path) -> None:
    objects = build.compile_kernels(compiler.SOURCE, level) | build.compile_host(level)
    done = fuzz(build.link(objects, tmp_path / "fuzz"), SEED, CASES)
    print(f"{level.name}: {done.stdout.strip()}")
    assert done.returncode == 0, done.stderr[-6000:]
    counts = [int(count) for count in re.findall(r"(\d+) (?:valid|malformed|with)", done.stdout)]
    assert sum(counts) == CASES
    assert min(counts) > CASES // 50  # every way of running a node is taken


# In what a defect is found by: words that checks of undefined behavior print, too. All others are printed only by the
# fuzzer or the address sanitizer.
UNDEFINED = "runtime error|negation of|null pointer|out of bounds|non-zero|(?<!Address)Sanitizer|(?<!buffer-)overflow"


# Files of kernels of which each is an operator's alone.
OPERATORS = frozenset(
    f"{name}.c"
    for name in (
        *("block_linear", "block_gather", "cached_attention", "quantize_activations", "norm_rows", "causal_conv"),
        *("experts", "block_experts", "float_linear", "choose_experts", "recurrence", "gated_norm"),
    )
)


@dataclass(frozen=True)
class Defect:
    """A change of one file of the kernels that the fuzzer must find."""

    file: str
    before: str
    after: str
    found: str  # in what the fuzzer or a sanitizer prints
    compiled: str = ""  # of a header: a file that includes it, which is enough to find the defect

    def __post_init__(self) -> None:
        assert self.file.endswith(".h") == bool(self.compiled), f"which file shows {self.before} of {self.file}?"

    @property
    def kernel(self) -> str:
        """Whose nodes show it, for the fuzzer: a check of one operator's input is met 17 times as often among them."""
        file = self.compiled or self.file
        return file if file in OPERATORS else "all"

    @property
    def sanitizer(self) -> build.Sanitizer:
        """Checks of undefined behavior take most of the time to compile, and few defects need them."""
        return build.MEMORY if re.search(UNDEFINED, self.found) else build.ADDRESSES


DEFECTS = {
    "the value cache is not checked": Defect(
        "cached_attention.c", "!values->present || values->rank != 4", "0", "null pointer|SEGV|accepted"
    ),
    "the size of sines is not checked": Defect(
        "cached_attention.c", "!holds(sines, FLOAT, cosines->elements)", "!sines->present", "overflow|accepted"
    ),
    "a sequence may exceed its blocks": Defect(
        "cached_attention.c", "|| total > positions", "", "AddressSanitizer|accepted"
    ),
    "a start may be negative": Defect("cached_attention.c", "|| w->starts[b] < 0", "", "AddressSanitizer|accepted"),
    "a block may lie behind the pool": Defect(
        "cached_attention.c", "|| w->table[b * w->M + i] >= w->blocks", "", "AddressSanitizer|accepted|SEGV"
    ),
    "offsets may end elsewhere than the tokens": Defect(
        "cached_attention.c", "|| w->offsets[w->B] != tokens", "", "AddressSanitizer|accepted|SEGV|changed|expected"
    ),
    "keys after a token are not left out": Defect(
        "cached_attention.c", "if (end <= 0) return 0;", "", "runtime error|expected"
    ),
    "a buffer of a unit is too small": Defect(
        "cached_attention.c", "4 * KEYS * (w->D + packed)", "4 * KEYS * w->D", "heap-buffer-overflow"
    ),
    "a query sees one key too few": Defect(
        "cached_attention.c",
        "end = position + 1 - start;",
        "end = position - start;",
        "expected",
    ),
    "a failed allocation is used": Defect(
        "cached_attention.c", "if (!memory) return 0;", "", "null pointer|SEGV|overflow|unknown-crash"
    ),
    "columns of padding are written": Defect(
        "block_product.c", "left >= TILE ? TILE : left > 0 ? left : 0,", "TILE,", "heap-buffer-overflow|expected"
    ),
    "a bias is read beyond its end": Defect(
        "block_product.c", "load_first(w->bias + column, columns)", "load(w->bias + column)", "heap-buffer-overflow"
    ),
    "a masked load reads one lane too many": Defect(
        "vector.h",
        "  Mask mask = first_lanes(count);\n  const float* next",
        "  Mask mask = first_lanes(count + 1);\n  const float* next",
        "heap-buffer-overflow",
        "gated_norm.c",
    ),
    "a masked store writes one lane too many": Defect(
        "vector.h",
        "  Mask mask = first_lanes(count);\n  _mm256_maskstore_ps",
        "  Mask mask = first_lanes(count + 1);\n  _mm256_maskstore_ps",
        "heap-buffer-overflow|expected",
        "gated_norm.c",
    ),
    "a prefetch of one group of tokens goes beyond the weights": Defect(
        "block_product.c",
        "smaller(steps - w->codes + STREAM_AHEAD, last_steps)",
        "smaller(steps - w->codes + STREAM_AHEAD, last_steps + 64)",
        "heap-buffer-overflow",
    ),
    "the run after the last is prefetched": Defect(
        "block_product.c",
        "smaller(end - first, w->tiles + w->after - stop)",
        "end - first",
        "heap-buffer-overflow",
    ),
    "a prefetch goes beyond the keys": Defect(
        "cached_attention.c",
        "next_keys + entries * key_size",
        "next_keys + KEYS * key_size",
        "heap-buffer-overflow",
    ),
    "the tile after the last is prefetched": Defect(
        "cached_attention.c",
        "(few ? next_total : total) - coming",
        "(few ? next_total : total + KEYS) - coming",
        "AddressSanitizer|runtime error",
    ),
    "the unit after the last is prefetched": Defect(
        "cached_attention.c",
        "next_pair < w->pairs ? last_key(w, next_pair) : 0",
        "last_key(w, next_pair)",
        "heap-buffer-overflow",
    ),
    "halves of a byte are exchanged where 4-bit keys are read": Defect(
        "cached_attention.c",
        "shift_left(word, 32 - bits - bits * i)",
        "shift_left(word, 32 - bits - bits * (bits == 4 ? i ^ 1 : i))",
        "expected",
    ),
    "halves of a byte are exchanged where 4-bit codes are loaded": Defect(
        "vector.h", "shufflevector(x & 15, x >> 4,", "shufflevector(x >> 4, x & 15,", "expected", "cached_attention.c"
    ),
    "both halves of a byte are stored in the low one": Defect(
        "vector.h", "9, 11, 13, 15) << 4;", "9, 11, 13, 15);", "cache entry", "cached_attention.c"
    ),
    "4-bit codes are not clipped": Defect(
        "vector.h",
        "__builtin_elementwise_max(__builtin_elementwise_min(x, splat_int(7)), splat_int(-8)) + 8",
        "(x + 8) & 15",
        "cache entry",
        "cached_attention.c",
    ),
    "the scales of another head are those of 4-bit values": Defect(
        "cached_attention.c",
        "w->value_scale + head * E + i",
        "w->value_scale + (w->bits == 4 ? (head + 1) % k->kv_heads : head) * E + i",
        "expected",
    ),
    "keys are quantized by the scales of another head": Defect(
        "cached_attention.c",
        "quantize(rotated, w->key_scale + head * D",
        "quantize(rotated, w->key_scale",
        "cache entry",
    ),
    "an entry of a cache of 4 bits has twice its bytes": Defect(
        "cached_attention.c",
        "return w->D * w->bits / 8;",
        "return w->D * (w->bits > 8 ? 4 : 1);",
        "overflow|cache entry",
    ),
    "the first sequence of a mix is left out": Defect(
        "cached_attention.c",
        "is_long(w, b, scores) == now) *to++",
        "is_long(w, b, scores) == now && b) *to++",
        "expected|AddressSanitizer|SEGV|runtime error",
    ),
    "two bits of 6-bit codes are exchanged": Defect(
        "block_product.c", "if (s % 4 == 3) high >>= 2;", "if (s % 4 == 3) high >>= 1;", "expected"
    ),
    "the high bit of a 5-bit code is that of an earlier step": Defect(
        "block_product.c", "shift_left(high, 4 - s % 8)", "shift_left(high, 5 - s % 8)", "expected"
    ),
    "the high bit of a 5-bit code is that of a later step": Defect(
        "block_product.c", "high >> (s % 8 - 4);", "high >> (s % 8 - 3);", "expected"
    ),
    "the sums of NaN overflow": Defect(
        "block_product.c", "largest <= FLT_MAX && inverse <= FLT_MAX", "1", "negation of"
    ),
    "blocks may be of any size": Defect("block_linear.c", "found.shape.block > LARGEST_BLOCK", "0", "accepted"),
    "the last of equal logits is chosen": Defect(
        "block_linear.c", "found[part].value > max.value", "found[part].value >= max.value", "chose"
    ),
    "an id may be one too large": Defect("block_gather.c", "w.ids[i] >= k->N", "w.ids[i] > k->N", "accepted|overflow"),
    "zero points are not checked": Defect(
        "block_gather.c", "(zero_points.present && !holds(&zero_points, UINT8, blocks))", "0", "overflow|accepted"
    ),
    "a row may be one too large": Defect(
        "norm_rows.c", "w.rows[i] >= tokens", "w.rows[i] > tokens", "accepted|overflow"
    ),
    "a residual is not checked": Defect(
        "norm_rows.c", "(residual.present && !holds(&residual, FLOAT, x.elements))", "0", "accepted|overflow"
    ),
    "keys are normalized by the weight of queries": Defect(
        "norm_rows.c", "w->next, w->L", "w->weight, w->L", "Norm.*expected|AddressSanitizer"
    ),
    "values behind keys are those of the first token": Defect(
        "norm_rows.c", "load(w->x + at + i)", "load(w->x + i)", "Norm.*expected"
    ),
    "the epsilon is left out": Defect("norm_rows.c", "(float)K + w->epsilon", "(float)K", "Norm.*expected"),
    "what a norm adds is not in its sum": Defect(
        "norm_rows.c", "store(w->sum + at + i, sum)", "store(w->sum + at + i, load(x + i))", "ResidualNorm: sum"
    ),
    "a sum of one value": Defect("norm_rows.c", "k->kind == RESIDUAL_NORM && !residual.present", "0", "accepted"),
    "a token of another sequence is left without experts": Defect(
        "choose_experts.c", "tokens = logits.elements / E", "tokens = logits.dims[0]", "ChooseExperts|overflow|accepted"
    ),
    "a sequence begins with what its row of the state held": Defect(
        "causal_conv.c", "w->starts[sequence] ? load_some(", "1 ? load_some(", "CausalConv.*expected"
    ),
    "a window loses a token": Defect(
        "causal_conv.c", "k + 2 < K; k++) rows[k] =", "k + 3 < K; k++) rows[k] =", "CausalConv.*(expected|last tokens)"
    ),
    "the row of the state is a neighbour's": Defect(
        "causal_conv.c", "(int64_t)w->slots[sequence] *", "sequence *", "CausalConv.*(expected|changed|last tokens)"
    ),
    "a sequence without tokens loses its state": Defect(
        "causal_conv.c",
        "if (w->offsets[sequence] == w->offsets[sequence + 1]) return;",
        "",
        "CausalConv.*changed",
    ),
    "a row may lie behind the state": Defect(
        "causal_conv.c", "w->slots[b] >= rows", "w->slots[b] > rows", "AddressSanitizer|accepted|SEGV"
    ),
    "the last channels are a whole vector": Defect(
        "causal_conv.c", "1, channels % LANES, w->K)", "1, LANES, w->K)", "heap-buffer-overflow"
    ),
    "there may be any number of taps": Defect(
        "causal_conv.c", "weight.dims[0] > MOST_TAPS ||", "", "out of bounds|accepted|AddressSanitizer"
    ),
    "a token gets one expert twice": Defect(
        "choose_experts.c", "taken |= index[i] == e;", "taken |= 0;", "ChooseExperts: an expert twice"
    ),
    "one expert less is chosen among": Defect(
        "choose_experts.c",
        "choose(by, E, chosen",
        "choose(by, E - (E > chosen), chosen",
        "ChooseExperts: .* experts are",
    ),
    "the bias of a router goes into the weights": Defect(
        "choose_experts.c", "values[c] = x[index[c]]", "values[c] = by[index[c]]", "ChooseExperts: weight"
    ),
    "the worst groups are kept": Defect(
        "choose_experts.c", "&& !is_kept", "&& is_kept", "ChooseExperts: .* (groups|experts) are before"
    ),
    "a group counts by its best score alone": Defect(
        "choose_experts.c",
        "i < k->best; i++) sums",
        "i < 1; i++) sums",
        "ChooseExperts: .* (groups|experts) are before",
    ),
    "the weights of experts are not scaled": Defect(
        "choose_experts.c", "values[c] * k->factor", "values[c]", "ChooseExperts: weight"
    ),
    "the bias of a router is not checked": Defect(
        "choose_experts.c", "bias.present && !holds(&bias, FLOAT, w.E)", "0", "overflow|accepted"
    ),
    "there may be fewer experts in a group than count": Defect(
        "choose_experts.c", "|| w.E / k->groups < k->best)", ")", "AddressSanitizer|accepted|SEGV"
    ),
    "weights are not normalized": Defect(
        "choose_experts.c", "values[c] /= sum", "values[c] /= sum > 0 ? 1 : sum", "ChooseExperts: weight"
    ),
    "the weight of a router is not checked": Defect(
        "float_linear.c", "weight.dims[1] != K ||", "", "overflow|accepted"
    ),
    "the last outputs of a router are a whole vector": Defect(
        "float_linear.c", "left < LANES ? left : LANES;", "left < 0 ? left : LANES;", "heap-buffer-overflow"
    ),
    "the state keeps what is convolved without its gate": Defect(
        "causal_conv.c",
        "store(rows[0] + i, newest);",
        "store(rows[0] + i, load_some(x + i, count));",
        "CausalConv.*(expected|last tokens)",
    ),
    "the first column of a convolution is not checked": Defect(
        "causal_conv.c", "|| x.dims[x.rank - 1] - C < k->first)", ")", "AddressSanitizer|accepted|SEGV|runtime error"
    ),
    "the sign of a decay": Defect(
        "recurrence.c", "factor = vexp(decay)", "factor = vexp(-decay)", "(GatedDelta|SelectiveScan).*expected"
    ),
    "a time step without its bias": Defect(
        "recurrence.c",
        "w->bias ? decay + splat(w->bias[head]) : decay",
        "decay",
        "(GatedDelta|SelectiveScan).*expected",
    ),
    "a time step without softplus": Defect(
        "recurrence.c", "softplus(x)));", "x));", "(GatedDelta|SelectiveScan).*expected"
    ),
    "a time step beyond its bounds": Defect(
        "recurrence.c", "vmin(splat(k->most_step)", "vmax(splat(k->most_step)", "(GatedDelta|SelectiveScan).*expected"
    ),
    "the decay of the neighbouring channel": Defect(
        "recurrence.c", "factor = splat(factors[i])", "factor = splat(factors[(i + 1) % K])", "GatedDelta.*expected"
    ),
    "a row answers before it decays": Defect(
        "recurrence.c", "key[i] * key_scale * factors[i]", "key[i] * key_scale", "GatedDelta.*expected"
    ),
    "the bias of a channel's decay is the first head's": Defect(
        "recurrence.c", "w->bias + head * w->K + i", "w->bias + i", "GatedDelta.*expected"
    ),
    "a decay without its least": Defect(
        "recurrence.c", "splat(k->least_decay) * sigmoid", "splat(-1) * sigmoid", "GatedDelta.*expected"
    ),
    "decays by channel are checked as if they were a head's": Defect(
        "recurrence.c", "k->by_channel ? H * K : H", "H", "AddressSanitizer|accepted|SEGV|overflow"
    ),
    "a value is not multiplied by its time step": Defect(
        "recurrence.c", "change[v] *= step;", ";", "SelectiveScan.*expected"
    ),
    "beta is no sigmoid": Defect(
        "recurrence.c", "beta = sigmoid(beta) *", "beta = beta + beta *", "GatedDelta.*expected"
    ),
    "beta is at most one": Defect("recurrence.c", "splat(k->most_beta)", "splat(1)", "GatedDelta.*expected"),
    "what is skipped is the next head's": Defect(
        "recurrence.c", "splat(w->skip[head])", "splat(w->skip[(head + 1) % H])", "SelectiveScan.*expected"
    ),
    "a head reads the keys of a neighbour": Defect(
        "recurrence.c", "group = head * w->G / H", "group = head % w->G", "(GatedDelta|SelectiveScan).*expected"
    ),
    "a recurrence begins with what its row of the state held": Defect(
        "recurrence.c", "fresh = !w->starts[sequence]", "fresh = 0", "(GatedDelta|SelectiveScan).*expected"
    ),
    "the row of a recurrence's state is a neighbour's": Defect(
        "recurrence.c", "w->slots[sequence] * w->H", "sequence * w->H", "(GatedDelta|SelectiveScan).*(expected|changed)"
    ),
    "a state in bfloat16 is cut instead of rounded": Defect(
        "recurrence.c", "(U32x16)x + 0x8000u", "(U32x16)x", "the state of sequence.*expected"
    ),
    "a row of a state in bfloat16 is stored beyond its end": Defect(
        "recurrence.c",
        "memcpy(to, &bits, count * sizeof *to);",
        "memcpy(to, &bits, sizeof bits);",
        "AddressSanitizer|expected|changed",
    ),
    "the first columns of a recurrence are not checked": Defect(
        "recurrence.c",
        "in[i].dims[in[i].rank - 1] - needed[i] < k->first[i]",
        "0",
        "AddressSanitizer|accepted|SEGV|overflow",
    ),
    "a gate is applied on the other side of the norm": Defect(
        "gated_norm.c", "k->norm_first ? given : product", "k->norm_first ? product : given", "GatedNorm.*expected"
    ),
    "the gate of a run is that of the first": Defect(
        "gated_norm.c", "gate + run * k->period", "gate", "GatedNorm.*expected"
    ),
    "the columns of a gate are not checked": Defect(
        "gated_norm.c", "gate.dims[gate.rank - 1] < end", "gate.dims[gate.rank - 1] < 1", "accepted|AddressSanitizer"
    ),
    "a gate of all channels is that of a column": Defect(
        "gated_norm.c", "k->one ? splat(*gate)", "0 ? splat(*gate)", "GatedNorm.*expected|AddressSanitizer"
    ),
    "what is added is not checked": Defect(
        "gated_norm.c", "!holds(&added, FLOAT, x.elements)", "0", "accepted|AddressSanitizer"
    ),
    "a sum is not added": Defect("gated_norm.c", "if (w->added) scaled +=", "if (!w->x) scaled +=", "Scale.*expected"),
    "a query is read where its neighbour's gate lies": Defect(
        "cached_attention.c", "query_head * w->period", "query_head * D", "CachedAttention.*expected"
    ),
    "keys are read where queries end, not their gates": Defect(
        "cached_attention.c",
        "w->key = w->query + k->heads * w->period",
        "w->key = w->query + k->heads * w->D",
        "CachedAttention.*expected",
    ),
    "keys are normalized with the weight of queries": Defect(
        "cached_attention.c",
        "rotate(w, key, w->key_norm",
        "rotate(w, key, w->query_norm",
        "CachedAttention.*expected",
    ),
    "values have the stride of keys": Defect(
        "cached_attention.c",
        "*of_values = w->value_cache + at * value_size",
        "*of_values = w->value_cache + at * key_size",
        "CachedAttention.*expected|AddressSanitizer",
    ),
    "new values are written at the stride of keys": Defect(
        "cached_attention.c",
        "*to_value = w->value_cache + at * value_bytes(w)",
        "*to_value = w->value_cache + at * key_bytes(w)",
        "CachedAttention.*(expected|changed)|AddressSanitizer",
    ),
    "values of a token have the columns of its keys": Defect(
        "cached_attention.c",
        "token * w->value_stride",
        "token * w->key_stride",
        "CachedAttention.*expected|AddressSanitizer",
    ),
    "a value has the scale of a neighbouring channel": Defect(
        "cached_attention.c",
        "load(w->value_scale + head * E + i)",
        "load(w->value_scale + head * w->D + i)",
        "CachedAttention.*expected|AddressSanitizer",
    ),
    "the room for keys that are packed is that of values": Defect(
        "cached_attention.c", "w->D > w->E ? w->D : w->E", "w->E", "CachedAttention.*expected|AddressSanitizer"
    ),
    "a head has the sink of another": Defect(
        "cached_attention.c",
        "w->sinks[head * w->group + q % w->group]",
        "w->sinks[head * w->group]",
        "CachedAttention.*expected",
    ),
    "a sink has no weight in the sum": Defect(
        "cached_attention.c", "has_codes(w) && AVX512 ? LARGEST_WEIGHT : 1;", "0;", "CachedAttention.*expected"
    ),
    "the number of sinks is not checked": Defect(
        "cached_attention.c", "!holds(&in[SINKS], FLOAT, k->heads)", "0", "AddressSanitizer|accepted|SEGV|overflow"
    ),
    "channels that do not turn are lost": Defect(
        "cached_attention.c",
        "memcpy(to + 2 * half, from + 2 * half, (w->D - 2 * half) * sizeof(float));",
        "if (!half) memcpy(to, from, w->D * sizeof(float));",
        "CachedAttention.*expected",
    ),
    "floats of 4 bits are read as integers": Defect(
        "block_product.c", "return e2m1 ? look_up", "return e2m1 > 1 ? look_up", "(Linear|BlockExperts).*expected"
    ),
    "a float of 4 bits has the value of its neighbour": Defect(
        "codes.h", "20, 22, 24, 28", "20, 22, 28, 28", "Gather.*expected", "block_gather.c"
    ),
    "the scales of floats of 4 bits are those of another expert": Defect(
        "block_experts.c", "scales * scale_bytes(&w.shape)", "scales * 0", "BlockExperts.*expected"
    ),
    "the type of scales of floats of 4 bits is not checked": Defect(
        "block_product.h",
        "return s->e2m1 ? UINT8 : s->half_scales ? HALF : FLOAT;",
        "return s->e2m1 ? FLOAT : s->half_scales ? HALF : FLOAT;",
        "accepted|refused|expected|weights of another",
        "block_linear.c",
    ),
    "an index may be one too large": Defect(
        "experts.h", "r->index[i] >= r->experts", "r->index[i] > r->experts", "accepted|overflow", "experts.c"
    ),
    "ups are read where gates are": Defect(
        "experts.c", "ups = gates + w->inner_tiles", "ups = gates", "Experts.*expected"
    ),
    "the bias of experts is not checked": Defect(
        "experts.c",
        "(down_bias.present && !holds(&down_bias, FLOAT, r->experts * w.hidden_tiles * LANES))",
        "0",
        "overflow|accepted",
    ),
    "the shares of a token are exchanged": Defect(
        "experts.c",
        "splat(w->weight[pair])",
        "splat(w->weight[(int64_t)token * w->routing.chosen])",
        "Experts.*expected",
    ),
    "an expert has the scales of its neighbour": Defect(
        "block_experts.c",
        "scales = tiles * w.blocks",
        "scales = expert / 2 * 2 * w.tiles * w.blocks",
        "BlockExperts.*expected",
    ),
    "the first row of an expert is that of the one before": Defect(
        "block_experts.c",
        "some_rows(&w->rows, part.shape.K, begin, count)",
        "some_rows(&w->rows, part.shape.K, begin ? begin - 1 : 0, count)",
        "BlockExperts.*expected",
    ),
    "gates and ups are exchanged": Defect(
        "block_experts.c", "load(from), load(from + TILE)", "load(from + TILE), load(from)", "BlockExperts.*expected"
    ),
    "a choice has the share of another": Defect(
        "block_experts.c", "splat(w->share[choice])", "splat(w->share[token * r->chosen])", "BlockExperts.*expected"
    ),
    "a token has the answers of another": Defect(
        "block_experts.c", "w->places[choice] * columns", "choice * columns", "BlockExperts.*expected"
    ),
    "only the first choice has a token's activations": Defect(
        "block_experts.c",
        "choice = w->routing.chosen; choice-- > 0;",
        "choice = 1; choice-- > 0;",
        "BlockExperts|Sanitizer",
    ),
    "an expert of its own bits has the sums of another's": Defect(
        "block_experts.c",
        "w->up_begins, w->routing.index[first + choice]",
        "w->up_begins, w->routing.index[first]",
        "BlockExperts.*expected",
    ),
    "inner channels have the sums of another expert's bits": Defect(
        "block_experts.c",
        "w->routing.index[w->routing.order[row]]",
        "w->routing.index[w->routing.order[0]]",
        "BlockExperts.*expected",
    ),
    "an expert of its own bits has the codes of its neighbour": Defect(
        "block_experts.c",
        "begins ? begins[expert] :",
        "begins ? begins[expert / 2 * 2] :",
        "BlockExperts.*expected|Sanitizer",
    ),
    "an expert has the bits of the widest": Defect(
        "block_experts.c",
        "w.shape.bits = bits_of(&w.shape, begins, expert)",
        "w.shape.bits = first->shape.bits",
        "BlockExperts.*expected|Sanitizer",
    ),
    "where codes of experts begin is not checked": Defect(
        "block_experts.c", "if (begins[e] != at ||", "if (", "overflow|accepted|SEGV"
    ),
    "codes of experts may end early": Defect(
        "block_experts.c", "return at == bytes;", "return at <= bytes;", "accepted"
    ),
    "biases of experts over codes are not checked": Defect(
        "block_experts.c",
        "!holds(&in[DOWN_BIAS], FLOAT, experts * padded_tiles(k->down.N) * TILE)",
        "0",
        "overflow|accepted",
    ),
    "a part of the outputs has the biases of the first": Defect(
        "block_product.h",
        "part.bias += first * TILE",
        "part.bias += 0",
        "BlockExperts.*expected",
        "block_experts.c",
    ),
    "the last activations are read as a whole vector": Defect(
        "quantize_activations.c", "load_first(x + i, count - i)", "load(x + i)", "heap-buffer-overflow"
    ),
    "the last activations are not counted": Defect(
        "quantize_activations.c",
        "/* no zero lies beyond the grid */\n    clipped += beyond(codes, 8);",
        "",
        "counted as clipped",
    ),
    "the largest code counts as clipped": Defect(
        "vector.h", "(x > largest)", "(x >= largest)", "counted as clipped", "quantize_activations.c"
    ),
    "a static scale may be zero": Defect("quantize_activations.c", "w.scale > 0 &&", "", "accepted"),
    "a status leaks": Defect(
        "ort.h",
        "  release_status(api, status);\n  return status ? otherwise",
        "  return status ? otherwise",
        "leak",
        "norm_rows.c",
    ),
    "a failing call is ignored": Defect(
        "ort.h", "TRY(data_of(api, value, &tensor->data));", "", "null pointer|missing|Sanitizer", "norm_rows.c"
    ),
    "the last logits are read as whole vectors": Defect(
        "sampling.c",
        "blend(first_lanes(left), load_first(logits + at, left), x)",
        "load(logits + at)",
        "overflow|expected",
    ),
    "the largest token is chosen among padding": Defect(
        "sampling.c",
        "F32x16 x = splat(-INFINITY);",
        "F32x16 x = splat(0);",
        "excluded|not the likeliest|expected|order|SEGV",
    ),
    "one of the top tokens is missing": Defect(
        "sampling.c",
        "if (!row->top) return;\n  const int64_t count = find_largest(w, row->top);",
        "if (!row->top) return;\n  const int64_t count = find_largest(w, row->top) - 1;",
        "not in order",
    ),
    "a draw goes past the last token": Defect(
        "sampling.c",
        "while (point >= w->weights[token])",
        "while (point + 1 >= w->weights[token])",
        "overflow|excluded",
    ),
    "the memory is too small": Defect(
        "sampling.c", "LANES * sizeof(float)));", "8 * sizeof(float)));", "heap-buffer-overflow"
    ),
    "a mask does not exclude tokens whose logits change": Defect(
        "sampling.c", "if (row->mask && !(row->mask[token >> 5] >> (token & 31) & 1)) continue;", "", "gave"
    ),
    "the caller does not wait for the others": Defect(
        "threads.c", "if (t->ranges[i].active) return 1;", ";", "AddressSanitizer|expected|SEGV|runtime error"
    ),
    "the indexes of a thread that sleeps are left out": Defect(
        "threads.c", "&t->ranges[(number + i) % t->count]", "&t->ranges[number]", "expected|chose|changed|Sanitizer"
    ),
    "the threads of a library stay": Defect(
        "threads.c",
        "if (t && !--t->kernels) end_helpers(t, t->count);",
        "if (t) --t->kernels;",
        "leak|Sanitizer|null pointer",
    ),
    "what threads read ahead is freed before they end": Defect(
        "threads.c",
        "  t->ending = 1;\n",
        "  for (Stream* early; (early = t->streams);) t->streams = early->other, free(early);\n  t->ending = 1;\n",
        "heap-use-after-free|SEGV",  # SEGV: freed between the check of the address and the read of a pointer there
    ),
    "a constant of another shape is taken": Defect(
        "block_linear.c",
        "is_block_weight(&k->shape, 1, codes, scales, zero_points)",
        "(k->codes.present || is_block_weight(&k->shape, 1, codes, scales, zero_points))",
        "overflow|accepted|null pointer",
    ),
    "a domain leaks": Defect(
        "provider.c", "if (f->domain) ((void (*)(Domain*))f->ort[RELEASE_DOMAIN])(f->domain);", "", "leak"
    ),
    "an initializer is not copied": Defect(
        "provider.c", "constant->dims = dims, constant->data = data;", "", "expected|chose|changed|Sanitizer|non-zero"
    ),
    "copies of initializers leak": Defect("provider.c", "free(chunk->memory);", "", "leak"),
    "a step that cannot be made leaks": Defect(
        "provider.c", "if (status) release_computes(p, computes, count);", "", "leak|Sanitizer"
    ),
    "a step takes operators of others": Defect(
        "provider.c", "!strcmp(domain, OPERATOR_DOMAIN) && i < operator_count", "i < operator_count", "a step of"
    ),
    "the buffers of a step leak": Defect(
        "step.c", "for (size_t i = 0; i < w->count; i++) free(w->buffers[i].memory);", "", "leak"
    ),
    "a step takes another output": Defect(
        "step.c",
        "(size_t)plan->output, dims",
        "(size_t)(plan->output ^ 1), dims",
        "expected|Sanitizer|output|shape|null pointer",
    ),
    "a buffer of a step is too small": Defect(
        "step.c",
        "b->memory = aligned_alloc(unit, rounded)",
        "b->memory = aligned_alloc(unit, 64)",
        "overflow",
    ),
}


@pytest.fixture(scope="module")
def whole(sanitizers: None) -> dict[str, Path]:
    """Objects of the kernels as they are, and of the host."""
    return build.compile_kernels(compiler.SOURCE, least_level()) | build.compile_host(least_level())


@pytest.mark.parametrize("defect", DEFECTS.values(), ids=DEFECTS)
def test_a_planted_defect_is_found(defect: Defect, whole: dict[str, Path], tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(compiler.SOURCE, source)
    text = (source / defect.file).read_text()
    assert text.count(defect.before) >= 1, f"{defect.file} no longer has: {defect.before}"
    (source / defect.file).write_text(text.replace(defect.before, defect.after))
    changed = frozenset({defect.compiled or defect.file})
    objects = whole | build.compile_kernels(source, least_level(), changed, defect.sanitizer)
    done = fuzz_until_found(build.link(objects, tmp_path / "fuzz"), PLANTED_CASES, PLANTED_RUNS, defect.kernel)
    assert done.returncode != 0, f"not found in {PLANTED_RUNS} x {PLANTED_CASES} cases: {done.stdout}"
    assert re.search(defect.found, done.stderr), done.stderr[-3000:]


# Of files with tile registers: an access, and one whose rows lie elsewhere.
TILE_DEFECTS = {
    "attention loads rows beyond its values": (
        "cached_attention.c",
        "_tile_loadd(FIRST_CODES, codes, 4 * E)",
        "_tile_loadd(FIRST_CODES, codes, 4 * E + 1536)",
        "heap-buffer-overflow",
    ),
    "a linear loads rows beyond its unpacked codes": (
        "block_product.c",
        "at->codes + c * TILE, TILE * STEP)",
        "at->codes + c * TILE, TILE * STEP << 7)",
        "heap-buffer-overflow",
    ),
    "a linear stores rows beyond its sums": (
        "block_product.c",
        "_tile_stored(3, to, TILE * sizeof *to)",
        "_tile_stored(3, to, 8 * TILE * sizeof *to)",
        "stack-buffer-overflow",
    ),
}


@pytest.mark.usefixtures("sanitizers")
@pytest.mark.parametrize("defect", TILE_DEFECTS.values(), ids=TILE_DEFECTS)
def test_an_access_of_a_tile_register_beyond_its_memory_is_found(
    defect: tuple[str, str, str, str], tmp_path: Path
) -> None:
    """No sanitizer knows AMX: ``checked_intrinsics.h`` accesses each row before it is loaded or stored."""
    name, before, after, expected = defect
    found = found_with_tiles(name, before, after, tmp_path)
    assert expected in found and "in checked_rows" in found, found[-3000:]


@pytest.mark.usefixtures("sanitizers")
def test_too_little_memory_for_the_sums_of_a_chunk_is_found(tmp_path: Path) -> None:
    """Sums are kept only where a linear has more channels than are unpacked at once."""
    change = "block_product.c", "sums = most_tiles * rows->count * TILE;", "sums = most_tiles * rows->count * TILE / 2;"
    found = found_with_tiles(*change, tmp_path)
    assert "heap-buffer-overflow" in found, found[-3000:]


def found_with_tiles(name: str, before: str, after: str, folder: Path) -> str:
    """What the fuzzer says of kernels with AMX whose file ``name`` is changed."""
    amx = find_level("x86-64-amx")
    if reason := amx.refusal():
        pytest.skip(reason)
    source = folder / "source"
    shutil.copytree(compiler.SOURCE, source)
    text = (source / name).read_text()
    assert text.count(before) == 1
    (source / name).write_text(text.replace(before, after))
    objects = build.compile_kernels(compiler.SOURCE, amx) | build.compile_host(amx)
    objects |= build.compile_kernels(source, amx, frozenset({name}))
    done = fuzz_until_found(build.link(objects, folder / "fuzz"), PLANTED_CASES, PLANTED_RUNS)
    assert done.returncode != 0
    return done.stderr


# Text of threads.c and another that leaves a race, which x86 would hide: ThreadSanitizer knows C11, not the processor.
RACES = {
    "none": ("", ""),
    "results are not released": (
        "own->active = 0;",
        "atomic_store_explicit(&own->active, 0, memory_order_relaxed);",
    ),
}


@pytest.fixture(scope="module")
def racing(sanitizers: None) -> dict[str, Path]:
    """Objects for ThreadSanitizer, of the kernels as they are and of the host."""
    kernels = build.compile_kernels(compiler.SOURCE, least_level(), sanitizer=build.RACES)
    return kernels | build.compile_host(least_level(), build.RACES)


@pytest.mark.parametrize("race", RACES.values(), ids=RACES)
def test_threads_race_only_where_a_race_is_planted(
    race: tuple[str, str], racing: dict[str, Path], tmp_path: Path
) -> None:
    before, after = race
    source = tmp_path / "source"
    shutil.copytree(compiler.SOURCE, source)
    text = (source / "threads.c").read_text()
    assert before in text
    (source / "threads.c").write_text(text.replace(before, after) if before else text)
    changed = build.compile_kernels(source, least_level(), frozenset({"threads.c"}), build.RACES)
    program = build.link(racing | changed, tmp_path / "fuzz", build.RACES)
    done = fuzz_until_found(program, RACE_CASES, RACE_RUNS) if before else fuzz(program, SEED, RACE_CASES)
    assert ("data race" in done.stderr) == bool(before), done.stderr[-3000:]
    assert (done.returncode == 0) == (not before), done.stderr[-3000:]
