"""Models with recurrent state, experts or latents run on our own operators, at every level, with linears of blocks."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing

import pytest

from engines.kernels.cpu import LEVELS, all_native
from engines.kernels.operators import OPERATORS
from engines.load import load
from engines.sequences import Sequences, SlotEntry
from runtime.engine.opening import open_bundle
from runtime.wire.start import EngineSettings
from tapeout.errors import RequestError
from tapeout.recipe import Rule
from tapeout.schemes import Scheme
from tests.family_engines import Made, difference_from_checkpoint, make, words

RULES = (Rule(match="*", scheme=Scheme(bits=8, group_size=32, symmetric=True)),)
FAMILIES = ("lfm2", "bamba", "granitemoehybrid-scans", "nemotron_h", "qwen3_5", "qwen3_next", "falcon_h1", "mamba2")
# Decays of key channels, beside latents and experts; and betas above one, beside norms after the blocks.
DELTAS = ("kimi_linear", "bailing_hybrid", "olmo_hybrid")
# Each chooses its experts in another way.
MIXTURES = ("afmoe", "ernie4_5_moe", "glm4_moe", "gpt_oss", "lfm2_moe", "olmoe", "qwen2_moe")
# Keys of latents, of which a part turns and is shared by all heads.
LATENT = ("deepseek_v2", "deepseek_v3", "deepseek_v3-dense", "glm4_moe_lite", "youtu")
# Of the first layer, whose input nothing is added to, and norms that several operators read.
SMALL = {"SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"}
# Experts see the tokens of all sequences as rows; norms of all heads of a query take a linear apart.
SHAPES = {"Concat", "Reshape", "Shape", "Split"}
SEQUENCES = 4
HALF = ("qwen3_5", "kimi_linear", "mamba2")  # also with states in bfloat16


@pytest.fixture(
    scope="module",
    params=[
        *((name, "float32") for name in FAMILIES + DELTAS + MIXTURES + LATENT),
        *((name, "bfloat16") for name in HALF),
    ],
    ids="-".join,
)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    name, state = request.param
    return make(name, tmp_path_factory.mktemp(name), RULES, state)


@pytest.fixture(scope="module")
def engines(made: Made) -> Generator[tuple[Sequences, Sequences]]:
    """With one thread and with two of their own."""
    with (
        closing(Sequences(load(made.bundle.folder, threads=1, slots=SEQUENCES))) as one,
        closing(Sequences(load(made.bundle.folder, threads=2, slots=SEQUENCES))) as two,
    ):
        yield one, two


def test_a_bundle_has_every_level(made: Made) -> None:
    counts = made.bundle.record.operator_counts
    allowed = SMALL | (SHAPES if made.name in (*MIXTURES, *LATENT, *DELTAS, "qwen3_next") else set())
    assert all_native(counts) and {*counts} - OPERATORS.keys() <= allowed, counts
    assert [each.level for each in made.bundle.record.hardware] == [level.name for level in LEVELS]


def test_it_computes_what_its_checkpoint_says(made: Made) -> None:
    assert difference_from_checkpoint(made, 4, 30) == ""


def test_tokens_are_the_same_to_the_bit_in_any_cut_and_batch_by_any_threads(
    made: Made, engines: tuple[Sequences, Sequences]
) -> None:
    one, two = engines
    texts = [words(made.name, 1, 9 + 7 * row, row)[0] for row in range(SEQUENCES)]
    alone = [one.prefill(0, text, positions=range(len(text))) for text in texts]
    for cut in (1, 4, 8):
        first = two.feed([SlotEntry(row, text[:cut], 0, range(cut)) for row, text in enumerate(texts)])
        rest = two.feed(
            [SlotEntry(row, text[cut:], cut, range(len(text) - cut)) for row, text in reversed([*enumerate(texts)])]
        )
        for whole, begin, end in zip(alone, first, reversed(rest), strict=True):
            assert (whole[:cut] == begin).all() and (whole[cut:] == end).all()


@pytest.mark.parametrize("kv_bytes", [None, 4 << 20])
def test_an_engine_is_opened_with_snapshots_for_a_share_of_its_memory(made: Made, kv_bytes: int | None) -> None:
    io = made.bundle.record.io
    settings = EngineSettings(threads=1, slots=3, kv_bytes=kv_bytes, snapshot_share=0.25)
    if not io.slot_bytes:
        with pytest.raises(RequestError, match="has no recurrent state"):
            open_bundle(made.bundle.folder, settings)
        return
    with closing(open_bundle(made.bundle.folder, settings).engine) as engine:
        has = engine.capabilities
    each = io.token_bytes * io.max_tokens + io.slot_bytes
    sequences = 3 if kv_bytes is None else (kv_bytes - (kv_bytes // 4 // io.slot_bytes) * io.slot_bytes) // each
    snapshots = has.slots - sequences
    memory = kv_bytes or sequences * each + snapshots * io.slot_bytes
    assert abs(snapshots * io.slot_bytes - memory / 4) <= io.slot_bytes
