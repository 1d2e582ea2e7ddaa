from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.api.instance import Instance
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from engines.sequences import Sequences
from evals.items import read_items
from evals.kinds.tasks import ChoiceItem, EvalReport, TaskSettings
from evals.kinds.tasks.harness import EngineLM, bos_token_of, encode
from evals.kinds.tasks.questions import choose_documents, definition_path, load_task, share_out
from evals.kinds.text import HeldOutSettings, TextItem, text_metrics
from evals.kinds.text.measure import choice_items, evaluate, task_metrics
from evals.text import log_likelihoods
from pipeline.stages.answering import CoreAnswerer
from runtime.wire.limits import Limits
from tapeout.artifact import ArtifactRef, load
from tapeout.errors import EvidenceError, RecipeError, RequestError
from tests.fake_engine import MACHINE, History, TorchEngine
from tests.task_tables import write_tables

TOKENS = st.lists(st.integers(0, 31), min_size=1, max_size=6)


def words() -> Tokenizer:
    """w0 .. w31, one token a word."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(32)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def answerer(engine: Any) -> CoreAnswerer:
    return CoreAnswerer(engine, Limits())


def lm_over(engine: Any, **options: Any) -> EngineLM:
    return EngineLM(engine, words(), stop_tokens=[0], bos_token=options.pop("bos_token", None), **options)


def instance(kind: Any, *arguments: Any) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


@settings(deadline=None, max_examples=150)
@given(st.lists(TOKENS, min_size=1, max_size=4), st.data())
def test_scores_come_back_in_request_order_whatever_is_shared(contexts: list[list[int]], data: st.DataObject) -> None:
    longer = [one + other for one in contexts for other in contexts]  # some have a common beginning
    draw = st.lists(st.tuples(st.sampled_from([*contexts, *longer]), TOKENS), min_size=1, max_size=12)
    requests = [(None, context, continuation) for context, continuation in data.draw(draw)]
    engine = History()
    results = lm_over(engine)._loglikelihood_tokens(requests)
    for (_, context, continuation), (score, greedy) in zip(requests, results, strict=True):
        rows = np.stack([engine.engine.logits_after([*context, *continuation[:i]]) for i in range(len(continuation))])
        assert score == pytest.approx(log_likelihoods(rows, continuation).sum())
        assert greedy == (rows.argmax(axis=1).tolist() == continuation)


def test_a_shared_context_is_computed_once_and_one_token_choices_cost_nothing_more() -> None:
    engine = History()
    lm = lm_over(engine)
    context = [1, 2, 3, 4]
    lm._loglikelihood_tokens([(None, context, choice) for choice in ([5], [6], [7, 8, 9], [5, 6])])
    assert engine.engine.steps == [[4], [2, 1]]
    assert (lm.calls, lm.tokens) == (2, 7)
    lm._loglikelihood_tokens([(None, context, [5, 6])])  # alone: one call, the last token is never fed
    assert engine.engine.steps[2:] == [[5]]
    lm._loglikelihood_tokens([(None, context, choice) for choice in ([7, 8, 9], [5, 6])])  # the first comes with it
    assert engine.engine.steps[3:] == [[6], [1]]


def test_what_two_contexts_have_in_common_is_computed_once() -> None:
    engine = History()
    lm_over(engine)._loglikelihood_tokens([(None, [1, 2, 3, 4, option], [7, 8]) for option in (5, 6)])
    assert engine.engine.steps == [[6], [2]]


def test_greedy_flag_is_true_for_the_likeliest_continuation_only() -> None:
    engine = History()
    best = [int(engine.engine.logits_after([3]).argmax())]
    best.append(int(engine.engine.logits_after([3, *best]).argmax()))
    worse = [best[0], (best[1] + 1) % 32]
    (one, two) = lm_over(engine)._loglikelihood_tokens([(None, [3], best), (None, [3], worse)])
    assert one[1] and not two[1] and one[0] > two[0]


def test_too_long_requests_lose_their_beginning() -> None:
    engine = History(max_tokens=6)
    tokens = list(range(1, 12))
    # 6 positions hold all but the last token: 7 tokens are read or predicted, 3 of them the continuation.
    ((score, _),) = lm_over(engine)._loglikelihood_tokens([(None, tokens[:8], tokens[8:])])
    ((short, _),) = lm_over(engine)._loglikelihood_tokens([(None, tokens[4:8], tokens[8:])])
    assert score == short
    with pytest.raises(EvidenceError, match="7 continuation tokens"):
        lm_over(engine)._loglikelihood_tokens([(None, [1], [1] * 7)])


@pytest.mark.parametrize("context, continuation", [([], [1]), ([1], [])])
def test_requests_with_nothing_to_score_are_refused(context: list[int], continuation: list[int]) -> None:
    with pytest.raises(EvidenceError, match="at least one of each"):
        lm_over(History())._loglikelihood_tokens([(None, context, continuation)])


def test_non_finite_logits_are_refused() -> None:
    engine = History()
    engine.engine.table[:] = np.nan
    with pytest.raises(RequestError, match="not finite"):
        lm_over(engine)._loglikelihood_tokens([(None, [1], [2])])


def test_the_bos_token_is_pinned_and_put_once() -> None:
    tokenizer = words()
    assert bos_token_of(tokenizer) is None
    tokenizer.post_processor = processors.TemplateProcessing(single="w7 $A", special_tokens=[("w7", 7)])
    assert bos_token_of(tokenizer) == 7
    assert encode(tokenizer, "w2 w3", 7) == encode(tokenizer, "w7 w2 w3", 7) == [7, 2, 3]
    assert encode(tokenizer, "w2 w3", None) == [2, 3]
    tokenizer.post_processor = processors.TemplateProcessing(single="$A w7", special_tokens=[("w7", 7)])
    with pytest.raises(EvidenceError, match="beginning-of-text"):
        bos_token_of(tokenizer)


@pytest.mark.parametrize("bos_token, context", [(None, [0]), (7, [7])])
def test_an_empty_context_is_the_prefix_token(bos_token: int | None, context: list[int]) -> None:
    engine = History()
    ((score, _),) = lm_over(engine, bos_token=bos_token).loglikelihood([instance("loglikelihood", "", "w4 w5")])
    rows = np.stack([engine.engine.logits_after(context), engine.engine.logits_after([*context, 4])])
    assert score == pytest.approx(log_likelihoods(rows, [4, 5]).sum())


@pytest.mark.parametrize("length", [1, 5, 6, 7, 20])
def test_rolling_predicts_every_token_once(length: int) -> None:
    engine = History(max_tokens=6)
    tokens = [(3 * i + 1) % 32 for i in range(length)]
    text = " ".join(f"w{token}" for token in tokens)
    requests = [instance("loglikelihood_rolling", text), instance("loglikelihood_rolling", "w9")]
    first, second = lm_over(engine).loglikelihood_rolling(requests)
    stream, expected = [0, *tokens], 0.0
    for end in range(1, length + 1):
        # Windows of 6 positions: whole ones first, and the last reaches back as far as 6 positions go.
        window = 6 * ((end - 1) // 6)
        begin = window if window + 6 <= length else max(length - 6, 0)
        expected += float(log_likelihoods(engine.engine.logits_after(stream[begin:end])[None], [stream[end]])[0])
    assert first == pytest.approx(expected)
    assert second == pytest.approx(log_likelihoods(engine.engine.logits_after([0])[None], [9])[0])


def test_generate_until_cuts_at_the_stop_string_and_truncates_from_the_left() -> None:
    engine = History(max_tokens=16)
    tokens = [3]
    for _ in range(8):
        tokens.append(int(engine.engine.logits_after(tokens).argmax()))
    answer = [f"w{token}" for token in tokens[1:]]
    unsaid = next(token for token in range(32) if token not in tokens)
    lm = EngineLM(engine, words(), stop_tokens=[unsaid], bos_token=None, answerer=answerer)
    free, cut = lm.generate_until(
        [
            instance("generate_until", "w3", {"max_gen_toks": 8, "until": []}),
            instance("generate_until", "w3", {"max_gen_toks": 8, "until": [f" {answer[4]} "[1:-1]]}),
        ]
    )
    assert free.split() == answer
    assert cut == free.split(answer[4])[0]
    long = " ".join(["w5"] * 30)
    (text,) = lm.generate_until([instance("generate_until", long, {"max_gen_toks": 10, "until": "never"})])
    assert text.split()[0] == f"w{int(engine.engine.logits_after([5] * 6).argmax())}"
    with pytest.raises(EvidenceError, match="sampling"):
        lm.generate_until([instance("generate_until", "w3", {"temperature": 0.7})])


@given(st.dictionaries(st.text(max_size=3), st.integers(1, 500), min_size=1, max_size=6), st.integers(1, 1500))
def test_items_are_shared_out_evenly_and_add_up(sizes: dict[str, int], items: int) -> None:
    shares = share_out(sizes, items)
    assert shares.keys() == sizes.keys() and sum(shares.values()) == min(items, sum(sizes.values()))
    for task, share in shares.items():
        assert share <= sizes[task]
        assert share == sizes[task] or share >= max(shares.values()) - 1
    chosen = choose_documents({task: contents(size) for task, size in sizes.items()}, items, seed=3)
    assert {task: len(numbers) for task, numbers in chosen.items()} == {t: n for t, n in shares.items() if n}
    for task, numbers in chosen.items():
        assert numbers == sorted(set(numbers)) and numbers[-1] < sizes[task]


def contents(size: int) -> list[str]:
    return [f"question {number}" for number in range(size)]


def test_the_draw_is_the_seeds_and_not_the_other_tasks() -> None:
    hundred = contents(100)
    both = choose_documents({"a": hundred, "b": hundred}, 40, seed=1)
    assert both == choose_documents({"a": hundred, "b": hundred}, 40, seed=1)
    assert both["a"] != both["b"] and both["a"] != choose_documents({"a": hundred, "b": hundred}, 40, seed=2)["a"]
    assert both["a"] == choose_documents({"a": hundred, "c": hundred}, 40, seed=1)["a"]


def test_a_question_that_stands_twice_in_the_data_is_asked_once() -> None:
    asked = ["a", "b", "a", "c", "b", "a"]
    assert choose_documents({"task": asked}, 6, seed=0) == {"task": [0, 1, 3]}


# --- lm-eval's definitions over local tables, and the tiny llama -----------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tables")
    write_tables(root)
    return root


@pytest.fixture(scope="module")
def tiny_model() -> Any:
    from transformers import AutoModelForCausalLM

    from tests.tiny import tiny_checkpoint

    return AutoModelForCausalLM.from_pretrained(tiny_checkpoint())


@pytest.mark.parametrize("name, metric", [("sciq", "acc_norm"), ("winogrande", "acc")])
def test_loglikelihoods_match_lm_evals_own_transformers_model(
    name: str, metric: str, data: Path, tiny_model: Any, tiny_checkpoint: Path
) -> None:
    from lm_eval.evaluator import evaluate as run_tasks
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    tokenizer = Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))
    task = load_task(name, data)
    assert task.main_metric == metric
    ours = EngineLM(
        Sequences(TorchEngine(tiny_model, max_tokens=512)),
        tokenizer,
        stop_tokens=[2],
        bos_token=bos_token_of(tokenizer),
    )
    theirs = HFLM(pretrained=tiny_model, tokenizer=AutoTokenizer.from_pretrained(tiny_checkpoint), batch_size=1)
    logs: list[list[dict[str, Any]]] = []
    for lm in (ours, theirs):
        results: Any = run_tasks(lm, {"tasks": {name: task}, "groups": {}}, limit=12, bootstrap_iters=0)
        logs.append(results["samples"][name])
    assert len(logs[0]) == len(logs[1]) == 12
    for mine, other in zip(*logs, strict=True):
        assert mine["prompt_hash"] == other["prompt_hash"] and mine[metric] == other[metric]
        left, right = (list(zip(*sample["filtered_resps"], strict=True)) for sample in (mine, other))
        np.testing.assert_allclose(left[0], right[0], atol=1e-3)
        assert left[1] == right[1]


def test_templates_that_are_compiled_once_read_the_same(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lm_eval.utils

    environment: Any = lm_eval.utils.env
    once = {name: load_task(name, data).contents() for name in ("sciq", "winogrande")}
    monkeypatch.setattr(environment, "from_string", environment.from_string.__wrapped__)
    assert {name: load_task(name, data).contents() for name in once} == once


def test_task_items_pair_by_document_and_know_the_right_answer(data: Path, tiny_checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))
    engines = [History(tokenizer.get_vocab_size(), max_tokens=512, noise=noise) for noise in (0.0, 0.4)]
    left, right = (EngineLM(engine, tokenizer, stop_tokens=[2], bos_token=None) for engine in engines)
    for name, choices in (("sciq", 4), ("winogrande", 2)):
        task = load_task(name, data)
        numbers = [1, 4, 9, 20]
        items = choice_items(task, numbers, left, right)
        assert [item.doc_id for item in items] == numbers
        for item in items:
            doc = task.task_docs[item.doc_id]
            assert item.gold == (3 if name == "sciq" else int(doc["answer"]) - 1)
            assert item.baseline_score == (item.baseline_choice == item.gold)
            assert item.candidate_score == (item.candidate_choice == item.gold)
            assert len(item.baseline_loglikelihoods) == len(item.candidate_loglikelihoods) == choices
            assert item.baseline_loglikelihoods != item.candidate_loglikelihoods
            if name == "sciq":
                lengths = [len(choice) for choice in task.doc_to_choice(doc)]
                assert item.baseline_choice == np.argmax(np.array(item.baseline_loglikelihoods) / lengths)


class Inattentive(EngineLM):
    """Answers other questions than it was asked."""

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> Any:
        for request in requests:
            request.arguments = (request.arguments[0] + " w", request.arguments[1])
        return super().loglikelihood(requests)


def test_engines_that_saw_different_questions_are_not_paired(data: Path) -> None:
    left, right = (kind(History(), words(), stop_tokens=[0], bos_token=None) for kind in (EngineLM, Inattentive))
    with pytest.raises(EvidenceError, match="not asked the same questions of winogrande"):
        choice_items(load_task("winogrande", data), [1, 4], left, right)


def test_evaluate_writes_the_same_report_twice(
    tmp_path: Path, data: Path, tiny_checkpoint: Path, tiny_texts: Callable[[int, int], list[str]]
) -> None:
    def run(name: str) -> Any:
        return evaluate(
            TaskSettings(tasks=("sciq", "winogrande"), items=20),
            HeldOutSettings(document_tokens=40),
            History(1024, max_tokens=512),
            History(1024, max_tokens=512, noise=0.2),
            answerer,
            tokenizer_file=tiny_checkpoint / "tokenizer.json",
            stop_tokens=[2],
            data=data,
            heldout_texts=tiny_texts(3, 1),
            seed=0,
            executed_on=MACHINE,
            folder=tmp_path / name,
            parents={name: ArtifactRef("EngineBundle", name) for name in ("baseline", "candidate")},
        )

    one, two = run("one"), run("two")
    assert one.digest == two.digest
    report = load(tmp_path / "one", EvalReport).record
    assert report.tasks == {"sciq": 10, "winogrande": 10} and report.documents == 3 + HeldOutSettings().long_documents
    assert report.baseline != report.candidate
    questions = read_items(one.folder / "task_items.jsonl", ChoiceItem)
    texts = read_items(one.folder / "text_items.jsonl", TextItem)
    assert len(questions) == 20 and [item.tokens for item in texts if not item.long] == [39, 39, 39]
    metrics = json.loads((one.folder / "metrics.json").read_text())
    assert metrics == {**task_metrics(questions), **text_metrics(texts)}
    right = sum(item.candidate_score for item in questions)
    assert metrics["candidate_accuracy"] == right / 20
    assert 0 < metrics["kl_mean"] < metrics["kl_max"] and metrics["top_token_agreement"] < 1
    assert metrics["perplexity_ratio"] == pytest.approx(
        metrics["candidate_perplexity"] / metrics["baseline_perplexity"]
    )
    assert sorted(p.name for p in data.glob("sciq/none/validation/*")) == [
        "data-00000-of-00001.arrow",
        "dataset_info.json",
        "state.json",
    ]  # nothing is cached beside the user's data


def test_definitions_are_lm_evals_own() -> None:
    assert definition_path("arc_easy").parts[-2:] == ("arc", "arc_easy.yaml")
    with pytest.raises(RecipeError, match="arc_easy"):
        definition_path("arc_esay")


def test_a_data_set_is_found_by_its_other_name(tmp_path: Path) -> None:
    """lm-eval's social_iqa reads lighteval/siqa, a copy of allenai/social_i_qa."""
    answers = {"answerA": "rest", "answerB": "run", "answerC": "shout"}
    row = {"context": "Robin came home late.", "question": "What does Robin want to do?", **answers, "label": "1"}
    rows = [row, {**row, "label": "3"}, {**row, "question": "Why did Robin come late?"}]
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "social_i_qa/none/validation"))
    task = load_task("social_iqa", tmp_path)
    assert task.right_choice(task.task_docs[0]) == 0 and task.main_metric == "acc"
    asked = task.contents()
    assert asked[0] == asked[1] != asked[2]  # another right answer makes no other question


def test_tasks_that_cannot_be_paired_or_read_are_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="generate_until"):
        load_task("gsm8k", data)
    with pytest.raises(EvidenceError, match="no table for task 'piqa'"):
        load_task("piqa", data)
    Dataset.from_list([{"question": "q", "passage": "p", "answer": True}]).save_to_disk(
        str(tmp_path / "super_glue/boolq/validation")
    )
    with pytest.raises(EvidenceError, match=r"reads 'label'(.|\n)*found question, passage, answer"):
        load_task("boolq", tmp_path)
    Dataset.from_list([{"question": "q", "label": 1}]).save_to_disk(str(tmp_path / "other/super_glue/boolq/validation"))
    with pytest.raises(EvidenceError, match=r"'boolq' cannot read(.|\n)*found question, label"):
        load_task("boolq", tmp_path / "other")


def test_a_hidden_test_split_is_not_used_where_the_definition_names_none(data: Path, tmp_path: Path) -> None:
    rows = Dataset.from_list([{"goal": "g", "sol1": "a", "sol2": "b", "label": 1}])
    rows.save_to_disk(str(tmp_path / "piqa/plain_text/test"))
    with pytest.raises(EvidenceError, match="piqa/<one folder>/validation"):
        load_task("piqa", tmp_path)
    rows.save_to_disk(str(tmp_path / "piqa/plain_text/validation"))
    assert len(load_task("piqa", tmp_path).task_docs) == 1
