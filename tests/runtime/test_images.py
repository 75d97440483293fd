"""Images arrive as viewers, transformers and vLLM show them, whatever file and mode hold them."""

import base64
import io

import numpy as np
import pytest
from PIL import Image
from transformers.image_utils import load_image

from mmrl.runtime.images import check_mode, decode_data_url, local_path, to_rgb
from mmrl.runtime.jsonl import RowError
from mmrl.sims.turns.chat import read_image
from mmrl.tasks.data.image_files import ImageFiles
from mmrl.tasks.data.video_files import VideoFiles
from mmrl.tasks.visual_qa.data.conversations import ConversationFields
from mmrl.tasks.visual_qa.reading.fields import Fields

A, B, C, D = (250, 10, 20), (30, 240, 40), (50, 60, 230), (0, 0, 0)
# What a viewer shows of the rows A B, C D stored under each orientation: EXIF 2.3, tag 274.
TURNED = {
    1: [[A, B], [C, D]],
    2: [[B, A], [D, C]],
    3: [[D, C], [B, A]],
    4: [[C, D], [A, B]],
    5: [[A, C], [B, D]],
    6: [[C, A], [D, B]],
    7: [[D, B], [C, A]],
    8: [[B, D], [A, C]],
}
LOSSLESS = {"PNG": {}, "WEBP": {"lossless": True}, "TIFF": {}}


def stored(image, form, orientation=None, **options):
    file, exif = io.BytesIO(), Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
        options["exif"] = exif
    image.save(file, form, **options)
    return file.getvalue()


def opened(data):
    return Image.open(io.BytesIO(data))


def square():
    return Image.fromarray(np.array([[A, B], [C, D]], np.uint8))


@pytest.mark.parametrize("orientation", TURNED)
@pytest.mark.parametrize("form", LOSSLESS)
def test_every_orientation_by_hand(form, orientation):
    image = opened(stored(square(), form, orientation, **LOSSLESS[form]))
    assert np.asarray(to_rgb(image)).tolist() == np.array(TURNED[orientation]).tolist()


MODES = {
    "PNG": ["1", "L", "P", "RGB"],
    "JPEG": ["L", "RGB", "CMYK"],
    "WEBP": ["RGB"],
    "GIF": ["L", "P"],
    "BMP": ["1", "L", "P", "RGB"],
    "TIFF": ["1", "L", "P", "RGB", "CMYK", "YCbCr"],
}


@pytest.mark.parametrize(
    ("form", "mode", "orientation"),
    [
        (form, mode, orientation)
        for form, modes in MODES.items()
        for mode in modes
        for orientation in ((None,) if form in ("GIF", "BMP") else (None, 5, 6))
    ],
)
def test_pixels_are_those_of_the_loader_of_transformers(form, mode, orientation):
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8))
    data = stored(noise.convert(mode), form, orientation)
    shown, theirs = to_rgb(opened(data)), load_image(opened(data))
    assert shown.mode == "RGB" and shown.size == theirs.size == ((7, 5) if orientation is None else (5, 7))
    assert np.array_equal(np.asarray(shown), np.asarray(theirs))


def strokes(mode):
    """Black pixels of three opacities, 255, 128 and 0."""
    image = Image.new("RGBA", (3, 1))
    image.putdata([(0, 0, 0, 255), (0, 0, 0, 128), (0, 0, 0, 0)])
    return image.convert(mode)


@pytest.mark.parametrize(
    ("form", "mode"), [("PNG", "RGBA"), ("PNG", "LA"), ("WEBP", "RGBA"), ("TIFF", "RGBA"), ("TIFF", "LA")]
)
def test_transparent_drawings_stand_on_white(form, mode):
    shown = to_rgb(opened(stored(strokes(mode), form, **({"lossless": True, "exact": True} if form == "WEBP" else {}))))
    assert np.asarray(shown)[0].tolist() == [[0] * 3, [127] * 3, [255] * 3]


def test_palettes_and_colours_that_are_transparent():
    palette = Image.new("P", (2, 1))
    palette.putpalette([*A, *B])
    palette.putdata([0, 1])
    for form in ("PNG", "GIF"):
        shown = to_rgb(opened(stored(palette, form, transparency=1)))
        assert np.asarray(shown)[0].tolist() == [list(A), [255] * 3]
    for mode, colour, clear in (("RGB", A, A), ("L", 7, 7)):
        shown = to_rgb(opened(stored(Image.new(mode, (1, 1), colour), "PNG", transparency=clear)))
        assert np.asarray(shown)[0, 0].tolist() == [255] * 3
    assert np.asarray(to_rgb(strokes("RGBA").convert("RGBa")))[0].tolist() == [[0] * 3, [127] * 3, [255] * 3]


@pytest.mark.parametrize("form", ["PNG", "TIFF"])
def test_sixteen_bits_of_grey_become_eight(form):
    deep = Image.fromarray(np.array([[0, 128, 129, 257, 32768, 65535]], np.uint16))
    shown = to_rgb(opened(stored(deep, form)))
    assert np.asarray(shown)[0, :, 0].tolist() == [0, 0, 1, 1, 128, 255]


@pytest.mark.parametrize("mode", ["I", "F"])
def test_numbers_without_a_range_are_refused_by_the_header(mode, tmp_path):
    (tmp_path / "deep.tif").write_bytes(stored(Image.new(mode, (2, 2), 3), "TIFF"))
    with pytest.raises(ValueError, match=f"mode {mode} have no known range; save the image with 8 or 16 bits"):
        check_mode(opened((tmp_path / "deep.tif").read_bytes()))
    for use in (ImageFiles(tmp_path).check, ImageFiles(tmp_path).decode):
        with pytest.raises(RowError, match=f"mode {mode} have no known range"):
            use("deep.tif")
        with pytest.raises(RowError, match=f"mode {mode} have no known range"):
            use(Image.new(mode, (2, 2)))


@pytest.mark.parametrize(
    "damage", [b"II*\x00\xff\xff\xff\xff", b"nonsense", b"II*\x00\x08\x00\x00\x00\x01\x00\x12\x01\x02\x00"]
)
def test_damaged_exif_is_passed_over(damage):
    image = opened(stored(square(), "PNG", exif=b"Exif\x00\x00" + damage))
    assert np.asarray(to_rgb(image)).tolist() == TURNED_AS_LISTS


TURNED_AS_LISTS = np.array(TURNED[1]).tolist()
TURNED_RIGHT = np.array(TURNED[6]).tolist()


def url(data, kind="png"):
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def ways(folder):
    """The same file, every way that a row can name it."""
    data = stored(square(), "PNG", 6)
    (folder / "a b.png").write_bytes(data)
    return {
        "path": "a b.png",
        "absolute path": str(folder / "a b.png"),
        "file URL": f"file://{folder}/a%20b.png",
        "data URL": url(data),
        "data URL in capitals": url(data).replace("data:", "DATA:"),
        "bytes": data,
        "mapping of bytes": {"bytes": data, "path": None},
        "mapping of a path": {"bytes": None, "path": "a b.png"},
        "mapping of a URL": {"url": url(data)},
        "nested": {"image_url": {"url": url(data)}},
        "Pillow": opened(data),
    }


@pytest.mark.parametrize(
    "way",
    [
        *("path", "absolute path", "file URL", "data URL", "data URL in capitals", "bytes"),
        *("mapping of bytes", "mapping of a path", "mapping of a URL", "nested", "Pillow"),
    ],
)
def test_every_way_to_name_an_image_shows_it_upright(way, tmp_path):
    image = ways(tmp_path)[way]
    fields = Fields(image_files=ImageFiles(tmp_path))
    row = {"images": image, "problem": "which?", "answer": "a"}
    fields.check(row)
    assert np.asarray(fields.prompt(row, "p").images[0]).tolist() == TURNED_RIGHT
    talk = ConversationFields(image_files=ImageFiles(tmp_path))
    messages = [{"role": "user", "content": "<image>which?"}, {"role": "assistant", "content": "a"}]
    talked = talk.prompt({"images": [image], "messages": messages}, "p")
    assert np.asarray(talked.messages[0].images[0]).tolist() == TURNED_RIGHT


def test_an_environment_shows_images_upright_and_on_white():
    assert np.asarray(read_image(url(stored(square(), "PNG", 6)))).tolist() == TURNED_RIGHT
    assert np.asarray(read_image(strokes("RGBA")))[0].tolist() == [[0] * 3, [127] * 3, [255] * 3]


def test_frames_of_a_transparent_animation_stand_on_white(tmp_path):
    frames = [strokes("RGBA"), strokes("RGBA").transpose(Image.Transpose.FLIP_LEFT_RIGHT)]
    frames[0].save(tmp_path / "a.webp", save_all=True, append_images=frames[1:], lossless=True, exact=True)
    shown = VideoFiles(ImageFiles(tmp_path)).decode("a.webp").frames
    assert [np.asarray(frame)[0, :, 0].tolist() for frame in shown] == [[0, 127, 255], [255, 127, 0]]


def test_urls_by_hand():
    assert (
        decode_data_url("data:image/png;base64,QUI=") == b"AB"
        and decode_data_url("data:image/jpeg;base64,QU\nI%3D") == b"AB"
    )
    assert local_path("file:///a%20b/%C3%A9.png") == "/a b/\xe9.png" and local_path("file://localhost/a") == "/a"
