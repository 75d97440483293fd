"""The strip of conversations before and after RL: what is read from a table of samples, and where it is drawn."""

import base64
import io

from PIL import Image

from mmrl.report.conversations import ROLE
from scripts.readme import conversations
from scripts.readme.conversations import FRAME, GAP, LARGE, RIGHT, SMALL, TEXT, WRONG


def embedded(colour, side=64):
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), colour).save(buffer, "PNG")
    return f'<img src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}">'


def row(colour, said, accuracy, crop=""):
    talk = f"<div>{ROLE.format('user')} {embedded(colour, 32)}<pre>Q</pre></div>"
    talk += "".join(f"<div>{ROLE.format('response')} <pre>{one}</pre></div>{crop}" for one in said)
    cells = {"images": embedded(colour), "prompt": "<pre>Which &lt;one&gt;?</pre>", "answer": "3", "response": talk}
    cells["accuracy"] = accuracy
    return "<tr>" + "".join(f'<td data-name="{name}">{value}</td>' for name, value in cells.items()) + "</tr>"


def page(*rows):
    return "<table><tr><th>images</th></tr>" + "".join(rows) + "</table>"


def near(pixel, colour):
    return max(abs(a - b) for a, b in zip(pixel, colour, strict=True)) < 12


def test_a_conversation_is_read_with_its_box_and_last_answer():
    zoomed, direct, broken = conversations.read_conversations(
        page(
            row("blue", ["zoom(1, 2,3,4)", "7"], "1", embedded("lime", 24)),
            row("red", ["5"], "0"),
            row("white", ["zoom(1,2)", "zoom(0,0,1,1)", "2"], "0"),
        )
    )
    assert zoomed.box == (1.0, 2.0, 3.0, 4.0) and zoomed.answer == "7" and zoomed.right
    assert zoomed.question == "Which <one>?" and zoomed.image.size == (64, 64)
    assert [image.getpixel((1, 1)) for image in zoomed.seen[:2]] == [(0, 0, 255), (0, 255, 0)]
    assert (direct.box, direct.answer, direct.right) == (None, "5", False) and len(direct.seen) == 1
    assert broken.box is None and broken.answer == "2"
    assert conversations.one_each([direct, zoomed, direct]) == [direct, zoomed]


def test_the_strip_has_a_band_before_and_one_after(tmp_path):
    """The box 1, 2, 3, 4 of 0 to 4 begins a quarter from the left, half from the top."""
    (tmp_path / "samples").mkdir()
    before, after = page(row("blue", ["5"], "0")), page(row("blue", ["zoom(1,2,3,4)", "3"], "1", embedded("lime", 24)))
    for step, text in ((0, before), (40, page()), (60, after)):
        (tmp_path / "samples" / f"evaluation-{step:06}.html").write_text(text)
    conversations.main(tmp_path / "strip.png", tmp_path, 1, 4.0)
    with Image.open(tmp_path / "strip.png") as file:
        sheet = file.convert("RGB")
    band, left = LARGE + TEXT + 22, LARGE + GAP
    corner, middle = (LARGE // 4 + 1, LARGE // 2 + 40), (left + SMALL // 2, 16 + SMALL // 2)
    answer = (left + 3, 2 * (SMALL + 26) + 30)
    for top, frame, crop, colour in ((22, (0, 0, 255), "white", WRONG), (22 + band, FRAME, (0, 255, 0), RIGHT)):
        crop = (255, 255, 255) if crop == "white" else crop
        assert near(sheet.getpixel((corner[0], corner[1] + top)), frame)
        assert near(sheet.getpixel((middle[0], middle[1] + top)), (0, 0, 255))
        assert near(sheet.getpixel((middle[0], middle[1] + SMALL + 26 + top)), crop)
        assert near(sheet.getpixel((answer[0], answer[1] + top)), colour)
