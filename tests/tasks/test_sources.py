import importlib.util
import io
import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tasks.visual_qa.files import FileSource
from tasks.visual_qa.huggingface import HuggingFaceSource


def png(red):
    buffer = io.BytesIO()
    Image.new("RGB", (5, 4), (red, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def rows(count, **first):
    """Rows with one picture each, whose red is the row's number; `first` overwrites fields of row 0."""
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
def pictures(tmp_path):
    for n in range(4):
        (tmp_path / f"{n}.png").write_bytes(png(n))
    return tmp_path


def question(n, **changes):
    return {"images": [f"{n}.png"], "problem": f"<image>How many? {n}", "answer": str(n)} | changes


def test_jsonl_by_path(pictures):
    path = write_jsonl(
        pictures,
        [
            question(0),
            "",
            question(1, images=["1.png", {"path": "2.png", "bytes": None}], problem="<image> é <image>?"),
            question(3, images=[], problem="No picture?", source="book"),
            question(3, images="3.png", problem="One picture and no marker?", answer=3),
        ],
    )
    source = FileSource(path)
    assert len(source) == 4 and source.bad == []
    assert [red(source[i]) for i in (3, 2, 1, 0)] == [[3], [], [1, 2], [0]]
    assert source[1].text == "<image> é <image>?"
    assert (source[2].metadata, source[2].id) == ({"source": "book"}, "questions:4")  # the blank line counts as a line
    assert source[3].answer == 3
    assert source[0].images[0].mode == "RGB"


def test_bad_rows_are_listed_with_file_line_and_field(pictures):
    (pictures / "torn.png").write_bytes(png(1)[:50])
    bad = [
        ("{'not': json}", "not JSON"),
        ('["a list"]', "object"),
        (question(1, answer=None), "field 'answer' is empty"),
        ({"images": [], "problem": "?"}, "field 'answer' is missing"),
        (question(1, problem=" "), "field 'problem' is empty"),
        (question(1, problem=7), "field 'problem' must be text"),
        (
            question(1, images=["1.png", "2.png"]),
            "field 'problem' has 1 <image> markers, field 'images' has 2 pictures",
        ),
        (question(1, images=["gone.png"]), "field 'images', picture 0: cannot read .*gone.png"),
        (question(1, images=["torn.png"]), "field 'images', picture 0: cannot read .*torn.png"),
        (question(1, images=[{"bytes": None, "path": None}]), "neither a path nor bytes"),
    ]
    path = write_jsonl(pictures, [question(0), *(line for line, _ in bad), question(2)])
    source = FileSource(path, max_bad_share=0.9)
    assert [source[i].answer for i in range(len(source))] == ["0", "2"]
    assert [row.line for row in source.bad] == list(range(2, 12))
    for row, (_, reason) in zip(source.bad, bad, strict=True):
        assert row.reason.startswith(f"{path}, line {row.line}: ") and "\n" not in row.reason
        assert re.search(reason, row.reason), row.reason


def test_share_of_bad_rows_stops_or_not(pictures):
    path = write_jsonl(pictures, [question(0)] * 9 + ["oops"])
    assert len(FileSource(path, max_bad_share=0.1)) == 9
    with pytest.raises(
        ValueError, match=r"1 of 10 rows cannot be used, more than max_bad_share=0.09 .*line 10: not JSON"
    ):
        FileSource(path, max_bad_share=0.09)
    unchecked = FileSource(path, validate=False)
    assert len(unchecked) == 10 and unchecked[0].answer == "0"
    with pytest.raises(ValueError, match="line 10: not JSON"):
        unchecked[9]


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
    pq.write_table(pa.Table.from_pylist(rows(4, images=[{"bytes": b"no picture", "path": None}])), path)
    source = FileSource(path, max_bad_share=0.25)
    assert (len(source), source.bad[0].line, source[0].id) == (3, 1, "questions:2")
    assert "row 1: field 'images', picture 0: cannot read bytes" in source.bad[0].reason


def test_other_field_names_and_root(pictures):
    (pictures / "text").mkdir()
    path = write_jsonl(pictures / "text", [{"photo": "2.png", "q": "What?", "a": "two"}])
    source = FileSource(path, image_field="photo", problem_field="q", answer_field="a", image_root=pictures)
    assert (red(source[0]), source[0].text, source[0].answer) == ([2], "What?", "two")


def test_files_that_are_none(tmp_path):
    with pytest.raises(FileNotFoundError, match="gone.jsonl"):
        FileSource(tmp_path / "gone.jsonl")
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(ValueError, match="ends in .jsonl or .parquet"):
        FileSource(tmp_path / "a.csv")
    (tmp_path / "a.parquet").write_text("x")
    with pytest.raises(ValueError, match="a.parquet: not a Parquet file"):
        FileSource(tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match="no question in it"):
        FileSource(tmp_path / "a.jsonl")


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
    table = rows(5, images=[{"bytes": b"no picture", "path": None}])
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


def test_huggingface_without_datasets(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"mmrl\[huggingface\]"):
        HuggingFaceSource("anything")
