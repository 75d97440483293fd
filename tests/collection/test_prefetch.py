"""Prompts that processes read ahead are those that are read in time; so are the runs."""

import json
import logging
import multiprocessing
import os
import signal

import pytest
import torch
from PIL import Image

from mmrl.collection.prefetch import ReadAhead
from mmrl.errors import UserError
from mmrl.policies.vlm import prompts
from mmrl.policies.vlm.responses.fitting import PromptEncoder
from mmrl.tasks.visual_qa.data.files import FileSource
from mmrl.tasks.visual_qa.task import with_instruction
from tests.helpers.processes import gone
from tests.whole_runs.parts import (
    call,
    distance,
    final,
    make,
    metrics,
    model_folder,
    release,
    server,
    start,
    timeless,
    wait,
)

BAD = 5  # an image whose header is right, and that ends in the middle
ROWS = 24


def write(folder):
    """Questions with images of two sizes, no two alike."""
    generator, lines = torch.Generator().manual_seed(0), []
    for row in range(ROWS):
        size = (16, 24, 3) if row % 3 else (16, 16, 3)
        pixels = torch.randint(0, 256, size, generator=generator, dtype=torch.uint8)
        Image.fromarray(pixels.numpy()).save(folder / f"{row}.jpg", quality=95)
        lines.append({"problem": f"Which digit is {row}?", "answer": str(row % 10), "images": [f"{row}.jpg"]})
    broken = (folder / f"{BAD}.jpg").read_bytes()
    (folder / f"{BAD}.jpg").write_bytes(broken[: len(broken) * 3 // 4])
    path = folder / "questions.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def asked(path, readers, **options):
    return with_instruction(FileSource(path, max_bad_share=0.5, **options), "Answer.", "You see.", readers)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    server()  # the one that other tests of this session use too
    return write(tmp_path_factory.mktemp("questions"))


@pytest.fixture(scope="module")
def processor():
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(model_folder())


@pytest.fixture(scope="module")
def reader(path, processor):
    made = ReadAhead(asked(path, 2), PromptEncoder(processor, 1024))
    yield made
    made.close()


def same(one, other):
    """Prompts with equal images, and all else equal."""
    assert [i.tobytes() for i in one.images] == [i.tobytes() for i in other.images]
    assert [(i.mode, i.size) for i in one.images] == [(i.mode, i.size) for i in other.images]
    for name in ("id", "text", "answer", "system", "metadata"):
        assert vars(one)[name] == vars(other)[name]


def test_what_was_expected_is_what_would_have_been_read(reader, path, processor, caplog):
    """In whatever order it is asked for; a row that can not be used is named, and the next one takes its place."""
    plain, order = asked(path, 0), [7, BAD, 3, 11, 3]
    with caplog.at_level(logging.WARNING):
        expected = [plain[index] for index in order]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and f"questions.jsonl, line {BAD + 1}: " in told[0] and f"'{BAD}.jpg'" in told[0]
    caplog.clear()
    reader.prefetch(order[::-1])
    with caplog.at_level(logging.WARNING):
        found = [reader[index] for index in order]
    assert [record.getMessage() for record in caplog.records] == told
    for one, other in zip(found, expected, strict=True):
        same(one, other)
    assert found[1].id == f"questions:{BAD + 2}" and reader.source.source.bad == plain.source.bad
    made = [reader.encoded(prompt) for prompt in found]
    assert [tokens is not None for tokens in made] == [True, False, True, True, False]  # 3 was expected once
    assert all(reader.encoded(prompt) is None for prompt in found)  # it was given away
    for tokens, prompt in zip(made, expected, strict=True):
        if tokens is not None:
            alike(tokens, prompts.encode(processor, [prompt], 1024)[0])
    batch = prompts.encode(processor, expected, 1024)  # prompts with images of one size are encoded together
    for tokens, other in zip(made, batch, strict=True):
        if tokens is not None:
            alike(tokens, other)


def alike(one, other):
    assert torch.equal(one.prompt, other.prompt) and one.images.keys() == other.images.keys()
    for name in ("images", "sequence"):
        held, wanted = vars(one)[name], vars(other)[name]
        assert all(torch.equal(held[key], wanted[key]) and held[key].dtype == wanted[key].dtype for key in wanted)


def test_what_is_not_expected_any_more_is_not_kept(reader, path):
    reader.prefetch([0, 1, 2])
    first = reader[0]
    reader.prefetch([2, 3])
    assert set(reader._futures) == {2, 3} and reader.encoded(first) is None
    same(reader[9], asked(path, 0)[9])  # was never expected


def test_a_prompt_that_is_too_long_is_named_as_ever(path, processor, caplog):
    short = ReadAhead(asked(path, 1), PromptEncoder(processor, 3))
    short.prefetch([0])
    with caplog.at_level(logging.WARNING):
        prompt = short[0]
    assert "could not be read ahead by a process of task.data.readers: UserError: prompt questions:1 has" in caplog.text
    assert short.encoded(prompt) is None
    short.close()
    with pytest.raises(UserError, match="prompt questions:1 has .* more than rollout.max_prompt_length=3"):
        prompts.encode(processor, [prompt], 3)


def test_rows_of_a_parquet_file_are_read_by_processes_too(tmp_path, path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["images"] = [{"bytes": (path.parent / row["images"][0]).read_bytes(), "path": None}]
    file = tmp_path / "questions.parquet"
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=4)
    reader = ReadAhead(asked(file, 1), None)
    reader.prefetch([21, 2])
    for index in (2, 21):
        same(reader[index], asked(file, 0)[index])
    reader.close()


def test_a_process_that_is_killed_is_named_with_its_key(path):
    reader = ReadAhead(asked(path, 1), None)
    reader.prefetch([0])
    assert reader[0].id == "questions:1"
    for pid in reader._pool._processes:
        os.kill(pid, signal.SIGKILL)
    reader.prefetch([1])
    with pytest.raises(UserError, match="was killed .* task.data.readers"):
        reader[1]
    reader.close()


# --- runs ---

RUN = ["steps=4", "rollout.prompts=4", "rollout.group_size=2", "checkpoint.every=1", "rollout.sampler.type=skip_flat"]


def options(path, readers):
    data = f"{{type: files, train: {path}, eval: {path}, max_bad_share: 0.5, readers: {readers}}}"
    return [f"task.data={data}", "task.rewards=[{name: 'tests.whole_runs.parts:spread'}]", *RUN]


def made(folder, path, readers):
    multiprocessing.current_process()._config["daemon"] = False  # as tests start this one, it could have no children
    return make(folder, *options(path, readers))


def run(folder, path, readers):
    trainer, answers = made(folder, path, readers), []
    reader = trainer.collector.draws.reader
    if reader is not None:
        usual = reader._result
        reader._result = lambda future: answers.append(usual(future)) or answers[-1]
    trainer.train()
    release(trainer)
    assert (reader is None) == (readers == 0)
    if reader is not None:
        assert sum(isinstance(answer, bytes) for answer in answers) >= 4 and reader._pool is None


def killed(folder, path):
    """Its third step kills it, with processes that read the fourth."""
    trainer, seen = made(folder, path, 1), []
    usual = trainer.update

    def update(minibatch, metrics):
        seen.append(1)
        if len(seen) == 3:
            (folder / "readers.json").write_text(json.dumps(list(trainer.collector.draws.reader._pool._processes)))
            os.kill(os.getpid(), signal.SIGKILL)
        return usual(minibatch, metrics)

    trainer.update = update
    trainer.train()


def resumed(folder, path):
    trainer = made(folder, path, 1)
    trainer.resume()
    assert trainer.step > 0
    trainer.train()
    release(trainer)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, path):
    folder = tmp_path_factory.mktemp("runs")
    call(run, folder / "in time", path, 0, log=folder / "log", timeout=400)
    return folder


def test_a_run_is_the_same_with_and_without_processes(runs, path):
    """Prompts are drawn by what became of earlier ones, so that not all that is expected is what comes."""
    one, other = runs / "in time", runs / "ahead"
    call(run, other, path, 2, log=runs / "log", timeout=400)
    assert distance(final(one), final(other)) == 0
    assert timeless(metrics(one)) == timeless(metrics(other))


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_exactly_and_leaves_no_process(runs, path):
    folder = runs / "killed"
    processes = start(killed, folder, path, log=runs / "killed log")
    assert wait(processes, runs / "killed log", 400) == [-signal.SIGKILL]
    readers = json.loads((folder / "readers.json").read_text())
    assert len(readers) == 1 and gone(readers)
    call(resumed, folder, path, log=runs / "resumed log", timeout=400)
    assert distance(final(runs / "in time"), final(folder)) == 0
