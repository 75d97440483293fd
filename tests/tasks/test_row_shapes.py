"""Rows in the shapes of other libraries, and in files of every kind: contents by value."""

import csv
import gzip
import json
import logging
import re

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mmrl.config import load
from mmrl.runtime.jsonl import RowError
from mmrl.tasks.visual_qa.data.files import FileSource
from mmrl.tasks.visual_qa.data.huggingface import HuggingFaceSource
from mmrl.tasks.visual_qa.reading.fields import value_of
from mmrl.tasks.visual_qa.reading.messages import ParsedQuestion, fill_markers, read_messages
from mmrl.tasks.visual_qa.settings import HuggingFaceData
from tests.tasks.test_sources import png, red


@pytest.fixture
def images(tmp_path):
    for n in range(4):
        (tmp_path / f"{n}.png").write_bytes(png(n))
    return tmp_path


def user(content, **others):
    return [{"role": "user", "content": content}, *({"role": role, "content": text} for role, text in others.items())]


def verl(n):
    return {
        "data_source": "own/colours",
        "prompt": [{"role": "system", "content": "Think."}, *user(f"<image>Which? {n}")],
        "images": [{"bytes": png(n), "path": None}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": f"gold {n}"},
        "extra_info": {"index": n, "answer": "another"},
    }


def trl(n):
    content = [{"type": "image"}, {"type": "text", "text": f"Which? {n}"}]
    return {"prompt": user(content), "image": f"{n}.png", "solution": f"gold {n}"}


def vlm_r1(n):
    turns = [{"from": "human", "value": f"<image>Which? {n}"}, {"from": "gpt", "value": f"gold {n}"}]
    return {"id": n, "image": f"{n}.png", "conversations": turns}


def swift(n):
    messages = [{"role": "system", "content": "Think."}, *user(f"<image>Which? {n}")]
    return {"messages": messages, "images": [f"{n}.png"], "solution": f"gold {n}"}


def llama_factory(n):
    return {"messages": user(f"<image>Which? {n}", assistant=f"gold {n}"), "images": [f"{n}.png"]}


def openai(n):
    parts = [{"type": "image_url", "image_url": {"url": f"{n}.png"}}, {"type": "text", "text": f"Which? {n}"}]
    return {"messages": user(parts, assistant=[{"type": "text", "text": f"gold {n}"}])}


def visual_rft(n):
    return {"image": f"{n}.png", "problem": f"<image>Which? {n}", "solution": f"gold {n}"}


SHAPES = {
    "verl": (verl, "verl: prompt, reward_model.ground_truth, images", "Think."),
    "trl": (trl, "TRL: prompt, solution, image", None),
    "vlm_r1": (vlm_r1, "LLaVA: conversations, image", None),
    "swift": (swift, "ms-swift: messages, solution, images", "Think."),
    "llama_factory": (llama_factory, "LLaMA-Factory: messages, images", None),
    "openai": (openai, "LLaMA-Factory: messages, images", None),
    "visual_rft": (visual_rft, "VLM-R1: problem, solution, image", None),
}


def write(folder, rows, suffix):
    path = folder / f"questions{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif suffix == ".json":
        path.write_text(json.dumps(rows, indent=1))
    else:
        path.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n\n")
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_read_as_it_is(name, suffix, images, caplog):
    row, line, system = SHAPES[name]
    if name == "verl" and suffix != ".parquet":
        rows = [row(n) | {"images": [f"{n}.png"]} for n in range(4)]
    else:
        rows = [row(n) for n in range(4)]
    path = write(images, rows, suffix)
    with caplog.at_level(logging.INFO):
        source = FileSource(path)
    assert [r.getMessage() for r in caplog.records] == [f"{path}: read in the format of {line}"]
    assert len(source) == 4 and source.bad == []
    for n in (2, 0, 3, 1):
        prompt = source[n]
        marker = "<image>" if "<image>" in prompt.text else ""
        assert (prompt.text, prompt.answer, prompt.system) == (f"{marker}Which? {n}", f"gold {n}", system)
        assert marker and red(prompt) == [n]
    assert source[1].id == {".jsonl": "questions:3"}.get(suffix, "questions:2")


def test_columns_of_verl_stay_for_rewards(images):
    metadata = FileSource(write(images, [verl(n) for n in range(2)], ".parquet"))[1].metadata
    assert metadata == {
        "data_source": "own/colours",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "gold 1"},
        "extra_info": {"index": 1, "answer": "another"},
    }


def test_several_images_and_rows_without_one(images):
    several = {
        "image": ["2.png", "1.png"],
        "conversations": [{"from": "human", "value": "a <image> b <image>"}, {"from": "gpt", "value": "x"}],
    }
    none = {"conversations": [{"from": "human", "value": "no image"}, {"from": "gpt", "value": "y"}]}
    source = FileSource(write(images, [none, several], ".jsonl"))
    assert [(red(p), p.answer, p.text) for p in (source[0], source[1])] == [
        ([], "y", "no image"),
        ([2, 1], "x", "a <image> b <image>"),
    ]


def test_images_of_parts_and_of_the_column_come_in_order(images):
    parts = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image", "image": "3.png"}, {"type": "image"}]
    row = {"prompt": user(parts), "images": ["1.png", "2.png"], "answer": "x"}
    (prompt,) = FileSource(write(images, [row], ".jsonl"))
    assert (red(prompt), prompt.text) == ([1, 3, 2], "<image>and<image><image>")
    few = FileSource(write(images, [row, row | {"images": ["1.png"]}], ".jsonl"), max_bad_share=0.5)
    assert "has 3 <image> markers, field 'images' has 2 images" in few.bad[0].reason
    text = {"prompt": "Which?", "images": ["1.png", "2.png"], "answer": "x"}
    (prompt,) = FileSource(write(images, [text], ".jsonl"))
    assert (red(prompt), prompt.text) == ([1, 2], "Which?")


def test_the_columns_problem_and_answer_come_first_and_a_named_one_before_all(images):
    row = verl(1) | {"images": ["1.png"], "problem": "<image>own", "answer": "mine"}
    (prompt,) = FileSource(write(images, [row], ".jsonl"))
    assert (prompt.text, prompt.answer) == ("<image>own", "mine")
    chosen = {"problem_field": "prompt", "answer_field": "extra_info.answer"}
    (prompt,) = FileSource(write(images, [row], ".jsonl"), **chosen)
    assert (prompt.text, prompt.answer, prompt.system) == ("<image>Which? 1", "another", "Think.")
    (prompt,) = FileSource(write(images, [vlm_r1(2)], ".jsonl"), problem_field="conversations", image_field="image")
    assert (prompt.answer, red(prompt)) == ("gold 2", [2])


def test_two_shapes_that_fit_are_refused_with_the_keys_to_write(images):
    path = write(images, [trl(1) | {"answer": "7"}], ".jsonl")
    with pytest.raises(
        ValueError, match=r"TRL \(prompt, solution\) and TRL \(prompt, answer\).*task.data.answer_field"
    ):
        FileSource(path)
    assert FileSource(path, problem_field="prompt", answer_field="answer", image_field="image")[0].answer == "7"
    with pytest.raises(ValueError, match=r"'problem' is missing \(fields: ask, told\); set task.data.problem_field"):
        FileSource(write(images, [{"ask": "?", "told": "!"}], ".jsonl"))


def test_a_reply_is_no_gold_where_a_column_holds_one(images):
    row = {"messages": user("<image>Which?", assistant="a reply"), "images": ["1.png"], "solution": "gold"}
    assert FileSource(write(images, [row], ".jsonl"))[0].answer == "gold"


@pytest.mark.parametrize(
    ("gold", "read"), [({"bbox_2d": [1, 2]}, {"bbox_2d": [1, 2]}), ([], []), (0, 0), (False, False)]
)
def test_golds_stay_what_they_are(gold, read, images):
    (prompt,) = FileSource(write(images, [trl(1) | {"solution": gold}], ".jsonl"))
    assert prompt.answer == read and type(prompt.answer) is type(read)


def test_the_image_column_is_named_where_it_is_missing(images):
    row = {"problem": "<image>Which?", "answer": "x", "photo_file": "1.png"}
    with pytest.raises(ValueError) as raised:
        FileSource(write(images, [row], ".jsonl"))
    (line,) = str(raised.value).splitlines()
    assert "field 'images' has 0 images (fields: problem, answer, photo_file); set task.data.image_field to the" in line


def test_rows_of_several_replies_or_none_say_so_and_not_that_a_column_is_missing(images):
    turns = [{"from": sender, "value": "x"} for sender in ("human", "gpt", "human", "gpt")]
    with pytest.raises(ValueError, match="row 1: field 'conversations': .*task.data.type=conversations reads whole"):
        FileSource(write(images, [{"conversations": turns}], ".json"))
    with pytest.raises(ValueError, match="line 1: field 'answer' is missing.*task.data.answer_field"):
        FileSource(write(images, [{"messages": user("<image>Which?"), "images": ["1.png"]}], ".jsonl"))


# --- messages by hand ---


def test_messages_by_hand():
    assert read_messages(user("a")) == ParsedQuestion("a")
    turns = [{"from": "system", "value": "s"}, {"from": "human", "value": "<video>a"}, {"from": "gpt", "value": "b"}]
    assert read_messages(turns) == ParsedQuestion("<video>a", "s", (), (None,), "b")
    parts = [{"type": "text", "text": "<image>x"}, {"type": "video", "video": "v.mp4"}, "y"]
    assert read_messages(user(parts)) == ParsedQuestion("<image>x<video>y", None, (None,), ("v.mp4",))


def test_markers_without_an_image_take_the_rows_in_order_and_the_rest_follow():
    assert fill_markers([None, "a", None], ["b", "c", "d"]) == ["b", "a", "c", "d"]
    assert fill_markers([None, "a", None], ["b"]) == ["b", "a", None]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (user("a", assistant="b", user="c"), "the messages have the roles user, assistant, user, but a question is"),
        ([{"role": "assistant", "content": "b"}], "the messages have the roles assistant, but"),
        ([{"role": "robot", "content": "b"}], "message 0: role 'robot' is not one of"),
        (["a"], "message 0 must be an object, not str"),
        (user(None), "content of a message must be text or a list of parts, not NoneType"),
        (user([{"type": "audio", "audio": "x"}]), "a part of type 'audio'"),
        (
            [{"role": "system", "content": [{"type": "image"}]}, *user("a")],
            "an image or video in a system or assistant message",
        ),
    ],
)
def test_messages_that_are_no_question(messages, reason):
    with pytest.raises(RowError, match=re.escape(reason)):
        read_messages(messages)


def test_dotted_names():
    row = {"a": {"b": {"c": 0}}, "x.y": 3, "x": {"y": 4}}
    assert [value_of(row, name) for name in ("a.b.c", "x.y", "a.z", "a.b.c.d", "q")] == [0, 3, None, None, None]


# --- tables ---


def table(folder, text, suffix=".csv"):
    path = folder / f"table{suffix}"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_tables_of_text(images):
    text = 'problem,answer,images\n\n"<image>one, or\ntwo?",7,1.png\n'
    text += '<image>b <image>?,"a ""b""","[""2.png"", ""3.png""]"\nnone?,c,\n'
    for content, suffix in ((text, ".csv"), ("﻿" + text.replace("\n", "\r\n"), ".csv")):
        source = FileSource(table(images, content, suffix))
        assert [(p.id, p.answer, red(p)) for p in map(source.__getitem__, range(3))] == [
            ("table:3", "7", [1]),  # the first of its two lines
            ("table:5", 'a "b"', [2, 3]),
            ("table:6", "c", []),
        ]
        assert source[0].text.replace("\r", "") == "<image>one, or\ntwo?"
    tabs = FileSource(table(images, "problem\tanswer\timages\nwhy, so?\tx\t2.png\n", ".tsv"))
    assert (tabs[0].text, tabs[0].answer, red(tabs[0])) == ("why, so?", "x", [2])


def test_a_comma_without_quotes_is_a_bad_row(images):
    path = table(images, "problem,answer,images\na,b,1.png\nc, d,e,2.png\nf,g,3.png\nh,i\n")
    source = FileSource(path, max_bad_share=0.5)
    assert [source[i].answer for i in range(2)] == ["b", "g"]
    assert [bad.line for bad in source.bad] == [3, 5]
    assert f"{path}, line 3: the row has 4 columns, the header 3; put a cell that contains ','" in source.bad[0].reason
    with pytest.raises(ValueError, match="2 of 4 rows cannot be used"):
        FileSource(path)


@pytest.mark.parametrize(
    ("text", "suffix", "reason"),
    [
        ("problem;answer\na;b\n", ".csv", "write ',' between columns, not ';'"),
        ("problem,answer,problem\na,b,c\n", ".csv", "two columns are named 'problem'"),
        ('problem,answer\n"a,b\nc,d\n', ".csv", "line 2: .*write a quote inside a quoted cell twice"),
        (b"problem,answer\n\xe9,b\n", ".csv", "not UTF-8"),
        ("", ".csv", "no row of it can be used"),
        ('{"data": [\n1]}', ".json", "a list of objects"),
        ('[{"a": 1},', ".json", "not JSON: .*line 1"),
        ("[]", ".json", "no row of it can be used"),
        ("a", ".txt", "a file of questions must end in .jsonl, .parquet, .csv, .tsv, .json"),
    ],
)
def test_files_that_are_refused(text, suffix, reason, images):
    with pytest.raises(ValueError, match=reason) as raised:
        FileSource(table(images, text, suffix))
    assert "\n" not in str(raised.value)


def test_long_cells_and_json_that_is_lines(images):
    long = "x" * 200_000
    path = images / "long.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["problem", "answer"], [long, "b"]])
    assert FileSource(path)[0].text == long
    lines = table(images, "\n".join(json.dumps(visual_rft(n)) for n in (3, 1)) + "\n\noops\n", ".json")
    source = FileSource(lines, max_bad_share=0.5)
    assert [red(source[0]), red(source[1])] == [[3], [1]]
    assert source.bad[0].reason.startswith(f"{lines}, line 4: not JSON")


def test_a_saved_data_set_has_its_shape_read(images, caplog):
    datasets = pytest.importorskip("datasets")
    rows = [{k: v for k, v in verl(n).items()} for n in range(3)]
    datasets.Dataset.from_list(rows).save_to_disk(images / "saved")
    with caplog.at_level(logging.INFO, "mmrl"):
        source = HuggingFaceSource(str(images / "saved"))
    assert (source[2].answer, source[2].text, red(source[2])) == ("gold 2", "<image>Which? 2", [2])
    assert "read in the format of verl" in caplog.text


# --- through a job ---


def config(folder, name, suffix):
    for n in range(4):
        Image.new("RGB", (16, 16), (60 * n, 0, 0)).save(folder / f"{n}.png")
    row = SHAPES[name][0]
    rows = [row(n) | ({"images": [f"{n}.png"]} if name == "verl" else {}) for n in range(4)]
    path = write(folder, rows, suffix)
    return [
        "model={build: 'mmrl.tasks.visual_qa.tiny.model:build'}",
        f"task={{type: visual_qa, data: {{type: files, train: {path}, eval: {path}}}}}",
        "rollout={prompts: 2, group_size: 2, max_prompt_length: 128, max_response_length: 4}",
        "evaluation={before: false, every: 0, prompts: 2}",
        f"run_dir={folder / 'run'}",
        "threads=1",
    ]


def test_the_rows_own_system_message_reaches_the_task(tmp_path):
    from mmrl.build import build_task

    text = "\n".join(
        f"{line.partition('=')[0]}: {line.partition('=')[2]}" for line in config(tmp_path, "swift", ".json")
    )
    (tmp_path / "job.yaml").write_text(text)
    task = build_task(load(str(tmp_path / "job.yaml"), []))
    assert [task.train[n].system for n in range(4)] == ["Think."] * 4
    other = build_task(load(str(tmp_path / "job.yaml"), ["task.system=Be short."]))
    assert other.train[1].system == "Be short." and other.train[1].answer == "gold 1"


@pytest.mark.parametrize(
    ("name", "suffix", "steps"),
    [
        ("verl", ".json", 1),
        *(
            pytest.param(name, suffix, 10, marks=pytest.mark.slow)
            for name, suffix in [
                ("verl", ".parquet"), ("trl", ".jsonl"), ("vlm_r1", ".json"), ("swift", ".jsonl"), ("openai", ".json")
            ]
        ),
    ],
)  # fmt: skip
def test_a_shape_trains(name, suffix, steps, tmp_path):
    from mmrl.job import Job

    lines = [*config(tmp_path, name, suffix), f"steps={steps}"]
    text = "\n".join(f"{line.partition('=')[0]}: {line.partition('=')[2]}" for line in lines)
    (tmp_path / "job.yaml").write_text(text)
    with Job(load(str(tmp_path / "job.yaml"), [])) as job:
        job.train()
    logged = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(line["step"] for line in logged) == steps


# --- streams, packed files, marks of bytes ---


def test_the_first_rows_of_a_stream_are_held_without_a_download(tmp_path):
    rows = [{"problem": f"{n}?", "answer": str(n), "image": {"bytes": png(n), "path": None}} for n in range(6)]
    features = datasets.Features(
        {"problem": datasets.Value("string"), "answer": datasets.Value("string"), "image": datasets.Image()}
    )
    datasets.Dataset.from_list(rows, features=features).to_parquet(str(tmp_path / "rows.parquet"))
    files = {"data_files": {"train": str(tmp_path / "rows.parquet"), "test": str(tmp_path / "rows.parquet")}}
    data = HuggingFaceData(name="parquet", options=files, stream=4, image_field="image")
    train, held_out = data.sources(0)
    assert (len(train), len(held_out)) == (4, 4)
    prompts = [train[row] for row in (3, 0)]
    assert [(p.id, p.text, p.answer) for p in prompts] == [("parquet:3", "3?", "3"), ("parquet:0", "0?", "0")]
    assert [p.images[0].getpixel((0, 0))[0] for p in prompts] == [3, 0]
    assert len(HuggingFaceData(name="parquet", options=files, stream=40, image_field="image").sources(0)[0]) == 6
    with pytest.raises(ValueError, match="task.data.options has streaming=true; leave that out"):
        HuggingFaceData(name="parquet", options=files | {"streaming": True}).sources(0)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\n\n"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", [".jsonl", ".json"])
def test_marks_of_bytes_and_line_ends_and_gzip_change_nothing(tmp_path, end, packed, kind):
    lines = [json.dumps({"problem": f"{n}?", "answer": str(n)}).encode() for n in range(3)]
    data = b"\xef\xbb\xbf" + end.join(lines) + end
    path = tmp_path / f"rows{kind}{'.gz' if packed else ''}"
    path.write_bytes(gzip.compress(data) if packed else data)
    source = FileSource(path)
    step = end.count(b"\n")
    assert [(source[n].id, source[n].text) for n in range(3)] == [(f"rows:{1 + step * n}", f"{n}?") for n in range(3)]
