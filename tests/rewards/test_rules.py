"""Rewards that follow rules, through the registry: several boxes, points, choices, silence, agreement, calls."""

import itertools
import math
import random
import time

import pytest
from PIL import Image

from mmrl.errors import UserError
from mmrl.rewards import RewardSet, RewardSpec, build
from mmrl.rewards.matching import best_assignment, soft_assignment
from mmrl.rewards.visual.coordinates import Resize
from mmrl.rollouts import Prompt, Sample


def sample(response, answer, size=(100, 200)):
    images = () if size is None else (Image.new("RGB", size),)
    return Sample(Prompt("p", "question", images=images, answer=answer), response)


def score(name, response, answer, size=(100, 200), **options):
    return build(name, options)(sample(response, answer, size))


# --- coordinates ---

HALF = [[0, 0, 50, 100]]  # of an image of 100 x 200 the upper left quarter

SAID = [
    ("pixels", "[0, 0, 50, 100]", {}),
    ("thousandths", "[0, 0, 500, 500]", {}),
    ("unit", "[0, 0, 0.5, 0.5]", {}),
    ("resized", "[0, 0, 56, 98]", {"resize": {"factor": 28}}),  # 112 x 196
]


@pytest.mark.parametrize(("convention", "said", "options"), SAID)
@pytest.mark.parametrize("match", ["hungarian", "sinkhorn"])
def test_every_convention_says_the_same_box(convention, said, options, match):
    assert score("boxes_matched", said, HALF, coordinates=convention, match=match, **options) == pytest.approx(1.0)
    others = [c for c, _, _ in SAID if c != convention]
    wrong = [score("boxes_matched", said, HALF, coordinates=other) for other in others]
    assert max(wrong) < 0.98


def test_gold_boxes_have_a_convention_of_their_own():
    assert score("boxes_matched", "[0,0,0.5,0.5]", [[0, 0, 500, 500]], coordinates="unit", answers="thousandths") == 1


@pytest.mark.parametrize(
    ("width", "height", "options", "expected"),
    [
        (100, 200, {}, (112, 196)),
        (1000, 500, {"factor": 28, "max_pixels": 100000}, (420, 196)),  # 1000 / 2.236 = 447.2 falls short of 16 x 28
        (10, 20, {"factor": 28, "min_pixels": 6272}, (56, 112)),  # 10 x 5.6 = 56, 20 x 5.6 = 112
        (10, 20, {"factor": 28, "min_pixels": 10000}, (84, 168)),  # 70.7 and 141.4 are rounded up
        (640, 480, {"factor": 32}, (640, 480)),
    ],
)
def test_resized(width, height, options, expected):
    found = Resize(**options).size(width, height)
    assert found == expected and found[0] % Resize(**options).factor == 0


def test_coordinates_that_need_an_image():
    with pytest.raises(UserError, match="set the reward's coordinates to thousandths or unit"):
        score("boxes_matched", "[0, 0, 1, 1]", HALF, size=None, coordinates="resized")


def test_boxes_of_one_convention_need_no_image():
    assert score("boxes_matched", "[0, 0, 50, 50]", HALF, size=None) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coordinates": "percent"}, "coordinates must be one of pixels, thousandths, unit, resized"),
        ({"resize": {"factor": 28}}, "resize is for coordinates 'resized'"),
        ({"coordinates": "resized", "resize": {"patch": 28}}, "resize has no key patch"),
        ({"match": "greedy"}, "match must be hungarian or sinkhorn"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        build("boxes_matched", options)


# --- assignments ---


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (3, 2), (4, 4), (5, 3)])
def test_the_best_assignment_is_the_best_of_all(shape):
    chance = random.Random(sum(shape))
    for _ in range(20):
        gains = [[chance.choice([0.0, chance.random()]) for _ in range(shape[1])] for _ in range(shape[0])]
        small, large = sorted(shape)
        best = max(
            sum(gains[r][c] if shape[0] <= shape[1] else gains[c][r] for r, c in zip(range(small), order, strict=True))
            for order in itertools.permutations(range(large), small)
        )
        pairs = best_assignment(gains)
        assert len(pairs) == small and len({r for r, _ in pairs}) == len({c for _, c in pairs}) == small
        assert sum(gains[r][c] for r, c in pairs) == pytest.approx(best)


def test_pairs_stand_in_the_order_of_the_rows():
    assert best_assignment([[0.9, 0.8, 0.0], [0.85, 0.1, 0.0]]) == [(0, 1), (1, 0)]  # 0.8 + 0.85, not 0.9 + 0.1
    assert best_assignment([[0.2], [0.7], [0.1]]) == [(1, 0)]
    assert best_assignment([]) == []


def test_soft_assignment():
    # exp of (1, 0; 0, 1) scaled: e / (e + 1) on the diagonal.
    weights = soft_assignment([[1.0, 0.0], [0.0, 1.0]], epsilon=1.0)
    assert weights[0] == pytest.approx([math.e / (math.e + 1), 1 / (math.e + 1)])
    sharp = soft_assignment([[0.9, 0.8, 0.0], [0.85, 0.1, 0.0]], epsilon=0.01)
    assert [[round(w) for w in row] for row in sharp] == [[0, 1, 0], [1, 0, 0]]  # 0.8 + 0.85, not 0.9 + 0.1


# --- boxes ---

TWO = [[0, 0, 10, 10], [20, 0, 30, 10]]


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("[0,0,10,10] [20,0,30,10]", 1.0),
        ("[20,0,30,10] (0, 0, 10, 10)", 1.0),  # in any order
        ("[0,0,10,10]", 0.5),
        ("[0,0,10,10] [20,0,30,10] [50,50,60,60]", 2 / 3),
        ("[0,0,10,5] [20,0,30,10]", 0.75),  # 1/2 and 1
        ("[0,0,10,10] [0,0,10,10]", 0.5),  # nobody is matched twice
        ("[10,10,0,0]", 0.0),
        ("none", 0.0),
        ("<think>[20,0,30,10]</think><answer>[0,0,10,10]</answer>", 0.5),
    ],
)
def test_boxes_matched(response, expected):
    assert score("boxes_matched", response, TWO) == pytest.approx(expected)


def test_sinkhorn_gives_something_for_a_box_between_two():
    between = "[10, 0, 20, 10] [0, 0, 10, 10]"
    near = [[5, 0, 15, 10], [0, 0, 10, 10]]
    hard = score("boxes_matched", between, near)
    soft = score("boxes_matched", between, near, match="sinkhorn", epsilon=0.5)
    assert hard == pytest.approx((1 / 3 + 1) / 2) and 0 < soft < hard


def test_boxes_without_a_gold_one_are_not_scored():
    assert score("boxes_matched", "[0,0,1,1]", None) is None
    assert score("boxes_matched", "[0,0,1,1]", "somewhere") is None


CATS = [{"label": "cat", "bbox_2d": [0, 0, 10, 10]}, {"label": "dog", "bbox_2d": [0, 0, 10, 10]}]


@pytest.mark.parametrize(
    ("response", "options", "expected"),
    [
        ('[{"label": "Cat", "bbox_2d": [0,0,10,10]}, {"label": "dog", "box": [0,0,10,5]}]', {}, 0.75),
        ('[{"label": "Cat", "bbox_2d": [0,0,10,10]}, {"label": "dog", "box": [0,0,10,5]}]', {"threshold": 0.6}, 0.5),
        ('[{"label": "cat", "bbox_2d": [0,0,10,10]}, {"label": "cat", "bbox_2d": [0,0,10,10]}]', {}, 0.5),
        ('{"label": "cat", "bbox_2d": [0,0,10]} {"bbox_2d": [0,0,10,10]} {broken}', {}, 0.0),
        ('<think>{"label": "cat", "bbox_2d": [0,0,10,10]}</think><answer>2</answer>', {"whole_response": True}, 0.5),
        ('<think>{"label": "cat", "bbox_2d": [0,0,10,10]}</think><answer>2</answer>', {}, 0.0),
    ],
)
def test_labelled_boxes(response, options, expected):
    assert score("labelled_boxes", response, CATS, **options) == pytest.approx(expected)


def objects(*boxes, label="cat", scores=None):
    rows = []
    for i, box in enumerate(boxes):
        scored = "" if scores is None else f', "score": {scores[i]}'
        rows.append(f'{{"label": "{label}", "bbox_2d": {box}{scored}}}')
    return ", ".join(rows)


RIGHT, OTHER, NOTHING = [0, 0, 10, 10], [20, 0, 30, 10], [50, 50, 60, 60]
GOLD = [{"label": "cat", "bbox_2d": RIGHT}, {"label": "cat", "bbox_2d": OTHER}]


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (objects(RIGHT, OTHER), 1.0),
        (objects(RIGHT), 0.5),
        (objects(RIGHT, NOTHING, OTHER), (1 + 2 / 3) / 2),  # precisions 1, 1/2, 2/3 at the hits 1 and 3
        (objects(NOTHING, RIGHT, OTHER), (2 / 3 + 2 / 3) / 2),
        (objects(NOTHING, RIGHT, OTHER, scores=[0.1, 0.9, 0.8]), 1.0),
        (objects(RIGHT, OTHER) + ", " + objects(RIGHT, label="dog"), 0.5),  # a label too many is worth 0
        (objects(RIGHT, RIGHT), 0.5),
    ],
)
def test_average_precision(response, expected):
    assert score("average_precision", response, GOLD, thresholds=[0.5]) == pytest.approx(expected)


def test_average_precision_over_thresholds():
    # 0.8 of the box: found at 0.5 to 0.8, which are 7 of 10.
    gold = [{"label": "cat", "bbox_2d": [0, 0, 10, 10]}]
    assert score("average_precision", objects([0, 0, 10, 8.01]), gold) == pytest.approx(0.7)


# --- points, clicks, regions ---


def test_point_inside():
    assert score("point_inside", "first (99, 99), then [20, 100]", [10, 50, 30, 150]) == 1.0
    assert score("point_inside", "(31, 100)", [10, 50, 30, 150]) == 0.0
    assert score("point_inside", "(300, 500)", [10, 50, 30, 150], coordinates="thousandths") == 1.0
    assert score("point_inside", "here", [10, 50, 30, 150]) == 0.0
    assert score("point_inside", "(1, 1)", "no box") is None


def test_points_outside_get_less_the_further_they_are():
    # 0.1 of the width and nothing of the height away.
    found = score("point_inside", "(40, 100)", [10, 50, 30, 150], spread=0.2)
    assert found == pytest.approx(math.exp(-0.125))
    assert score("point_inside", "(20, 100)", [10, 50, 30, 150], spread=0.2) == 1.0


def test_the_corners_of_a_box_are_no_point():
    assert score("point_inside", "[10, 50, 30, 150]", [10, 50, 30, 150]) == 0.0


CLICK = {"action": "click", "box": [10, 50, 30, 150]}


@pytest.mark.parametrize(
    ("response", "gold", "expected"),
    [
        ('<answer>{"action": "click", "coordinate": [20, 60]}</answer>', CLICK, 1.0),
        ('{"action": "click", "coordinate": [20, 160]}', CLICK, 0.25),
        ('{"action": "click"}', CLICK, 0.25),
        ('{"action": "type", "coordinate": [20, 60]}', CLICK, 0.0),
        ('{"action": "click", "coordinate": [20, 60]} {"action": "click", "coordinate": [20, 60]}', CLICK, 0.0),
        ('{"action": "type", "text": "Hello big world"}', {"action": "type", "text": "hello world"}, 0.25 + 0.75 * 0.8),
        ('{"action": "back"}', {"action": "back"}, 1.0),
        ('{"action": "back"}', "back", None),
    ],
)
def test_interface_action(response, gold, expected):
    found = score("interface_action", response, gold, kind_weight=0.25)
    assert found == (None if expected is None else pytest.approx(expected))


def test_region_iou():
    square = [[0, 0], [50, 0], [50, 100], [0, 100]]
    same = "(0,0) (50,0) (50,100) (0,100)"
    assert score("region_iou", same, square) == 1.0
    assert score("region_iou", "(0,0) (25,0) (25,100) (0,100)", square) == pytest.approx(0.5, abs=0.01)
    assert score("region_iou", "(0,0) (50,0)", square) == 0.0
    assert score("region_iou", same, [[0, 0], [1, 1]]) is None


# --- choices, silence, agreement ---


@pytest.mark.parametrize(
    ("response", "subset", "jaccard", "f1", "exact"),
    [
        ("A, C", 1.0, 1.0, 1.0, 1.0),
        ("C", 0.5, 0.5, 2 / 3, 0.0),
        ("A, B, C", 0.0, 2 / 3, 0.8, 0.0),
        ("B", 0.0, 0.0, 0.0, 0.0),
        ("nothing", 0.0, 0.0, 0.0, 0.0),
    ],
)
def test_several_choices(response, subset, jaccard, f1, exact):
    for credit, expected in (("subset", subset), ("jaccard", jaccard), ("f1", f1), ("exact", exact)):
        assert score("several_choices", response, ["A", "C"], credit=credit) == pytest.approx(expected)
    assert score("several_choices", response, "A, C") == pytest.approx(subset)
    assert score("several_choices", response, "no letters") is None


def test_abstention():
    assert score("abstention", "<answer>7</answer>", "7") == 1.0
    assert score("abstention", "<answer>I don't know.</answer>", "7") == 0.0
    assert score("abstention", "<answer>8</answer>", "7") == -1.0
    assert score("abstention", "pass", "7", phrases=["pass"], silent=0.25, wrong=0) == 0.25
    with pytest.raises(ValueError, match="wrong <= silent <= right"):
        build("abstention", {"silent": -2})


def test_an_abstention_that_is_the_answer_is_right():
    assert score("abstention", "cannot be determined", "cannot be determined") == 1.0


def test_majority_of_each_group():
    import torch

    said = ["<answer>Seven.</answer>", "seven", "8", "", "1", "2", "2", "1"]
    samples = [sample(text, None) for text in said]
    rewards = RewardSet(
        [RewardSpec(name="majority"), RewardSpec(name="majority", label="share", options={"graded": True})]
    )
    found = rewards.score(samples, torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]))
    assert found[:, 0].tolist() == [1, 1, 0, 0, 1, 1, 1, 1]  # a tie has two majorities
    assert found[:, 1].tolist() == [0.5, 0.5, 0.25, 0, 0.5, 0.5, 0.5, 0.5]


def test_fewer_votes_are_no_majority():
    import torch

    samples = [sample(text, None) for text in ("a", "a", "a", "b", "b")]
    found = RewardSet([RewardSpec(name="majority")]).score(samples, torch.zeros(5, dtype=torch.long))
    assert found[:, 0].tolist() == [1, 1, 1, 0, 0]


# --- calls and boxes in the reasoning ---

CALLS = [{"name": "zoom", "arguments": {"x": 1, "y": 2}}, {"name": "ocr"}]


def call(text):
    return f"<tool_call>{text}</tool_call>"


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (call('{"name": "zoom", "arguments": {"x": 1, "y": 2}}') + call('{"name": "ocr"}'), 1.0),
        (call('{"name": "ocr"}'), 0.5),
        (
            call('{"name": "zoom", "arguments": {"x": 1, "z": 9}}') + call('{"name": "ocr"}'),
            (1 + (1 + 1 / 3 + 0.5) / 3) / 2,
        ),
        (call('{"name": "ocr"}') * 4, 1 / 4),
        (call('{"name": "ocr"}') + call("{oops"), 0.0),
        ("no call", 0.0),
    ],
)
def test_tool_calls(response, expected):
    assert score("tool_calls", response, CALLS) == pytest.approx(expected)
    assert score("tool_calls", response, "zoom") is None


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<think>the cat [1, 2, 30, 40] sits</think><answer>cat</answer>", 1.0),
        ("<think>the cat sits</think><answer>[1, 2, 30, 40]</answer>", 0.0),
        ("<think>[1, 2, 30, 40] and [5, 5, 5, 5]</think>", 0.0),
        ("<think>" + "[1, 2, 30, 40] " * 4 + "</think>", 0.0),
        ("the cat [1, 2, 30, 40]", 0.0),
    ],
)
def test_boxes_in_reasoning(response, expected):
    assert score("boxes_in_reasoning", response, None, at_most=3) == expected


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<info>a cat</info> <think>one</think>\n<answer>1</answer> ", 1.0),
        ("<think>one</think><info>a cat</info><answer>1</answer>", 0.0),
        ("<info>a cat</info><answer>1</answer>", 0.0),
        ("<info> </info><think>one</think><answer>1</answer>", 0.0),
        ("<info>a</info> and <think>one</think><answer>1</answer>", 0.0),
        ("<info>a</info><think>one</think><answer>1</answer>2", 0.0),
        ("<info>a</info><think>one</think><answer>1</answer><answer>2</answer>", 0.0),
        ("<info>a<think></info><think>one</think><answer>1</answer>", 0.0),
    ],
)
def test_sections(response, expected):
    assert score("sections", response, None, tags=["info", "think", "answer"]) == expected


def test_sections_have_names_of_their_own():
    with pytest.raises(ValueError, match="tags must be different names"):
        build("sections", {"tags": ["think", "think"]})


LONG = [
    ("boxes_matched", "[1, " * 40000, TWO),
    ("boxes_matched", "[0, 0, 1, 1] " * 8000, TWO),
    ("labelled_boxes", "{" * 100000, CATS),
    ("labelled_boxes", objects(*[RIGHT] * 3000), CATS),
    ("average_precision", objects(*[RIGHT] * 3000), GOLD),
    ("tool_calls", "<tool_call>" * 20000, CALLS),
    ("boxes_in_reasoning", "<think>" * 20000, None),
    ("several_choices", "A " * 50000, ["A"]),
    ("interface_action", '{"action": "type", "text": "' + "a b " * 30000 + '"}', {"action": "type", "text": "a b"}),
    ("region_iou", "(1, 2) " * 20000, [[0, 0], [50, 0], [50, 100]]),
]


@pytest.mark.parametrize(("name", "response", "gold"), LONG)
def test_no_response_takes_long(name, response, gold):
    reward, given = build(name, {}), sample(response, gold)
    started = time.perf_counter()
    reward(given)
    assert time.perf_counter() - started < 3


# --- intervals ---


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("from 2 to 6 seconds", 0.5),  # 3 of 6 are shared: 3 .. 6 of 2 .. 8
        ("at 1.0, <answer>3 - 8</answer>", 1.0),
        ("<answer>[5.5, 8.0]</answer>", 0.5),
        ("step 2: from 3 to 8", 1.0),
        ("10 to 20", 0.0),
        ("8 to 3", 0.0),
        ("3", 0.0),
    ],
)
def test_interval_iou(response, expected):
    assert score("interval_iou", response, [3, 8]) == pytest.approx(expected)


def test_intervals_that_hardly_overlap_may_earn_nothing():
    assert score("interval_iou", "2 to 6", [3, 8], least=0.6) == 0.0
    assert score("interval_iou", "3 to 8", [3, 8], least=0.6) == 1.0
    assert score("interval_iou", "2 to 6", "3 to 8") == 0.5
    assert score("interval_iou", "2 to 6", "soon") is None
    assert score("interval_iou", "2 to 6", [8, 3]) is None
    with pytest.raises(ValueError, match="least must be at least 0 and below 1"):
        score("interval_iou", "2 to 6", [3, 8], least=1.0)
