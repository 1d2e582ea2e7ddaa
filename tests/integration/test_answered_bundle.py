"""Responses that compiled engines continue after tokens of another one of the same bundle: equal to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from quantization.calibrate import calibrate
from runtime.constraints.compiler import ConstraintCompiler
from runtime.engine.core import EngineCore
from runtime.engine.in_process import ModelledTime
from runtime.engine.opening import Opened, open_bundle
from runtime.engine.sampling import BatchSampler
from runtime.wire.limits import Limits
from runtime.wire.messages import GenerateRequest
from runtime.wire.start import EngineSettings
from tests.answering import KINDS, served
from tests.exported import build_float, tiny_graph
from tests.integration.test_batch_invariance import Model, make_bundle, recipe
from tests.tiny import tiny_texts

NEW, CUTS = 40, (1, 2, 7, 19, 33, 39)


@pytest.fixture(scope="module", params=["float", "mix", "int8 KV"])
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opened]:
    folder, graph = tmp_path_factory.mktemp("bundle"), tiny_graph()
    if request.param == "float":
        bundle = build_float(graph, folder / "engine", 16)
    else:
        calibration = calibrate(recipe("8-bit").calibrate, graph, tiny_texts(8, 0), folder / "calibration")
        bundle = make_bundle(Model(graph, calibration, []), request.param, folder)
    found = open_bundle(bundle.folder, EngineSettings(threads=1))
    yield found
    found.engine.close()


def core(opened: Opened) -> EngineCore:
    engine, info = ModelledTime(opened.engine), opened.info
    compiler = ConstraintCompiler(opened.tokenizer or "", info.vocab_size, info.stop_tokens)
    return EngineCore(engine, Limits(), BatchSampler(info.vocab_size, compiler, opened.kernel), clock=engine.clock)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_request_goes_on_to_the_bit(opened: Opened, kind: str) -> None:
    from tokenizers import Tokenizer

    text = tiny_texts(1, 3)[0]
    prompt = Tokenizer.from_str(opened.tokenizer or "").encode(text).ids[:90]
    request = GenerateRequest("a", prompt, NEW, **{"stop_tokens": opened.info.stop_tokens, **KINDS[kind]})
    made = core(opened)
    (expected,) = served(made, request)
    cuts = [cut for cut in CUTS if cut < len(expected.tokens)]
    assert cuts
    asked = [
        replace(request, id=f"{cut}", answered=expected.tokens[:cut], prompt_logprobs=None, cache_salt=salt)
        for salt in (b"", b"computed again")
        for cut in cuts
    ]
    alone = [served(core(opened), one)[0] for one in asked]
    together = served(core(opened), *[replace(one, id=f"{number}") for number, one in enumerate(asked)])
    for one, *found in zip(asked, alone, together, strict=True):
        assert found == [expected.after(len(one.answered))] * 2, f"after {len(one.answered)} tokens"
