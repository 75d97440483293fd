"""What a part of one's own gives back is checked, and blamed in one line on its own key."""

import math
import re

import pytest
import torch

from mmrl.algorithms.grouped import GroupedAlgorithm
from mmrl.algorithms.surrogates.surrogate import Surrogate
from mmrl.errors import UserError
from mmrl.prompts.views import View
from mmrl.rollouts import Prompt
from mmrl.samplers.settings import FlowSDE
from mmrl.samplers.transitions import Coefficients
from mmrl.settings import make
from mmrl.terms.term import Mask, Shaper, Term
from tests.joints.parts import Table, close

HERE = "tests.joints.test_part_checks"


class Flat(GroupedAlgorithm):
    def loss(self, micro, replay):
        return (replay.logp * micro.advantages).sum(), {}


class Transposed(GroupedAlgorithm):
    def loss(self, micro, replay):
        return (replay.logp * micro.advantages).T, {}


class Numberless(GroupedAlgorithm):
    def loss(self, micro, replay):
        return 1.5, {}


class Constant(GroupedAlgorithm):
    def loss(self, micro, replay):
        return torch.zeros(micro.mask.shape), {}


class ByPrompt(GroupedAlgorithm):
    def loss(self, micro, replay):
        return replay.logp * micro.advantages, {"own": replay.logp.detach().sum(1)}


class Wide(GroupedAlgorithm):
    def advantages(self, batch):
        return torch.zeros(len(batch.rollouts), 7)

    def loss(self, micro, replay):
        return replay.logp, {}


class Infinite(Shaper):
    def shape(self, advantages, batch):
        return advantages.index_fill(1, torch.tensor([2]), math.inf)


class Whole(Shaper):
    def shape(self, advantages, batch):
        return torch.ones(advantages.shape, dtype=torch.int64)


class Weights(Mask):
    def keep(self, batch):
        return torch.ones(batch.rollouts.mask.shape)


class Prompts(Mask):
    of = "rollouts"

    def keep(self, batch):
        return torch.ones(1, dtype=torch.bool)


class Scalar(Term):
    def values(self, micro, replay):
        return replay.logp.sum(), {}


class Sum(Surrogate):
    def values(self, log_ratio, advantages, micro, replay):
        return (log_ratio * advantages).sum(1), {}


class Words(View):
    def change(self, prompt):
        return prompt.text


class Alone(GroupedAlgorithm):
    def loss(self, micro, replay):
        return replay.logp * micro.advantages


class AloneTerm(Term):
    def values(self, micro, replay):
        return replay.logp


class ThreeTerm(Term):
    def values(self, micro, replay):
        return replay.logp, {}, {}


class AloneSurrogate(Surrogate):
    def values(self, log_ratio, advantages, micro, replay):
        return [log_ratio * advantages, {}]


class Both(GroupedAlgorithm):
    def loss(self, micro, replay):
        return replay.logp, {}

    def objective(self, micro, replay, reduction):
        return reduction(replay.logp)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("algorithm.type={}:Flat", r"algorithm.type={}:Flat gave values of shape \[\]; expected \[4, 3\], by decision"),
        ("algorithm.type={}:Transposed", r"gave values of shape \[3, 4\]; expected \[4, 3\], by decision"),
        ("algorithm.type={}:Numberless", r"algorithm.type={}:Numberless gave float; expected a tensor of shape"),
        ("algorithm.type={}:Alone", "algorithm.type={}:Alone gave Tensor; expected values and a mapping of statistics"),
        ("algorithm.type={}:Both", "algorithm.type={}:Both gave Tensor; expected values and a mapping of statistics"),
        ("algorithm.terms=['{}:AloneTerm']", r"algorithm.terms.0 \({}:AloneTerm\) gave Tensor; expected values and"),
        ("algorithm.terms=['{}:ThreeTerm']", r"algorithm.terms.0 \({}:ThreeTerm\) gave tuple; expected values and"),
        ("algorithm.surrogate={}:AloneSurrogate", "algorithm.surrogate={}:AloneSurrogate gave list; expected values"),
        ("algorithm.type={}:Constant", "algorithm.type={}:Constant gave a loss without a gradient"),
        ("algorithm.type={}:ByPrompt", r"the statistic own gave values of shape \[4\]; expected \[4, 3\]"),
        ("algorithm.type={}:Wide", r"algorithm.type={}:Wide gave values of shape \[4, 7\]; expected \[4, 3\]"),
        ("algorithm.surrogate={}:Sum", r"algorithm.surrogate={}:Sum gave values of shape \[4\]; expected \[4, 3\]"),
        (
            "algorithm.shaping=['{}:Infinite']",
            r"algorithm.shaping.0 \({}:Infinite\) gave 4 values that are NaN or infinite",
        ),
        ("algorithm.shaping=['{}:Whole']", r"algorithm.shaping.0 \({}:Whole\) gave values of type int64"),
        (
            "algorithm.masks=['{}:Weights']",
            r"algorithm.masks.0 \({}:Weights\) gave values of type float32; expected bool",
        ),
        (
            "algorithm.masks=['{}:Prompts']",
            r"algorithm.masks.0 \({}:Prompts\) gave .*\[1\]; expected \[4\], by rollout",
        ),
        ("algorithm.terms=['{}:Scalar']", r"algorithm.terms.0 \({}:Scalar\) gave values of shape \[\]; expected"),
        (
            "algorithm.terms=[{{type: kl, against: {{type: view, view: '{}:Words'}}}}]",
            r"view.type={}:Words: change\(\) returned str for prompt",
        ),
    ],
)
def test_a_part_that_gives_something_else_is_named(given, part, message):
    table = Table([[-1.0, -2.0, -0.5]] * 4, group=[0, 0, 1, 1], rewards=[1.0, 0.0, 1.0, 0.0], view=[[-1.0] * 3] * 4)
    with pytest.raises(UserError, match=message.replace("{}", HERE)) as error:
        made = given(table, part.format(HERE))
        made.prepare()
        made.learn()
    assert "\n" not in str(error.value)


# --- columns that a part reads without asking for them ---


class Doubting(Surrogate):
    def values(self, log_ratio, advantages, micro, replay):
        return -log_ratio * advantages * replay.divergence, {}


class DoubtingBefore(Surrogate):
    def prepare(self, batch):
        batch.rollouts.old_entropy.mean()

    def values(self, log_ratio, advantages, micro, replay):
        return log_ratio, {}


class Entropic(Shaper):
    def shape(self, advantages, batch):
        return advantages * batch.rollouts.old_entropy


class Sharp(Mask):
    of = "rollouts"

    def keep(self, batch):
        return batch.column("entropy") < 1


class Sure(Mask):
    def keep(self, batch):
        return batch.rollouts.old_entropy < 1


class Near(Term):
    def values(self, micro, replay):
        return replay.logp - micro.ref_logp, {}


class NearBefore(Term):
    def prepare(self, batch):
        batch.rollouts.ref_logp.mean()

    def values(self, micro, replay):
        return replay.logp, {}


class OldRatio(GroupedAlgorithm):
    """Reads log-probabilities that are None in the first update of a step."""

    def loss(self, micro, replay):
        return (replay.logp - micro.old_logp) * micro.advantages, {}


class OldAdvantages(GroupedAlgorithm):
    def advantages(self, batch):
        return batch.rollouts.old_entropy * 1.0

    def loss(self, micro, replay):
        return replay.logp, {}


@pytest.mark.parametrize(
    ("part", "key", "reads"),
    [
        ("type={}:OldRatio", "algorithm.type={}:OldRatio", "micro has .*advantages.*; replay has logp"),
        ("type={}:OldAdvantages", "algorithm.type={}:OldAdvantages", "rollouts has .*rewards"),
        ("surrogate={}:Doubting", "algorithm.surrogate={}:Doubting", "micro has .*old_logp.*; replay has logp"),
        ("surrogate={}:DoubtingBefore", "algorithm.surrogate={}:DoubtingBefore", "rollouts has .*advantages"),
        ("shaping=[whitening, '{}:Entropic']", r"algorithm.shaping.1 \({}:Entropic\)", "rollouts has .*rewards"),
        ("masks=[truncated, '{}:Sharp']", r"algorithm.masks.1 \({}:Sharp\)", "rollouts has .*mask, .*rewards"),
        ("masks=['{}:Sure']", r"algorithm.masks.0 \({}:Sure\)", "rollouts has .*advantages"),
        ("terms=[entropy, '{}:Near']", r"algorithm.terms.1 \({}:Near\)", "micro has .*; replay has logp, .*entropy"),
        ("terms=['{}:NearBefore']", r"algorithm.terms.0 \({}:NearBefore\)", "rollouts has .*advantages"),
    ],
)
def test_a_part_that_reads_a_column_which_is_not_there_is_named(given, part, key, reads):
    entropy = {"entropy": [[1.0] * 3] * 4} if "entropy" in part else {}
    table = Table([[-1.0, -2.0, -0.5]] * 4, group=[0, 0, 1, 1], rewards=[1.0, 0.0, 1.0, 0.0], **entropy)
    whole = "" if part.startswith("type") else "type: grpo, epochs: 2, "
    made = given(table, f"algorithm={{{whole}{part.format(HERE).replace('=', ': ', 1)}}}")
    with pytest.raises((TypeError, AttributeError, AssertionError)) as raised:
        made.prepare()
        made.learn()
    (note,) = raised.value.__notes__
    assert re.match(f"raised in {key.format(HERE)}. {reads}.*Other columns are None unless", note), note
    assert "None" in str(raised.value) or "no part requested" in str(raised.value)


class Blind(View):
    def change(self, prompt):
        raise ValueError("no image here")


def test_a_view_that_raises_is_named_with_its_prompt():
    with pytest.raises(ValueError, match="^no image here") as raised:
        make(Blind, {"type": f"{HERE}:Blind"}).changed(Prompt("7", "How many?"))
    assert raised.value.__notes__ == [f"raised by change() of view.type={HERE}:Blind for prompt 7"]


class Short(FlowSDE):
    def coefficients(self, sigma, sigma_next, sigma_second):
        return Coefficients(*(values[:1] for values in super().coefficients(sigma, sigma_next, sigma_second)))


class Vanishing(FlowSDE):
    def coefficients(self, sigma, sigma_next, sigma_second):
        found = super().coefficients(sigma, sigma_next, sigma_second)
        return found._replace(std=found.std / 0)


class Negative(FlowSDE):
    def coefficients(self, sigma, sigma_next, sigma_second):
        found = super().coefficients(sigma, sigma_next, sigma_second)
        return found._replace(std=-found.std)


@pytest.mark.parametrize(
    ("transition", "message"),
    [
        (Negative(type="own"), r"the transition own gave a std of -0\.\d+; coefficients\(\) must return 0 for a step"),
        (Short(type="own"), r"the transition own gave a_x of shape \[1\].*of shape \[3\]"),
        (Vanishing(type="own"), r"the transition own gave std of shape \[3\], not all finite"),
    ],
)
def test_a_transition_that_gives_something_else_is_named(transition, message):
    sigma = torch.tensor([0.9, 0.6, 0.3])
    assert len(FlowSDE().step(sigma, sigma - 0.1, torch.tensor(0.9)).std) == 3
    with pytest.raises(UserError, match=message):
        transition.step(sigma, sigma - 0.1, torch.tensor(0.9))


# --- rollouts that shapers do not change ---


class Generous(Shaper):
    """A shaper that gives every decision something."""

    def shape(self, advantages, batch):
        return advantages + 5.0


def test_shapers_change_neither_unscored_rollouts_nor_fillers(given):
    """Rewards 2 and 0 around 1; the third was not scored, the fourth fills up the batch."""
    table = Table([[-1.0]] * 4, rewards=[2.0, 0.0, math.nan, 1.0])
    made = given(
        table,
        "rollout.prompts=1",
        "rollout.group_size=4",
        "algorithm.scale=none",
        f"algorithm.shaping=[{{type: '{HERE}:Generous'}}]",
    )
    rollouts = made.next()
    rollouts.filler = torch.tensor([False, False, False, True])
    advantages = made.prepare(rollouts).advantages[:, 0]
    close(advantages, [6.0, 4.0, 0.0, 0.0])


def test_groups_that_fill_up_a_batch_have_no_advantages(given):
    """The second group would have 1 and -1 too."""
    made = given(Table([[-1.0]] * 4, group=[0, 0, 1, 1], rewards=[2.0, 0.0, 3.0, 1.0]), "algorithm.scale=none")
    rollouts = made.next()
    rollouts.filler = torch.tensor([False, False, True, True])
    close(made.prepare(rollouts).advantages[:, 0], [1.0, -1.0, 0.0, 0.0])
