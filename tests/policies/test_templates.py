"""Chat templates as published models have them: used as they are meant to be, or refused before weights are read."""

import json
import logging
import resource
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from mmrl.errors import UserError
from mmrl.policies.vlm import prompts, templates
from mmrl.policies.vlm.loading import load
from mmrl.policies.vlm.responses.tokens import ChatTokenizer
from mmrl.rollouts import Message, Prompt, Video
from mmrl.runtime import template_limits
from tests.helpers.tiny_models import MAKERS, build
from tests.policies.conftest import configured, image

START, END = "<|im_start|>", "<|im_end|>\n"
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
HEAD, TAIL = (
    "{%- for m in messages -%}",
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}",
)
ROLE = "{{- '<|im_start|>' + m['role'] + '\n' -}}"
PARTS = (
    "{%- for p in m['content'] -%}{%- if p['type'] == 'image' -%}"
    + PLACE
    + "{%- elif p['type'] == 'text' -%}{{- p['text'] -}}{%- endif -%}{%- endfor -%}"
)
ENDED = "{{- '<|im_end|>\n' -}}"
TEXT, ANYHOW = "{{- m['content'] + '' -}}", "{{- m['content'] -}}"
NO_SYSTEM = "{%- if messages[0]['role'] == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}"


def template(content, first=""):
    return first + HEAD + ROLE + content + ENDED + TAIL


QUESTION = Prompt("rows:1", "<image> or <image>?", (image(16, 16), image(32, 16)), system="Be brief.")


@pytest.fixture
def processor():
    return MAKERS["qwen2_5_vl"]()[1]


def shown(processor, text, prompt=QUESTION):
    processor.chat_template = text
    return prompts.chat_texts(processor, [prompt])[0]


SYSTEM_APART = f"{START}system\nBe brief.{END}{START}user\n{PLACE} or {PLACE}?{END}{START}assistant\n"
SYSTEM_IN_FRONT = f"{START}user\nBe brief.\n\n{PLACE} or {PLACE}?{END}{START}assistant\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(template(PARTS), SYSTEM_APART, id="parts"),
        pytest.param(template(TEXT), SYSTEM_APART, id="strings"),
        pytest.param(template(ANYHOW), SYSTEM_APART, id="lists-as-they-stand"),
        pytest.param(template("{{- m['content'] | trim -}}"), SYSTEM_APART, id="lists-trimmed"),
        pytest.param(template(PARTS, NO_SYSTEM), SYSTEM_IN_FRONT, id="no-system-raised"),
        pytest.param(template(TEXT, NO_SYSTEM), SYSTEM_IN_FRONT, id="no-system-raised-strings"),
        pytest.param(
            HEAD + "{%- if m['role'] != 'system' -%}" + ROLE + PARTS + ENDED + "{%- endif -%}" + TAIL,
            SYSTEM_IN_FRONT,
            id="no-system-dropped",
        ),
        pytest.param(
            template("{%- if m['role'] == 'system' -%}" + ANYHOW + "{%- else -%}" + PARTS + "{%- endif -%}"),
            SYSTEM_APART,
            id="system-as-string",
        ),
        pytest.param(
            # shows the system text, and nothing else where there is one
            HEAD + "{%- if messages[0]['role'] != 'system' or m['role'] == 'system' -%}" + ROLE + PARTS + ENDED
            + "{%- endif -%}" + TAIL,
            SYSTEM_IN_FRONT,
            id="system-alone",
        ),
    ],
)  # fmt: skip
def test_text_of_a_question_by_hand(processor, text, expected):
    assert shown(processor, text) == expected


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "idefics3", "llava_onevision", "internvl"])
def test_strings_hold_what_parts_become(family):
    """Token by token: the family's own template with its placeholder, and one that takes strings only."""
    processor = MAKERS[family]()[1]
    (as_parts,) = prompts.encode(processor, [QUESTION], 1000)
    end = processor.tokenizer.eos_token + "\n"
    processor.chat_template = (HEAD + ROLE + TEXT + "{{- '" + end + "' -}}" + TAIL).replace("\n", "\\n")
    (as_text,) = prompts.encode(processor, [QUESTION], 1000)
    assert as_text.prompt.tolist() == as_parts.prompt.tolist() and as_text.images.keys() == as_parts.images.keys()


def test_what_follows_a_response_in_strings(processor):
    processor.chat_template = template(TEXT)
    text = prompts.between(processor, prompts.chat(QUESTION), [Message("user", ("Look: ", image(8, 8)))], "<|im_end|>")
    assert text == f"\n{START}user\nLook: {PLACE}{END}{START}assistant\n"


def test_system_texts_in_later_messages():
    said = [Message(role, (text,)) for role, text in (("user", "a"), ("system", "b"), ("assistant", "c"))]
    moved = templates.without_system([*said, Message("user", (image(8, 8), "d")), Message("system", ("e",))])
    assert [message.role for message in moved] == ["user", "assistant", "user", "user"]
    assert moved[0].parts == ("a",) and moved[3].parts == ("e",)
    assert moved[2].parts[0] == "b\n\n" and isinstance(moved[2].parts[1], Image.Image) and moved[2].parts[2] == "d"


DROPS = template("{%- for p in m['content'] -%}{{- p['text'] -}}{%- endfor -%}")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (None, r"has no chat template.*chat_template\.jinja"),
        (DROPS, r"\(chat_template\.jinja\) drops images"),
        (template("{{- m['content'][0]['text'] -}}"), r"drops images"),
        (template("{{- m['text'] -}}"), r"renders the text of a question neither from a list"),
        (template("{{- m['content']['text'] + '' -}}"), r"neither.*UndefinedError"),
        ("{{ broken", r"neither.*TemplateSyntaxError"),
    ],
)
def test_what_is_refused_names_key_and_file(processor, text, named):
    processor.tokenizer.name_or_path = "some/folder"
    with pytest.raises(
        UserError, match=rf"^model\.path=some/folder: (the model|its chat template) .*{named}"
    ) as raised:
        shown(processor, text)
    assert "\n" not in str(raised.value)


def test_messages_that_a_template_refuses_are_named_by_their_roles(processor):
    first = "{%- if messages | length > 2 -%}{{ raise_exception('roles\n must alternate') }}{%- endif -%}"
    twice = Prompt("p", "", messages=tuple(Message("user", ("a",)) for _ in range(3)))
    with pytest.raises(
        UserError,
        match=r"these roles \(user, user, user\): roles must alternate; change the messages, or the template$",
    ):
        shown(processor, template(PARTS, first), twice)


def test_a_question_without_images_needs_no_placeholder(processor):
    assert shown(processor, DROPS, Prompt("p", "Two?")) == f"{START}user\nTwo?{END}{START}assistant\n"


def test_videos_that_a_template_drops(processor):
    film = Video((Image.fromarray(np.zeros((16, 16, 3), np.uint8)),) * 2, 1.0)
    prompt = Prompt("p", "What moves?", videos=(film,))
    with pytest.raises(UserError, match=r"drops videos"):
        shown(processor, template(PARTS), prompt)
    place = "<|vision_start|><|video_pad|><|vision_end|>"
    assert place + "What moves?" in shown(processor, template(TEXT), prompt)


def test_a_template_of_the_tokenizer_alone_is_used(processor):
    processor.tokenizer.chat_template = template(PARTS)
    assert shown(processor, None) == SYSTEM_APART


def test_another_template_is_tried_anew(processor):
    assert shown(processor, template(PARTS, NO_SYSTEM)) == SYSTEM_IN_FRONT
    assert shown(processor, template(PARTS)) == SYSTEM_APART


# --- before weights are read ---


class Rows(list):
    """A source of prompts."""


class Questions:
    """A task with rows."""

    def __init__(self, *rows):
        self.train, self.evaluation = Rows(rows), Rows(rows[:1])


def job(folder, text, *rows):
    """Loads the policy of a folder whose weights are gone: what is raised before they are read differs."""
    build("qwen2_5_vl", folder)
    (folder / "chat_template.jinja").unlink()
    held = json.loads((folder / "processor_config.json").read_text())
    assert "chat_template" not in held
    if text is not None:
        (folder / "chat_template.jinja").write_text(text)
    (folder / "model.safetensors").unlink()
    config = configured(folder)
    return load(str(folder), config.model, config, Questions(*rows))


@pytest.mark.parametrize(
    ("text", "named"), [(None, "has no chat template"), (DROPS, "drops images"), ("{{ x", "TemplateSyntaxError")]
)
def test_a_template_is_judged_before_weights_are_read(tmp_path, text, named):
    plain = Prompt("rows:0", "No image here")
    with pytest.raises(UserError, match=rf"^model\.path={tmp_path}: .*{named}"):
        job(tmp_path, text, plain, plain, QUESTION)


def test_a_moved_system_text_is_logged_once(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "mmrl"), pytest.raises(OSError, match="safetensors"):
        job(tmp_path, template(PARTS, NO_SYSTEM), QUESTION, QUESTION)
    lines = [record.message for record in caplog.records if "no system role" in record.message]
    assert len(lines) == 1 and lines[0].startswith(f"task.system: the chat template of model.path={tmp_path} has no")


def test_a_system_role_is_no_reason_for_a_line(tmp_path, caplog):
    plain = Prompt("rows:0", "No system text")
    for text, row in ((template(PARTS), QUESTION), (template(PARTS, NO_SYSTEM), plain)):
        folder = tmp_path / row.id.replace(":", "")
        with caplog.at_level(logging.WARNING, "mmrl"), pytest.raises(OSError, match="safetensors"):
            job(folder, text, row)
    assert not [record for record in caplog.records if "system" in record.message]


def test_a_template_that_loops_is_named(processor, monkeypatch):
    """transformers bounds one range, not ranges within each other."""
    monkeypatch.setattr(template_limits, "TEMPLATE_S", 0.5)
    loops = "{%- for i in range(99999) -%}{%- for k in range(99999) -%}{%- endfor -%}{%- endfor -%}"
    with pytest.raises(UserError, match=r"model\.path=.*: its chat template did not finish within 0\.5 s"):
        shown(processor, template(PARTS, first=loops))


POWERS = ["{{ 9**9**9 }}", "{%- set n = 9 -%}{%- if n  **\n n**n > 1 -%}x{%- endif -%}", "{{ [10][0] ** (9 ** 8) }}"]


@pytest.mark.parametrize("power", POWERS)
def test_a_template_with_a_power_is_named_before_it_is_rendered(processor, power):
    """9**9**9 is one operation, which no limit of time stops, at the compilation of the template already."""
    with pytest.raises(UserError, match=r"model\.path=.*: its chat template computes a power \(\*\*\), which may take"):
        shown(processor, template(PARTS, first=power))


def test_asterisks_that_are_no_power_are_rendered(processor):
    text = "{#- 9**9**9 -#}{%- set more = {'b': 2} -%}**2 ** 3{{ '4**5' }}{{ dict({'a': 1}, **more) }}"
    assert "**2 ** 34**5{'a': 1, 'b': 2}" in str(shown(processor, template(PARTS, first=text)))


BOMBS = {
    "one string": "{%- set bomb = 'ab' * 99999999999 -%}",
    "a format": "{%- set bomb = '%99999999999d' % 1 -%}",
    "a filter": "{%- set bomb = 'ab' | center(99999999999) -%}",
    "a list": "{%- set bomb = [0] * 99999999999 -%}",
    "doubled": "{%- set bomb = namespace(text='ab') -%}{%- for i in range(60) -%}"
    "{%- set bomb.text = bomb.text ~ bomb.text -%}{%- endfor -%}",
}


@pytest.mark.skipif(sys.platform != "linux", reason="no limit of address space")
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_template_that_takes_gigabytes_is_named(processor, monkeypatch, bomb):
    monkeypatch.setattr(template_limits, "TEMPLATE_BYTES", 2**28)
    before, most = resource.getrlimit(resource.RLIMIT_AS), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match=r"model\.path=.*: its chat template takes more than 0\.25 GiB of memory"):
        shown(processor, template(PARTS, first=BOMBS[bomb]))
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - most < 2**20  # KiB


def test_a_template_whose_text_is_too_long_is_named(processor):
    long = "{{ 'ab ' * 4000000 }}"
    with pytest.raises(
        UserError, match=r"its chat template makes 1200\d{4} characters of a conversation, more than \d+; fix it"
    ):
        shown(processor, template(PARTS, first=long))
    assert shown(processor, template(PARTS, first="{{ 'ab ' * 1000000 }}"))


def test_a_limit_of_two_threads_ends_with_the_last_of_them():
    before, steps = resource.getrlimit(resource.RLIMIT_AS), [threading.Event() for _ in range(3)]

    def first():
        with template_limits.limit_memory_growth(2**30, "first"):
            steps[0].set()
            steps[1].wait(10)
        steps[2].set()

    thread = threading.Thread(target=first)
    thread.start()
    steps[0].wait(10)
    with template_limits.limit_memory_growth(2**30, "second"):
        steps[1].set()
        steps[2].wait(10)
        within = resource.getrlimit(resource.RLIMIT_AS)
    thread.join()
    assert resource.getrlimit(resource.RLIMIT_AS) == before != within


def test_a_lower_limit_of_the_process_stays():
    """That of its surroundings, such as `ulimit -v`, which leaves less than a template may take."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    lower = pages * resource.getpagesize() + 2**28
    resource.setrlimit(resource.RLIMIT_AS, (lower, before[1]))
    try:
        with template_limits.limit_memory_growth(2**31, "too large"):
            within = resource.getrlimit(resource.RLIMIT_AS)
        after = resource.getrlimit(resource.RLIMIT_AS)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert within == after == (lower, before[1])


def test_a_response_knows_whether_its_prompt_opened_a_thought():
    """The first prompt ends in <think> and a new line; the second response opens a thought itself."""
    words = ["Which?", "<think>", "\n", "yes", "<end>"]

    def decode(ids, **options):
        return "".join(words[i] for i in ids.tolist())

    made = object.__new__(ChatTokenizer)
    made.tokenizer = SimpleNamespace(decode=decode, batch_decode=lambda rows, **options: [decode(row) for row in rows])
    made.eos, made.response_limit = (4,), SimpleNamespace(value=8)
    tokens = [([0, 1, 2], [3, 4]), ([0], [3, 1])]
    rows = [SimpleNamespace(prompt=torch.tensor(asked), response=torch.tensor(said)) for asked, said in tokens]
    samples = made.rollouts([Prompt("1", "Which?")] * 2, rows, 1).samples
    assert [sample.prompt_opens_think for sample in samples] == [True, False]
    assert [sample.truncated for sample in samples] == [False, True]
