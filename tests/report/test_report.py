"""The report says what metrics.jsonl says, names what is wrong, and makes something of any run directory."""

import json
import math
import re
import subprocess
import sys
import time

import numpy as np
import pytest
import yaml

from mmrl.errors import UserError
from mmrl.report import conversations, lock
from mmrl.report.changes import cut_positions, find_change
from mmrl.report.health import examine
from mmrl.report.html.cards import cards
from mmrl.report.html.explanations import explanation
from mmrl.report.html.galleries import by_priority, data_url, galleries
from mmrl.report.html.page import differences, paragraph, report_html
from mmrl.report.records import Series, duration_text, read_run
from mmrl.report.run import Run, write_samples
from mmrl.rollouts import Conversation, Episode, Message, Prompt, Sample, Turn
from tests.report.made import CONFIG, evaluations, healthy, write_run


def embedded(page):
    """What the script of a page draws from."""
    return json.loads(re.search(r'<script type="application/json" id="figures">(.*?)</script>', page, re.S).group(1))


def folded(page):
    """Values of the metrics that did not move, by name, as they are written."""
    tables = re.findall(r'<details class="constants">.*?</details>', page, re.S)
    rows = [re.findall(r"<td>(.*?)</td>", row) for table in tables for row in re.findall(r"<tr>(.*?)</tr>", table)]
    return {name: values for name, *values in rows}


def drawn(page):
    """Numbers of all curves of a page, by run and metric."""
    found = {}
    for figure in embedded(page)["figures"]:
        for line in figure["lines"]:
            key = (line["run"], line["metric"])
            assert key not in found
            found[key] = dict(zip(line["x"], line["y"], strict=True))
    return found


def logged(folder):
    """The same from metrics.jsonl, line by line."""
    found = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        for name, value in row.items():
            if name not in ("step", "time", "evaluation/n", "evaluation/standard_error"):
                found.setdefault(name, {})[row["step"]] = value if math.isfinite(value) else None
    return found


# --- numbers ---


def test_headings_without_a_figure_share_the_last_one(tmp_path):
    run = write_run(tmp_path, healthy(12), evaluations((0, 0.2), (6, 0.3), (12, 0.4)))
    headings = re.findall('class="curves"><h2>(.*?)</h2>(.*?)</section>', report_html([read_run(run)]), re.S)
    assert [title for title, content in headings if 'class="figures"' not in content] == [headings[-1][0]]
    still = folded(headings[-1][1])
    assert headings[-1][0] == "Metrics that did not change"
    assert still["evaluation/unscored"] == ["0"] and still["response/truncated"] == ["0"]
    assert "surrogate/ratio_gap" not in still  # it stands under Optimisation


def test_every_number_of_a_curve_is_the_logged_one(tmp_path):
    rows = healthy(12)
    rows[3] |= {"loss": 0.1 + 0.2, "entropy": 1e-17, "grad_norm": float("nan"), "odd/<b>": float("inf")}
    one, other = write_run(tmp_path / "a", rows), write_run(tmp_path / "b", healthy(5), evaluations())
    page = report_html([read_run(one), read_run(other)])
    found, still = drawn(page), folded(page)
    assert still["surrogate/ratio_gap"] == ["0", "0"] and still["time/step"] == ["0.55", "0.55"]
    for number, folder in enumerate((one, other)):
        expected = {name: values for name, values in logged(folder).items() if name not in still}
        assert {name: values for (run, name), values in found.items() if run == number and values} == expected
    assert found[0, "loss"][4] == 0.30000000000000004 and found[0, "grad_norm"][4] is None


def test_a_step_that_was_repeated_has_the_numbers_of_its_last_line(tmp_path):
    """As after a resume: steps 3 and 4 were logged, and logged again."""
    again = [row | {"loss": 9.0 + row["step"]} for row in healthy(4)[2:]]
    run = read_run(write_run(tmp_path, healthy(4) + again, []))
    assert [row["step"] for row in run.rows] == [1, 2, 3, 4]
    assert [row["loss"] for row in run.rows[2:]] == [12.0, 13.0]


def test_intervals_are_two_standard_errors_wide_on_each_side(tmp_path):
    page = report_html([read_run(write_run(tmp_path, healthy(4), evaluations((0, 0.25), (4, 0.5))))])
    line = next(
        line for f in embedded(page)["figures"] for line in f["lines"] if line["metric"] == "evaluation/accuracy"
    )
    assert line["errors"] == pytest.approx([1.96 * 0.02] * 2)


def test_a_long_run_is_thinned_out_and_keeps_its_last_step(tmp_path):
    rows = [{"step": step, "loss": 1.0 / step} for step in range(1, 10_002)]
    values = drawn(report_html([read_run(write_run(tmp_path, rows, []))]))[0, "loss"]
    assert 1000 <= len(values) <= 2001 and max(values) == 10_001 and min(values) == 1
    assert all(value == 1.0 / step for step, value in values.items())


def test_bars_are_mean_seconds_of_phases(tmp_path):
    page = report_html([read_run(write_run(tmp_path / name, healthy(6))) for name in "ab"])
    figures = embedded(page)["figures"]
    (bars,) = [figure["bars"] for figure in figures if "bars" in figure]
    assert bars["rows"] == ["a", "b"] and len(figures) > 10
    seconds = {part["name"]: part["values"] for part in bars["parts"]}
    assert seconds == {
        name: pytest.approx([s, s]) for name, s in {"rollout": 0.2, "update": 0.3, "the rest": 0.05}.items()
    }


def test_a_metric_that_moves_in_one_run_alone_is_drawn(tmp_path):
    still, moves = healthy(6), healthy(6)
    for step, row in enumerate(moves):
        row["guard/diversity"] = 0.4 + step
    page = report_html([read_run(write_run(tmp_path / "a", still)), read_run(write_run(tmp_path / "b", moves))])
    assert "guard/diversity" not in folded(page)
    assert drawn(page)[0, "guard/diversity"] == {step: 0.4 for step in range(1, 7)}


def test_axes_are_hours_since_the_first_line_and_rollouts_of_a_step(tmp_path):
    rows = [{"step": step, "time": 1000.0 + 1800.0 * step, "loss": float(step)} for step in range(1, 5)]
    page = report_html([read_run(write_run(tmp_path, rows, [{"step": 0, "time": 1000.0, "evaluation/accuracy": 0.5}]))])
    assert embedded(page)["runs"] == [{"hours": {"0": 0.0, "1": 0.5, "2": 1.0, "3": 1.5, "4": 2.0}, "rollouts": 8 * 4}]


def cards_of(run):
    return {card.label: (card.value, card.note, card.mark) for card in cards(run, examine(run))}


def test_cards_say_the_headline_numbers(tmp_path):
    folder = write_run(tmp_path / "a", healthy(), evaluations((0, 0.2), (20, 0.7), (40, 0.6)))
    shown = cards_of(read_run(folder))
    interval = 1.96 * math.hypot(0.02, 0.02)
    assert shown["held-out accuracy"] == ("0.200 → 0.600", f"+0.400 ± {interval:.3f} (95 %)", "good")
    assert shown["best held out"] == ("0.700", "step 20", "")
    assert shown["steps"] == ("40 of 40", "finished", "good")
    assert shown["health"][0] == "good" and shown["next"][0] == f"mmrl eval {folder}"
    worse = cards_of(read_run(write_run(tmp_path / "b", healthy(), evaluations((0, 0.5), (40, 0.3)))))
    assert worse["held-out accuracy"][2] == "bad" and "best held out" not in worse
    assert worse["health"][0] == "1 to look at" or worse["health"][2] in ("warning", "bad")
    stopped = cards_of(read_run(write_run(tmp_path / "c", healthy(8), [], end=("stopped", "SIGTERM"))))
    assert stopped["steps"] == ("8 of 40", "stopped", "warning") and stopped["next"][0] == "the same command"


def test_three_prompts_are_too_few_for_standard_errors(tmp_path):
    rows = [row | {"evaluation/n": 3.0} for row in evaluations((0, 0.2), (40, 0.9))]
    page = report_html([read_run(write_run(tmp_path, healthy(), rows))])
    assert "on 3 prompts: too few" in page and "standard errors" not in page
    assert "It changes by +0.7000 on 3 prompts: too few to tell a gain from chance" in page


def test_a_calm_second_scorer_may_drift(tmp_path):
    """-1.56 to -1.57 is not a fall, -1.56 to -1.9 is one."""
    for end, wrong in ((-1.57, False), (-1.9, True)):
        rows = healthy(16)
        for step, row in enumerate(rows):
            row["guard/second_scorer"] = -1.56 + (end + 1.56) * step / 15
        (finding,) = [f for f in examine(read_run(write_run(tmp_path / str(end), rows))) if f.name == "Second scorer"]
        assert (finding.verdict == "bad") == wrong


def test_what_sampling_gains_stands_beside_greedy_decoding(tmp_path):
    run = read_run(write_run(tmp_path, healthy(), evaluations((0, 0.0), (40, 0.0))))
    (finding,) = [f for f in examine(run) if f.name == "Held-out accuracy"]
    assert "sampled, on training prompts, it went from 0.255 to 0.555" in finding.sentence


def test_names_are_explained(tmp_path):
    figures = embedded(report_html([read_run(write_run(tmp_path, healthy(6)))]))["figures"]
    texts = {figure["title"]: figure["explanation"] for figure in figures}
    assert texts["grad_norm"].startswith("norm of the gradient before clipping") and texts["reward/exact_match"]
    assert explanation("surrogate/ratio_gap_max").startswith("largest distance") and explanation("odd/name") == ""


def test_the_page_is_small(tmp_path):
    assert len(report_html([read_run(write_run(tmp_path, healthy(6)))])) < 60_000


# --- words ---


def test_the_paragraph_says_what_was_trained_and_what_came_of_it(tmp_path):
    text = paragraph(read_run(write_run(tmp_path / "mine", healthy(), evaluations((0, 0.2), (40, 0.6)))))
    assert text.startswith("mine trains a vision-language model (a/model) on visual qa (digits) with grpo")
    assert "8 prompts with 4 rollouts each" in text and "the learning rate 0.001, the seed 7, and 40 steps" in text
    assert "It reached its end, step 40." in text
    assert "from 0.2000 ± 0.0200 at step 0 to 0.6000 ± 0.0200 at step 40: +0.4000, 14.1 standard errors" in text
    assert "it took 40 s; a step took 0.55 s" in text


def test_durations():
    assert [duration_text(s) for s in (0, 59.6, 200, 7500, 3600, 100_000)] == [
        "0 s", "1 min", "3 min 20 s", "2 h 5 min", "1 h", "1 d 3 h",
    ]  # fmt: skip


def test_differences_of_configurations():
    one = {"a": {"b": 1, "c": [1, 2]}, "terms": [{"type": "kl", "coefficient": 0.1}]}
    other = {"a": {"b": 2, "c": [1, 2]}, "terms": [{"type": "kl", "coefficient": 0.2}], "new": True}
    assert differences([one, other]) == {
        "a.b": ["1", "2"],
        "terms.0.coefficient": ["0.1", "0.2"],
        "new": ["–", "True"],
    }


# --- health ---


def wrong(folder, rows, held_out=None, config=None):
    return [f for f in examine(read_run(write_run(folder, rows, held_out, config))) if f.verdict != "good"]


def changed(**columns):
    """Rows of a healthy run in which some metrics are functions of the step; names have __ for /."""
    rows = healthy()
    for row in rows:
        row |= {name.replace("__", "/"): value(row["step"]) for name, value in columns.items()}
    return rows


def test_a_healthy_run_has_no_complaint(tmp_path):
    findings = examine(read_run(write_run(tmp_path, healthy())))
    assert [f.sentence for f in findings if f.verdict != "good"] == []
    assert len(findings) > 15


def test_a_gradient_below_the_clip_bound_may_grow(tmp_path):
    """LoRA's second factor begins at 0, so its gradient grows a hundredfold in a healthy run."""
    rows = changed(grad_norm=lambda s: 0.001 * 1.3 ** min(s, 20))
    assert wrong(tmp_path / "below", rows) == []
    (found,) = wrong(tmp_path / "above", rows, config=CONFIG | {"optim": {"clip_grad_norm": 0.1}})
    assert "explodes" in found.sentence and found.verdict == "bad"


def test_a_peak_below_the_clip_bound_is_no_warning(tmp_path):
    rows = changed(grad_norm=lambda s: 0.9 if s == 17 else 0.01)
    assert wrong(tmp_path / "below", rows) == []
    (finding,) = wrong(tmp_path / "above", rows, config=CONFIG | {"optim": {"clip_grad_norm": 0.1}})
    assert "it jumped to 0.9 at step 17" in finding.sentence and finding.verdict == "warning"


LATE = 31  # the first step of the last quarter
FAULTS = [
    # what is wrong, the metric and a word by which it must be named, how bad
    (changed(guard__out_of_gamut=lambda s: 0.3 + 0.01 * s), "guard/out_of_gamut", "hacked", "bad"),
    (changed(correction__logp_gap=lambda s: 1e-3 * 1.2**s), "correction/logp_gap", "older weights", "bad"),
    (changed(generation__probe_gap=lambda s: 0.5 if s > 20 else 1e-7), "generation/probe_gap", "step 21", "bad"),
    (changed(grad_norm=lambda s: 1.5 * 1.3**s), "grad_norm", "explodes", "bad"),
    (changed(grad_norm=lambda s: 90.0 if s == 17 else 1.5), "grad_norm", "step 17", "warning"),
    (changed(reward__exact_match=lambda s: 0.0), "reward/exact_match", "0 in all 40 steps: no rollout", "bad"),
    (changed(reward__exact_match=lambda s: 0.5), "reward/exact_match", "0.5 in all 40 steps", "bad"),
    (changed(surrogate__ratio_gap_max=lambda s: 0.01 if s == 3 else 0.0), "surrogate/ratio_gap_max", "0.01", "bad"),
    (changed(surrogate__clip_low=lambda s: 0.39), "surrogate/clip_low", "40.0%", "warning"),
    (changed(entropy=lambda s: 0.8 * 0.8**s), "entropy", "collapses", "warning"),
    (changed(advantages__zero_variance_groups=lambda s: 0.9), "advantages/zero_variance_groups", "90%", "warning"),
    (changed(unscored=lambda s: 0.1, unscored__exact_match=lambda s: 0.1), "unscored", "exact_match 10.0%", "warning"),
    (changed(unscored=lambda s: 0.5, unscored__exact_match=lambda s: 0.5), "unscored", "exact_match 50.0%", "bad"),
    (changed(generation__staleness=lambda s: 3.0), "generation/staleness", "up to 3 steps ago", "warning"),
    (changed(updates_skipped=lambda s: float(s in (5, 9))), "updates_skipped", "2 steps, first in step 5", "bad"),
    (changed(time__rollout_max=lambda s: 0.6), "time/rollout_max", "3.00 times the median; it is rank", "warning"),
    (changed(response__truncated=lambda s: 0.8), "response/truncated", "80%", "warning"),
    (changed(guard__second_scorer=lambda s: -4.0 - 0.1 * s), "guard/second_scorer", "falls from", "bad"),
    (changed(guard__diversity=lambda s: 0.4 if s < LATE else 0.05), "guard/diversity", "look alike", "warning"),
    (changed(grad_norm=lambda s: 0.0), "grad_norm", "exactly 0 in 40 of 40", "bad"),
    (changed(loss=lambda s: math.nan if s == 8 else 0.0), "loss", "not finite", "warning"),
    (changed(correction__effective_sample_size=lambda s: 0.3), "correction/effective_sample_size", "30%", "warning"),
    (changed(simulator__dropped=lambda s: 0.5), "simulator/dropped", "adds up to 20", "warning"),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "metric", "word", "verdict"), FAULTS, ids=[f"{f[1]}-{f[3]}" for f in FAULTS])
def test_an_injected_fault_is_named_and_nothing_else(tmp_path, rows, metric, word, verdict):
    found = wrong(tmp_path, rows)
    assert [f.verdict for f in found] == [verdict], [f.sentence for f in found]
    assert metric in found[0].metrics and word in found[0].sentence and found[0].advice
    page = report_html([read_run(tmp_path)])
    assert f'<div class="finding {verdict}">' in page and found[0].name in page


def test_what_evaluations_noticed_is_counted_with_the_rest(tmp_path):
    held_out = evaluations((0, 0.2), (40, 0.6))
    held_out[1]["evaluation/generation/restarts"] = 2.0
    (found,) = wrong(tmp_path, changed(generation__restarts=lambda s: float(s == 7)), held_out)
    assert found.metrics[0] == "generation/restarts" and "adds up to 3" in found.sentence


@pytest.mark.parametrize("steps", [40, 400])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.6, 0.9])
@pytest.mark.parametrize(
    ("metric", "before", "after", "word"),
    [
        ("guard/out_of_gamut", 0.3, 0.9, r"90% of the pixel values .* from step (\d+)"),
        ("correction/logp_gap", 1e-4, 0.3, "older weights"),
        ("grad_norm", 1.5, 20.0, r"1.5 before step (\d+), and 20 from then on"),
    ],
)
def test_a_fault_is_named_whenever_it_begins(tmp_path, steps, share, metric, before, after, word):
    first, rows = int(steps * share), healthy(steps)
    for row in rows:
        row[metric] = before if row["step"] < first else after
    (found,) = [finding for finding in wrong(tmp_path, rows) if metric in finding.metrics]
    assert found.verdict == "bad"
    told = re.search(word, found.sentence)
    assert told, found.sentence
    assert all(abs(int(step) - first) <= steps / 48 for step in told.groups())


def test_an_engine_that_was_never_right_is_named(tmp_path):
    """It does not drift, and it is further away than rounding makes."""
    (found,) = wrong(tmp_path / "far", changed(correction__logp_gap=lambda s: 0.3))
    assert found.metrics == ("correction/logp_gap",) and found.verdict == "bad"
    assert wrong(tmp_path / "near", changed(correction__logp_gap=lambda s: 0.015)) == []


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_no_change(tmp_path, seed):
    """Gradients, gaps and shares that vary by a factor of a few from step to step, without a course."""
    rng, rows = np.random.default_rng(seed), healthy(int(12 * 3 ** (seed % 4)))
    for row in rows:
        row["grad_norm"] = float(rng.lognormal(0, 0.8))
        row["correction/logp_gap"] = float(rng.lognormal(-6, 0.8))
        row["guard/out_of_gamut"] = float(rng.beta(6, 14))
    names = {metric for finding in wrong(tmp_path, rows) for metric in finding.metrics}
    assert not names & {"correction/logp_gap", "guard/out_of_gamut"}
    assert not [f for f in wrong(tmp_path, rows) if "grad_norm" in f.metrics and f.verdict == "bad"]


def test_changes_are_looked_for_near_both_ends_and_between():
    assert cut_positions(5) == [] and cut_positions(6) == [3] and cut_positions(9) == [3, 4, 5, 6]
    many = cut_positions(10_000)
    assert many[:3] == [3, 4, 5] and many[-1] == 9997 and 50 < len(many) < 70
    values = [1.0, math.nan, 1.0, 1.0, 5.0, 5.0, 5.0, 5.0]
    found = find_change(Series("x", list(range(1, 9)), values))
    assert (found.before, found.after, found.step) == (1.0, 5.0, 5)
    assert find_change(Series("x", [1, 2, 3], [1.0, 2.0, 3.0])) is None
    found = find_change(
        Series("x", list(range(1, 10)), [0.0, 1e-4, 1e-4, 1e-4, 3e-4, 1.0, 1.0, 1.0, 2.0]), factors=True
    )
    assert found.step == 6 and found.factor == pytest.approx(1e4) and found.after == pytest.approx(1.0)


def test_a_gain_within_chance_and_a_loss_beside_a_rising_reward(tmp_path):
    found = wrong(tmp_path / "a", healthy(), evaluations((0, 0.2), (40, 0.25)))
    assert [f.name for f in found] == ["Held-out accuracy"] and "+0.0500" in found[0].sentence
    found = wrong(tmp_path / "b", healthy(), evaluations((0, 0.6), (40, 0.2)))
    assert [f.verdict for f in found] == ["bad", "warning"] and "falls by 0.4" in found[0].sentence


def test_several_updates_a_step_may_leave_the_policy(tmp_path):
    rows = changed(surrogate__ratio_gap_max=lambda s: 0.2)
    several = CONFIG | {"algorithm": {"type": "grpo", "epochs": 2, "minibatches": 2}}
    assert wrong(tmp_path / "a", rows, config=several) == []
    rounded = CONFIG | {"model": CONFIG["model"] | {"dtype": "bfloat16"}}
    assert len(wrong(tmp_path / "b", rows, config=rounded)) == 1  # rounding alone does not make 0.2
    little = changed(surrogate__ratio_gap_max=lambda s: 0.02)
    assert wrong(tmp_path / "c", little, config=rounded) == []


def test_stale_rollouts_that_are_allowed_are_no_fault(tmp_path):
    rollout = CONFIG["rollout"] | {
        "generator": {"type": "vllm_server", "async_steps": 1, "partial": {"max_staleness": 3}}
    }
    assert wrong(tmp_path, changed(generation__staleness=lambda s: 3.0), config=CONFIG | {"rollout": rollout}) == []


# --- run directories in any state ---


def test_how_a_run_ended(tmp_path):
    def ending(name, **files):
        folder = write_run(tmp_path / name, healthy(9), [], end=None)
        for file, text in files.items():
            (folder / file.replace("__", ".")).write_text(text)
        return read_run(folder).ending

    here, gone = lock.this_process(), lock.this_process() | {"process": 2**22 - 3, "started": 1}
    assert ending("alive", run__lock=json.dumps(here)).state == "running"
    killed = ending("killed", run__lock=json.dumps(gone))
    assert (
        killed.state == "killed" and "killed at step 9 of 40" in killed.sentence and str(2**22 - 3) in killed.sentence
    )
    away = ending("away", run__lock=json.dumps(here | {"host": "elsewhere"}))
    assert (
        away.state == "unknown" and "may be running on another host" in away.sentence and "elsewhere" in away.sentence
    )
    assert ending("silent").state == "unknown" and "without recording why" in ending("silent").sentence
    failed = ending("failed", end__json=json.dumps({"state": "failed", "sentence": "It ended at step 9 of 40: no."}))
    assert (failed.state, failed.sentence) == ("failed", "It ended at step 9 of 40: no.")
    (tmp_path / "old" / "final").mkdir(parents=True)
    (tmp_path / "old" / "final" / "run.json").write_text('{"step": 9}')
    assert ending("old").sentence == "It reached its end at step 9."


def test_a_process_that_is_killed_is_told_from_one_that_runs(tmp_path):
    """With a real process that holds the lock."""
    code = f"""if True:
        from pathlib import Path; import time
        from mmrl.report.run import Run
        run = Run(Path({str(tmp_path / "run")!r}), "steps: 3", writes=True)
        run.log(1, {{"loss": 1.0}}); print("ready", flush=True); time.sleep(60)
    """
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        running = read_run(tmp_path / "run")
        assert running.ending.state == "running" and "step 1 of 3" in running.ending.sentence
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert read_run(tmp_path / "run").ending.state == "killed"


def test_a_run_says_how_it_ended_and_forgets_when_it_goes_on(tmp_path):
    run = Run(tmp_path / "run", "steps: 3", writes=True)
    run.log(1, {"loss": 1.0})
    run.end("failed", "It ended at step 1 of 3 with an error: <no>")
    run.close()
    assert read_run(run.folder).ending.sentence == "It ended at step 1 of 3 with an error: <no>"
    assert "with an error: &lt;no&gt;" in report_html([read_run(run.folder)])
    again = Run(tmp_path / "run", "steps: 3", writes=True)
    assert read_run(run.folder).ending.state == "running"
    gone = lock.this_process() | {"process": 2**22 - 3, "started": 1}
    (run.folder / "run.lock").write_text(json.dumps(gone))  # as after a kill: the end before is not this one's
    assert read_run(run.folder).ending.state == "killed"
    again.close()


def test_an_empty_folder_and_one_that_is_missing(tmp_path):
    found = read_run(tmp_path)
    assert found.ending.state == "empty"
    assert [p.split(" ")[0] for p in found.problems] == ["config.yaml", "versions.json", "metrics.jsonl"]
    page = report_html([found])
    assert "It has not logged anything." in page and "metrics.jsonl is missing, so there are no curves." in page
    with pytest.raises(UserError, match=r"not a run directory: there is no such folder"):
        read_run(tmp_path / "none")


def test_a_damaged_run_says_what_is_damaged(tmp_path):
    folder = write_run(tmp_path, healthy(6), [])
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    lines[1] = b'{"step": 2, "lo\n'
    lines[3] = b"\x00\xff\xfe\n"
    lines[4] = b'{"step": 5, "loss": "much", "entropy": 0.5}\n'
    (folder / "metrics.jsonl").write_bytes(b"".join(lines) + b'{"step": 7, "loss"')
    (folder / "config.yaml").write_text("steps: [1\n")
    (folder / "versions.json").write_bytes(b"\xff\xff")
    (folder / "bad-step-3-rank0.jsonl").write_text("{}\n")
    found = read_run(folder)
    assert [int(row["step"]) for row in found.rows] == [1, 3, 5, 6] and "loss" not in found.rows[2]
    told = " ".join(found.problems)
    assert (
        "2 of 7 lines of metrics.jsonl are damaged" in told
        and "1 lines of metrics.jsonl have values that are not numbers" in told
    )
    assert "config.yaml is damaged" in told and "versions.json cannot be read" in told
    assert "bad-step-3-rank0.jsonl" in told
    assert "configuration cannot be read" in report_html([found])


@pytest.mark.parametrize(
    ("file", "content", "told"),
    [
        ("config.yaml", "", "config.yaml is empty."),
        ("versions.json", " \n", "versions.json is empty."),
        ("end.json", "", "end.json is damaged: how the run ended is concluded from the other files."),
        ("end.json", '{"state": "fini', "end.json is damaged: how the run ended is concluded from the other files."),
        ("metrics.jsonl", None, "metrics.jsonl ends at step 20, but the run finished at step 40."),
    ],
)
def test_each_file_that_is_damaged_is_named(tmp_path, file, content, told):
    folder = write_run(tmp_path, healthy())
    assert read_run(folder).problems == []
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / file).write_text("".join(lines[:21]) + lines[21][:30] if content is None else content)
    found = read_run(folder)
    assert found.problems == [told] and told in report_html([found])


def test_a_line_in_the_making_is_no_damage(tmp_path):
    folder = write_run(tmp_path, healthy(3), [], end=None)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    assert read_run(folder).problems == [] and read_run(folder).step == 3


# --- galleries ---


def sample(number, answer="2", **more):
    return Sample(Prompt(f"id{number}", f"question {number}", answer=answer), "said", 1, **more)


def test_galleries_show_tables_before_and_after_images_and_videos(tmp_path):
    import torch

    folder = write_run(tmp_path, healthy(4))
    for step, value in ((0, 0.1), (2, 0.5), (4, 0.9)):
        image = torch.full((3, 4, 4), value)
        write_samples(
            folder / "samples" / f"evaluation-{step:06d}.html", [sample(1, image=image)], {"accuracy": [value]}
        )
    frames = np.zeros((3, 16, 16, 3), np.uint8)
    episode = Episode("reach for it", True, True, 2, 1.0, frames=frames)
    write_samples(folder / "samples.html", [sample(2, episode=episode)], {})
    found = {gallery.title: gallery for gallery in galleries(read_run(folder))}
    held_out = found["Held-out prompts"]
    assert [m.step for m in held_out.moments] == [0, 2, 4] and held_out.left_out == 0
    assert [m.step for m in held_out.compared] == [0, 4] and all(len(m.images) == 1 for m in held_out.moments)
    assert "question 1" in held_out.moments[0].table and ">0.9</td>" in held_out.moments[2].table
    (written,) = found["Written by mmrl sample"].moments
    assert written.videos == [] and written.table.count('<video src="data:video/mp4;base64,') == 1
    page = report_html([read_run(folder)])
    assert "before (step 0)" in page and "after (step 4)" in page and page.count("<video") == 1


def test_a_group_shares_its_prompt_and_a_conversation_shows_its_crops(tmp_path):
    from PIL import Image

    folder = write_run(tmp_path, healthy(4))
    image = Image.new("RGB", (32, 32), "white")
    crop = Message("tool", (image.crop((0, 0, 8, 8)),))
    talk = Conversation(
        (Message("user", (image, "what is it?")),),
        (Turn("zoom", (crop,), tool="zoom", facts={"box": (0, 0, 0.25, 0.25)}), Turn("a cat", reward=1.0)),
        "environment",
    )
    group = [sample(1), sample(1), sample(1, conversation=talk), sample(2)]
    write_samples(folder / "samples" / "train-000004.html", group, {"reward": [1.0, 2.0, 3.0, 4.0]})
    table = galleries(read_run(folder))[0].moments[0].table
    assert table.count('rowspan="3"') == table.count("rowspan") == 2 and table.count("question 1") == 1
    assert table.count("<img") == 2 and "what is it?" in table and "a cat" in table and "tool zoom" in table
    # The box is drawn into the first image that the policy saw, and the crop stays as it is.
    shown = re.findall(r'<img src="(data:image/png;base64,[^"]+)"', table)
    seen = [conversations.with_boxes(image, [[0, 0, 0.25, 0.25]]), crop.images[0]]
    assert shown == [conversations.data_url(one) for one in seen]
    assert re.findall(r'<td data-name="reward">(\d)</td>', table) == ["1", "2", "3", "4"]


def test_videos_stand_in_the_rows_of_their_episodes(tmp_path):
    folder = write_run(tmp_path, healthy(4))
    frames = np.zeros((3, 16, 16, 3), np.uint8)
    filmed = [Episode("reach", True, True, 2, 1.0, frames=frames + shade) for shade in (40, 200)]
    group = [sample(1, episode=filmed[0]), sample(1, episode=Episode("reach", False, False, 2, 0.0))]
    group.append(sample(1, episode=filmed[1]))
    page = folder / "samples" / "train-000004.html"
    write_samples(page, group, {"reward": [1.0, 2.0, 3.0]})
    urls = [data_url(page.with_name(f"train-000004-{number:03d}.mp4")) for number in (0, 2)]
    assert urls[0] != urls[1]
    (moment,) = galleries(read_run(folder))[0].moments
    rows = moment.table.split("<tr ")[1:]
    assert [row.partition(">")[0] for row in rows] == ['class="success"', 'class="failure"', 'class="success"']
    assert [[url in row for url in urls] for row in rows] == [[True, False], [False, False], [False, True]]
    assert moment.videos == [] and moment.size == len(moment.table)
    page.with_name("train-000004-000.mp4").unlink()  # nothing asks for it
    page.write_text(page.read_text().replace('src="train-000004-002.mp4"', 'src="other.mp4"'))
    (moment,) = galleries(read_run(folder))[0].moments
    assert moment.videos == urls[1:] and ".mp4" not in moment.table


def test_a_table_from_elsewhere_can_not_do_anything(tmp_path):
    folder = write_run(tmp_path, healthy(4))
    (folder / "samples").mkdir()
    evil = (
        "<table><tr><td onclick=alert(1)>kept<script>alert(2)</script><img src=http://example.com/x.png>"
        '<img src="javascript:alert(3)"><iframe src=x></iframe><a href="http://example.com">link</a>'
    )
    (folder / "samples" / "train-000001.html").write_text(evil)  # cut off, too
    table = galleries(read_run(folder))[0].moments[0].table
    assert "kept" in table and table.endswith("</table>")
    assert not re.search(r"script|onclick|http|iframe|<a", table)


def test_what_does_not_fit_is_left_out_and_counted(tmp_path):
    folder = write_run(tmp_path, healthy(4))
    for step in range(0, 100, 10):
        write_samples(folder / "samples" / f"train-{step:06d}.html", [sample(step)], {})
    size = galleries(read_run(folder))[0].moments[0].size
    kept = galleries(read_run(folder), budget=3 * size + 20)[0]
    assert [m.step for m in kept.moments] == [0, 50, 90] and kept.left_out == 7
    assert [step for _, step in by_priority([10, 20, 30])] == [30, 10, 20] and list(by_priority([])) == []
    assert [step for _, step in by_priority([None])] == [None]


# --- the page as a whole ---


def test_the_page_is_below_the_limit_and_asks_for_nothing(tmp_path):
    page = report_html([read_run(write_run(tmp_path, healthy()))])
    assert len(page.encode()) < 2_000_000
    assert "default-src 'none'" in page
    assert not re.search(r'(?:src|href)="(?!data:|#)', page.split('<script type="application/json"')[0])


def test_names_and_keys_are_escaped(tmp_path):
    config = CONFIG | {"task": {"type": "</script><script>alert(1)</script>"}}
    rows = [{"step": 1, "</script><b>": 1.0}]
    page = report_html([read_run(write_run(tmp_path / "<i>", rows, [], config))])
    assert "<script>alert" not in page and "</script><b>" not in page and "<i>trains" not in page


def test_a_comparison_has_a_row_for_each_run(tmp_path):
    one = write_run(tmp_path / "one", healthy(), evaluations((0, 0.2), (20, 0.7), (40, 0.6)))
    two = write_run(tmp_path / "two", healthy(8), [], CONFIG | {"optim": {"lr": 0.5}}, end=("stopped", "SIGTERM"))
    page = report_html([read_run(one), read_run(two)])
    table = re.search(r'<table class="sortable" id="results">(.*?)</table>', page, re.S).group(1)
    heads = re.findall(r"<th>(.*?)</th>", table)
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", table, re.S)[1:]]
    cells = [dict(zip(heads, row, strict=True)) for row in rows]
    assert [c["run"] for c in cells] == ["one", "two"] and [c["ended"] for c in cells] == ["finished", "stopped"]
    assert [c["steps"] for c in cells] == ["40", "8"]
    assert [c["evaluation/accuracy, last"] for c in cells] == ["0.6", "–"] and cells[0]["best held-out"] == "0.7"
    assert "<code>optim.lr</code></td><td>0.001</td><td>0.5</td>" in page
    assert page.count('type="checkbox" checked data-run') == 2


def test_the_command_writes_beside_the_run_and_imports_no_torch(tmp_path):
    one, two = write_run(tmp_path / "one", healthy(5)), write_run(tmp_path / "two", healthy(5))
    code = "import sys; from mmrl.cli.main import main\ntry: main(sys.argv[1:])\nfinally: print('torch' in sys.modules)"
    started = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code, "report", one], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and time.perf_counter() - started < 20
    assert done.stdout.splitlines() == ["It reached its end, step 40.", f"written to {one / 'report.html'}", "False"]
    done = subprocess.run(
        [sys.executable, "-m", "mmrl", "report", one, two], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0 and (tmp_path / "report.html").is_file()
    done = subprocess.run([sys.executable, "-m", "mmrl", "report", "no"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr == "mmrl: no is not a run directory: there is no such folder\n"
    away = ["report", one, "--output", tmp_path / "no" / "x.html"]
    done = subprocess.run([sys.executable, "-m", "mmrl", *away], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith(f"mmrl: --output={tmp_path}/no/x.html: ")


def test_the_configuration_stands_on_the_page(tmp_path):
    page = report_html([read_run(write_run(tmp_path, healthy(4)))])
    text = re.search(r"<pre>(.*?)</pre>", page.split('id="configuration"')[1], re.S).group(1)
    assert yaml.safe_load(text) == CONFIG and "<td>torch</td><td>2.13.0</td>" in page
