"""Rows that the model can not read are left out, counted and named: at the start on a sample, later on first use."""

import json
import logging
import pickle

import pytest
from PIL import Image
from transformers import AutoProcessor

from mmrl import Job, load
from mmrl.errors import UserError
from mmrl.job import check_start
from mmrl.policies.vlm import prompts
from mmrl.policies.vlm.responses.fitting import PromptEncoder
from mmrl.preflight.fitting import MIN_ROWS, try_rows
from mmrl.tasks.visual_qa.data.files import FileSource
from mmrl.tasks.visual_qa.task import with_instruction
from tests.whole_runs.parts import model_folder

LONG, PLACEHOLDER, LOST = 7, 11, 13  # rows, from 0


@pytest.fixture(scope="module")
def processor():
    return AutoProcessor.from_pretrained(model_folder())


def written(folder, count=24, long=(LONG,), placeholder=(PLACEHOLDER,), lost=()):
    lines = []
    for row in range(count):
        Image.new("RGB", (16, 16), (row, 0, 0)).save(folder / f"{row}.png")
        text = f"What is {row}?" + (" Why?" * 200 if row in long else "")
        text += " Is it <|image_pad|>?" if row in placeholder else ""
        lines.append({"problem": text, "answer": str(row), "images": [f"{row}.png"]})
    for row in lost:
        data = (folder / f"{row}.png").read_bytes()
        (folder / f"{row}.png").write_bytes(data[: len(data) * 2 // 3])
    path = folder / "train.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def source(path, processor, share=0.5, longest=100, instruction=None):
    rows = with_instruction(FileSource(path, max_bad_share=share), instruction, None)
    rows.fit(PromptEncoder(processor, longest, ["<|image_pad|>", "<image>"]).prompt_problem)
    return rows


def config(path, folder, *more):
    data = {"type": "files", "train": str(path), "eval": str(path), "max_bad_share": 0.2}
    return load(
        "visual_qa_digits",
        [
            f"run_dir={folder / 'run'}",
            f"task.data={json.dumps(data)}",
            "steps=1",
            "threads=1",
            "model.warm_start=null",
            f"model.path={model_folder()}",
            "model.build=null",
            "rollout={prompts: 4, group_size: 2, max_response_length: 4, max_prompt_length: 100}",
            "engine.micro_batch=8",
            "evaluation={every: 0, before: false, prompts: 4}",
            *more,
        ],
    )


def test_each_row_that_does_not_fit_is_named_with_its_line_and_the_next_takes_its_place(tmp_path, processor, caplog):
    rows = source(written(tmp_path, lost=(LOST,)), processor)
    assert [rows[row].id for row in (LONG, PLACEHOLDER, LOST, 3)] == ["train:9", "train:13", "train:15", "train:4"]
    long, placeholder, lost = [text for name, _, text in caplog.record_tuples if name.startswith("mmrl")]
    assert (
        f"train.jsonl, line {LONG + 1}: the prompt has " in long
        and "more than rollout.max_prompt_length=100; raise it" in long
    )
    assert f"line {PLACEHOLDER + 1}: its text holds <|image_pad|>, which stands for an image" in placeholder
    assert f"line {LOST + 1}: field 'images', image 0: cannot read '{LOST}.png'" in lost
    assert [row.line for row in rows.rows.bad] == [LONG + 1, PLACEHOLDER + 1, LOST + 1]


def test_a_prompt_is_tried_with_its_instruction(tmp_path, processor):
    path = written(tmp_path, long=(), placeholder=())
    length = len(prompts.encode(processor, [source(path, processor)[3]], 100)[0].prompt)
    assert source(path, processor, longest=length)[3].id == "train:4"
    with pytest.raises(UserError, match=f"the prompt has .* more than rollout.max_prompt_length={length}"):
        source(path, processor, longest=length, instruction="In one word.")[3]


def test_beyond_the_share_the_next_bad_row_ends_it_naming_all(tmp_path, processor):
    rows = source(written(tmp_path), processor, share=1 / 24)
    assert rows.fits(3) and not rows.fits(LONG) and not rows.fits(LONG)
    with pytest.raises(UserError, match=r"2 of 24 rows cannot be used, more than max_bad_share=.*line 8.*line 12"):
        rows.fits(PLACEHOLDER)


def test_a_checked_prompt_is_encoded_once(tmp_path, processor, monkeypatch):
    encoder, calls = PromptEncoder(processor, 100), []
    monkeypatch.setattr(
        "mmrl.policies.vlm.responses.fitting.encode",
        lambda p, shown, longest: calls.append(len(shown)) or prompts.encode(p, shown, longest),
    )
    rows = with_instruction(FileSource(written(tmp_path)), "Answer.", None)
    rows.fit(encoder.prompt_problem)
    prompt = rows[2]
    first = encoder.take(prompt)
    assert calls == [1] and first.prompt.tolist() == prompts.encode(processor, [prompt], 100)[0].prompt.tolist()
    assert encoder.take(prompt) is None  # it is handed out once
    rows[2]
    assert calls == [1]  # a row is tried when it is first used
    rows[3]
    assert not encoder._cached  # of a prompt that nobody holds any more, nothing is kept
    assert pickle.loads(pickle.dumps(encoder)).prompt_problem(prompt) is None


def test_of_a_large_file_the_share_is_judged_from_the_rows_that_were_tried(tmp_path, processor):
    """Ten bad of 200 that are tried, of 400, all at the beginning: 5 %, of which three standard errors leave 2.02 %."""
    abbreviate = source(written(tmp_path, 400, long=range(0, 20, 2), placeholder=()), processor, share=0.0255)
    assert try_rows(abbreviate, 400) == 200 and len(abbreviate.rows.bad) == 10
    many = source(tmp_path / "train.jsonl", processor, share=0.0201)
    many.rows.max_bad_share = 0.5  # of the whole file, as if it were larger
    with pytest.raises(UserError, match=r"10 of \d+ checked rows cannot be used, see the warnings above.*=0.0201"):
        try_rows(many, 400)
    every = source(written(tmp_path, 400, long=range(400), placeholder=()), processor, share=0.2)
    with pytest.raises(UserError, match=f"{MIN_ROWS} of {MIN_ROWS} checked rows cannot be used"):
        try_rows(every, 400)


def test_a_job_tries_rows_before_the_first_step_and_trains_on_the_rest(tmp_path, caplog):
    path = written(tmp_path, 24)
    with caplog.at_level(logging.WARNING), Job(config(path, tmp_path, "checkpoint.every=1")) as job:
        assert [row.line for row in job.task.train.rows.bad] == [LONG + 1, PLACEHOLDER + 1]
        drawn = {job.task.train[row].id for row in range(24)}
        assert len(drawn) == 22 and not drawn & {f"train:{LONG + 1}", f"train:{PLACEHOLDER + 1}"}
        job.train()
    assert "train.jsonl, line 8: the prompt has " in caplog.text
    path.write_text(path.read_text().replace("What is 3?", "What was 3?"))
    more = "checkpoint.every=1", "steps=2"
    with pytest.raises(UserError, match=r"task.data.train=.*train.jsonl has changed since run_dir"):
        check_start(config(path, tmp_path, *more))
    check_start(config(path, tmp_path, *more, "checkpoint.changed_data=accept"))


def test_a_job_is_refused_in_one_line_beyond_the_share(tmp_path):
    path = written(tmp_path, 24)
    job = Job(config(path, tmp_path, "task.data.max_bad_share=0.04"))
    with pytest.raises(UserError, match=r"rows cannot be used, more than max_bad_share=0.04") as error, job:
        pass
    assert "\n" not in str(error.value) and f"line {PLACEHOLDER + 1}" in str(error.value)
