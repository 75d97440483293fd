"""What lies outside the repository trains like what lies in it: an algorithm, a loss term with a forward pass of its
own on a masked image, an advantage shaper and a sampler of prompts, from a folder that is not a package."""

import os
import shutil
from functools import cache

import pytest

from tests.whole_runs.parts import TINY, call, command, distance, final, metrics, timeless

OWN = '''
import math

from mmrl.algorithms.grouped import GroupedAlgorithm
from mmrl.measurements.responses import ViewReplay
from mmrl.schedules.schedule import Schedule, number
from mmrl.protocols.requirements import Needs
from mmrl.prompts.sampler import PromptSampler
from mmrl.settings import option
from mmrl.terms.term import Shaper, Term
from mmrl.prompts.views import View, MaskedPatches


class Squared(GroupedAlgorithm):
    """The policy gradient with a quadratic pull towards the policy that made the rollouts."""

    pull: float = option(0.5, "weight of the pull", ge=0)
    shaping: list[Shaper] = option([], "changes of the advantages")

    @property
    def shapers(self):
        return self.shaping

    @property
    def base_needs(self):
        return Needs(old=True)

    def loss(self, micro, replay):
        advantages = micro.advantages.to(replay.logp.device)
        old = replay.logp.detach() if micro.old_logp is None else micro.old_logp
        ratio = (replay.logp - old)
        if advantages.dim() == 1:
            advantages = advantages[:, None]
        values = -advantages * ratio.exp() + self.pull * ratio.square()
        return values, {"own/ratio_gap": ratio.detach().abs(), "own/advantage": advantages.expand_as(ratio)}


class Blinded(Term):
    """Responses shall be less likely where the image is masked."""

    coefficient: Schedule = number(0.1, "weight", ge=0)
    view: View = option(MaskedPatches(share=0.5, patch=4), "the masked image")

    @property
    def needs(self):
        return Needs(measurements=(ViewReplay(self.view),))

    def values(self, micro, replay):
        blind = ViewReplay(self.view).of(replay).logp
        return self.coefficient.value * blind, {"own/blind": blind.detach(), "own/seeing": replay.logp.detach()}


class Halved(Shaper):
    """Each advantage is half of the one before it in the response."""

    def shape(self, advantages, batch):
        place = (batch.rollouts.mask.cumsum(1) - 1).clamp(min=0)
        return advantages * 0.5**place


class Stubborn(PromptSampler):
    """The prompts that taught most so far come again, and new ones in between."""

    again: int = option(1, "prompts of a draw that come again", ge=0)
    _size: int = 0
    _drawn: int = 0
    _spread: dict = {}

    def start(self, size, seed):
        self._size, self._drawn, self._spread = size, seed, {}

    def draw(self, count):
        best = sorted(self._spread, key=lambda p: (-self._spread[p], p))[: min(self.again, count)]
        new = [(self._drawn + i) % self._size for i in range(count - len(best))]
        self._drawn += len(new)
        return best + new

    def observe(self, outcomes):
        for outcome in outcomes:
            known = [r for r in outcome.rewards if not math.isnan(r)]
            self._spread[outcome.prompt] = max(known) - min(known) if known else 0.0

    def state(self):
        return {"drawn": self._drawn, "spread": {str(p): s for p, s in self._spread.items()}}

    def load(self, state):
        self._drawn, self._spread = state["drawn"], {int(p): s for p, s in state["spread"].items()}
'''

RECIPE = f"""
extends: {TINY}
algorithm:
  type: own:Squared
  pull: 0.25
  epochs: 2
  terms: [{{type: "own:Blinded", coefficient: {{type: linear, start: 0.2, end: 0.0, steps: 4}}}}]
  shaping: ["own:Halved"]
rollout:
  sampler: {{type: "own:Stubborn", again: 2}}
checkpoint: {{every: 2, best: false}}
"""


def train_in(folder, *arguments):
    os.chdir(folder)
    command("train", "own.yaml", *arguments)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("outside")
    (path / "own.py").write_text(OWN)
    (path / "own.yaml").write_text(RECIPE)
    return path


@pytest.fixture(scope="module")
def trained(folder):
    """Makes a run of two ranks under a ZeRO stage, once."""

    @cache
    def make(stage):
        run = folder / f"whole-{stage}"
        options = [f"run_dir={run}", f"engine.zero_stage={stage}"]
        call(train_in, folder, *options, log=folder / f"whole-{stage}.log", ranks=2)
        return run

    return make


@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 2))])
@pytest.mark.slow
def test_they_train_on_two_ranks_and_go_on_exactly(folder, trained, stage):
    whole, cut = trained(stage), folder / f"cut-{stage}"
    cut.mkdir()
    shutil.copytree(whole / "checkpoints" / "step-000002", cut / "checkpoints" / "step-000002")
    shutil.copy(whole / "metrics.jsonl", cut)
    resumed = [f"run_dir={cut}", "checkpoint.resume=true", f"engine.zero_stage={stage}"]
    call(train_in, folder, *resumed, log=folder / f"cut-{stage}.log", ranks=2)
    assert distance(final(whole), final(cut)) == 0
    steps = [row for row in timeless(metrics(whole)) if "loss" in row]
    assert [row for row in timeless(metrics(cut)) if "loss" in row] == steps and len(steps) == 4
    for row in steps:
        assert row["own/blind"] != row["own/seeing"]  # the image was really another one
        assert row["own/ratio_gap_max"] > 0  # in the second epoch
    # after 0, 1, 2 and 3 steps of 4: 0.2, 0.15, 0.1, 0.05
    assert [row["control/algorithm.terms.0.coefficient"] for row in steps] == pytest.approx([0.2, 0.15, 0.1, 0.05])


@pytest.mark.slow
def test_zero_stages_agree(trained):
    one, other, third = map(trained, (0, 2, 3))
    assert distance(final(one), final(other)) < 1e-5
    assert distance(final(one), final(third)) < 1e-5


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("algorithm.pul=1", "unknown key algorithm.pul; did you mean algorithm.pull?"),
        ("algorithm.pull=-1", "algorithm.pull: Input should be greater than or equal to 0"),
        ("algorithm.type=own:Squird", "algorithm.type=own:Squird: no such object (own has no Squird)"),
        (
            "algorithm.type=own:Halved",
            "algorithm.type=own:Halved does not inherit from mmrl.algorithms.algorithm:Algorithm",
        ),
        ("algorithm.type=own:Lacking", "algorithm.type=own:Lacking does not define loss"),
        ("algorithm.type=owl:Squared", "algorithm.type=owl:Squared: no such object (No module named 'owl')"),
        ("algorithm.shaping=[own:Wide]", "algorithm.shaping.0 (own:Wide) gave values of shape"),
        ("algorithm.terms=[{type: 'own:Flat'}]", "algorithm.terms.0 (own:Flat) gave values of shape"),
        ("algorithm.terms.0.coefficient={type: additive, start: 1, metric: nosuch, target: 1, rate: 1}", "nosuch"),
    ],
)
def test_what_is_wrong_with_them_is_one_line(folder, override, message):
    (folder / "own.py").write_text(
        OWN
        + """

class Lacking(GroupedAlgorithm):
    pass


class Wide(Shaper):
    def shape(self, advantages, batch):
        return advantages[:, :1]


class Flat(Term):
    def values(self, micro, replay):
        return replay.logp.sum(), {}
"""
    )
    log, name = folder / "wrong.log", str(abs(hash(override)))
    log.unlink(missing_ok=True)
    with pytest.raises(AssertionError):
        call(train_in, folder, f"run_dir={folder / name}", override, log=log)
    said = [line for line in log.read_text().splitlines() if line.startswith("mmrl: ")]
    assert len(said) == 1 and message in said[0], log.read_text()
    assert "Traceback" not in log.read_text()
