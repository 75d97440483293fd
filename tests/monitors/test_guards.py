"""Guards: bands by hand, what each action does to a real run, and a reward that can be hacked."""

import json
import math

import pytest
import torch

from mmrl import checkpoints
from mmrl.config import load
from mmrl.errors import UserError
from mmrl.monitors.guards import Guard, Guards
from mmrl.protocols.batch import Batch
from mmrl.rewards.guards import GuardReward, flicker, motion, static
from mmrl.rollouts import Prompt, Rollouts, Sample
from mmrl.schedules.schedule import Schedule
from mmrl.settings import SettingsError, choose, make
from mmrl.terms.term import Mask
from tests.helpers.command_line import ROOT
from tests.whole_runs.parts import make as start
from tests.whole_runs.parts import release

DIGITS = ROOT / "configs" / "digits" / "image_digits_perceptron.yaml"
SECOND = "mmrl.tasks.image_generation.data.digits:second_classifier"


class Log:
    """What guards did."""

    def __init__(self):
        self.done = []

    def line(self, text):
        self.done.append(text)

    def scale_lr(self, factor):
        self.done.append(factor)

    def go_back(self):
        self.done.append("back")
        return "step-000002"


def guard(**keys):
    return make(Guard, {"metric": "m", **keys})


class TestBands:
    def test_patience_counts_measurements_in_a_row(self):
        guards, log = Guards([guard(low=0, high=1, patience=2)]), Log()
        within = []
        for value in (0.5, 2, 0.5, 2, -1, math.nan, 2, 2):
            guards.judge({"m": value}, log)
            within.append(guards.all_in_band)
        # 2 | 2, -1: acts | nan is not outside | 2, 2: acts
        assert log.done == ["guard: m is -1, outside 0 to 1", "guard: m is 2, outside 0 to 1"]
        assert within == [True, False, True, False, False, True, False, False]

    def test_it_acts_again_after_as_many_more(self):
        guards, log = Guards([guard(high=1, patience=2)]), Log()
        for value in (2, 3, 4, 5, 6):
            guards.judge({"m": value}, log)
        assert log.done == ["guard: m is 3, outside -inf to 1", "guard: m is 5, outside -inf to 1"]

    def test_it_goes_on_after_a_checkpoint(self):
        guards, other, log = Guards([guard(high=1, patience=2)]), Guards([guard(high=1, patience=2)]), Log()
        guards.judge({"m": 3}, log)
        other.load(json.loads(json.dumps(guards.state())))
        assert log.done == [] and other.judge({"m": 3}, log) == {"outside/m": 2.0}
        assert len(log.done) == 1

    @pytest.mark.parametrize(
        ("action", "done"),
        [
            ({"type": "lower_lr", "factor": 0.25}, [0.25, "guard: m is 3, outside -inf to 1; the learning rate is "]),
            ("restore", ["back", 0.5, "guard: m is 3, outside -inf to 1; the run goes back to step-000002, with the "]),
        ],
    )
    def test_what_an_action_does(self, action, done):
        log = Log()
        Guards([guard(high=1, action=action)]).judge({"m": 3}, log)
        assert log.done[:-1] == done[:-1] and log.done[-1].startswith(done[-1])

    def test_stop_and_a_metric_that_is_not_there(self):
        with pytest.raises(UserError, match="guard: m is 3, outside -inf to 1; the run stops, since action=stop"):
            Guards([guard(high=1, action="stop")]).judge({"m": 3}, Log())
        with pytest.raises(
            UserError, match="guards.0: metric 'm' is not a metric of this job; choose one of accuracy, loss"
        ):
            Guards([guard(high=1)]).judge({"loss": 3, "accuracy": 1, "time/x": 1}, Log())
        on_evaluation = Guards([guard(metric="evaluation/accuracy", low=0.5)])
        on_evaluation.judge({"loss": 3}, Log())  # a step's metrics are not asked for it
        log = Log()
        on_evaluation.judge({"evaluation/accuracy": 0.2}, log, evaluation=True)
        assert len(log.done) == 1

    @pytest.mark.parametrize(("keys", "message"), [({}, "has no band"), ({"low": 2, "high": 1}, "low=2 above high=1")])
    def test_no_band(self, keys, message):
        with pytest.raises(SettingsError, match=message):
            guard(**keys)

    def test_a_coefficient_rises_outside_and_falls_back(self):
        made = choose(
            Schedule, {"type": "band", "start": 0.1, "most": 0.5, "metric": "m", "low": 1, "factor": 2}, ("k",)
        )
        found = []
        for step, value in enumerate([0, 0, 0, 2, math.nan, 2, 2, 2], 1):
            made.update(step, {"m": value})
            found.append(round(made.value, 9))
        assert found == [0.2, 0.4, 0.5, 0.25, 0.25, 0.125, 0.1, 0.1]
        assert made.extremes == (0.1, 0.5)


class TestClips:
    def test_motion_stillness_and_flicker_by_hand(self):
        still = torch.full((3, 1, 2, 2), 0.5)
        moves = torch.zeros(3, 1, 1, 4)
        for t in range(3):
            moves[t, 0, 0, t] = 1.0
        blinks = torch.tensor([0.0, 1.0, 0.0]).view(3, 1, 1, 1).expand(3, 1, 2, 2)
        # of 4 pixels two change by 1 at every step
        assert motion(moves[None]).tolist() == [0.5] and motion(still[None]).tolist() == [0.0]
        assert static(torch.stack([still, blinks])).tolist() == [1.0, 0.0]
        # brightness 0, 1, 0: its second difference is -2; what only moves keeps its brightness
        assert flicker(blinks[None]).tolist() == [2.0] and flicker(moves[None]).tolist() == [0.0]

    def test_a_guard_is_a_reward(self):
        blinks = torch.tensor([0.0, 1.0, 0.0]).view(3, 1, 1, 1).expand(3, 1, 3, 3)
        clips = [Sample(Prompt("a", "a"), frames=blinks), Sample(Prompt("b", "b"), frames=blinks * torch.nan)]
        assert GuardReward(of="flicker").score(clips) == [2.0, None]
        assert GuardReward(of="brightness").score(clips[:1]) == [pytest.approx(1 / 3)]
        assert GuardReward(of="brightness").score([Sample(Prompt("a", "a"), image=torch.ones(1, 3, 3))]) == [1.0]
        with pytest.raises(UserError, match="has no video"):
            GuardReward(of="static").score([Sample(Prompt("a", "a"), image=torch.ones(1, 3, 3))])
        with pytest.raises(ValueError, match="`of` must be one of out_of_gamut"):
            GuardReward(of="beauty")


def test_a_mask_drops_what_is_outside():
    rewards = torch.tensor([[1.0, -3.0], [0.0, -0.5], [0.5, torch.nan], [0.2, 4.0]])
    samples = [Sample(Prompt("p", "p"))] * 4
    rollouts = Rollouts(samples, [None] * 4, torch.zeros(4, dtype=torch.long), torch.ones(4, 1).bool(), rewards)
    batch = Batch(rollouts, ["mark", "look"], [1.0, 0.0])
    mask = choose(Mask, {"type": "band", "fact": "reward/look", "low": -1, "high": 3}, ("m",))
    assert mask.keep(batch).tolist() == [False, True, True, False]
    assert batch.reports == {"band/reward/look": 0.5}


def run(folder, *overrides, base=DIGITS):
    trainer = start(folder, *overrides, base=base)
    try:
        trainer.train()
    finally:
        release(trainer)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def based(folder, steps):
    """Weights of so many steps of supervised learning."""
    small = [f"steps={steps}", "evaluation.before=false", "evaluation.prompts=100", "checkpoint.every=0"]
    run(folder, *small, base=ROOT / "configs" / "warm_starts" / "digits" / "image_digits_perceptron_base.yaml")
    return folder / "final"


HACKED = [
    "model.warm_start=null",
    "evaluation.prompts=200",
    "rollout.prompts=10",
    "engine.micro_batch=120",
    "steps=30",
    "task.rewards=[{name: guard, options: {of: brightness}}, "
    f"{{name: classifier_logp, options: {{classifier: '{SECOND}'}}, weight: 0, label: looks}}]",
]


@pytest.mark.slow
def test_a_reward_that_can_be_hacked_ruins_images_unless_a_guard_acts(tmp_path):
    """Brightness is paid for. Without a guard digits drown in white; where a KL coefficient rises as soon as a second
    scorer finds them unlikely, and what it finds worst is dropped, images grow brighter and stay digits."""
    path = [f"model.path={based(tmp_path / 'base', 200)}", *HACKED]
    plain = run(tmp_path / "plain", *path)
    coefficient = "{type: band, start: 0.0005, most: 100, metric: reward/looks, low: -0.5, factor: 2}"
    guarded = run(
        tmp_path / "guarded",
        *path,
        f"algorithm.terms=[{{type: kl, estimator: exact, coefficient: {coefficient}}}]",
        "algorithm.masks=[{type: band, fact: reward/looks, low: -1}]",
    )

    def ends(rows, name):
        found = [row[name] for row in rows if name in row]
        return found[0], sum(found[-5:]) / len(found[-5:])

    assert ends(plain, "reward/guard")[1] > ends(plain, "reward/guard")[0] + 0.2
    first, last = ends(guarded, "reward/guard")
    assert last > first + 0.003, "the reward still rises"
    accuracy = {name: [r["evaluation/accuracy"] for r in rows if "evaluation/accuracy" in r] for name, rows in
                (("plain", plain), ("guarded", guarded))}  # fmt: skip
    assert accuracy["plain"][-1] < accuracy["plain"][0] - 0.3
    assert accuracy["guarded"][-1] > accuracy["guarded"][0] - 0.15
    assert 0 < ends(guarded, "band/reward/looks")[1] < 1
    assert max(row.get("control/algorithm.terms.0.coefficient", 0) for row in guarded) > 0.0005


def test_a_run_goes_back_to_the_last_good_checkpoint_with_half_the_rate(tmp_path):
    """From step 3 on the guard is outside: no checkpoint is written any more, and the weights of step 2 come back."""
    trainer = start(
        tmp_path,
        f"model.path={based(tmp_path / 'base', 1)}",
        *HACKED,
        "steps=3",
        "checkpoint.every=1",
        "evaluation.before=false",
        "evaluation.every=0",
        "optim.schedule=constant",
        "guards=[{metric: lr, low: 1, patience: 3, action: restore}]",  # out of its band at once; acts at step 3
        base=DIGITS,
    )
    kept = []
    log = trainer.log

    def watched(rollouts, metrics):
        log(rollouts, metrics)
        kept.append([p.detach().clone() for p in trainer.policy.module.parameters()])
        if trainer.step == 2:
            trainer.guards.outside = [0]  # the second step counts as a good one
            trainer.save()
            trainer.guards.outside = [2]

    trainer.log = watched
    try:
        trainer.train()
        assert trainer.engine.lr_factor == 0.5
        assert trainer.engine.updates == 6  # of three steps with two updates each: schedules go on
        assert all(torch.equal(a, b) for a, b in zip(kept[2], kept[1], strict=True))
        assert not all(torch.equal(a, b) for a, b in zip(kept[1], kept[0], strict=True))
        assert trainer.engine.lr == pytest.approx(0.5 * load(DIGITS, [f"run_dir={tmp_path}"]).optim.lr)
        assert [path.name for path in checkpoints.list_finished(tmp_path / "checkpoints")] == ["step-000002"]
    finally:
        release(trainer)
