"""The time that a response takes to be read grows with its length: every pattern of ours, every verifier and every
reader gets 8 KB and 32 KB of the pieces that are worst for it."""

import importlib
import re
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from PIL import Image

from mmrl.generation.vllm.engine import last_error
from mmrl.rewards import REWARDS, build
from mmrl.rewards.judges.process import _ENDS, steps
from mmrl.rewards.judges.text import _tag_content
from mmrl.rewards.judges.written import WrittenScore, verdict_pattern
from mmrl.rewards.mathematics import _to_latex
from mmrl.rewards.parsing import boxes, choices, quotes, responses, times
from mmrl.rewards.registry import ISOLATED
from mmrl.rewards.services.http import decode
from mmrl.rewards.visual.boxes import _absence_reward
from mmrl.rewards.visual.images import _letters
from mmrl.rewards.visual.pointing import word_f1
from mmrl.rollouts import Prompt, Sample
from mmrl.runtime.jsonl import RowError, check_value, parsed
from mmrl.runtime.template_limits import _has_power
from mmrl.sims.turns import tools
from mmrl.sims.turns.calculator import value
from mmrl.sims.turns.cards import CardGame
from mmrl.tasks.data.tables import _is_object, _json_lines
from mmrl.tasks.image_generation.rewriting import PromptRewriting
from mmrl.tasks.visual_qa.data.columns import Columns
from mmrl.tasks.visual_qa.tiny.sums import read_sum
from tests.house.layout import ROOT

LONG = 32_768  # characters
FAST_S = 0.05  # what takes no longer for LONG is not compared
MOST = 9.0  # times as long for LONG as for a quarter of it: 4 where time is linear, 16 where it grows with the square
TRIES = 3

# --- pieces ---

WORST = [
    *("a", "x1=3, ", "1 minute 3 s ", "1,11", "[1,", "(", "<answer>", "</think><answer>"),
    *("\\boxed{", "<tool_call>", "a(", "B) ", ","),
]
PIECES = [
    *WORST,
    *("_", "1", " ", "\n", "[", "{", "<", "\\", "$", '"', "\u201c", ".", "-", "\xe9", "\u4e2d", "\u0301", "\u0663"),
    *("(a", "()", "1,", "1,111", "1 111", "1e", "1/", "x=", "a b ", "{}", "[]", '{"a":', "```", "\u221a(", "not("),
    *("<think>", "</think>", "</answer>", "<answer>x</answer>", "<tool_call>{}</tool_call>", "<|begin_of_box|>"),
    *("(1, 2), ", "[1, 2, 3, 4] ", "(1,2),(3,4)", "1:2", "and ", "\\frac{1}{", "\\text{", "^{", "1 1/2 ", "1h"),
    *("<box>", "#### ", "\n#### a", "A. x\n", "no ", "not a "),
]
ENDS = ["", "x", "1", ")", "</answer>"]


def literals(pattern: re.Pattern[str]) -> list[str]:
    """The texts that a pattern asks for, letter by letter, and a letter of each of its sets; also what it repeats, by
    itself: runs of them are the pieces that it begins to match again and again."""
    runs: list[str] = []

    def walk(tree, run: str) -> str:
        for op, argument in tree:
            name = str(op)
            if name == "LITERAL":
                run += chr(argument)
            elif name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
                runs.append(walk(argument[2], ""))
                for _ in range(min(max(1, argument[0]), 4)):
                    run = walk(argument[2], run)
            elif name == "SUBPATTERN":
                run = walk(argument[3], run)
            elif name == "BRANCH":
                runs.extend(walk(one, "") for one in argument[1])
                run = walk(argument[1][0], run)
            elif name in ("ATOMIC_GROUP",):
                run = walk(argument, run)
            elif name == "IN":
                run += member(argument)
            elif name == "ANY":
                run += "a"
        return run

    runs.append(walk(re._parser.parse(pattern.pattern, pattern.flags & ~re.UNICODE), ""))
    whole = max(runs, key=len)
    return [run for run in {*runs, *(whole[:n] for n in range(1, min(len(whole), 8)))} if run]


def member(options) -> str:
    """A character of a set."""
    for op, argument in options:
        if str(op) == "LITERAL":
            return chr(argument)
        if str(op) == "RANGE":
            return chr(argument[0])
        if str(op) == "CATEGORY":
            return {"CATEGORY_DIGIT": "1", "CATEGORY_SPACE": " ", "CATEGORY_WORD": "a"}.get(str(argument), "-")
    return "~"


# --- growth ---


Read = Callable[[str], object]


def seconds(read: Read, text: str) -> float:
    start = time.thread_time()
    read(text)
    return time.thread_time() - start


def grows_with_the_square(read: Read, piece: str, end: str, length: int = LONG, fast_s: float = FAST_S) -> bool:
    """Compares a text of `length` characters with one of a quarter."""
    short, long = ((piece * (n // len(piece) + 1))[:n] + end for n in (length // 4, length))
    for _ in range(TRIES):
        large = seconds(read, long)
        if large < fast_s or large < MOST * seconds(read, short):
            return False
    return True


def worst(read: Read, pieces: list[str], ends: list[str] = ENDS) -> tuple[str, str] | None:
    """Returns the piece and the end for which the time grows with the square of the length; None without one."""
    return next((text for text in product(pieces, ends) if grows_with_the_square(read, *text)), None)


def test_growth_is_seen():
    """By the patterns that tools and rewritten prompts were once read by."""
    named, tagged = re.compile(r"([A-Za-z_]\w*)\(([^()]*)\)\s*$"), re.compile(r"<t>(.*?)</t>", re.DOTALL)
    assert literals(tagged) and "<t>" in literals(tagged)
    for read, piece in ((named.search, "a"), (tagged.findall, "<t>")):
        assert grows_with_the_square(read, piece, "", length=4_096, fast_s=0.002)
    assert ",111" in literals(re.compile(r"\d{1,3}(?:,\d{3})+"))
    assert not grows_with_the_square(re.compile("a++b").match, "a", "")


# --- patterns ---

READ_BY = ("children", "rewards", "sims", "tasks")
ANCHORED: dict[str, str] = {
    "rewards.programs.responses:_LANGUAGE": "match",  # to one place of the text
    "rewards.parsing.boxes:_FULL_TEXT": "fullmatch",
    "rewards.parsing.choices:_LEAD_IN": "match",
    "rewards.parsing.responses:_WRAPPER": "match",
    "tasks.manipulation.selection:SPLIT": "fullmatch",
    "tasks.data.image_files:_URL": "match",
    "rewards.verifiers:_FORMAT": "fullmatch",  # after each of its tags was counted: there is one
}


def patterns() -> Iterator[tuple[str, re.Pattern[str]]]:
    """Every pattern that a module holds by name, of those that read what others write."""
    for folder in [*(ROOT / "mmrl" / name for name in READ_BY[:2]), *(ROOT / name for name in READ_BY[2:])]:
        for path in sorted(path for path in folder.rglob("*.py") if "re.compile(" in path.read_text()):
            parts = path.relative_to(ROOT).with_suffix("").parts
            module = importlib.import_module(".".join(parts if parts[0] == "mmrl" else ("mmrl", *parts)))
            for name, content in vars(module).items():
                if isinstance(content, re.Pattern):
                    yield f"{module.__name__.removeprefix('mmrl.')}:{name}", content


def test_no_pattern_takes_the_square():
    found = dict(patterns())
    assert len(found) > 40 and ANCHORED.keys() <= found.keys()
    slow = {}
    for name, pattern in found.items():
        reads: dict[str, Read] = {"fullmatch": pattern.fullmatch, "match": pattern.match}
        read = reads.get(ANCHORED.get(name, ""), lambda text, pattern=pattern: sum(1 for _ in pattern.finditer(text)))
        pieces = [] if name.endswith(":_FORMAT") else literals(pattern)
        if (text := worst(read, pieces, ENDS[:3:2])) is not None:
            slow[name] = text
    assert slow == {}


# --- readers and verifiers ---


def refused(read: Read, error: type[Exception] = ValueError) -> Read:
    """A reader that may refuse a text."""

    def attempt(text: str) -> object:
        try:
            return read(text)
        except error:
            return None

    return attempt


def rewritten(text: str) -> str:
    task = cast(Any, SimpleNamespace(settings=SimpleNamespace(tag="answer")))
    return PromptRewriting.extract_prompt(task, text)


def written(text: str) -> object:
    judge: Any = WrittenScore.__new__(WrittenScore)
    judge.after, judge.low, judge.high, judge.words = "a", 1.0, 5.0, {}
    judge._verdict = verdict_pattern([])
    return judge.read(text)


def card_game() -> CardGame:
    game = CardGame(rounds=9, choices=3)
    game.start(Prompt("p", "Which?", metadata={"seed": 0, "kind": "count"}))
    return game


READERS: dict[str, Read] = {
    "JSON calls of tools": refused(tools.json_call),
    "Python calls of tools": refused(tools.python_call),
    "arithmetic": refused(value),
    "rewritten prompts": rewritten,
    "answers": responses.extract_answer,
    "options of a question": choices.parse_options,
    "boxes": boxes.parse_boxes,
    "points": boxes.parse_points,
    "objects": boxes.parse_objects,
    "quotes": quotes.quoted_texts,
    "times": times.parse_times,
    "gold answers": responses.gold_answer_text,
    "steps of a thought": lambda text: [steps(text, re.compile(ending)) for ending in _ENDS.values()],
    "a tag of a judge": lambda text: _tag_content(text, "answer"),
    "scores that a judge writes": written,
    "mathematics": _to_latex,
    "absence": _absence_reward,
    "words": lambda text: word_f1(text, text),
    "letters": _letters,
    "requests of rewards": refused(lambda text: decode(text.encode(), "json", max_bytes=LONG), Exception),
    "lines of JSONL": refused(lambda text: parsed(text.encode()), RowError),
    "lines of a .json file": lambda text: list(_json_lines(Path("x.json"), b"{}\n" + text.encode())),
    "whether a .json file has lines": lambda text: _is_object(text.encode()),
    "texts of rows": refused(lambda text: check_value(text, "f"), RowError),
    "powers in templates": _has_power,
    "markers of images": refused(lambda text: Columns(images=("a",))._place_images({"a": 1}, text), RowError),
    "letters to invert": refused(lambda text: Columns()._invert({"g": text, "q": ""}, ["A"], "q", "g"), RowError),
    "cards": lambda text: card_game().step(text),
    "lines of sums": read_sum,
    "logs of vLLM": last_error,
}
OPTIONS: dict[str, dict[str, Any]] = {"sections": {"tags": ["think", "answer"]}}
GOLDS: dict[str, Any] = {
    "multiple_choice": "A",
    "several_choices": "A",
    "labelled_boxes": [{"bbox": [1, 1, 2, 2], "label": "a"}],
    "average_precision": [{"bbox": [1, 1, 2, 2], "label": "a"}],
    "tool_calls": [{"name": "a", "arguments": {}}],
    "interface_action": {"action": "click", "box": [1, 1, 2, 2]},
    "interval_iou": "[1, 2]",
    "region_iou": [[1, 1], [2, 2], [1, 2]],
} | dict.fromkeys(
    (
        "box_iou",
        "box_giou",
        "boxes_matched",
        "point_inside",
    ),
    "[1, 1, 2, 2]",
)
MODULES = ("verifiers", "mathematics", "boxes", "pointing", "intervals", "credit", "findings")
NO_TEXT = {"overlong_penalty", "tokens_per_forward", "random"}  # they do not read the response
VERIFIERS = [
    name
    for name, factory in REWARDS.items()
    if factory.__module__.rpartition(".")[2] in MODULES and name not in NO_TEXT | ISOLATED  # those have a deadline
]


def verified(name: str) -> Read:
    reward: Any = build(name, OPTIONS.get(name))
    images = (Image.new("RGB", (8, 8)),)  # pixels are parts of it
    prompt = Prompt("p", "What?\nA. x\nB. y", images, answer=GOLDS.get(name, "7"), metadata={"findings": ["a", "b"]})

    def read(text: str) -> object:
        sample = Sample(prompt, text)
        return reward.score([sample]) if hasattr(reward, "score") else reward(sample)

    return read


def test_every_verifier_of_text_is_here():
    assert len(VERIFIERS) == 21 and all(verified(name)("") is not None for name in VERIFIERS)


@pytest.mark.parametrize("name", READERS)
def test_no_reader_takes_the_square(name):
    assert worst(READERS[name], WORST) is None


@pytest.mark.parametrize("name", VERIFIERS)
def test_no_verifier_takes_the_square(name):
    assert worst(verified(name), WORST) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", [*READERS, *VERIFIERS])
def test_none_takes_the_square_of_anything(name):
    assert worst(READERS.get(name) or verified(name), PIECES) is None
