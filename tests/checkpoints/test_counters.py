"""What a trainer counts goes on where it was: skipped updates in a row, the best accuracy, and those so far."""

import math

import pytest
import torch

from mmrl.checkpoints.starting import read_origin
from mmrl.errors import UserError
from tests.whole_runs.parts import Fixed, make, metrics, release, spread

pytestmark = pytest.mark.usefixtures("alone")


def test_skipped_updates_in_a_row_are_counted_on(tmp_path):
    """The second update before the end of the first run, and the first after it, have a loss of NaN: two in a row."""

    def half(steps, bad):
        trainer = make(tmp_path, f"steps={steps}", "checkpoint.every=1", "engine.max_bad_steps=2", "optim.ema=0.9")
        usual = trainer.losses

        def losses(micro, totals):
            found, stats = usual(micro, totals)
            return {name: part * (math.nan if trainer.step in bad else 1.0) for name, part in found.items()}, stats

        trainer.losses = losses
        return trainer

    first = half(2, {1})
    first.train()
    assert (first.step, first.bad_steps, first.engine.updates) == (2, 1, 1)
    assert first.ema.updates == 1  # a skipped update moves no average
    release(first)
    second = half(5, {2})
    second.resume()
    assert (second.step, second.bad_steps) == (2, 1)
    with pytest.raises(UserError, match="2 updates in a row were skipped, the last because its loss"):
        second.train()
    assert second.step == 2 and second.engine.updates == 1
    release(second)


@pytest.mark.parametrize(
    ("option", "counted", "told"),
    [
        ("rollout.max_idle_steps=3", (0, 2, 2), "step 3: nothing was learned in 3 steps in a row"),
        ("rollout.max_unscored_steps=3", (2, 2, 0), "step 3: no rollout could be scored in 3 steps in a row"),
    ],
)
def test_steps_without_a_signal_in_a_row_are_counted_on(tmp_path, option, counted, told):
    """Two steps before the end of the first run, and the first after it: three in a row, which end the run."""
    value = 1.0 if "idle" in option else math.nan  # the same for all, or none

    def half(steps):
        options = [f"steps={steps}", "checkpoint.every=1", "evaluation.max_unscored=1", option]
        return make(tmp_path, *options, task=Fixed(lambda sample: value))

    first = half(2)
    first.train()
    release(first)
    second = half(5)
    second.resume()
    idle = second.zero_gradient_monitor
    assert (second.unscored_monitor.steps, idle.steps, idle.flat_steps) == counted
    with pytest.raises(UserError, match=told):
        second.train()
    assert second.step == 3
    release(second)


def test_a_checkpoint_of_an_earlier_version_has_no_such_counts(tmp_path):
    """A run goes on from it, and counts from 0."""
    first = make(tmp_path, "steps=1", "checkpoint.every=1", task=Fixed(lambda sample: 1.0))
    save = first.saver.save
    first.saver.save = lambda step, state, own: save(step, {k: v for k, v in state.items() if k != "monitors"}, own)
    first.train()
    assert first.zero_gradient_monitor.state() == [1, 1]
    release(first)
    second = make(tmp_path, "steps=2", "checkpoint.every=1", task=Fixed(lambda sample: 1.0))
    second.resume()
    assert (second.step, second.zero_gradient_monitor.state()) == (1, [0, 0])
    release(second)


def test_the_best_accuracy_and_those_so_far_are_kept(tmp_path):
    """0.5, then 0.9; after the resume 0.7, which is not the best, and 0.95, which is."""
    marks = {0: 0.25, 1: 0.5, 2: 0.9, 3: 0.7, 4: 0.95}

    def half(steps):
        class Graded(Fixed):
            def accuracy(self, samples):
                return torch.full([len(samples)], marks[trainer.step] if self.grading else 0.0)

        task = Graded(spread)
        task.grading = False
        options = [f"steps={steps}", "checkpoint.every=1", "checkpoint.best=true", "evaluation.every=1"]
        trainer = make(tmp_path, *options, task=task)
        evaluate = trainer.evaluate

        def graded():
            task.grading = True
            result = evaluate()
            task.grading = False
            return result

        trainer.evaluate = graded
        return trainer

    first = half(2)
    first.train()
    release(first)
    for steps, best, file_step in [(3, 0.9, 2), (4, 0.95, 4)]:
        again = half(steps)
        again.resume()
        known = {str(step): pytest.approx(marks[step]) for step in range(1, steps)}
        assert {step: value for step, value in again.accuracies.items() if step != "0"} == known
        assert again.best == pytest.approx(0.9)
        again.train()
        assert again.best == pytest.approx(best)
        release(again)
        assert read_origin(tmp_path / "best")["step"] == file_step


def test_a_step_that_was_logged_before_a_kill_is_logged_once(tmp_path):
    """Its line is written before its checkpoint: a kill in between leaves a step that the resumed run repeats."""
    whole = make(tmp_path, "steps=3", "checkpoint.every=2")
    whole.train()
    release(whole)
    path = tmp_path / "metrics.jsonl"
    rows = path.read_text().splitlines()
    path.write_text("\n".join([*rows, rows[-1].replace('"step": 3', '"step": 4'), '{"step": 5, "lo']))
    again = make(tmp_path, "steps=4", "checkpoint.every=2")
    again.resume()
    assert again.step == 2 and [row["step"] for row in metrics(tmp_path)] == [1, 2]
    again.train()
    release(again)
    assert [row["step"] for row in metrics(tmp_path) if "loss" in row] == [1, 2, 3, 4]
