"""`mmrl check` names what is wrong with every planted misconfiguration, and says nothing of sound ones."""

import json
import logging
import math
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from PIL import Image

from mmrl.build import build_task
from mmrl.cli.check import JobCheck, report_lines
from mmrl.cli.main import main
from mmrl.config import load
from mmrl.errors import UserError
from mmrl.preflight import Alarm, CheckReport
from mmrl.preflight.boxes import probe_boxes
from mmrl.preflight.golds import (
    GoldScores,
    Reasons,
    components_to_try,
    gold_strings,
    probe_golds,
    probe_rewards,
    score_golds,
)
from mmrl.preflight.prompts import probe_images, probe_overlap, sample_prompts, select_evenly
from mmrl.preflight.questions import score_with_rewards
from mmrl.preflight.readers import probe_lengths, probe_placeholders, probe_reading
from mmrl.rewards import RewardSet, RewardSpec
from mmrl.rollouts import Prompt, Sample
from mmrl.tasks.manipulation import episodes
from mmrl.tasks.manipulation.episodes import record_expert
from tests.checks.misconfigurations.cases import CONTROLS, PLANTED
from tests.checks.misconfigurations.parts import named_by

PIPELINES = ("generation",)  # building one takes seconds


def alarms(case, folder, monkeypatch):
    made = case.write(folder)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    for name in case.unset:
        monkeypatch.delenv(name, raising=False)
    report = JobCheck(str(made.config), made.overrides).run()
    return "\n".join(alarm.text for alarm in report.alarms)


def marked(cases):
    return [pytest.param(c, id=c.name, marks=[pytest.mark.slow] if c.user in PIPELINES else []) for c in cases]


@pytest.mark.parametrize("case", marked(PLANTED))
def test_a_misconfiguration_is_named(case, tmp_path, monkeypatch):
    text = alarms(case, tmp_path, monkeypatch)
    assert named_by(case, text), text


def test_sixty_are_planted():
    assert len({case.name for case in PLANTED}) == len(PLANTED) == 60


@pytest.mark.parametrize("case", marked(CONTROLS))
def test_what_is_sound_raises_no_alarm(case, tmp_path, monkeypatch):
    assert alarms(case, tmp_path, monkeypatch) == ""


# --- golds by hand ---


def prompts(*golds, **fields):
    return [Prompt(f"rows:{n}", "question", answer=gold, **fields) for n, gold in enumerate(golds, 1)]


def marks_of(name, *golds, **options):
    rewards = RewardSet([RewardSpec(name=name, options=options)])
    (marks,) = score_golds(prompts(*golds), rewards, rewards.specs, 32)
    return marks


def test_marks_of_a_verifier_by_hand():
    found = marks_of("exact_match", "red", "blue", ["green", "lime"])
    assert [(mark.gold, mark.empty) for mark in found] == [(1.0, 0.0)] * 3
    assert found[0].other_golds == {"green": 0.0, "blue": 0.0} and found[2].other_golds == {"blue": 0.0, "red": 0.0}
    form = marks_of("think_answer", "red", "blue")
    assert [(mark.gold, mark.empty, *mark.other_golds.values()) for mark in form] == [(1.0, 0.0, 1.0)] * 2


def test_a_component_is_tried_on_its_own_rows():
    rows = [replace(row, metadata={"kind": kind}) for row, kind in zip(prompts("red", "7"), "ab", strict=True)]
    specs = [RewardSpec(name="exact_match", where={"kind": "a"}), RewardSpec(name="numeric", where={"kind": "b"})]
    alarms, marks = probe_rewards(rows, RewardSet(specs), "task.rewards", 32, custom=True)
    assert alarms == []
    assert {name: [mark.prompt.id for mark in of] for name, of in marks.items()} == {
        "exact_match": ["rows:1"],
        "numeric": ["rows:2"],
    }


def test_judges_forms_and_groups_are_not_tried():
    names = (
        "exact_match",
        "think_answer",
        "majority",
        "boxes_in_reasoning",
        "math",
        "tests.checks.test_check:pays_a_form",
    )
    rewards = RewardSet([RewardSpec(name=name) for name in names])
    assert [spec.name for spec in components_to_try(rewards, custom=True)] == [names[0], names[4], names[5]]
    assert [spec.name for spec in components_to_try(rewards, custom=False)] == [names[0], names[4]]


def pays_a_form(sample):
    return float(sample.response.startswith("<plan>"))


class LongestOfGroup:
    """A custom reward that compares the responses of a group."""

    scope = "group"

    def score(self, samples):
        longest = max(len(sample.response) for sample in samples)
        return [float(len(sample.response) == longest) for sample in samples]


def test_custom_rewards_of_groups_are_not_tried():
    rewards = RewardSet([RewardSpec(name="tests.checks.test_check:LongestOfGroup"), RewardSpec(name="exact_match")])
    assert [spec.name for spec in components_to_try(rewards, custom=True)] == ["exact_match"]


def test_a_form_of_the_users_own_is_no_fault():
    rewards = RewardSet([RewardSpec(name="tests.checks.test_check:pays_a_form")])
    assert probe_rewards(prompts("red", "blue"), rewards, "task.rewards", 32, custom=True)[0] == []


def refuses(sample):
    raise UserError("the service is down")


def test_scores_of_the_verifier_are_not_shown_as_those_of_rewards_that_fail():
    def scores(reward):
        verifier, rewards = (RewardSet([RewardSpec(name=name)]) for name in ("exact_match", reward))
        task = SimpleNamespace(verifier=verifier, rewards=rewards)
        return list(score_with_rewards(task, prompts("red", "blue"), 32, CheckReport()))

    assert scores("numeric") == ["numeric"]
    assert scores("tests.checks.test_check:refuses") == []


def test_reasons_are_those_of_the_reward():
    reasons = Reasons()
    with reasons.collected():
        logging.getLogger("mmrl.rewards.x").warning("reward mathematical failed on prompt a: no")
        logging.getLogger("mmrl.rewards.x").warning("reward math failed on prompt a: slow\n line")
        logging.getLogger("mmrl.rewards.x").warning("reward math failed on prompt b: later")
    assert reasons.first("math") == "reward math failed on prompt a: slow line" and reasons.first("numeric") == ""


@pytest.mark.parametrize(
    ("gold", "texts"),
    [("a", ["a"]), (["a", "b"], ["a", "b", "a, b"]), ([1, 2], ["[1, 2]"]), ({"x": 1}, ['{"x": 1}']), (3, ["3"])],
)
def test_texts_that_a_gold_stands_for(gold, texts):
    assert gold_strings(gold) == texts


def said(marks):
    return [
        (alarm.severity, alarm.text)
        for alarm in probe_golds(RewardSpec(name="exact_match", label="own"), marks, "task.rewards")
    ]


def mark(row, gold, silence=0.0, **others):
    return GoldScores(Prompt(f"rows:{row}", "q", answer="gold"), gold, silence, others)


def test_what_marks_say_by_hand():
    assert said([mark(1, 1, a=0), mark(2, 1, a=0.5)]) == []
    assert said([mark(1, 1, a=1), mark(2, 1, a=1)]) == []  # the form alone is looked at
    ((severity, text),) = said([mark(1, 1, a=1), mark(2, 1, a=0)])
    assert severity == "warned" and "gives 'a', the gold of another row, as much as the gold 'gold' of rows:1" in text
    ((severity, text),) = said([mark(1, math.nan), mark(2, 1, a=0)])
    assert severity == "warned" and "leaves 1 of 2 rows unscored, such as rows:1" in text
    ((severity, text),) = said([mark(1, math.nan), mark(2, math.nan)])
    assert severity == "refused" and "leaves every row unscored" in text
    ((severity, text),) = said([mark(1, 1, silence=1, a=0), mark(2, 1, a=0)])
    assert severity == "warned" and "gives an empty response 1, as much as the gold, in rows:1" in text
    ((severity, text),) = said([mark(1, 0, a=1), mark(2, 1, a=0)])
    assert (
        severity == "warned"
        and "gives the gold no more than an empty response (0), in any format, in 1 of 2 rows" in text
    )
    ((_, text),) = said([mark(1, 2, silence=2, a=2), mark(2, 2, silence=2, a=2)])
    assert "gives the same value, 2, to golds" in text


# --- prompts by hand ---


def texts(found):
    return [alarm.text for alarm in found]


def image(colour, size=(8, 8), dot=None):
    made = Image.new("RGB", size, colour)
    if dot is not None:
        made.putpixel((1, 1), dot)
    return made


def test_overlap_looks_at_images_text_and_answer():
    one = Prompt("a:1", "q", (image("red"),), "x")
    same, other = Prompt("b:1", "q", (image("red"),), "x"), Prompt("b:2", "q", (image("red", dot=(0, 0, 1)),), "x")
    (text,) = texts(probe_overlap([one], [same, other], "task.data.eval"))
    assert text.startswith("task.data.eval: 1 of 2 held-out prompts are trained on too (b:1 is a:1)")
    assert texts(probe_overlap([one], [other, Prompt("b:3", "q", (image("red"),), "y")], "key")) == []


def test_images_that_show_nothing():
    rows = [Prompt("a:1", "q", (image("red", dot=(0, 0, 1)),)), Prompt("a:2", "q", (image("red"),)), Prompt("a:3", "q")]
    (text,) = texts(probe_images(rows))
    assert "images of a single color in a:2 (1 of 3 rows)" in text


def test_boxes_and_their_frames():
    shown = {"images": (image("red", (40, 20)),)}
    specs = [RewardSpec(name="box_iou"), RewardSpec(name="exact_match")]
    rows = prompts([0, 0, 40, 20], [[1, 1, 5, 20.5]], [0.1, 0.2, 0.5, 1.0], {"bbox_2d": [0, 0, 41, 5]}, **shown)
    shares, outside = texts(probe_boxes(rows, specs, {}, "task.rewards"))
    assert "those of 1 of 4 rows lie in 0 .. 1, such as rows:3; set its options.answers=unit" in shares
    assert (
        "the gold box of rows:2, rows:4 lies outside of its image, which has 40 x 20 pixels once it is turned upright"
        in outside
    )
    assert texts(probe_boxes(rows[:1], specs, {}, "task.rewards")) == []
    resized = [RewardSpec(name="boxes_matched", options={"coordinates": "resized", "resize": {"max_pixels": 10}})]
    (text,) = texts(probe_boxes(rows[:1], resized, {"max_pixels": 20}, "task.rewards"))
    assert "resize.max_pixels=10, but model.processor.max_pixels is 20" in text
    assert texts(probe_boxes(rows[:1], resized, {"max_pixels": 10}, "task.rewards")) == []


def test_readers_by_hand():
    rows = prompts("red", "a very long gold")
    rows[1] = Prompt("rows:2", "what is <|pad|>?", answer="a very long gold")
    assert texts(probe_placeholders(rows, ["<|pad|>", "<|end|>"]))[0].startswith("the text of rows:2 holds <|pad|>")
    (text,) = texts(probe_lengths(rows, lambda text: len(text.split()), 4))
    assert text.startswith("the gold of 1 of 2 rows, such as rows:2, has at least rollout.max_response_length=4")
    assert text.endswith("raise that key to at least 5: the longest of these golds, and the end token")

    def read(prompt):
        raise UserError(f"prompt {prompt.id} is too long") if prompt.id == "rows:2" else StopIteration

    assert texts(probe_reading(rows, read)) == ["rows:1: StopIteration:", "prompt rows:2 is too long"]
    many = [Prompt(f"rows:{n}", "q") for n in range(2, 12)]  # of which one is too long

    def at_times(prompt):
        if prompt.id == "rows:2":
            raise UserError("prompt rows:2 is too long")

    severities = {share: [a.severity for a in probe_reading(many, at_times, share)] for share in (0.05, 0.1)}
    assert severities == {0.05: ["refused"], 0.1: ["warned"]}
    assert texts(probe_reading(many, at_times, 0.1)) == [
        "prompt rows:2 is too long; left out within task.data.max_bad_share"
    ]


def test_rows_of_a_large_source_are_spread_evenly():
    source = [Prompt(str(n), "q") for n in range(5000)]
    assert [prompt.id for prompt in sample_prompts(source, 4)] == ["0", "1250", "2500", "3750"]
    assert (
        len(sample_prompts(source)) == 200
        and len(sample_prompts(source[:30])) == 30
        and sample_prompts(source[:0]) == []
    )
    assert [prompt.id for prompt in select_evenly(source[:6], 3)] == ["0", "2", "4"] and select_evenly([], 3) == []


def test_large_images_are_read_as_far_as_they_fit(monkeypatch):
    monkeypatch.setattr("mmrl.preflight.prompts.IMAGE_BYTES", 3 * 8 * 8 * 5)
    source = [Prompt(str(n), "q", (image("red"),)) for n in range(20)]
    assert [prompt.id for prompt in sample_prompts(source)] == ["0", "4", "8", "12", "16"]
    source[0] = Prompt("0", "q", (image("red", (900, 900)),))
    assert len(sample_prompts(source)) == 1


def test_of_a_scripted_expert_a_few_episodes_are_recorded(tmp_path, monkeypatch):
    """A recipe with 1,100 episodes of each of five tasks took minutes."""
    recorded = []

    def record(sim, start_states, **options):
        recorded.extend(start_states)
        return record_expert(sim, start_states, **options)

    monkeypatch.setattr(episodes, "record_expert", record)
    overrides = ["task.demonstrations={type: expert, episodes: 2000}", "task.tasks=[reach, push]"]
    report = JobCheck("configs/warm_starts/vla/manipulation_tabletop_warm_start.yaml", overrides).run()
    assert [alarm.text for alarm in report.alarms] == []
    assert [[task for task, _ in recorded].count(name) for name in ("reach", "push")] == [16, 16]


def test_a_path_that_is_not_set_is_told_as_that():
    check = JobCheck("configs/vlm/visual_qa_digits.yaml", ["model.warm_start=null", "model.build=null"])
    check._policy(load(check.name, list(check.overrides)), None)
    assert check.report.skipped == [("model", "a model: model.path is not set")]


def test_findings_hold_an_alarm_once_and_errors_as_lines():
    report = CheckReport()
    report.add([Alarm("data", "warned", "x"), Alarm("data", "warned", "x")])
    with report.catch_errors("model"):
        raise UserError("a\n  b")
    with report.catch_errors("model"):
        raise KeyError("c")
    assert report_lines(report)[:-1] == ["warned    data   x", "refused   model  a b", "refused   model  KeyError: 'c'"]
    assert report_lines(report)[-1] == "3 alarms" and report.refused and report_lines(CheckReport()) == ["no alarm"]


def test_what_data_say_does_not_reach_the_terminal_as_control_characters():
    report = CheckReport()
    report.add([Alarm("data", "warned", "prompt \x1b[2Ja")])
    assert report_lines(report)[0] == "warned    data  prompt \\x1b[2Ja"


# --- the command ---


def test_the_command_and_its_page(tmp_path, monkeypatch, capsys):
    case = next(case for case in PLANTED if case.name == "overlong_row")
    made = case.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="1"):
        main(["check", str(made.config), *made.overrides, "--html", "out/check.html"])
    out = capsys.readouterr().out
    assert "max_prompt_length" in out and "12 prompts to train on, 6 held out" in out and out.endswith("1 alarm\n")
    page = (tmp_path / "out" / "check.html").read_text()
    assert page.count("data:image/png;base64,") == 8 and "exact_match" in page and "max_prompt_length" in page
    assert "&lt;|im_start|&gt;user" in page or "<|im_start|>" not in page


def test_training_says_it_before_the_first_step(tmp_path, monkeypatch, caplog):
    case = next(case for case in PLANTED if case.name == "index_golds_for_letters")
    made = case.write(tmp_path)
    monkeypatch.chdir(tmp_path)
    from mmrl.job import Job

    with Job(load(str(made.config), made.overrides)):
        pass
    assert any("multiple_choice leaves every row unscored" in record.getMessage() for record in caplog.records)


def test_a_gold_that_is_tried_in_training_calls_no_reward_of_the_user(tmp_path, monkeypatch):
    (tmp_path / "own_counted.py").write_text(
        "CALLS = []\n\n\ndef counted(sample):\n    CALLS.append(sample)\n    return 0.0\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    case = next(case for case in PLANTED if case.name == "silence_is_paid")
    made = case.write(tmp_path)
    from mmrl.preflight.quick import probe_quickly

    rewards = json.dumps([{"name": "own_counted:counted"}, {"name": "exact_match"}])
    config = load(str(made.config), [*made.overrides, f"task.rewards={rewards}", "task.accuracy={name: exact_match}"])
    task = build_task(config)
    assert list(probe_quickly(config, task)) == []
    import own_counted

    assert own_counted.CALLS == []
    task.score([Sample(task.train[0], "red", 1, False, 8)], torch.zeros(1, dtype=torch.long))
    assert len(own_counted.CALLS) == 1
    assert os.getcwd() == str(tmp_path)


def test_rewards_that_come_with_the_data_are_built():
    """Shipped recipes of drawn images name no rewards."""
    assert build_task(load("image_digits_base")).reward_names == ("classifier_logp",)
