import importlib.util
import io
import json
import logging
import os
import re
import struct
import sys
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mmrl.config import load
from mmrl.errors import UserError
from mmrl.rewards.credit import several_choices
from mmrl.rollouts import Sample
from mmrl.runtime import jsonl
from mmrl.tasks import visual_qa
from mmrl.tasks.visual_qa import parquet, verdicts
from mmrl.tasks.visual_qa.data import files
from mmrl.tasks.visual_qa.data.files import FileSource
from mmrl.tasks.visual_qa.data.huggingface import HuggingFaceSource
from mmrl.tasks.visual_qa.reading.fields import Fields

ROOT = Path(__file__).parents[2]


def png(red):
    buffer = io.BytesIO()
    Image.new("RGB", (5, 4), (red, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def rows(count, **first):
    """Rows with one image each, whose red is the row's number; `first` overwrites fields of row 0."""
    made = [
        {
            "images": [{"bytes": png(n), "path": None}],
            "problem": f"<image>Question {n}?",
            "answer": str(n),
            "level": n % 3,
        }
        for n in range(count)
    ]
    made[0] |= first
    return made


def write_jsonl(folder, lines):
    path = folder / "questions.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def red(prompt):
    return [image.getpixel((0, 0))[0] for image in prompt.images]


@pytest.fixture
def images(tmp_path):
    for n in range(4):
        (tmp_path / f"{n}.png").write_bytes(png(n))
    return tmp_path


def question(n, **changes):
    return {"images": [f"{n}.png"], "problem": f"<image>How many? {n}", "answer": str(n)} | changes


def test_jsonl_by_path(images):
    path = write_jsonl(
        images,
        [
            question(0),
            "",
            "   ",
            question(1, images=["1.png", {"path": "2.png", "bytes": None}], problem="<image> é <image>?"),
            question(3, images=[], problem="No image?", source="book"),
            question(3, images="3.png", problem="One image and no marker?", answer=3),
        ],
    )
    source = FileSource(path)
    assert len(source) == 4 and source.bad == []
    assert [red(source[i]) for i in (3, 2, 1, 0)] == [[3], [], [1, 2], [0]]
    assert source[1].text == "<image> é <image>?"
    assert (source[2].metadata, source[2].id) == ({"source": "book"}, "questions:5")  # blank lines count as lines
    assert source[3].answer == 3
    assert source[0].images[0].mode == "RGB"


def test_bad_rows_are_listed_with_file_line_and_field(images):
    (images / "torn.png").write_bytes(png(1)[:20])
    bad = [
        ("{'not': json}", "not JSON"),
        ('["a list"]', "object"),
        (question(1, answer=None), "field 'answer' is empty"),
        ({"images": [], "problem": "?"}, "field 'answer' is missing"),
        (question(1, problem=" "), "field 'problem' is empty"),
        (question(1, problem=7), "field 'problem' must be text"),
        (
            question(1, images=["1.png", "2.png"]),
            "field 'problem' has 1 <image> markers, field 'images' has 2 images",
        ),
        (question(1, images=["gone.png"]), "field 'images', image 0: cannot read .*gone.png"),
        (question(1, images=["torn.png"]), "field 'images', image 0: cannot read .*torn.png"),
        (question(1, images=[{"bytes": None, "path": None}]), "neither a path, a URL nor bytes"),
    ]
    path = write_jsonl(images, [question(0), *(line for line, _ in bad), question(2)])
    source = FileSource(path, max_bad_share=0.9)
    assert [source[i].answer for i in range(len(source))] == ["0", "2"]
    assert [row.line for row in source.bad] == list(range(2, 12))
    for row, (_, reason) in zip(source.bad, bad, strict=True):
        assert row.reason.startswith(f"{path}, line {row.line}: ") and "\n" not in row.reason
        assert re.search(reason, row.reason), row.reason


def test_share_of_bad_rows_stops_or_not(images):
    path = write_jsonl(images, [question(0)] * 9 + ["oops"])
    assert len(FileSource(path, max_bad_share=0.1)) == 9
    with pytest.raises(
        ValueError, match=r"1 of 10 rows cannot be used, more than max_bad_share=0.09 .*line 10: not JSON"
    ):
        FileSource(path, max_bad_share=0.09)
    unchecked = FileSource(path, validate=False)
    assert len(unchecked) == 10 and unchecked[0].answer == "0"
    with pytest.raises(UserError, match="1 of 10 rows cannot be used.*line 10: not JSON"):
        unchecked[9]


def test_an_image_that_turns_out_torn_costs_its_row_when_it_is_used(images, caplog):
    (images / "torn.png").write_bytes(png(9)[:50])  # the header is whole
    path = write_jsonl(images, [question(n % 4) for n in range(8)] + [question(1, images=["torn.png"])] * 2)
    source = FileSource(path, max_bad_share=0.2)
    assert len(source) == 10 and source.bad == []
    with caplog.at_level(logging.WARNING):
        assert [red(source[i]) for i in (8, 9, 8, 0)] == [[0]] * 4  # the next good row, and after the last the first
    assert [row.line for row in source.bad] == [9, 10]
    assert caplog.text.count("left out, the next row takes its place") == 2 and "line 9: field 'images'" in caplog.text
    assert len(source) == 10  # the places of all others stay as they are
    strict = FileSource(path, max_bad_share=0.1)
    with pytest.raises(UserError, match="2 of 10 rows cannot be used.*torn.png"):
        strict[8]


def test_where_no_row_can_be_used(images):
    (images / "torn.png").write_bytes(png(9)[:50])
    source = FileSource(write_jsonl(images, [question(1, images=["torn.png"])] * 2), max_bad_share=1)
    with pytest.raises(UserError, match="no row of it can be used; the first error: .*line 1"):
        source[1]


REFUSED = {
    "absolute": ("/etc/hostname", "lies outside of image_root="),
    "file of another host": ("file://server/0.png", "lies on another host"),
    "file elsewhere": ("file:///etc/hostname", "lies outside of image_root="),
    "web": ("https://example.com/0.png", "images are not fetched"),
    "no base64": ("data:image/png,abc", "only base64 is read"),
    "damaged base64": ("data:image/png;base64,@@@", "Only base64 data|Invalid base64|Non-base64|Incorrect padding"),
    "empty URL": ("data:image/png;base64,", "cannot read 'data:image"),
    "up": ("../secret.png", r"contains '\.\.'; write"),
    "up and down": ("sub/../0.png", r"contains '\.\.'; write"),
    "link out": ("link.png", "lies outside of image_root="),
    "folder that leads out": ("way/secret.png", "lies outside of image_root="),
    "itself": (".", "lies outside of image_root="),
    "loop": ("loop.png", "cannot read 'loop.png'"),
    "pipe": ("pipe.png", "is not a regular file"),
    "folder": ("sub", "is not a regular file"),
    "long": ("x" * 5000, "File name too long"),
    "zero byte": ("a\0.png", "embedded null"),
    "program": ("page.eps", "cannot read 'page.eps': not a PNG, JPEG, WEBP, GIF, BMP or TIFF"),
    "huge": ("huge.png", "has 13000 x 13000 pixels, more than max_pixels=40000000"),
    "number": (7, "neither a path, a URL nor bytes"),
    "bytes of JSON": ({"bytes": "abc"}, "neither a path, a URL nor bytes"),
}


@pytest.fixture
def traps(images):
    root = images / "root"
    (root / "sub").mkdir(parents=True)
    (images / "secret.png").write_bytes(png(1))
    (root / "0.png").write_bytes(png(0))
    (root / "inner.png").symlink_to("0.png")
    (root / "link.png").symlink_to(images / "secret.png")
    (root / "way").symlink_to(images)
    (root / "loop.png").symlink_to("loop.png")
    os.mkfifo(root / "pipe.png")
    Image.new("RGB", (4, 4)).save(root / "page.eps")
    header = b"IHDR" + struct.pack(">IIBBBBB", 13000, 13000, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    (root / "huge.png").write_bytes(b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 4) + b"IDAT" + bytes(8))
    return root


@pytest.mark.parametrize(("image", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_images_that_a_file_may_not_open(traps, image, reason):
    path = write_jsonl(traps, [question(0), question(0, images=[image])])
    source = FileSource(path, max_bad_share=0.5)
    assert len(source) == 1
    assert re.search(f"line 2: field 'images', image 0: .*{reason}", source.bad[0].reason), source.bad[0].reason
    assert "\n" not in source.bad[0].reason


def test_links_and_roots_that_lead_below_are_followed(traps):
    assert red(FileSource(write_jsonl(traps, [question(0, images=["inner.png"])]))[0]) == [0]
    (traps.parent / "other").symlink_to(traps)
    path = write_jsonl(traps.parent, [question(0)])
    assert red(FileSource(path, image_root=traps.parent / "other")[0]) == [0]
    with pytest.raises(ValueError, match="has 5 x 4 pixels, more than max_pixels=19"):
        FileSource(path, max_pixels=19)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_formats_that_are_read(tmp_path, format):
    Image.new("RGB", (8, 8), (200, 0, 0)).save(tmp_path / "image", format)
    (image,) = FileSource(write_jsonl(tmp_path, [question(0, images=["image"])]))[0].images
    assert image.mode == "RGB" and image.size == (8, 8) and abs(image.getpixel((0, 0))[0] - 200) < 9


ROWS = {
    "surrogate": ('{"problem": "half \\ud83d", "answer": "1"}', "field 'problem': half of a surrogate pair"),
    "surrogate inside": ('{"problem": "?", "answer": "1", "more": [{"a": "\\udc00"}]}', "field 'more': half of a"),
    "surrogate in a name": ('{"problem": "?", "answer": "1", "a\\udc00": 1}', "half of a surrogate pair"),
    "deep": (
        '{"problem": "?", "answer": "1", "more": ' + "[" * 100 + "]" * 100 + "}",
        "field 'more': nested more than 64",
    ),
    "very deep": ("[" * 100_000, "more than 64 levels deep"),
    "many digits": ('{"problem": "?", "answer": ' + "9" * 5000 + "}", "cannot be parsed: Exceeds the limit"),
    "digits": ('{"problem": "?", "answer": ' + "9" * 400 + "}", "field 'answer': an integer of 1329 bits"),
    "infinite": ('{"problem": "?", "answer": 1e999}', "field 'answer' is inf, which no answer equals"),
    "no number": ('{"problem": "?", "answer": NaN}', "field 'answer' is nan, which no answer equals"),
    "not UTF-8": (b'{"problem": "caf\xe9", "answer": "1"}', "not JSON, for it is not UTF-8"),
    "image": (
        {"problem": "?", "answer": "1", "image": "0.png"},
        "but there is 'image': set task.data.image_field=image",
    ),
    "question": (
        {"question": "?", "answer": "1"},
        r"\(fields: question, answer\); set task.data.problem_field to the right",
    ),
    "label": ({"problem": "?", "label": "1"}, r"\(fields: problem, label\); set task.data.answer_field to the right"),
    "Images": ({"problem": "?", "answer": "1", "Images": ["0.png"]}, "is missing, but there is 'Images'"),
    "empty images": ({"problem": "?", "answer": "1", "images": None, "image": "0.png"}, "but there is 'image'"),
}


@pytest.mark.parametrize(("row", "reason"), ROWS.values(), ids=ROWS.keys())
def test_rows_that_would_end_the_run_later_are_named(images, row, reason):
    path = write_jsonl(images, [question(0)])
    line = row if isinstance(row, bytes) else (row if isinstance(row, str) else json.dumps(row)).encode()
    path.write_bytes(path.read_bytes() + line + b"\n")
    source = FileSource(path, max_bad_share=0.5)
    assert len(source) == 1
    assert re.search(f"line 2: .*{reason}", source.bad[0].reason), source.bad[0].reason
    source.bad[0].reason.encode()


def test_a_reason_that_many_rows_share_is_told_once(images):
    rows = [{"question": "?", "answer": "1"}] * 7 + [question(0), {"problem": " ", "answer": "1"}]
    path = write_jsonl(images, rows)
    with pytest.raises(ValueError, match="8 of 9 rows cannot be used") as refused:
        FileSource(path)
    told = str(refused.value).partition("raise max_bad_share: ")[2].split("; ")
    assert told[0] == f"{path}, line 1: field 'problem' is missing (fields: question, answer)"
    assert told[1:] == [
        "set task.data.problem_field to the right one (and 6 more like it)",
        f"{path}, line 9: field 'problem' is empty",
    ]


def test_names_that_are_not_near_are_metadata(images):
    path = write_jsonl(images, [{"problem": "?", "answer": "1", "image_id": 7, "image": None}])
    assert FileSource(path)[0].metadata == {"image_id": 7, "image": None}


def test_a_line_that_is_too_long_is_not_read(images, monkeypatch):
    monkeypatch.setattr(jsonl, "LONGEST_LINE", 1000)
    path = write_jsonl(images, [question(0), question(1, more="x" * 5000), question(2)])
    monkeypatch.setattr(files, "LONGEST_LINE", 1000)
    source = FileSource(path, max_bad_share=0.5)
    assert [red(source[i]) for i in range(2)] == [[0], [2]] and source[1].id == "questions:3"
    assert source.bad[0].line == 2 and "longer than" in source.bad[0].reason


@pytest.fixture
def counted(monkeypatch, tmp_path):
    """How many rows are checked."""
    monkeypatch.setenv("MMRL_ROW_CACHE", str(tmp_path / "cache"))
    checked, check = [], Fields.check

    def count(self, row):
        checked.append(row)
        return check(self, row)

    monkeypatch.setattr(Fields, "check", count)
    return checked


def test_a_verdict_is_kept_until_the_file_or_an_option_changes(images, counted):
    path = write_jsonl(images, [question(0), "oops", question(1)])
    first = FileSource(path, max_bad_share=0.5)
    assert len(counted) == 2 and len(first) == 2
    again = FileSource(path, max_bad_share=0.5)
    assert len(counted) == 2 and again.bad == first.bad and [red(again[i]) for i in range(2)] == [[0], [1]]
    with pytest.raises(ValueError, match="1 of 3 rows"):  # the share is asked about each time
        FileSource(path)
    FileSource(path, max_bad_share=0.5, max_pixels=50)
    assert len(counted) == 4
    os.utime(path, ns=(1, 1))
    FileSource(path, max_bad_share=0.5)
    assert len(counted) == 6
    write_jsonl(images, [question(0), question(1), question(2)])
    os.utime(path, ns=(1, 1))
    assert len(FileSource(path)) == 3 and len(counted) == 9


@pytest.mark.parametrize("text", ["", "[]", '{"count": 3, "bad": [[7, "x"]]}', '{"count": 3, "bad": 1}', "[" * 99999])
def test_a_verdict_that_cannot_be_read_is_none(images, counted, text, tmp_path):
    path = write_jsonl(images, [question(0), question(1), question(2)])
    FileSource(path)
    (kept,) = (tmp_path / "cache").glob("*.json")
    kept.write_text(text)
    assert len(FileSource(path)) == 3 and len(counted) == 6


def test_a_verdict_of_a_changed_parser_is_void(images, counted, tmp_path, monkeypatch):
    path = write_jsonl(images, [question(0), question(1)])
    (tmp_path / "parser").mkdir()
    parser = tmp_path / "parser" / "rows.py"
    monkeypatch.setattr(verdicts, "PARSERS", (tmp_path / "parser",))
    counts = []
    for text in ("a = 1", "a = 1", "a = 2"):
        parser.write_text(text)
        verdicts.code_digest.cache_clear()  # as in another process
        FileSource(path)
        counts.append(len(counted))
    assert counts == [2, 2, 4]
    verdicts.code_digest.cache_clear()
    monkeypatch.setattr(verdicts, "VERSION", "another")
    FileSource(path)
    assert len(counted) == 6
    monkeypatch.undo()
    verdicts.code_digest.cache_clear()
    assert {"rows.py", "files.py"} <= {file.name for folder in verdicts.PARSERS for file in folder.glob("*.py")}


def test_verdicts_that_cannot_be_kept_are_no_fault(images, counted, tmp_path):
    (tmp_path / "cache").write_text("a file")
    for _ in range(2):
        assert len(FileSource(write_jsonl(images, [question(0)]))) == 1
    assert len(counted) == 2


def test_parquet_row_groups_are_read_once_and_as_many_kept_as_fit(tmp_path, caplog):
    path = tmp_path / "questions.parquet"
    pq.write_table(pa.Table.from_pylist(rows(12)), path, row_group_size=3)
    reads = []

    def source(gib):
        made = FileSource(path, validate=False, parquet_gib=gib)
        read_group = made._rows._read_group
        made._rows._read_group = lambda group: (reads.append(group), read_group(group))[1]
        return made

    with caplog.at_level(logging.WARNING):
        everything = source(1.0)
        assert [red(everything[i])[0] for i in (0, 11, 1, 10, 4, 0)] == [0, 11, 1, 10, 4, 0] and reads == [0, 3, 1]
        assert caplog.text == ""
        reads.clear()
        one = source(0.0)
        assert [red(one[i])[0] for i in (0, 11, 10, 1)] == [0, 11, 10, 1] and reads == [0, 3, 0]
    assert "raise parquet_gib, or write smaller row groups" in caplog.text


def test_parquet_bombs_are_refused_by_row(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "MAX_GROUP_BYTES", 1 << 20)
    path = tmp_path / "questions.parquet"
    wide = pa.array(["x" * 1000] * 20_000)
    table = pa.table({"problem": wide, "answer": pa.array(["1"] * 20_000)})
    pq.write_table(table, path)  # 20 MB behind a dictionary of one entry
    assert path.stat().st_size < 20_000
    with pytest.raises(ValueError, match="row 1: row group 0: it decompresses to more than"):
        FileSource(path)
    monkeypatch.setattr(parquet, "MAX_ROWS", 10_000)
    with pytest.raises(ValueError, match="of up to 20000 rows; at most 10000 rows in groups of 4000000 are"):
        FileSource(path)
    monkeypatch.setattr(parquet, "MAX_ROWS", 20_000)
    monkeypatch.setattr(parquet, "MAX_GROUP_ROWS", 10_000)
    with pytest.raises(ValueError, match="rows in groups of 10000 are read"):
        FileSource(path)


def test_a_parquet_bomb_is_read_no_further_than_it_may_unpack(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "MAX_GROUP_BYTES", 1 << 20)
    monkeypatch.setattr(parquet, "MAX_BATCH_ROWS", 64)
    path, read = tmp_path / "questions.parquet", []
    pq.write_table(pa.table({"problem": ["x" * 1000] * 20_000, "answer": ["1"] * 20_000}), path)
    source = FileSource(path, validate=False)
    batches = pq.ParquetFile.iter_batches

    def counted(file, *arguments, **options):
        for part in batches(file, *arguments, **options):
            read.append(len(part))
            yield part

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counted)
    with pytest.raises(UserError, match="decompresses to more than"):
        source[0]
    assert 1000 < sum(read) < 1200  # of 20 000


def test_a_torn_row_group_costs_its_rows(tmp_path):
    path = tmp_path / "questions.parquet"
    pq.write_table(pa.Table.from_pylist(rows(6)), path, row_group_size=3)
    data = bytearray(path.read_bytes())
    data[4:200] = bytes(196)
    path.write_bytes(data)
    source = FileSource(path, max_bad_share=0.5)
    assert [row.line for row in source.bad] == [1, 2, 3] and "row group 0" in source.bad[0].reason
    assert red(source[0]) == [3]


@pytest.mark.parametrize("validate", [True, False])
def test_parquet_across_row_groups(tmp_path, validate):
    path = tmp_path / "questions.parquet"
    pq.write_table(pa.Table.from_pylist(rows(10)), path, row_group_size=4)
    source = FileSource(path, validate=validate)
    assert len(source) == 10
    assert [red(source[i]) for i in (9, 0, 4, 3)] == [[9], [0], [4], [3]]
    assert (source[7].text, source[7].answer, source[7].metadata) == ("<image>Question 7?", "7", {"level": 1})
    with pytest.raises(IndexError):
        source[10]


def test_parquet_counts_bad_rows_from_one(tmp_path):
    path = tmp_path / "questions.parquet"
    pq.write_table(pa.Table.from_pylist(rows(4, images=[{"bytes": b"no image", "path": None}])), path)
    source = FileSource(path, max_bad_share=0.25)
    assert (len(source), source.bad[0].line, source[0].id) == (3, 1, "questions:2")
    assert "row 1: field 'images', image 0: cannot read bytes" in source.bad[0].reason


def test_other_field_names_and_root(images):
    (images / "text").mkdir()
    path = write_jsonl(images / "text", [{"photo": "2.png", "q": "What?", "a": "two"}])
    source = FileSource(path, image_field="photo", problem_field="q", answer_field="a", image_root=images)
    assert (red(source[0]), source[0].text, source[0].answer) == ([2], "What?", "two")


def test_files_that_are_none(tmp_path):
    with pytest.raises(FileNotFoundError, match="gone.jsonl"):
        FileSource(tmp_path / "gone.jsonl")
    (tmp_path / "a.xlsx").write_text("x")
    with pytest.raises(ValueError, match="must end in .jsonl, .parquet, .csv"):
        FileSource(tmp_path / "a.xlsx")
    (tmp_path / "a.parquet").write_text("x")
    with pytest.raises(ValueError, match="a.parquet: not a Parquet file") as caught:
        FileSource(tmp_path / "a.parquet")
    assert "\n" not in str(caught.value)
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match="no row of it can be used"):
        FileSource(tmp_path / "a.jsonl")


def test_a_parquet_file_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    pq.write_table(pa.Table.from_pylist(rows(1)), tmp_path / "q.parquet")
    write_jsonl(tmp_path, [{"problem": "Why?", "answer": "1"}])
    monkeypatch.setitem(sys.modules, "pyarrow", None)  # its import fails
    monkeypatch.delitem(sys.modules, parquet.__name__)
    monkeypatch.delattr(visual_qa, "parquet")
    with pytest.raises(
        UserError, match=r"q.parquet: .*pyarrow.*; pip install -e '.\[parquet\]', or write it as .jsonl"
    ):
        FileSource(tmp_path / "q.parquet")
    assert len(FileSource(tmp_path / "questions.jsonl")) == 1


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="needs mmrl[huggingface]")
def test_a_hub_that_cannot_be_reached_is_named(monkeypatch):
    import datasets

    def load(name, **options):
        raise ConnectionError(f"Couldn't reach '{name}' on the Hub (LocalEntryNotFoundError)")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(
        ConnectionError, match=r"task.data.name=some/set cannot be downloaded \(Couldn't .*\); check the"
    ):
        HuggingFaceSource("some/set", "train")


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="needs mmrl[huggingface]")
def test_huggingface_saved_folder_and_parquet(tmp_path):
    import datasets

    features = datasets.Features(
        {
            "images": datasets.List(datasets.Image()),
            "problem": datasets.Value("string"),
            "answer": datasets.Value("string"),
            "level": datasets.Value("int64"),
        }
    )
    table = rows(5, images=[{"bytes": b"no image", "path": None}])
    data = datasets.Dataset.from_list(table, features=features)
    datasets.DatasetDict({"train": data}).save_to_disk(tmp_path / "saved")
    source = HuggingFaceSource(str(tmp_path / "saved"), "train", max_bad_share=0.2)
    assert [red(source[i]) for i in range(4)] == [[1], [2], [3], [4]]
    assert source.bad[0].line == 0 and "row 0: field 'images'" in source.bad[0].reason
    assert source[0].metadata == {"level": 1}
    with pytest.raises(ValueError, match="no split 'test'; it has train"):
        HuggingFaceSource(str(tmp_path / "saved"), "test")
    with pytest.raises(ValueError, match="1 of 5 rows"):
        HuggingFaceSource(str(tmp_path / "saved"), "train")

    pq.write_table(pa.Table.from_pylist(rows(3)), tmp_path / "q.parquet")
    options = {"data_files": str(tmp_path / "q.parquet"), "cache_dir": str(tmp_path / "cache")}
    source = HuggingFaceSource("parquet", "train", options=options)
    assert (len(source), red(source[2]), source[2].id) == (3, [2], "parquet:2")


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="needs mmrl[huggingface]")
def test_the_columns_of_mmk12_are_read(tmp_path):
    """A stand-in with the columns and splits of its card: one image a row, not a list of them."""
    import datasets

    texts = {name: datasets.Value("string") for name in ("id", "question", "answer", "subject")}
    row = {"id": "a", "question": "<image> How long is AB?", "answer": "$2\\sqrt{3}$", "subject": "math"}
    table = [row | {"image": {"bytes": png(7), "path": None}}]
    data = datasets.Dataset.from_list(table, features=datasets.Features({**texts, "image": datasets.Image()}))
    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "saved")
    config = load(ROOT / "configs/vlm/visual_qa_mmk12.yaml", ["model.path=x", f"task.data.name={tmp_path / 'saved'}"])
    for source in config.task.data.sources(seed=0):
        assert (source[0].text, source[0].answer) == (row["question"], row["answer"]) and len(source[0].images) == 1
        assert source[0].metadata == {"id": "a", "subject": "math"}


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="needs mmrl[huggingface]")
def test_huggingface_opens_files_below_the_root_only(images):
    import datasets

    root = images / "root"
    root.mkdir()
    (root / "0.png").write_bytes(png(0))
    paths = [root / "0.png", images / "1.png"]  # datasets writes absolute paths
    table = [{"images": [{"bytes": None, "path": str(path)}], "problem": "?", "answer": "1"} for path in paths]
    datasets.Dataset.from_list(table).save_to_disk(images / "saved")
    source = HuggingFaceSource(str(images / "saved"), image_root=root, max_bad_share=0.5)
    assert red(source[0]) == [0] and "row 1: field 'images', image 0: " in source.bad[0].reason
    assert "lies outside of image_root" in source.bad[0].reason
    with pytest.raises(ValueError, match="is a path, but image_root is not set"):
        HuggingFaceSource(str(images / "saved"))


def test_huggingface_without_datasets(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ModuleNotFoundError,
        match=r"task.data.type=huggingface needs the package datasets: pip install -e '.\[huggingface\]'",
    ):
        HuggingFaceSource("anything")


# --- questions whose options and images are in columns of their own ---


def asked(tmp_path, row, **fields):
    """The prompt of a row whose images are colours."""
    for name in ("one", "two", "three"):
        Image.new("RGB", (5, 4), ("one", "two", "three").index(name) * 40).save(tmp_path / f"{name}.png")
    options = {"image_field": ["image_1", "image_2", "image_3"], "options_field": "options", **fields}
    return FileSource(write_jsonl(tmp_path, [row]), **options)[0]


MMMU = {
    "problem": "Which of <image 2> and <image 1> is darker?",
    "options": "['the first', \"the second's\", '<image 3>']",
    "answer": "B",
    "image_1": "one.png",
    "image_2": "two.png",
    "image_3": "three.png",
    "subfield": "light",
}


def test_options_and_numbered_images_become_a_question(tmp_path):
    """As MMMU has them: a text of a list, and images that texts name by number, in whatever order."""
    prompt = asked(tmp_path, MMMU)
    assert prompt.text == ("Which of <image> and <image> is darker?\nA. the first\nB. the second's\nC. <image>")
    assert red(prompt) == [40, 0, 80] and prompt.answer == "B"
    assert prompt.metadata == {"subfield": "light"}


def test_images_that_no_text_names_come_first(tmp_path):
    row = MMMU | {"problem": "Is it darker than <image 2>?", "options": ["yes", "no"], "image_3": None}
    prompt = asked(tmp_path, row)
    assert prompt.text == "<image>Is it darker than <image>?\nA. yes\nB. no" and red(prompt) == [0, 40]
    plain = asked(tmp_path, row | {"problem": "Darker?"})
    assert plain.text == "Darker?\nA. yes\nB. no" and red(plain) == [0, 40]
    number = "9" * 5000  # more digits than int() takes
    assert asked(tmp_path, row | {"problem": f"<image {number}>?"}).text.startswith(f"<image {number}>?")


def test_a_number_is_the_place_of_an_option(tmp_path):
    """As ScienceQA has them; letters of a mapping are kept, and a question without options is as it was."""
    row = {"problem": "Which?", "options": ["cat", "dog"], "answer": 1, "image_1": "one.png"}
    assert asked(tmp_path, row).answer == "B"
    assert asked(tmp_path, row | {"answer": 0}).answer == "A"
    lettered = asked(tmp_path, row | {"options": {"x": "cat", "y": "dog", "z": None}, "answer": "y"})
    assert lettered.text == "Which?\nx. cat\ny. dog" and lettered.answer == "y"
    for none in (None, "", "[]", []):
        free = asked(tmp_path, row | {"options": none, "answer": 7})
        assert (free.text, free.answer) == ("Which?", 7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"problem": "<image 3>?", "image_3": None},
            "the question has the marker <image 3>, but the row has no such image",
        ),
        ({"options": "['a'"}, "field 'options' is text, but not a list of options"),
        ({"options": "7"}, "field 'options' must be a list of at most 26 options"),
        ({"options": ["a"] * 27}, "at most 26 options"),
        ({"options": ["a", "b"], "answer": 2}, "field 'answer' is 2, but there are 2 options, counted from 0"),
    ],
)
def test_options_that_can_not_be_used_are_named(tmp_path, change, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        asked(tmp_path, MMMU | change)


def test_the_keys_of_options_reach_the_files(tmp_path):
    asked(tmp_path, MMMU)
    columns = "options_field: options, image_field: [image_1, image_2, image_3]"
    data = f"task.data={{type: files, eval: {tmp_path}/questions.jsonl, {columns}}}"
    config = load(ROOT / "configs/vlm/visual_qa_geometry3k.yaml", [data, "model.path=x"])
    prompt = config.task.build(0).evaluation[0]
    assert "B. the second's\nC. <image>\n" in prompt.text and red(prompt) == [40, 0, 80]


# --- questions that ask for the wrong options ---

PETS = {"problem": "Which of them barks?", "options": ["cat", "dog", "bird"], "answer": 1, "image_1": "one.png"}
ASKS = "Which of these options are not right answers to the question? Name the letters of all of them."


def test_an_inverted_question_has_all_other_options_as_its_answer(tmp_path):
    prompt = asked(tmp_path, PETS, inverted=1.0)
    assert prompt.text == f"Which of them barks?\nA. cat\nB. dog\nC. bird\n{ASKS}" and prompt.answer == "A, C"
    for answers, expected in ((["A", "C"], "B"), ("A, B", "C"), ("C", "A, B")):
        assert asked(tmp_path, PETS | {"answer": answers}, inverted=1.0).answer == expected
    credit = several_choices()
    credits = [credit(Sample(prompt, response=f"<answer>{letters}</answer>")) for letters in ("A", "A, C", "A, B")]
    assert credits == [0.5, 1.0, 0.0]


def test_a_question_whose_options_are_all_right_is_not_inverted(tmp_path):
    prompt = asked(tmp_path, PETS | {"answer": ["A", "B", "C"]}, inverted=1.0)
    assert ASKS not in prompt.text and prompt.answer == ["A", "B", "C"]


def test_answers_that_are_no_letters_can_not_be_inverted(tmp_path):
    with pytest.raises(ValueError, match=r"field 'answer' is 'dog', but task.data.inverted needs letters .*A, B, C"):
        asked(tmp_path, PETS | {"answer": "dog"}, inverted=1.0)


def test_a_share_of_the_training_questions_is_inverted_and_no_held_out_one(tmp_path):
    """400 draws with a chance of a quarter: 100, give or take four standard deviations of 8.7."""
    rows = [{"problem": f"Question {i}?", "options": ["yes", "no"], "answer": "A", "images": []} for i in range(400)]
    file = write_jsonl(tmp_path, rows)
    data = f"task.data={{type: files, train: {file}, eval: {file}, options_field: options, inverted: 0.25}}"
    task = load(ROOT / "configs/vlm/visual_qa_geometry3k.yaml", [data, "model.path=x"]).task.build(0)
    inverted = [prompt.answer == "B" for prompt in task.train]
    assert inverted == [ASKS in prompt.text for prompt in task.train] and 65 < sum(inverted) < 135
    assert [prompt.answer for prompt in task.evaluation] == ["A"] * 400


def test_inversion_needs_options():
    data = "task.data={type: files, eval: rows.jsonl, inverted: 0.5}"
    with pytest.raises(UserError, match="inverted needs options_field"):
        load(ROOT / "configs/vlm/visual_qa_geometry3k.yaml", [data, "model.path=x"])


def test_splits_of_a_dataset_are_inverted_in_training_alone(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = [{"problem": f"Question {i}?", "options": ["yes", "no"], "answer": "A"} for i in range(8)]
    split = datasets.Dataset.from_list(rows)
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(tmp_path / "saved")
    data = f"task.data={{type: huggingface, name: {tmp_path}/saved, options_field: options, inverted: 1}}"
    task = load(ROOT / "configs/vlm/visual_qa_geometry3k.yaml", [data, "model.path=x"]).task.build(0)
    assert [prompt.answer for prompt in task.train] == ["B"] * 8
    assert [prompt.answer for prompt in task.evaluation] == ["A"] * 8
