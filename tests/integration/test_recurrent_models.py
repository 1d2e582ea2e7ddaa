"""Models with recurrent state, served: the same bits however sequences are cut, mixed, shared and preempted."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.load import load
from engines.sequences import Sequences, SlotEntry
from runtime.engine.core import EngineCore
from runtime.engine.in_process import CoreAnswer, ModelledTime, answer_all
from runtime.wire.limits import Limits
from runtime.wire.messages import GenerateRequest
from tapeout.state import Paged, Recurrent
from tests.exported import build_float, family_graph
from tests.family_engines import Made, make, words

SLOTS = 3
ANSWER = 140  # tokens: more than two blocks, where short answers were seen
# A conversation: its turns, and the tokens of what begins all, of what is asked, and of what is answered; 384 at most
TURNS, SYSTEM, USER, ANSWERED = 20, 80, 6, 9
FEW = 6  # of its prompts that come again

FAMILIES = {
    "lfm2": ["conv"],
    "qwen3_5": ["conv", "delta"],
    "kimi_linear": ["conv", "delta"],  # decays per key channel, latent attention
    "bamba": ["conv", "scan"],
    "mamba2": ["conv", "scan"],  # without attention
}  # with the recurrent state of layer 0
KEPT = [*((family, "float32") for family in FAMILIES), ("qwen3_5", "bfloat16"), ("bamba", "bfloat16")]


@pytest.fixture(scope="module", params=KEPT, ids="-".join)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    family, kept = request.param
    return make(family, tmp_path_factory.mktemp(family), recurrent_state=kept)


@pytest.fixture(scope="module")
def opened(made: Made) -> Generator[Callable[[int], Sequences]]:
    """By the number of threads."""
    engines: dict[int, Sequences] = {}

    def get(threads: int) -> Sequences:
        if threads not in engines:
            engines[threads] = Sequences(load(made.bundle.folder, threads=threads, slots=SLOTS))
        return engines[threads]

    yield get
    for engine in engines.values():
        engine.close()


def test_both_kinds_of_state_are_in_the_record(made: Made) -> None:
    state = made.bundle.record.io.state
    recurrent = [one for one in state if isinstance(one, Recurrent) and one.layer == 0]
    assert [tensor.name for one in recurrent for tensor in one.tensors] == FAMILIES[made.name]
    kept = {tensor.name: tensor.dtype for one in recurrent for tensor in one.tensors}
    assert kept.pop("conv") == "float32" and set(kept.values()) <= {made.quantized.record.recurrent_state}
    paged = {one.layer: [tensor.name for tensor in one.tensors] for one in state if isinstance(one, Paged)}
    assert paged == ({} if made.name == "mamba2" else {1: ["key", "value"]})
    assert made.graph.record.cached_layers == tuple(paged)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_tokens_are_the_same_to_the_bit_cut_anywhere_in_any_batch(
    data: st.DataObject, made: Made, opened: Callable[[int], Sequences]
) -> None:
    engine = opened(data.draw(st.sampled_from((1, 2))))
    texts = [words(made.name, 1, data.draw(st.integers(1, 40)), seed)[0] for seed in range(SLOTS)]
    alone = [opened(1).prefill(0, text, positions=range(len(text))) for text in texts]
    done = [0] * SLOTS
    while left := [slot for slot in range(SLOTS) if done[slot] < len(texts[slot])]:
        chosen = data.draw(st.permutations(left))[: data.draw(st.integers(1, len(left)))]
        counts = [data.draw(st.integers(1, len(texts[slot]) - done[slot])) for slot in chosen]
        batch = [
            SlotEntry(slot, texts[slot][done[slot] : done[slot] + count], done[slot], range(count))
            for slot, count in zip(chosen, counts, strict=True)
        ]
        for slot, count, rows in zip(chosen, counts, engine.feed(batch), strict=True):
            assert (rows == alone[slot][done[slot] : done[slot] + count]).all()
            done[slot] += count


def test_a_step_may_have_more_tokens_than_a_sequence(made: Made, opened: Callable[[int], Sequences]) -> None:
    """Of several together: ONNX Runtime's RotaryEmbedding refuses more tokens than its table has positions."""
    engine, texts = opened(1), [words(made.name, 1, 40, seed)[0] for seed in range(SLOTS)]
    assert engine.max_tokens < SLOTS * 40
    together = engine.feed([SlotEntry(slot, text, 0) for slot, text in enumerate(texts)])
    assert all((rows == engine.prefill(0, text)).all() for rows, text in zip(together, texts, strict=True))


@pytest.mark.parametrize(("family", "kept"), KEPT)
def test_requests_that_share_prompts_and_are_preempted_answer_as_alone(family: str, kept: str, tmp_path: Path) -> None:
    """Prompts begin alike, end inside a block, and come twice; the core has blocks for few of them."""
    graph = family_graph(family, max_position_embeddings=384)
    bundle = build_float(graph, tmp_path / "bundle", 6, recurrent_state=kept)
    shared = words(family, 1, 150, 0)[0]
    prompts = [
        shared[:cut] + words(family, 1, 5 + 9 * n, n + 1)[0] for n, cut in enumerate((150, 128, 64, 150, 149, 90))
    ]
    with closing(Sequences(load(bundle.folder, threads=1))) as alone:
        expected = [greedy(alone, prompt, ANSWER) for prompt in prompts]
    with closing(load(bundle.folder, threads=1)) as engine:
        timed = ModelledTime(engine, 10)
        core = EngineCore(timed, Limits(), clock=timed.clock)
        short = [GenerateRequest(f"short {n}", prompt, 1) for n, prompt in enumerate(prompts)]
        answer_all(core, short)
        answers: list[CoreAnswer] = []
        for turn in range(3):
            requests = [GenerateRequest(f"{turn} {n}", prompt, ANSWER) for n, prompt in enumerate(prompts)]
            answers = answer_all(core, requests)
            core.scheduler.check()
            assert [list(answer.tokens) for answer in answers] == expected
        assert bool(core.scheduler.preemptions) == bool(engine.capabilities.blocks)
        assert sum(answer.cached_tokens for answer in answers) > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_reads_again_only_what_follows_its_last_checkpoint(family: str, tmp_path: Path) -> None:
    """Twenty turns of two conversations that take turns and share their first tokens; then all prompts come again."""
    bundle = build_float(family_graph(family, max_position_embeddings=384), tmp_path / "bundle", 8)
    system = words(family, 1, SYSTEM, 0)[0]
    with closing(load(bundle.folder, threads=1)) as engine, closing(Sequences(load(bundle.folder, threads=1))) as alone:
        size = engine.capabilities.block_tokens
        timed = ModelledTime(engine, 10)
        core = EngineCore(timed, Limits(), clock=timed.clock)

        def asked(name: str, prompt: list[int]) -> CoreAnswer:
            (answer,) = answer_all(core, [GenerateRequest(name, prompt, ANSWERED)])
            core.scheduler.check()
            assert list(answer.tokens) == greedy(alone, prompt, ANSWERED)
            return answer

        histories, prompts = [list(system), list(system)], list[list[int]]()
        known = [0, 0]  # positions that a conversation's last turn computed
        for turn in range(TURNS):
            for one, history in enumerate(histories):
                prompt = history + words(family, 1, USER, 100 * one + turn + 1)[0]
                answer = asked(f"{turn} of {one}", prompt)
                assert answer.cached_tokens >= known[one] // size * size
                known[one] = len(prompt) + ANSWERED - 1
                histories[one] = prompt + list(answer.tokens)
                prompts.append(prompt)
        for prompt in prompts[-FEW:]:
            asked(f"first {len(prompt)} {prompt[-1]}", prompt)
        again = [asked(f"again {len(prompt)} {prompt[-1]}", prompt) for prompt in prompts[-FEW:]]
        assert [answer.cached_tokens for answer in again] == [
            (len(prompt) - 1) // size * size for prompt in prompts[-FEW:]
        ]


def greedy(engine: Sequences, prompt: list[int], count: int) -> list[int]:
    tokens = [int(engine.prefill(0, prompt)[0].argmax())]
    while len(tokens) < count:
        tokens.append(int(engine.decode_greedy([tokens[-1]], [len(prompt) + len(tokens) - 1])[0]))
    return tokens
