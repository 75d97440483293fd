"""Readers of text: neighbours of the cases in `answers_by_hand`, each reader by itself, and their time."""

import time
from fractions import Fraction

import pytest
from PIL import Image

from mmrl.rewards import build, extract_answer
from mmrl.rewards.parsing.boxes import gold_boxes, parse_boxes, parse_objects, parse_points, states_nothing
from mmrl.rewards.parsing.choices import OptionLetterReader, parse_options
from mmrl.rewards.parsing.quantities import last_quantity
from mmrl.rewards.parsing.quotes import quoted_texts
from mmrl.rewards.parsing.responses import split_thoughts, without_thoughts
from mmrl.rewards.parsing.times import parse_times
from mmrl.rewards.parsing.typography import normalize_typography
from mmrl.rewards.parsing.wording import normalize_answer
from mmrl.rollouts import Prompt, Sample


@pytest.mark.parametrize(
    ("response", "thoughts", "rest"),
    [
        ("<think>a</think>b", "a", "b"),
        ("a</think>b", "a", "b"),
        ("b<think>a", "a", "b"),
        ("<think>a</think>b<think>c", "ac", "b"),
        ("<think>a</think>b</think>c", "a</think>b", "c"),
        ("\u25c1think\u25b7a\u25c1/think\u25b7b", "a", "b"),
        ("[THINK]a[/THINK]b", "a", "b"),
        ("<thinking>a</thinking>b", "a", "b"),
        ("b", "", "b"),
    ],
)
def test_thoughts_end_with_the_last_closing_tag(response, thoughts, rest):
    assert split_thoughts(response) == (thoughts, rest) and without_thoughts(response) == rest


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"$\boxed{\text{cat}}$", "cat"),
        (r"<answer>\boxed{\mathbf{\text{cat}}}</answer>", "cat"),
        ("$$7$$", "7"),
        (r"\(7\)", "7"),
        ("$5 or $6", "$5 or $6"),
        ("<|begin_of_box|>\\boxed{7}<|end_of_box|>", "7"),
        ("<|begin_of_box|>6<|end_of_box|> or \\boxed{7}", "7"),
        ("\\boxed{7} or <|begin_of_box|>6<|end_of_box|>", "6"),
        ("3 + 4 = 7\n#### 7", "7"),
        ("#### Answer\nseven", "#### Answer\nseven"),
        (r"5\text{ cm}", r"5\text{ cm}"),
    ],
)
def test_the_answer_is_unwrapped(response, answer):
    assert extract_answer(response) == answer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\u2212\xbd", "-1/2"),
        ("3\xbe m\xb2", "3 3/4 m^2"),
        ("\u2155", "1/5"),
        ("10\u207b\xb3", "10^-3"),
        ("\u0661\u0662\u066b\u0665", "12.5"),
        ("\xabA\xbb \u201eB\u201c \u300cC\u300d", '"A" "B" "C"'),
        ("a\u200b\u00adb\u200f", "ab"),
        ("2\u202f000\u2009000 km", "2000000 km"),
        ("1\u20092", "1 2"),
        ("\uff21\uff1a\uff11\uff05", "A:1%"),
        ("x \u2264 3 \xd7 4", "x <= 3 * 4"),
        ("A`s", "A`s"),
    ],
)
def test_typography(text, expected):
    assert normalize_typography(text) == expected


SAME = [
    ("cat and dog", "A cat and a dog"),
    ("the cat on the mat", "Cat on the mat"),
    ("25 \xb0C", "25\xb0C"),
    ("5 %", "5%"),
    ("(1, 2)", "(1,2)"),
    ("Dr. Smith", "dr smith"),
    ("1'000", "1000"),
    ("1,00,000", "100000"),
    ("x^{2}", "x\xb2"),
    ("2\xbd", "2 1/2"),
    ("rock 'n' roll", "rock \u2018n\u2019 roll"),
    ("12:30", "12\uff1a30"),
    ("\u732b", "\u300e\u732b\u300f"),
    ("-.5", "-.5"),
    ("(cat)", "cat"),
    ('"5"', "5"),
    ("e.g.", "eg"),
]
DIFFERENT = [
    ("B", "A B"),
    ("B", "A, B"),
    ("7", "7!"),
    ("were", "we're"),
    ("co-op", "coop"),
    ("5'", '5"'),
    ("5'", "5"),
    ("[0,1]", "(0,1)"),
    ("Vitamin A deficiency", "vitamin deficiency"),
    (".5", "5"),
    ("1.5", "1,5"),
    ("&", "|"),
    ("10\xb2", "102"),
    ("f(x)", "fx"),
    ("a", "an"),
    ("5 m", "5 mm"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_wordings_that_are_the_same(one, other):
    assert normalize_answer(one) == normalize_answer(other) != ""


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_wordings_that_differ(one, other):
    assert normalize_answer(one) != normalize_answer(other)


def test_no_mark_is_worded_as_nothing_or_as_another():
    marks = [chr(code) for code in range(33, 127)] + list("\xb1\xb0\u20ac\xa3\xd7\u221a\u03c0\u221e")
    words = {normalize_answer(mark) for mark in marks}
    assert "" not in words
    pairs = {frozenset((a, b)) for a in marks for b in marks if a < b and normalize_answer(a) == normalize_answer(b)}
    letters = {frozenset((chr(code), chr(code + 32))) for code in range(65, 91)}
    assert pairs - letters == {frozenset("*\xd7")}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5 - 3", "3"),
        ("5 -3", "3"),
        ("x = - 7", "-7"),
        ("the answer is -3", "-3"),
        ("between -3 and -5", "-5"),
        ("covid-19", "19"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("(-5)", "-5"),
        ("minus 5", "-5"),
        ("-\\frac{3}{4}", "-3/4"),
        ("1\\frac{1}{2}", "3/2"),
        ("2**3", "8"),
        ("2^-1", "1/2"),
        ("2\u4e07", "20000"),
        ("1 000 000", "1000000"),
        ("1'234", "1234"),
        ("1/0", None),
        ("3/4/2020", None),
        ("v1.2.3", None),
        ("12:30", None),
        ("1e401", None),
        ("9" * 500, None),
        ("...5", "5"),
        ("5\\,000", "5000"),
        ("1.5 \\cdot 10^{-3}", "3/2000"),
        ("3rd", "3"),
        ("\xb15", "5"),
    ],
)
def test_numbers(text, value):
    quantity = last_quantity(text)
    assert (None if quantity is None else quantity.value) == (None if value is None else Fraction(value))


@pytest.mark.parametrize(
    ("gold", "response", "value"),
    [
        ("12 m", "1200 cm", 1),
        ("12 m", "0.12 km", 0),
        ("1 h", "60 minutes", 1),
        ("5 m/s", "18 km/h", 1),
        ("9.8 m/s^2", "9.8 m/s\xb2", 1),
        ("2 m^2", "20000 cm^2", 1),
        ("2 m^2", "200 cm^2", 0),
        ("5 m", "5 m\xb2", 0),
        ("$5", "5 dollars", 1),
        ("$5", "\u20ac5", 0),
        ("30\xb0C", "30\xb0F", 0),
        ("5 apples", "5", 1),
        ("5%", "5 kg", 0),
        ("7 in total", "7 cm", 1),
        ("1 ft", "30.48 cm", 1),
        ("1/3", "0.333333", 1),
        ("1/3", "0.33", 0),
        ("0", "1e-9", 0),
        ("1000001", "1000002", 0),
    ],
)
def test_units_and_closeness(gold, response, value):
    assert build("numeric")(Sample(Prompt("p", "question", answer=gold), response)) == value


@pytest.mark.parametrize(
    ("text", "letters"),
    [
        ("A is correct", "A"),
        ("The answer is A because it is red", "A"),
        ("the answer is a cat", ""),
        ("A Dog", ""),
        ("B dog", "B"),
        ("Option A shows a dog. Option B a cat. The answer is B.", "B"),
        ("Option A is wrong. Option B is right.", "AB"),
        ("not A but B", "AB"),
        ("Choose B over A", "AB"),
        ("C: I see", "C"),
        ("A-", ""),
        ("B-52", ""),
        ("B1", ""),
        ("J'ai", ""),
        ("I and J", "IJ"),
        ("b,d", "BD"),
        ("B\u2014a cat", "B"),
        ("\ub2f5\uc740 B\uc785\ub2c8\ub2e4", "B"),
        ("**Answer**: B", "B"),
        ("Answer is (a) cat", "A"),
    ],
)
def test_letters(text, letters):
    assert sorted(OptionLetterReader("ABCDEFGHIJ").read(text)) == sorted(letters)


def test_options_of_a_question():
    assert parse_options("Which?\nA. a cat\nB) Dog\n(C) 1/2\nAnswer with a letter.") == {
        "A": "cat",
        "B": "dog",
        "C": "1/2",
    }
    assert parse_options("Which? (A) cat (B) dog") == {"A": "cat", "B": "dog"}
    assert parse_options("Which?\nB. dog\nC. cat") == {} == parse_options("A. Einstein was born when?")


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2, 3, 4]",
        "[[1,2],[3,4]]",
        "(1,2) and (3,4)",
        "<box>1, 2, 3, 4</box>",
        "[1 2 3 4]",
        "{'x1': 1, 'y1': 2, 'x2': 3, 'y2': 4}",
        "left=1, top=2, right=3, bottom=4",
        "xmin: 1, xmax: 3, ymin: 2, ymax: 4",
        "x: 1, y: 2, width: 2, height: 2",
        '<box x1="1" y1="2" x2="3" y2="4"/>',
        "1,2,3,4.",
        "\u30101\uff0c2\uff0c3\uff0c4\u3011",
    ],
)
def test_forms_of_a_box(text):
    assert parse_boxes(text) == [(1, 2, 3, 4)] == gold_boxes(text)


def test_several_boxes_and_none():
    assert parse_boxes("[[1,2,3,4;5,6,7,8]]") == [(1, 2, 3, 4), (5, 6, 7, 8)]
    assert parse_boxes("(1,2) (3,4) (5,6) (7,8)") == [(1, 2, 3, 4), (5, 6, 7, 8)]
    assert parse_boxes("[1,2,3]") == [] == parse_boxes("there are 3 cats, 4 dogs")


def test_forms_of_a_point():
    for text in ('<point x="20" y="100" alt="cat">cat</point>', "click(20,100)", "x=20 y=100", "20 , 100"):
        assert parse_points(text) == [(20, 100)]
    assert parse_points('{"x":20.5,"y":-1}') == [(20.5, -1)]
    assert parse_points("[1, 2, 3, 4]") == []


@pytest.mark.parametrize(
    ("gold", "boxes"),
    [
        ([1, 2, 3, 4], [(1, 2, 3, 4)]),
        ([[1, 2], [3, 4]], [(1, 2, 3, 4)]),
        (["[1,2,3,4]", {"box": [5, 6, 7, 8]}], [(1, 2, 3, 4), (5, 6, 7, 8)]),
        ([], []),
        ({"bbox_2d": []}, []),
        ({"label": "cat"}, None),
        ([1, 2, 3], None),
        ([[1, 2, 3, 4], [5, 6, 7]], None),
        (None, None),
        (7, None),
    ],
)
def test_gold_boxes(gold, boxes):
    assert gold_boxes(gold) == boxes


@pytest.mark.parametrize("text", ["[]", "None.", "No", "There is no cat.", "The cat is not present", '{"objects": []}'])
def test_nothing_is_stated(text):
    assert states_nothing(text)


@pytest.mark.parametrize("text", ["", "cat", "not sure", "no cat [1, 2, 3, 4]?", "I see it"])
def test_nothing_is_not_stated(text):
    assert not states_nothing(text)


def test_objects_are_json_python_or_tags():
    assert parse_objects("[{'label': 'cat', 'bbox_2d': [1, 2, 3, 4]}] {broken}") == [
        {"label": "cat", "bbox_2d": [1, 2, 3, 4]}
    ]
    tagged = "<ref>cat</ref><box>[[1,2,3,4]]</box> <ref>dog</ref><box>(5,6),(7,8)</box>"
    assert parse_objects(tagged) == [
        {"label": "cat", "bbox_2d": [1, 2, 3, 4]},
        {"label": "dog", "bbox_2d": [5, 6, 7, 8]},
    ]


@pytest.mark.parametrize(
    ("text", "times"),
    [
        ("1 to 2 minutes", [60, 120]),
        ("1 min 30 s to 2 min", [90, 120]),
        ("1h 2m 3s to 1h3m", [3723, 3780]),
        ("2 minutes and 10 seconds", [130]),
        ("3 secs and 7 secs", [3, 7]),
        ("3000 ms - 7500 ms", [3, 7.5]),
        ("12:30.5", [750.5]),
        ("1:02:03.5", [3723.5]),
        ("0.5 hour", [1800]),
        ("1\u520630\u79d2", [90]),
    ],
)
def test_times(text, times):
    assert parse_times(text) == pytest.approx(times)


def test_quotes():
    text = "A 'big' sign \u2018x\u2019 \"y z\" \u201ez\u201c \xab w \xbb \u300cv\u300d, the dogs' 'don't'"
    assert quoted_texts(text) == ["big", "x", "y z", "z", "w", "v", "don't"]


ATOMS = (
    *("<think>", "</think>", "<|begin_of_box|>", "\\boxed{", "\\text{", "\\frac{1}{", "####\n", "{", "[1,", "(1, 2) "),
    *("[ ", "1", " ", "1 ", "1 1/", "1/", "1^", "1:2:", "1,000,", "1 000 ", "1m", "1 minute and ", "1 m/s*", "x=1 "),
    *("x1=1 ", "'", '"', "\u201ca", "\u2018a", "<ref>a</ref>", "$", "\xbd", "\xb2", "\u0301\u0327", "a ", "the "),
    *("A, ", "answer is ", "there is ", "a.", "(a,", "- ", "_a", "*", "\u221a(", "1 2 3 4 "),
)
BOX = [[1, 1, 9, 9]]
READ = {
    "exact_match": "7",
    "numeric": "7",
    "multiple_choice": "B",
    "several_choices": ["A"],
    "box_iou": BOX,
    "labelled_boxes": [{"label": "a", "bbox_2d": BOX[0]}],
    "point_inside": BOX,
    "interval_iou": [3, 8],
    "abstention": "7",
    "boxes_in_reasoning": None,
}


@pytest.mark.parametrize("name", READ)
def test_time_grows_with_the_length_and_not_with_its_square(name):
    """The square of 40 000 letters would take minutes; all of these together take a second or two."""
    reward, images = build(name), (Image.new("RGB", (64, 64)),)
    prompt = Prompt("p", "Which?\nA. cat\nB. dog", images=images, answer=READ[name])
    reward(Sample(prompt, "x"))  # imports what it needs, which is not measured
    for atom in ATOMS:
        text = atom * (40_000 // len(atom))
        start = time.process_time()
        reward(Sample(prompt, text + "x"))
        assert time.process_time() - start < 3, atom
