"""Conversations from files and datasets, from the key to what is learned of every token, and rows that are refused."""

import base64
import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from mmrl import build as parts
from mmrl.config import load, to_yaml
from mmrl.errors import UserError
from mmrl.report.run import Run
from mmrl.runtime.jsonl import RowError
from mmrl.tasks.data.image_files import ImageFiles
from mmrl.tasks.visual_qa.data.conversations import ConversationFields
from mmrl.tasks.visual_qa.tiny.zoom import build
from mmrl.trainer import Trainer

CALL = '<tool_call>\n{"name": "zoom", "arguments": {"left": 0, "top": 1.5}}\n</tool_call>'


def png(red):
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (red, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


def text(said):
    return {"type": "text", "text": said}


def zoomed(**more):
    """A conversation as TRL and others write it: parts, images in a column, a call, its result, two answers."""
    call = {"type": "function", "function": {"name": "zoom", "arguments": {"left": 0, "top": 1.5}}}
    messages = [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": [{"type": "image"}, text("Which digit?")]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "image"}, text("seen")]},
        {"role": "assistant", "content": [text("7")]},
        {"role": "user", "content": "And <image>?"},
        {"role": "assistant", "content": "9"},
    ]
    return {"messages": messages, "images": ["0.png", "1.png", "2.png"], **more}


@pytest.fixture
def folder(tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.png").write_bytes(png(10 * number))
    build(tmp_path / "model")
    return tmp_path


def written(folder, *rows):
    path = folder / "talks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config(folder, path, *overrides):
    data = json.dumps({"type": "conversations", "train": str(path), "eval": str(path)})
    own = ["model.warm_start=null", "model.build=null", f"model.path={folder / 'model'}", f"task.data={data}"]
    own += ["task.environment=null", "rollout.prompts=2", "engine.micro_batch=1", "rollout.max_response_length=120"]
    own += ["steps=1", "evaluation.before=false", "evaluation.every=0", "evaluation.prompts=1"]
    return load(
        "configs/warm_starts/vlm/visual_qa_zoom_warm_start.yaml", [f"run_dir={folder / 'run'}", *own, *overrides]
    )


def reds(messages):
    return [image.getpixel((0, 0))[0] for message in messages for image in message.images]


def test_a_row_becomes_a_beginning_responses_and_what_came_between(folder):
    task = config(folder, written(folder, zoomed(kind="easy"))).task
    prompt = task.build(0).train[0]
    assert [(m.role, m.text) for m in prompt.messages] == [("system", "Look."), ("user", "Which digit?")]
    assert (prompt.id, prompt.answer, prompt.text) == ("talks:1", "9", "Which digit?")
    assert prompt.metadata["demonstration"] == [CALL, "7", "9"] and prompt.metadata["kind"] == "easy"
    first, second = prompt.metadata["observations"]
    assert [(m.role, m.text) for m in (*first, *second)] == [("tool", "seen"), ("user", "And ?")]
    assert reds(prompt.messages) + reds(first) + reds(second) == [0, 10, 20]  # the column, in order
    assert [type(part) for part in second[0].parts] == [str, Image.Image, str]


def test_calls_and_results_may_be_written_as_the_tools_here_are(folder):
    data = written(folder, zoomed(answer="99", tools=json.dumps([{"type": "function"}])))
    overrides = ["task.data.calls=python", "task.data.tool_role=user"]
    prompt = config(folder, data, *overrides).task.build(0).train[0]
    assert prompt.metadata["demonstration"] == ["zoom(left=0, top=1.5)", "7", "9"] and prompt.answer == "99"
    assert prompt.metadata["observations"][0][0].role == "user" and prompt.tools == ({"type": "function"},)


def whole(policy, row):
    """The conversation through the chat template in one go, and which of its tokens assistants say, by hand."""
    ids, said = [], []
    for message in row["messages"]:
        content = message["content"]
        pieces = content if isinstance(content, list) else [text(content)]
        shown = "".join("<image>" if piece["type"] == "image" else piece["text"] for piece in pieces)
        shown = CALL if message.get("tool_calls") else shown
        shown = shown.replace("<image>", "<|vision_start|><|image_pad|><|vision_end|>")
        own = message["role"] == "assistant"
        for piece, learned in ((f"<|im_start|>{message['role']}\n", False), (f"{shown}<|im_end|>", own), ("\n", False)):
            new = policy.tokens.tokenizer(piece, add_special_tokens=False).input_ids
            ids, said = ids + new, said + [learned] * len(new)
    return ids[:-1], said[:-1]  # nothing comes after the last response


def trained(folder, *rows, overrides=()):
    made = config(folder, written(folder, *rows), "engine.micro_batch=2", *overrides)
    task = parts.build_task(made)
    policy = parts.build_policy(made, task)
    run = Run(folder / "run", to_yaml(made), writes=True)
    return policy, task, Trainer(made, policy, task, parts.build_engine(made, policy), run)


def test_every_response_is_learned_from_and_nothing_else(folder):
    """Tokens, mask and the loss of a step, against one forward of the conversation as the template writes it."""
    short = [{"role": "user", "content": "Which digit?"}, {"role": "assistant", "content": "3"}]
    rows = [zoomed(), {"messages": short}]
    policy, task, trainer = trained(folder, *rows)
    want = []
    demonstrated = policy.demonstrate([task.train[0], task.train[1]])
    for row, tokens in zip(rows, demonstrated.inputs, strict=True):
        ids, said = whole(policy, row)
        assert torch.cat([tokens.prompt, tokens.response]).tolist() == ids
        assert tokens.decision_mask.tolist() == said[len(tokens.prompt) :] and not any(said[: len(tokens.prompt)])
        images = [Image.open(folder / name).convert("RGB") for name in row.get("images", [])]
        shown = policy.tokens.processor.image_processor(images, return_tensors="pt") if images else {}
        inputs = {"input_ids": torch.tensor([ids]), **shown}
        if images:
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == policy.tokens.processor.image_token_id).long()
        with torch.no_grad():
            logits = policy.module.model(**inputs).logits[0, :-1]
        logits[:, list(policy.tokens.suppressed)] = -torch.inf
        logp = logits.log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
        want += logp[torch.tensor(said[1:])].tolist()
    trainer.train()
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    (loss,) = (line["loss"] for line in lines if "loss" in line)
    assert loss == pytest.approx(-np.mean(want), abs=1e-4)  # of all responses' tokens, each as much as any other


def test_a_response_that_is_too_long_is_named_with_the_key(folder):
    policy, task, _ = trained(folder, zoomed(), overrides=["rollout.max_response_length=70"])
    with pytest.raises(UserError, match=r"prompt talks:1 has .* rollout.max_response_length"):
        policy.demonstrate([task.train[0]])


# --- other ways to write them ---


def test_tables_fill_with_nulls_and_arguments_are_json(folder):
    """As datasets write them to Parquet: every part has every key."""
    row = zoomed()
    for message in row["messages"]:
        content = message["content"]
        parts_ = content if isinstance(content, list) else [text(content)] if "<image>" not in content else None
        parts_ = parts_ or [text("And "), {"type": "image"}, text("?")]
        message["content"] = [{"type": p["type"], "text": p.get("text"), "image": None} for p in parts_]
        for call in message.setdefault("tool_calls", None) or []:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    row["images"] = [{"bytes": png(10 * n), "path": None} for n in range(3)]
    path = folder / "talks.parquet"
    pq.write_table(pa.Table.from_pylist([row]), path)
    prompt = config(folder, path).task.build(0).train[0]
    assert prompt.metadata["demonstration"] == [CALL, "7", "9"]
    assert reds(prompt.messages + prompt.metadata["observations"][1]) == [0, 20]
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_parquet(str(path), cache_dir=str(folder / "cache"))
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(str(folder / "saved"))
    data = json.dumps({"type": "huggingface_conversations", "name": str(folder / "saved")})
    again = config(folder, path, f"task.data={data}").task.build(0)
    assert again.train[0].metadata["demonstration"] == [CALL, "7", "9"]
    assert reds(again.evaluation[0].messages) == [0]


def test_images_may_stand_in_their_parts():
    url = "data:image/png;base64," + base64.b64encode(png(30)).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "image", "image": {"bytes": png(40)}}]
    row = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "a"}]}
    prompt = ConversationFields().prompt(row, "p")
    assert reds(prompt.messages) == [30, 40] and prompt.text == ""


@pytest.mark.parametrize(("calls", "want"), [("json", '{"left": 0}'), ("python", "zoom(left=0)")])
def test_arguments_that_are_null_are_not_there(calls, want):
    """Where a table holds calls with other arguments."""
    call = {"function": {"name": "zoom", "arguments": {"left": 0, "degrees": None}}}
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]}
    (said,) = ConversationFields(calls=calls).prompt(row, "p").metadata["demonstration"]
    assert want in said and "degrees" not in said


# --- rows that can not be used ---


def changed(place, **message):
    row = zoomed()
    row["messages"][place] |= message
    return row


def cut(count):
    return zoomed() | {"messages": zoomed()["messages"][:count]}


def called(call):
    return changed(2, tool_calls=[call])


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([], "a row must be an object, not list"),
        (
            {"conversations": []},
            "'messages' must be a list of messages (fields: conversations); set task.data.messages_field",
        ),
        (cut(2), "no assistant message"),
        (cut(4), "the last message has the role tool"),
        (cut(5), "field 'images' has 1 more images than"),
        (zoomed(images=["0.png", "1.png"]), "message 5: an image is missing: field 'images' has fewer images"),
        (zoomed(images=["0.png", "1.png", "no.png"]), "message 5: image 2 of field 'images': cannot read 'no.png'"),
        (zoomed(images=["0.png", "1.png", "../2.png"]), "contains '..'"),
        (changed(3, role="function"), "message 3: role must be one of system, user, assistant, tool, not 'function'"),
        (changed(3, role="assistant", content="so"), "follows another assistant message"),
        (changed(5, role="system"), "message 5: a system message must be the first message"),
        (changed(4, content=None), "message 4: the message is empty"),
        (changed(4, content=[{"type": "image"}]), "message 4: an assistant message has an image"),
        (changed(5, content=[{"type": "video"}]), "message 5: a part of type 'video'; only text and images are read"),
        (changed(5, content=[{"type": "text"}]), "message 5: a part of type text without the key text"),
        (changed(5, content="<video>"), "message 5: <video> in a conversation"),
        (changed(5, content=[{"type": "image", "image": "https://a.b/c.png"}]), "images are not fetched"),
        (called({"function": {"name": "a b"}}), "message 2: malformed tool call"),
        (called({"name": "zoom", "arguments": "{"}), "message 2: the arguments of the tool call zoom are not JSON"),
        (
            called({"name": "zoom", "arguments": [1]}),
            "message 2: the arguments of the tool call zoom are not an object",
        ),
        (zoomed(tools="{"), "field 'tools' is not JSON"),
        (zoomed(tools=["zoom"]), "field 'tools' must be a list of JSON schemas"),
    ],
)
def test_bad_rows_are_named(folder, row, words):
    path = written(folder, zoomed(), row)
    with pytest.raises(ValueError) as caught:
        config(folder, path).task.build(0)
    said = str(caught.value)
    assert "1 of 2 rows cannot be used" in said and f"{path}, line 2: " in said and words in said and "\n" not in said


def test_a_bad_row_in_a_hundred_is_left_out(folder, caplog):
    path = written(folder, *[zoomed()] * 3, cut(2), *[zoomed()] * 100)
    source = config(folder, path).task.build(0).train.source
    assert len(source) == 103 and [bad.line for bad in source.bad] == [4] and "line 4" in caplog.text


def test_what_is_for_questions_is_refused(folder):
    with pytest.raises(UserError, match="remove instruction and system"):
        config(folder, written(folder, zoomed()), "task.system=You look.")


def test_one_call_a_message_in_python(folder):
    row = zoomed()
    row["messages"][2]["tool_calls"] *= 2
    assert ConversationFields().check({**row, "images": [{"bytes": png(0)}] * 3}) is None
    with pytest.raises(RowError, match="several tool_calls"):
        ConversationFields(calls="python").check({**row, "images": [{"bytes": png(0)}] * 3})


def test_conversations_of_llava_and_sharegpt_are_read(folder):
    senders = {"system": "system", "user": "human", "assistant": "gpt"}
    row = {"conversations": [{"from": "human", "value": "<image>Which?"}, {"from": "gpt", "value": "7"}]}
    row["conversations"] += [{"from": "human", "value": "Red?"}, {"from": "gpt", "value": "no"}]
    fields = ConversationFields("conversations", "image", image_files=ImageFiles(folder))
    prompt = fields.prompt(row | {"image": "1.png"}, "x")
    assert (prompt.messages[0].images[0].getpixel((0, 0)), prompt.answer) == ((10, 0, 0), "no")
    assert prompt.metadata["demonstration"] == ["7", "no"]
    usual = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
    ]
    theirs = [{"from": senders[m["role"]], "value": m["content"]} for m in usual]
    one, other = (ConversationFields().prompt({"messages": messages}, "x") for messages in (usual, theirs))
    assert one == other and [m.role for m in one.messages] == ["system", "user"]
    with pytest.raises(RowError, match="message 0: role must be one of .*, not 'function_call'"):
        fields.check({"conversations": [{"from": "function_call", "value": "a"}, *row["conversations"]]})
