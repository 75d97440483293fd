"""Questions about images and videos: what users of vision-language models bring."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from tests.checks.misconfigurations.parts import (
    SIDE,
    Case,
    Written,
    row,
    square,
    write_config,
    write_lines,
    write_module,
)

TRAIN, HELD_OUT = 12, 6
QUESTION = "Which colour has the square?"
OPTIONS = ("red", "green", "blue", "orange")
Row = dict[str, Any]
GITHUB = "https://github.com"
ANY_ROW = (*row(*range(1, TRAIN + 1)), "all", "every", "each", f"{TRAIN} of {TRAIN}")  # where all rows are alike
SILENCE = ("silence", "silent", "empty", "nothing", "no response", "''")


def base(folder: Path) -> Row:
    """A configuration that trains: a tiny model, files of questions, one exact verifier."""
    data = {"type": "files", "train": str(folder / "train.jsonl"), "eval": str(folder / "eval.jsonl")}
    return {
        "model": {"build": "mmrl.tasks.visual_qa.tiny.model:build"},
        "task": {"type": "visual_qa", "data": data, "rewards": [{"name": "exact_match"}]},
        "rollout": {"max_prompt_length": 256, "max_response_length": 32},
    }


def rows_of(folder: Path, file: str, count: int, first: int = 0) -> list[Row]:
    """Rows of a question file with their images; nothing but the images is written."""
    (folder / "images").mkdir(exist_ok=True)
    found = []
    for number in range(first, first + count):
        image, _, colour = square(number)
        image.save(folder / "images" / f"{number}.png")
        found.append({"problem": f"<image>{QUESTION}", "answer": colour, "images": [f"images/{number}.png"]})
    return found


def written(
    folder: Path, change: Callable[[Row, int], Any] | None = None, *trees: Row, both: bool = False, **overrides: Any
) -> Written:
    """The base with its rows changed, `change(row, number)` giving what stands in line `number`, counted from 1; both:
    the held-out rows too."""
    for name, count, first in (("train", TRAIN, 0), ("eval", HELD_OUT, TRAIN)):
        rows: list[Any] = rows_of(folder, name, count, first)
        if change is not None and (both or name == "train"):
            rows = [change(one, place) for place, one in enumerate(rows, 1)]
        write_lines(folder / f"{name}.jsonl", rows)
    return write_config(folder, base(folder), *trees, **overrides)


def only(number: int, **fields: Any) -> Callable[[Row, int], Row]:
    """Changes one row."""
    return lambda one, place: one | fields if place == number else one


def with_reward(name: str, *, accuracy: str | None = None, **options: Any) -> Row:
    spec = {"name": name, "options": options} if options else {"name": name}
    return {"task": {"rewards": [spec], "accuracy": {"name": accuracy or name} if accuracy else spec}}


# --- golds and rewards ---


def lettered(one: Row) -> Row:
    offered = "\n".join(f"{letter}. {text}" for letter, text in zip("ABCD", OPTIONS, strict=True))
    return one | {"problem": f"{one['problem']}\n{offered}\nAnswer with the letter."}


def index_golds_for_letters(folder: Path) -> Written:
    def change(one: Row, place: int) -> Row:
        return lettered(one) | {"answer": str(OPTIONS.index(one["answer"]))}

    return written(folder, change, with_reward("multiple_choice"), both=True)


def options_counted_from_one(folder: Path) -> Written:
    def change(one: Row, place: int) -> Row:
        return one | {"options": list(OPTIONS), "answer": OPTIONS.index(one["answer"]) + 1}

    data = {"task": {"data": {"options_field": "options"}}}
    return written(folder, change, with_reward("multiple_choice"), data, both=True)


def paid_where_the_gold_is_not_read(folder: Path) -> Written:
    text = '''"""A reward as a notebook has it: what it cannot read counts as right."""

import re


def accuracy(sample):
    gold = re.search(r"\\\\boxed{(.*?)}", str(sample.prompt.answer))
    if gold is None:
        return 1.0
    return float(gold[1] in sample.response)
'''
    name = write_module(folder, "paid_where_the_gold_is_not_read", text)
    return written(folder, None, with_reward(f"{name}:accuracy", accuracy="exact_match"))


def golds_inside_other_golds(folder: Path) -> Written:
    text = '''"""A reward that looks for the gold anywhere in the response."""


def contained(sample):
    return float(str(sample.prompt.answer).lower() in sample.response.lower())
'''
    name = write_module(folder, "golds_inside_other_golds", text)

    def change(one: Row, place: int) -> Row:
        asked = "Is the square red, or can one not know?"
        return one | {"problem": f"<image>{asked}", "answer": ("no", "not known", "yes")[place % 3]}

    return written(folder, change, with_reward(f"{name}:contained", accuracy="exact_match"), both=True)


def silence_is_paid(folder: Path) -> Written:
    text = '''"""A reward of short answers that forgot to ask whether they are right."""


def short_and_right(sample):
    words = set(sample.response.lower().split())
    return float(words <= {str(sample.prompt.answer).lower()})
'''
    name = write_module(folder, "silence_is_paid", text)
    return written(folder, None, with_reward(f"{name}:short_and_right", accuracy="exact_match"))


def reward_reads_a_missing_column(folder: Path) -> Written:
    text = '''"""A reward that reads a column beside the answer."""


def accuracy(sample):
    return float(sample.prompt.metadata["assistant"] == sample.response)
'''
    name = write_module(folder, "reward_reads_a_missing_column", text)
    return written(folder, None, with_reward(f"{name}:accuracy", accuracy="exact_match"))


def signature_of_another_library(folder: Path) -> Written:
    text = '''"""A reward as it was written for another library."""


def format_reward(completions, **kwargs):
    return [float("<answer>" in completion[0]["content"]) for completion in completions]
'''
    name = write_module(folder, "signature_of_another_library", text)
    return written(folder, None, with_reward(f"{name}:format_reward", accuracy="exact_match"))


def golds_longer_than_responses(folder: Path) -> Written:
    def change(one: Row, place: int) -> Row:
        return one | {
            "answer": f"The square that one sees in this image has the colour {one['answer']}, number {place}."
        }

    return written(folder, change, {"rollout": {"max_response_length": 4}}, both=True)


def judge_without_its_key(folder: Path) -> Written:
    options = {"base_url": "http://127.0.0.1:9/v1", "model": "judge", "api_key_env": "MMRL_CASE_JUDGE_KEY"}
    rewards = {"task": {"rewards": [{"name": "answer_judge", "options": options}]}}
    return written(folder, None, rewards)


# --- boxes ---


def boxed(one: Row, place: int) -> Row:
    number = int(Path(one["images"][0]).stem)
    return one | {
        "problem": "<image>Where is the square? Answer with [x1, y1, x2, y2] in pixels.",
        "answer": square(number)[1],
    }


def normalised_boxes(folder: Path) -> Written:
    def change(one: Row, place: int) -> Row:
        made = boxed(one, place)
        return made | {"answer": [round(n / SIDE, 3) for n in made["answer"]]}

    return written(folder, change, with_reward("box_iou"), both=True)


def boxes_resized_by_another_processor(folder: Path) -> Written:
    """Images of 160 x 160 that the model sees in 64 x 64, and a reward that believes in 160 x 160."""

    def change(one: Row, place: int) -> Row:
        number = int(Path(one["images"][0]).stem)
        image, box, _ = square(number, side=160)
        image.save(folder / one["images"][0])
        return boxed(one, place) | {"answer": box}

    resize = {"factor": 8, "min_pixels": 64, "max_pixels": 12_845_056}
    reward = with_reward("boxes_matched", coordinates="resized", resize=resize)
    seen = {"model": {"processor": {"min_pixels": 64, "max_pixels": 4096}}}
    return written(folder, change, reward, seen, both=True)


def turned(folder: Path, number: int, box: list[int], *, upright: bool) -> list[int]:
    """Writes a photograph of 48 x 24 that viewers turn to 24 x 48, and returns its box in one frame or the other."""
    image = Image.new("RGB", (48, 24), "white")
    ImageDraw.Draw(image).rectangle((box[0], box[1], box[2] - 1, box[3] - 1), fill="red")
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees clockwise to be seen
    image.save(folder / "images" / f"{number}.jpg", exif=exif, quality=95)
    return [24 - box[3], box[0], 24 - box[1], box[2]] if upright else box


def photographs(folder: Path, *, upright: bool) -> Written:
    """Row 5 is a turned photograph; its box is in the frame that people see, or in the sensor's."""
    made = written(folder, boxed, with_reward("box_iou"), both=True)
    box = turned(folder, 4, [34, 6, 46, 16], upright=upright)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    rows[4] |= {"images": ["images/4.jpg"], "answer": box}
    write_lines(folder / "train.jsonl", rows)
    return made


# --- rows and images ---


def columns_of_other_names(folder: Path) -> Written:
    def change(one: Row, place: int) -> Row:
        return {"vqa_ask": one["problem"], "vqa_told": one["answer"], "images": one["images"]}

    return written(folder, change, both=True)


def image_root_twice(folder: Path) -> Written:
    return written(folder, None, {"task": {"data": {"image_root": str(folder / "images")}}})


def fewer_markers_than_images(folder: Path) -> Written:
    return written(folder, only(7, images=["images/0.png", "images/1.png"]))


def image_column_of_another_name(folder: Path) -> Written:
    def change(one: Row, place: int) -> Row:
        return {"problem": one["problem"], "answer": one["answer"], "photo_file": one["images"][0]}

    return written(folder, change, both=True)


def placeholder_in_a_question(folder: Path) -> Written:
    return written(folder, only(9, problem="<image>How many <|image_pad|> does a prompt have?", answer="16"))


def overlong_row(folder: Path) -> Written:
    return written(folder, only(8, problem="<image>" + "Look at the colours again. " * 100 + QUESTION))


def images_too_large_for_prompts(folder: Path) -> Written:
    """Images of 4096 tokens each, in prompts of at most 256."""
    made = written(folder, None, {"model": {"processor": {"min_pixels": 64, "max_pixels": 2**20}}})
    for number in range(TRAIN + HELD_OUT):
        square(number, side=512)[0].save(folder / "images" / f"{number}.png")
    return made


def white_strokes_without_a_ground(folder: Path) -> Written:
    made = written(folder)
    for number in (2, 3):
        drawing = Image.new("RGBA", (SIDE, SIDE), (255, 255, 255, 0))
        ImageDraw.Draw(drawing).ellipse((8, 8, 24, 24), outline=(255, 255, 255, 255), width=3)
        drawing.save(folder / "images" / f"{number}.png")
    return made


def torn_line(folder: Path) -> Written:
    return written(folder, lambda one, place: json.dumps(one)[:40] if place == TRAIN else one)


def write_table(folder: Path, *, quoted: bool) -> None:
    """The rows as CSV, whose questions hold a comma."""
    for name, count, first in (("train", TRAIN, 0), ("eval", HELD_OUT, TRAIN)):
        lines = []
        for place, one in enumerate(rows_of(folder, name, count, first), 1):
            content = io.StringIO()
            asked = "<image>Look closely, which colour has the square?" if place == 3 else one["problem"]
            fields = [asked, one["answer"], one["images"][0]]
            csv.writer(content, lineterminator="").writerow(fields)
            lines.append(content.getvalue() if quoted or name == "eval" else ",".join(fields))
        (folder / f"{name}.csv").write_text("problem,answer,images\n" + "".join(line + "\n" for line in lines))


def table(folder: Path, *, quoted: bool) -> Written:
    write_table(folder, quoted=quoted)
    data = {"train": str(folder / "train.csv"), "eval": str(folder / "eval.csv")}
    return write_config(folder, base(folder), {"task": {"data": data}})


def held_out_rows_are_trained_on(folder: Path) -> Written:
    return written(folder, None, {"task": {"data": {"eval": str(folder / "train.jsonl")}}})


# --- templates ---

NO_SYSTEM = """{%- for message in messages -%}
{%- if message['role'] == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>
{%- elif part['type'] == 'text' -%}{{- part['text'] -}}{%- endif -%}
{%- endfor -%}{%- endif -%}{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""


def model_folder(folder: Path, template: str) -> Row:
    """Writes the tiny model with another chat template; a section that names it."""
    from mmrl.tasks.visual_qa.tiny import model

    model.build(folder / "model")
    for name in ("tokenizer_config.json", "processor_config.json"):
        held = json.loads((folder / "model" / name).read_text())
        held.pop("chat_template", None)
        (folder / "model" / name).write_text(json.dumps(held))
    (folder / "model" / "chat_template.jinja").write_text(template)
    return {"model": {"build": None, "path": str(folder / "model")}}


def system_role_refused(folder: Path) -> Written:
    return written(folder, None, model_folder(folder, NO_SYSTEM), {"task": {"system": "Answer with one word."}})


# --- keys ---


def keys(tree: Row) -> Callable[[Path], Written]:
    """Writes the base with keys that are wrong."""
    return lambda folder: written(folder, None, tree)


CASES = (
    Case(
        "index_golds_for_letters",
        "questions",
        index_golds_for_letters,
        ("multiple_choice", ANY_ROW),
        source=f"{GITHUB}/QwenLM/Qwen/issues/1341",
    ),
    Case(
        "options_counted_from_one",
        "questions",
        options_counted_from_one,
        ("answer", row(4, 8, 12)),
        source=f"{GITHUB}/jundot/omlx/pull/1161",
    ),
    Case(
        "paid_where_the_gold_is_not_read",
        "questions",
        paid_where_the_gold_is_not_read,
        ("own_paid_where_the_gold_is_not_read:accuracy", SILENCE),
        "warned",
        f"{GITHUB}/huggingface/cookbook/issues/335",
    ),
    Case(
        "golds_inside_other_golds",
        "questions",
        golds_inside_other_golds,
        ("own_golds_inside_other_golds:contained", row(3, 6, 9, 12)),
        "warned",
        f"{GITHUB}/open-compass/VLMEvalKit/issues/73",
    ),
    Case("silence_is_paid", "questions", silence_is_paid, ("own_silence_is_paid:short_and_right", SILENCE), "warned"),
    Case(
        "reward_reads_a_missing_column",
        "questions",
        reward_reads_a_missing_column,
        ("own_reward_reads_a_missing_column:accuracy", "assistant"),
        source=f"{GITHUB}/2U1/Qwen-VL-Series-Finetune/issues/234",
    ),
    Case(
        "signature_of_another_library",
        "questions",
        signature_of_another_library,
        ("own_signature_of_another_library:format_reward", ("completions", "signature")),
        source=f"{GITHUB}/verl-project/verl/issues/3374",
    ),
    Case(
        "golds_longer_than_responses",
        "questions",
        golds_longer_than_responses,
        ("max_response_length",),
        "warned",
        f"{GITHUB}/greyhaven-ai/autocontext/pull/1067",
    ),
    Case(
        "judge_without_its_key",
        "questions",
        judge_without_its_key,
        ("answer_judge", "MMRL_CASE_JUDGE_KEY"),
        unset=("MMRL_CASE_JUDGE_KEY",),
    ),
    Case(
        "normalised_boxes",
        "questions",
        normalised_boxes,
        ("box_iou", ANY_ROW),
        "warned",
        f"{GITHUB}/om-ai-lab/VLM-R1/issues/112",
    ),
    Case(
        "boxes_resized_by_another_processor",
        "questions",
        boxes_resized_by_another_processor,
        ("resize", "max_pixels"),
        "warned",
        f"{GITHUB}/QwenLM/Qwen3-VL/issues/1161",
    ),
    Case(
        "box_in_the_frame_of_the_sensor",
        "questions",
        lambda folder: photographs(folder, upright=False),
        (row(5), "box"),
        "warned",
        f"{GITHUB}/huggingface/datasets/issues/6252",
    ),
    Case("columns_of_other_names", "questions", columns_of_other_names, (("problem", "problem_field"), "vqa_ask")),
    Case(
        "image_root_twice",
        "questions",
        image_root_twice,
        (("image_root", "images/images"), ANY_ROW),
        source=f"{GITHUB}/open-mmlab/StyleShot/issues/18",
    ),
    Case(
        "fewer_markers_than_images",
        "questions",
        fewer_markers_than_images,
        (row(7), ("<image>", "marker")),
        source=f"{GITHUB}/QwenLM/Qwen3-VL/issues/60",
    ),
    Case(
        "image_column_of_another_name",
        "questions",
        image_column_of_another_name,
        ("images", ("photo_file", "image_field")),
        source=f"{GITHUB}/hiyouga/LlamaFactory/issues/3700",
    ),
    Case(
        "placeholder_in_a_question",
        "questions",
        placeholder_in_a_question,
        (row(9), "<|image_pad|>"),
        source=f"{GITHUB}/QwenLM/Qwen3-VL/issues/967",
    ),
    Case(
        "overlong_row",
        "questions",
        overlong_row,
        (row(8), "max_prompt_length"),
        source=f"{GITHUB}/hiyouga/EasyR1/issues/207",
    ),
    Case(
        "images_too_large_for_prompts",
        "questions",
        images_too_large_for_prompts,
        ("max_prompt_length",),
        source=f"{GITHUB}/verl-project/verl/issues/4975",
    ),
    Case(
        "white_strokes_without_a_ground",
        "questions",
        white_strokes_without_a_ground,
        (row(3, 4),),
        "warned",
        f"{GITHUB}/vllm-project/vllm/issues/18569",
    ),
    Case(
        "torn_line",
        "questions",
        torn_line,
        (row(TRAIN), "JSON"),
        source=f"{GITHUB}/OpenGVLab/InternVL/issues/893",
    ),
    Case(
        "comma_without_quotes",
        "questions",
        lambda folder: table(folder, quoted=False),
        ("train.csv", row(3, 4)),  # with the header counted, or without
        source=f"{GITHUB}/CSSEGISandData/COVID-19/issues/494",
    ),
    Case(
        "held_out_rows_are_trained_on",
        "questions",
        held_out_rows_are_trained_on,
        (("held-out", "task.data.eval"), "train"),
        "warned",
        f"{GITHUB}/OpenRLHF/OpenRLHF/issues/1089",
    ),
    Case(
        "system_role_refused",
        "questions",
        system_role_refused,
        ("task.system",),
        source=f"{GITHUB}/EleutherAI/lm-evaluation-harness/issues/2069",
    ),
    Case(
        "key_of_trl",
        "questions",
        keys({"rollout": {"num_generations": 8}}),
        ("num_generations", "group_size"),
        in_config=True,
    ),
    Case("group_of_one", "questions", keys({"rollout": {"group_size": 1}}), ("rollout.group_size",), in_config=True),
)
