import json
import logging
import re

import pytest

from mmrl.tasks.image_generation.data.prompts import hold_out, load, warn_of_overlap

GENEVAL = {
    "tag": "position",
    "include": [
        {"class": "bear", "count": 1},
        {"class": "kite", "count": 2, "color": "red", "position": ["left of", 0]},
    ],
    "prompt": "a photo of two red kites left of a bear",
}


def write(folder, lines, name="prompts.jsonl"):
    path = folder / name
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_text_file(tmp_path):
    prompts = load(write(tmp_path, ["a cat ", 'a sign, "Ünïted"', ""], "train.txt"))
    assert [(p.id, p.text, p.metadata) for p in prompts] == [
        ("train:1", "a cat", {}),
        ("train:2", 'a sign, "Ünïted"', {}),
    ]


def test_geneval_metadata(tmp_path):
    path = write(tmp_path, [GENEVAL, "", GENEVAL | {"tag": "counting", "exclude": []}])
    prompts = load(path, format="geneval")
    assert [p.id for p in prompts] == [
        "prompts:1",
        "prompts:3",
    ]  # a blank line is not a row, and counts
    assert prompts[0].text == GENEVAL["prompt"]
    assert prompts[0].metadata == {"tag": "position", "include": GENEVAL["include"]}


def test_ocr_prompts(tmp_path):
    lines = [
        '{"prompt": "a sign that says \\"Open\\""}',
        {"prompt": "a mug, “Hello”"},
        {"prompt": "a door", "text": "12"},
    ]
    assert len(load(write(tmp_path, lines), format="ocr")) == 3
    assert len(load(write(tmp_path, ['a sign that says "Open"'], "ocr.txt"), format="ocr")) == 1


def included(**changes):
    return {
        "tag": "t",
        "prompt": "p",
        "include": [{"class": "bear", "count": 1} | changes, {"class": "kite", "count": 1}],
    }


@pytest.mark.parametrize(
    "format, line, reason",
    [
        ("plain", '{"prompt": "a cat"', "not JSON"),
        ("plain", '{"prompt": "half \\ud83d"}', "field 'prompt': half of a surrogate pair"),
        ("plain", "[" * 100_000, "more than 64 levels deep"),
        ("plain", '{"prompt": "a", "more": ' + "[" * 99 + "]" * 99 + "}", "field 'more': nested more than 64 levels"),
        ("plain", '{"prompt": "a", "more": ' + "9" * 5000 + "}", "cannot be parsed: Exceeds the limit"),
        ("plain", '["a cat"]', "a row must be an object, not list"),
        ("plain", {"text": "a cat"}, r"key 'prompt' is missing \(keys: text\)"),
        ("plain", {"prompt": " "}, "key 'prompt' is empty"),
        ("plain", {"prompt": None}, "key 'prompt' must be text, not NoneType"),
        ("ocr", {"prompt": "a sign that says Open"}, "needs a text in double quotes in the prompt, or the key 'text'"),
        ("ocr", {"prompt": "a sign", "text": ""}, "key 'text' is empty"),
        ("geneval", {"prompt": "a cat", "include": []}, r"key 'tag' is missing"),
        ("geneval", {"prompt": "a cat", "tag": "t"}, "key 'include' is missing"),
        ("geneval", {"prompt": "a cat", "tag": "t", "include": []}, "key 'include' is empty"),
        ("geneval", {"prompt": "a cat", "tag": "t", "include": ["cat"]}, r"'include\[0\]' must be an object, not str"),
        ("geneval", {"prompt": "a", "tag": "t", "include": [{"class": "a"}]}, r"'include\[0\].count' is missing"),
        ("geneval", included(count="one"), r"'include\[0\].count' must be a number, not str"),
        ("geneval", included(count=0), r"'include\[0\].count' must be at least 1, not 0"),
        ("geneval", included(color=3), r"'include\[0\].color' must be text, not int"),
        ("geneval", included(position=["above", 2]), r"'include\[0\].position' must be \[relation, index of another"),
        ("geneval", included(position=["above", 0]), r"'include\[0\].position' must be \[relation, index of another"),
        ("geneval", included(position=["above"]), r"'include\[0\].position' must be \[relation, index of another"),
    ],
)
def test_bad_rows_are_named_by_file_line_and_key(tmp_path, caplog, format, line, reason):
    good = GENEVAL | {"prompt": 'a photo of "two" red kites'}
    path = write(tmp_path, [good, line, good])
    with pytest.raises(
        ValueError, match=f"1 of 3 rows cannot be used.*{re.escape(str(path))}, line 2: .*{reason}"
    ) as caught:
        load(path, format=format)
    assert "\n" not in str(caught.value)
    with caplog.at_level(logging.WARNING):
        kept = load(path, format=format, max_bad_share=0.34)
    assert [p.id for p in kept] == ["prompts:1", "prompts:3"]
    assert re.search(f"line 2: .*{reason}", caplog.text)


def test_bad_files(tmp_path):
    (tmp_path / "latin.txt").write_bytes("a café".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin.txt, line 1: not UTF-8"):
        load(tmp_path / "latin.txt")
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbfa cat\r\na dog\n\n\n")
    assert [(p.id, p.text) for p in load(tmp_path / "marked.txt")] == [("marked:1", "a cat"), ("marked:2", "a dog")]
    with pytest.raises(ValueError, match="empty.jsonl: the file holds no prompt"):
        load(write(tmp_path, ["", ""], "empty.jsonl"))
    with pytest.raises(FileNotFoundError, match="gone.txt: no such file of prompts"):
        load(tmp_path / "gone.txt")


def test_held_out_share_depends_on_the_texts_alone(tmp_path, caplog):
    lines = [f"image {n}" for n in range(1000)]
    prompts = load(write(tmp_path, lines, "a.txt"))
    train, heldout = hold_out(prompts, 0.1)
    assert len(train) + len(heldout) == 1000 and 70 < len(heldout) < 130
    shuffled = load(write(tmp_path, [*reversed(lines), *lines], "b.txt"))
    train_again, heldout_again = hold_out(shuffled, 0.1)
    assert {p.text for p in heldout_again} == {p.text for p in heldout} and len(heldout_again) == 2 * len(heldout)
    assert not {p.text for p in train_again} & {p.text for p in heldout_again}
    with pytest.raises(ValueError, match=r"task.data.heldout=0.5 leaves . training and . held-out prompts"):
        hold_out(prompts[:1], 0.5)
    with caplog.at_level(logging.WARNING):
        warn_of_overlap(train, heldout)
        assert caplog.text == ""
        warn_of_overlap(train + heldout[:2], heldout)
    assert f"2 of {len(heldout)} held-out prompts are training prompts too; remove them" in caplog.text
