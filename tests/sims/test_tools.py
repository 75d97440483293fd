"""Tools: how they are called, what they do to images by value, and what is said of a call that can not be done."""

import hashlib
import importlib.util
import json
from typing import Annotated, Literal

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from mmrl.build import build_task
from mmrl.config import load
from mmrl.errors import UserError
from mmrl.rollouts import Message, Prompt
from mmrl.settings import make
from mmrl.sims.turns import images, tools
from mmrl.sims.turns.calculator import value
from mmrl.sims.turns.settings import ToolsSettings
from mmrl.sims.turns.tools import Scene, Tool, ToolError, json_call, python_call


def board(width=8, height=4):
    """An image whose red is its column and whose green is its row."""
    rows, columns = np.mgrid[:height, :width]
    return Image.fromarray(np.stack([columns, rows, 0 * rows], -1).astype(np.uint8))


def environment(*names, image=None, **options):
    settings = make(ToolsSettings, {"tools": list(names), "calls": "python", "described": "no", **options})
    made = settings.make()
    made.start(Prompt("p", "?", messages=(Message("user", (image or board(), "?")),)))
    return made


def shown(reply):
    (image,) = reply.messages[0].images
    return np.asarray(image)


def test_zoom_shows_the_asked_pixels_of_the_whole_image():
    one = environment("zoom")
    reply = one.step("zoom(2, 1, 5, 3)")
    assert (reply.tool, reply.error, reply.end) == ("zoom", None, False)
    assert shown(reply)[:, :, 0].tolist() == [[2, 3, 4], [2, 3, 4]]
    assert shown(reply)[:, :, 1].tolist() == [[1, 1, 1], [2, 2, 2]]
    assert reply.facts == {"box": [0.25, 0.25, 0.625, 0.75], "image": 0}


def test_zoom_looks_at_the_original_where_the_image_is_shown_smaller():
    one = environment("zoom", shown_pixels=8)  # shown as 4 x 2
    reply = one.step("zoom(1, 0, 2, 1)")  # pixels as shown
    assert shown(reply)[:, :, 0].tolist() == [[2, 3], [2, 3]] and shown(reply)[:, :, 1].tolist() == [[0, 0], [1, 1]]


def test_coordinates_may_be_shares():
    reply = environment("zoom", coordinates=2.0).step("I look. zoom(1, 0, 2, 1)")
    assert shown(reply)[:, :, 0].tolist() == [[4, 5, 6, 7]] * 2 and shown(reply)[:, :, 1].max() == 1


def test_a_crop_that_is_large_is_averaged_down():
    reply = environment({"type": "zoom", "pixels": 2}).step("zoom(0, 0, 8, 4)")
    assert shown(reply)[:, :, 0].tolist() == [[2, 6]]  # the means of columns 0 to 3 and 4 to 7, rounded


def test_a_crop_can_be_looked_at_again():
    one = environment("zoom")
    one.step("zoom(2, 1, 6, 3)")
    reply = one.step("zoom(1, 0, 2, 2, 1)")  # of image 1, the crop
    assert shown(reply)[:, :, 0].tolist() == [[3], [3]]


def test_a_crop_that_was_shown_smaller_is_looked_at_in_its_own_size():
    """The whole image is shown as 4 x 2 pixels; its first shown pixel is 2 x 2 of the original's."""
    one = environment({"type": "zoom", "pixels": 8})
    assert shown(one.step("zoom(0, 0, 8, 4)")).shape[:2] == (2, 4)
    reply = one.step("zoom(0, 0, 1, 1, 1)")
    assert shown(reply)[:, :, 0].tolist() == [[0, 1]] * 2 and shown(reply)[:, :, 1].tolist() == [[0, 0], [1, 1]]


def test_the_unrelated_zoom_shows_another_place_of_the_same_size():
    for x in range(0, 8, 2):
        reply = environment("unrelated_zoom").step(f"zoom({x}, 0, {x + 2}, 2)")
        seen = shown(reply)
        assert seen.shape[:2] == (2, 2)
        columns, rows = set(seen[:, :, 0].flatten()), set(seen[:, :, 1].flatten())
        assert not (columns & {x, x + 1} and rows & {0, 1})
        assert reply.facts["box"] == [x / 8, 0.0, (x + 2) / 8, 0.5]


def test_the_unrelated_box_is_the_same_as_of_a_list_of_all_of_them():
    """By listing, as it can be done for large boxes: the box of that number among those without overlap."""
    image = Image.new("RGB", (8, 6))
    for box in [(0.0, 0.0, 0.25, 0.5), (0.1, 0.2, 0.35, 0.4), (0.7, 0.8, 1.0, 1.0), (0.2, 0.0, 1.0, 0.9), (0, 0, 1, 1)]:
        width, height = box[2] - box[0], box[3] - box[1]
        across, down = (max(1, int(1 / side + 1e-6)) for side in (width, height))
        corners = [(c * width, r * height) for c in range(across) for r in range(down)]
        apart = [(x, y) for x, y in corners if abs(x - box[0]) > width - 1e-6 or abs(y - box[1]) > height - 1e-6]
        digest = hashlib.sha256(image.tobytes() + repr(box).encode()).digest()
        listed = apart or corners
        assert images._elsewhere(box, image)[:2] == listed[int.from_bytes(digest[:4], "big") % len(listed)]


def test_a_box_as_small_as_can_be_takes_no_memory():
    """Boxes of that size that fit into an image are too many to list."""
    reply = environment("unrelated_zoom").step("zoom(0, 0, 1e-9, 1e-9)")
    assert reply.error == "the box is smaller than a pixel"
    x, y, *_ = images._elsewhere((0.5, 0.5, 0.5 + 1e-9, 0.5 + 1e-9), Image.new("RGB", (8, 8)))
    assert 0 <= x < 1 and 0 <= y < 1


def test_rotate_and_flip():
    image = board(2, 1)  # columns 0, 1
    assert shown(environment("rotate", image=image).step("rotate(90)"))[:, :, 0].tolist() == [[0], [1]]
    assert shown(environment("rotate", image=image).step("rotate(-90)"))[:, :, 0].tolist() == [[1], [0]]
    assert shown(environment("flip", image=image).step("flip('horizontal')"))[:, :, 0].tolist() == [[1, 0]]
    tall = board(1, 2)
    assert shown(environment("flip", image=tall).step("flip('vertical')"))[:, :, 1].tolist() == [[1], [0]]


def test_mark_draws_a_red_frame_and_leaves_the_rest():
    seen = shown(environment("mark", image=Image.new("RGB", (8, 8))).step("mark(2, 2, 5, 5)"))
    red = {(int(y), int(x)) for y, x in zip(*np.nonzero(seen[:, :, 0] == 255), strict=True)}
    assert red == {(y, x) for y in range(2, 6) for x in range(2, 6) if y in (2, 5) or x in (2, 5)}


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("zoom(5, 1, 2, 3)", "the box is empty"),
        ("zoom(90, 1, 95, 3)", "the box is empty"),
        ("zoom(1, 2, 3)", "zoom needs bottom"),
        ("zoom(1, 2, 3, 4, 7)", "there is no image 7"),
        ("zoom(1, 2, 3, 4, 0, 9)", "zoom takes left, top, right, bottom, image"),
        ("zoom('a', 2, 3, 4)", "zoom: left cannot be 'a'"),
        ("zoom(1, 2, 3, 4, True)", "zoom: image cannot be True"),
        ("zoom(1, 2, 3, size=4)", "zoom takes left"),
        ("zoom(a, 2, 3, 4)", "the arguments of the call cannot be read"),
        ("soom(1, 2, 3, 4)", "there is no function 'soom'; there are zoom"),
    ],
)
def test_a_call_that_can_not_be_done_is_an_observation(said, told):
    reply = environment("zoom").step(said)
    assert told in reply.error and reply.messages[0].text == f"error: {reply.error}" and not reply.end


def test_what_is_no_call_is_the_answer():
    assert environment("zoom").step("It is 7").end


def test_a_tool_that_raises_is_an_observation():
    def broken(number: int) -> str:
        """Breaks."""
        raise KeyError(number)

    one = tools.ToolEnvironment([Tool.of(broken)], calls="python", described="no")
    one.start(Prompt("p", "?", messages=(Message("user", ("?",)),)))
    assert "KeyError: 3" in one.step("broken(3)").error


def test_json_calls():
    call = json_call('first <tool_call>{"name": "zoom", "arguments": {"left": 1}}</tool_call>')
    assert (call.name, call.positional, call.named) == ("zoom", [], {"left": 1})
    assert json_call("no call") is None
    for wrong in ("{", "[]", '{"name": 3}', '{"name": "a", "arguments": [1]}'):
        with pytest.raises(ToolError):
            json_call(f"<tool_call>{wrong}</tool_call>")


def test_python_calls_take_literals_only():
    call = python_call("so zoom(1, -2.5, image=3)")
    assert (call.name, call.positional, call.named) == ("zoom", [1, -2.5], {"image": 3})
    assert python_call("zoom(1) and more") is None


@pytest.mark.parametrize("arguments", ["{[]}", "{[1]: 2}", "1j + [2]", "-" * 5000 + "1", "[" * 5000, "*[1]", "x", "\0"])
def test_a_call_whose_arguments_can_not_be_read_is_told_to_the_policy(arguments):
    """It is a wrong answer; an exception would lose the rollout, which then is not punished."""
    reply = environment("zoom").step(f"zoom({arguments})")
    assert reply.error == "the arguments of the call cannot be read" and not reply.end


@pytest.mark.parametrize(
    "text", ["it is not (3)", "not(3)", "if(1)", "yes (3)", "(3)", "a)", "f(1) or so", "f(g(1)) ("]
)
def test_words_before_brackets_are_no_calls(text):
    assert python_call(text) is None


@pytest.mark.parametrize("text", ["f(1)", "so: f(1) \n", "f(2) f(1)", "2f(1)", "x.f(1)", "\xe9f(1)"])
def test_the_call_at_the_end_counts(text):
    call = python_call(text)
    assert call is not None and (call.name, call.positional) == ("f", [1])


def test_halves_of_characters_do_not_reach_the_policy():
    """JSON can name them, and no tokenizer reads them."""
    tool = Tool.of(echo)
    assert tool(Scene(), [json.loads('"a\\ud800b"')], {}) == ("a?b",)


def echo(text: str) -> str:
    return text


def test_the_schema_follows_from_the_types():
    def look(
        scene: Scene,
        where: Annotated[list[float], "a point"],
        how: Literal["near", "far"],
        times: int = 1,
    ) -> str:
        """Looks.

        More of it."""
        return f"{len(scene.whole)} {where} {how} {times}"

    tool = Tool.of(look)
    assert tool.schema["function"] == {
        "name": "look",
        "description": "Looks.",
        "parameters": {
            "type": "object",
            "properties": {
                "where": {"type": "array", "items": {"type": "number"}, "description": "a point"},
                "how": {"type": "string", "enum": ["near", "far"]},
                "times": {"type": "integer"},
            },
            "required": ["where", "how"],
        },
    }
    assert tool(Scene(), [[1, 2.5]], {"how": "far"}) == ("0 [1.0, 2.5] far 1",)
    with pytest.raises(UserError, match="task.environment.tools: parameter x of the tool untyped needs a type"):
        Tool.of(lambda x: x, "untyped")


def test_tools_are_described_in_the_system_message_or_by_the_template():
    settings = make(ToolsSettings, {"tools": ["zoom"]})
    prompt = Prompt("p", "?", messages=(Message("user", ("?",)),))
    first, second = settings.make().start(prompt)
    assert (first.role, second) == ("system", prompt.messages[0])
    line = next(line for line in first.text.splitlines() if line.startswith("{"))
    assert json.loads(line)["function"]["name"] == "zoom" and not settings.make().tools()
    shown = make(ToolsSettings, {"tools": ["zoom"], "described": "template"}).make()
    assert shown.tools()[0]["function"]["name"] == "zoom" and list(shown.start(prompt)) == list(prompt.messages)


@pytest.mark.parametrize(
    ("expression", "want"),
    [("2 + 3 * 4", 14), ("(1 + 2) ** 2 / 3", 3), ("-7 // 2", -4), ("7 % 4 - 0.5", 2.5), ("sqrt(16) + abs(-1)", 5)],
)
def test_the_calculator_computes(expression, want):
    assert value(expression) == pytest.approx(want)


@pytest.mark.parametrize(
    "expression",
    ["9 ** 9 ** 9", "1 / 0", "__import__('os')", "(1).real", "a", "1" * 5000, "[1]", "", "(" * 200, "1e999"],
)
def test_the_calculator_refuses_what_is_no_small_arithmetic(expression):
    with pytest.raises(ToolError):
        value(expression)


def test_the_calculator_is_a_tool():
    reply = environment("calculator").step("calculator('2 * 21')")
    assert (reply.messages[0].text, reply.tool) == ("42", "calculator")


def page():
    """Two words, one on the left and one on the right half."""
    image = Image.new("RGB", (400, 96), "white")
    for place, word in ((16, "STOP"), (216, "EXIT")):
        ImageDraw.Draw(image).text((place, 24), word, fill="black", font=ImageFont.load_default(40))
    return image


@pytest.fixture(scope="module")
def reading():
    pytest.importorskip("rapidocr_onnxruntime")
    return environment("ocr", image=page(), coordinates=2.0, shown_pixels=8)


def said(reply):
    return reply.messages[0].text


def test_ocr_reads_the_whole_image_or_a_box_of_it(reading):
    assert said(reading.step("ocr()")) == "STOP\nEXIT"
    left, right = reading.step("ocr(0, 0, 1, 2)"), reading.step("ocr(left=1, top=0, right=2, bottom=2)")
    assert (said(left), said(right)) == ("STOP", "EXIT")  # from the original, though 8 pixels of it are shown
    assert (left.facts, right.facts["box"]) == ({"box": [0.0, 0.0, 0.5, 1.0], "image": 0}, [0.5, 0.0, 1.0, 1.0])
    assert (left.tool, left.error, said(reading.step("ocr(0, 0, 2, 0.2)"))) == ("ocr", None, "(no text)")


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ("ocr(0, 0, 1)", "give all of left, top, right and bottom"),
        ("ocr(1, 0, 1, 2)", "the box is empty"),
        ("ocr(0, 0, 0.001, 2)", "smaller than a pixel"),
        ("ocr(0, 0, 1, 2, 4)", "there is no image 4"),
        ("ocr('STOP')", "ocr: left cannot be 'STOP'"),
    ],
)
def test_a_box_that_can_not_be_read_is_an_observation(reading, call, told):
    reply = reading.step(call)
    assert told in reply.error and not reply.end


def test_what_ocr_reads_and_tells_has_limits(reading, monkeypatch):
    seen = []
    monkeypatch.setattr(images, "reader", lambda threads: lambda one: [*map(str, (threads, *one.size))] + seen)
    one = environment({"type": "ocr", "pixels": 2400, "threads": 3}, image=page())
    assert said(one.step("ocr(0, 0, 400, 96)")) == "3\n100\n24"
    seen.append("x" * 30)
    one = environment({"type": "ocr", "characters": 8}, image=page())
    assert said(one.step("ocr()")) == "1\n400\n96... (31 characters more: read a part of it)"


def test_the_schema_of_ocr_has_a_box_and_needs_none():
    (schema,) = make(ToolsSettings, {"tools": ["ocr"], "described": "template"}).make().tools()
    parameters = schema["function"]["parameters"]
    assert [value["type"] for value in parameters["properties"].values()] == ["number"] * 4 + ["integer"]
    assert list(parameters["properties"]) == ["left", "top", "right", "bottom", "image"] and not parameters["required"]


def test_reading_without_its_engine_is_one_line_before_a_model_is_loaded(monkeypatch, tmp_path):
    usual, gone = importlib.util.find_spec, "rapidocr_onnxruntime"
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name == gone else usual(name, *more))
    config = load("configs/vlm/visual_qa_zoom.yaml", [f"run_dir={tmp_path}", "task.environment.tools=[zoom, ocr]"])
    with pytest.raises(UserError, match=r"^task: task.environment.tools: reading text needs the extra `ocr`: pip "):
        build_task(config)
