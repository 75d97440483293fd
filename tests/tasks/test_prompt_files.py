"""Files of prompts in every kind that is read: the same prompts, numbers and metadata from each."""

import gzip
import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmrl.tasks.data import prompt_files
from mmrl.tasks.data.prompt_files import load_prompts
from mmrl.tasks.image_generation.data.prompts import load
from mmrl.tasks.image_generation.settings import PromptsData
from mmrl.tasks.video_generation.settings import VideoPromptsData

ROWS = [{"prompt": "a cat, red", "level": 1}, {"prompt": 'a sign "Ünïted"', "level": 2}]
BOM = b"\xef\xbb\xbf"
JSON_LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
CSV = 'prompt,level\n"a cat, red",1\n"a sign ""Ünïted""",2\n'


def parquet(path, rows=ROWS):
    pq.write_table(pa.Table.from_pylist(rows), path)


def saved(path):
    datasets.Dataset.from_list(ROWS).save_to_disk(str(path))


WRITERS = {
    "rows.jsonl": lambda path: path.write_text(JSON_LINES),
    "blank.jsonl": lambda path: path.write_text("\n" + JSON_LINES.replace("\n", "\n\n")),
    "windows.jsonl": lambda path: path.write_bytes(BOM + JSON_LINES.replace("\n", "\r\n").encode()),
    "list.json": lambda path: path.write_bytes(BOM + json.dumps(ROWS).encode()),
    "lines.json": lambda path: path.write_bytes(BOM + JSON_LINES.encode()),
    "packed.jsonl.gz": lambda path: path.write_bytes(gzip.compress(BOM + JSON_LINES.encode())),
    "rows.csv": lambda path: path.write_bytes(BOM + CSV.replace("\n", "\r\n").encode()),
    "packed.csv.gz": lambda path: path.write_bytes(gzip.compress(CSV.encode())),
    "rows.tsv": lambda path: path.write_text('prompt\tlevel\na cat, red\t1\n"a sign ""Ünïted"""\t2\n'),
    "rows.parquet": parquet,
    "folder": saved,
}


@pytest.mark.parametrize("name", WRITERS)
def test_each_kind_of_file_holds_the_same_prompts(tmp_path, name):
    path = tmp_path / name
    WRITERS[name](path)
    prompts = load_prompts(path)
    assert [prompt.text for prompt in prompts] == ["a cat, red", 'a sign "Ünïted"']
    assert [int(prompt.metadata["level"]) for prompt in prompts] == [1, 2]
    stem, numbers = name.split(".")[0], [int(prompt.id.partition(":")[2]) for prompt in prompts]
    assert all(prompt.id.startswith(f"{stem}:") for prompt in prompts)
    assert numbers == ([2, 4] if stem == "blank" else [2, 3] if "csv" in name or "tsv" in name else [1, 2])


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_blank_lines_of_text_are_passed_over_and_count(tmp_path, end):
    path = tmp_path / "train.txt.gz"
    path.write_bytes(gzip.compress(BOM + end.join(["a cat", "", "  ", " a dog ", ""]).encode()))
    assert [(p.id, p.text, p.metadata) for p in load_prompts(path)] == [
        ("train:1", "a cat", {}),
        ("train:4", "a dog", {}),
    ]


def test_files_of_flow_grpo_and_geneval(tmp_path):
    """As dataset/ocr, dataset/geneval and GenEval's own prompts come."""
    (tmp_path / "train.txt").write_text('A shop window with the text "OPEN" and "24h"\nA neon sign that reads “Bar”\n')
    assert len(load(tmp_path / "train.txt", format="ocr")) == 2
    row = {"tag": "single_object", "include": [{"class": "bench", "count": 1}], "prompt": "a photo of a bench"}
    more = row | {"exclude": [{"class": "bench", "count": 2}], "tag": "counting"}
    (tmp_path / "train_metadata.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(more) + "\n")
    prompts = load(tmp_path / "train_metadata.jsonl", format="geneval")
    assert [prompt.metadata["tag"] for prompt in prompts] == ["single_object", "counting"]
    parquet(tmp_path / "geneval.parquet", [row])
    assert load(tmp_path / "geneval.parquet", format="geneval")[0].metadata["include"][0]["class"] == "bench"


def test_a_column_of_another_name_reaches_the_task(tmp_path):
    (tmp_path / "edits.csv").write_text("caption,style\na dog runs,oil\na cat sits,ink\n")
    for kind in (PromptsData, VideoPromptsData):
        train, held_out = kind(
            train=tmp_path / "edits.csv", eval=tmp_path / "edits.csv", prompt_field="caption"
        ).sources(0)
        assert [p.text for p in held_out] == ["a dog runs", "a cat sits"] and train[0].metadata == {"style": "oil"}
        with pytest.raises(
            ValueError, match=r"line 2: key 'prompt' is missing \(keys: caption, style\); set task.data.prompt_"
        ):
            kind(train=tmp_path / "edits.csv", eval=tmp_path / "edits.csv").sources(0)


def test_images_of_a_table_stay_where_they_are(tmp_path):
    picture = {"bytes": b"\x89PNG", "path": None}
    parquet(
        tmp_path / "rows.parquet", [{"prompt": "a", "image": picture, "images": [picture], "raw": b"1", "tag": "x"}]
    )
    assert load_prompts(tmp_path / "rows.parquet")[0].metadata == {"tag": "x"}


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (
            "a.yaml",
            b"prompt: x",
            r"a.yaml: prompts are read from .* ends in .txt, .jsonl, .parquet, .csv, .tsv, .json",
        ),
        ("a.txt.gz", b"plain", "a.txt.gz: not a gzip file"),
        ("a.jsonl.gz", gzip.compress(JSON_LINES.encode() * 90)[:-30], "a.jsonl.gz: not a gzip file"),
        ("a.parquet", b"PAR1", "a.parquet: not a Parquet file"),
        ("a.csv", b"prompt;level\nx;1\n", "write ',' between columns, not ';'"),
        ("a.txt", "a\ncafé".encode("latin-1"), "a.txt: 1 of 2 rows .* line 2: not UTF-8"),
        ("a.csv", b"prompt,level\nx,1,2\n", "line 2: the row has 3 columns, the header 2"),
    ],
)
def test_what_can_not_be_read_is_named(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        load_prompts(tmp_path / name)


def test_a_folder_of_splits_names_them(tmp_path):
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "set"))
    with pytest.raises(ValueError, match=r"name the folder of one split .* its splits are .*set/train"):
        load_prompts(tmp_path / "set")
    assert len(load_prompts(tmp_path / "set" / "train")) == 2


def test_a_packed_file_that_unpacks_too_far_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("mmrl.tasks.data.tables.MAX_UNPACKED", 100)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"x" * 101))
    with pytest.raises(ValueError, match="decompresses to more than"):
        load_prompts(tmp_path / "a.txt.gz")
    monkeypatch.setattr(prompt_files, "MAX_ROWS", 1)
    parquet(tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match="2 rows; at most 1 are read, since prompts are held in memory"):
        load_prompts(tmp_path / "rows.parquet")


def test_a_text_file_has_no_columns_whatever_the_prompts_column_is_called(tmp_path):
    (tmp_path / "a.txt").write_text("a cat\n")
    (prompt,) = load_prompts(tmp_path / "a.txt", field="caption")
    assert (prompt.text, prompt.metadata) == ("a cat", {})
