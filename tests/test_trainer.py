"""What one update does to the weights, in one process."""

import json
import math
import re
from dataclasses import replace

import pytest
import torch

from mmrl.algorithms.surrogates.surrogate import Surrogate
from mmrl.checkpoints.settings import Checkpoint
from mmrl.config import load
from mmrl.engine.deepspeed import learning_rate
from mmrl.errors import UserError
from mmrl.evaluation.evaluate import checkpoint_score
from mmrl.prompts.sampler import Permutation
from mmrl.training.metrics import Metrics, ZeroGradientMonitor
from tests.whole_runs import parts
from tests.whole_runs.parts import TINY, Fixed, distance, final, make, metrics, release, spread, train, under

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    made = make(tmp_path_factory.mktemp("run"), "algorithm.terms=[{type: kl, coefficient: 0.1}]")
    yield made
    release(made)


@pytest.fixture(scope="module")
def batch(trainer):
    """Rollouts of an earlier policy: old_logp and ref_logp differ from what is replayed now, by up to e."""
    made = trainer.policy.rollout([trainer.task.train[i] for i in range(2)], 4, list(range(8)))
    generator = torch.Generator().manual_seed(0)
    made.advantages = torch.randn(8, generator=generator)[:, None].expand(made.mask.shape)
    with torch.no_grad():
        now = trainer.policy.replay(made, trainer.engine).logp
    made.old_logp = now + (2 * torch.rand(now.shape, generator=generator) - 1) * made.mask
    made.ref_logp = now + torch.randn(now.shape, generator=generator) * made.mask
    return made


def configured(*overrides):
    return load(TINY, ["run_dir=r", *overrides])


def gradient(trainer, batch, *overrides):
    """The gradient of one batch under a changed algorithm, flat."""
    return parts.gradient(under(trainer, configured(*overrides)), batch)


def apart(a, b):
    return float((a - b).norm() / a.norm())


def kl(coefficient, estimator="k3"):
    return f"algorithm.terms=[{{type: kl, coefficient: {coefficient}, estimator: {estimator}}}]"


def entropy(coefficient):
    return f"algorithm.terms=[{{type: entropy, coefficient: {coefficient}}}]"


@pytest.mark.parametrize("surrogate", ["clip", "reinforce"])
def test_decisions_that_an_engine_found_less_likely_weigh_more(trainer, batch, surrogate):
    options = ["rollout.generator=vllm_colocated", f"algorithm.surrogate={surrogate}"]
    plain = gradient(trainer, batch, *options)
    for factor, weight in [(0.5, 0.5), (1.5, 1.5), (4.0, 2.0)]:  # 2 is the default cap
        sampled = replace(batch, behaviour_logp=batch.old_logp - math.log(factor))
        assert apart(weight * plain, gradient(trainer, sampled, *options)) < 1e-5


def test_engines_too_far_apart_stop_the_run(trainer):
    means = {"correction/logp_gap": 0.1, "correction/weight": 1.5, "correction/weight_squared": 41 / 12}
    sampled = under(trainer, configured("rollout.generator=vllm_colocated"))
    sampled.judge_generator(means)
    assert means == pytest.approx(
        {"correction/logp_gap": 0.1, "correction/weight": 1.5, "correction/effective_sample_size": 27 / 41}
    )
    for gap in (0.6, math.nan):
        with pytest.raises(UserError, match="rollout.generator.correction.max_gap=0.5"):
            sampled.judge_generator(means | {"correction/logp_gap": gap, "correction/weight_squared": 1.0})


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_term_changes_the_gradient_in_proportion(trainer, batch, estimator):
    none = gradient(trainer, batch)
    one, two = (gradient(trainer, batch, kl(c, estimator)) for c in (0.1, 0.2))
    assert apart(none, one) > 1e-3
    torch.testing.assert_close(two - none, 2 * (one - none), atol=1e-5, rtol=1e-3)


def test_the_estimators_of_kl_differ(trainer, batch):
    one, two, three = (gradient(trainer, batch, kl(0.1, estimator)) for estimator in ("k1", "k2", "k3"))
    assert min(apart(one, two), apart(two, three), apart(one, three)) > 1e-3


def test_the_entropy_term_changes_the_gradient_in_proportion(trainer, batch):
    none, one, less = (gradient(trainer, batch, entropy(c)) for c in (0.0, 0.1, -0.1))
    assert apart(none, one) > 1e-3
    assert apart(none, gradient(trainer, batch)) < 1e-6
    torch.testing.assert_close(one - none, none - less, atol=1e-5, rtol=1e-3)


def test_terms_add_up(trainer, batch):
    none, one, other = (
        gradient(trainer, batch),
        gradient(trainer, batch, kl(0.1)),
        gradient(trainer, batch, entropy(0.1)),
    )
    both = gradient(trainer, batch, "algorithm.terms=[{type: kl, coefficient: 0.1}, {type: entropy, coefficient: 0.1}]")
    torch.testing.assert_close(both - none, (one - none) + (other - none), atol=1e-5, rtol=1e-3)


def test_every_surrogate_has_a_gradient_of_its_own_off_policy(trainer, batch):
    options = {"divergence_mask": "{type: divergence_mask, bound: 0.005}", "dual_clip": "{type: dual_clip, cap: 1.05}"}
    kinds = [k for k, place in Surrogate.kinds.items() if place.startswith("mmrl.algorithms.surrogates.surrogate:")]
    assert len(kinds) == 8
    found = {k: gradient(trainer, batch, f"algorithm.surrogate={options.get(k, k)}") for k in kinds}
    for i, a in enumerate(kinds):
        for b in kinds[:i]:
            assert apart(found[a], found[b]) > 1e-3, (a, b)


SUPERVISED = ["algorithm.type=supervised", "rollout={prompts: 4, max_response_length: 3}"]


@pytest.mark.parametrize(
    "change",
    [["algorithm.level=sequence"], ["algorithm.surrogate.low=0.5"], ["algorithm.surrogate.high=0.9"], SUPERVISED],
    ids=lambda change: change[0],
)
def test_each_option_of_the_loss_changes_the_gradient(trainer, batch, change):
    assert apart(gradient(trainer, batch), gradient(trainer, batch, *change)) > 1e-3


def test_truncated_rollouts_can_be_left_out(tmp_path):
    """Every response of the untrained model is cut at 1 token, so that with the mask nothing is left to learn from."""
    settings = ["steps=1", "rollout.max_response_length=1"]
    for name, masks in (("with", "[]"), ("without", "[truncated]")):
        train(tmp_path / name, *settings, f"algorithm.masks={masks}")
    assert metrics(tmp_path / "with")[0]["grad_norm"] > 0.1
    assert metrics(tmp_path / "without")[0]["grad_norm"] == 0
    assert metrics(tmp_path / "without")[0]["updates_skipped"] == 0


def stepped(trainer):
    """Weights by parameter name before and after the trainer's run, and the names of those that train."""
    before = {n: p.detach().clone() for n, p in trainer.policy.module.named_parameters()}
    trainer.train()
    release(trainer)
    return before, dict(trainer.policy.module.named_parameters())


@pytest.mark.parametrize("part", [None, "vision", "language"])
def test_every_parameter_that_should_train_changes_and_no_frozen_one(tmp_path, part):
    trainer = make(tmp_path, "steps=2", "optim.eps=1e-12", *([f"model.freeze=[{part}]"] if part else []))
    before, after = stepped(trainer)
    frozen = {n for n, p in after.items() if not p.requires_grad}
    assert bool(frozen) == (part is not None) and len(frozen) < len(after)
    changed = {n for n in after if not torch.equal(before[n], after[n])}
    # A key's bias adds the same to all scores of a query, so its gradient is 0 but for rounding.
    keyless = {n for n in after if n.endswith("k_proj.bias")}
    assert changed - keyless == set(after) - frozen - keyless
    assert not changed & frozen


def test_only_the_adapters_of_lora_train(tmp_path):
    trainer = make(tmp_path, "steps=2", "model.lora={rank: 2}")
    before, after = stepped(trainer)
    changed = {n for n in after if not torch.equal(before[n], after[n])}
    assert changed and all("lora_" in n for n in changed)
    assert {n for n in after if "lora_B" in n} <= changed


def prepared(trainer, rollouts, step=0):
    """The minibatches of a step, as `Trainer.train` has them made."""
    shuffle = torch.Generator().manual_seed(step)
    return trainer.preparation.minibatches(rollouts, step, shuffle, Metrics(trainer.engine))[0]


def test_an_update_moves_towards_rewarded_responses(tmp_path):
    trainer = make(tmp_path, "optim.lr=1e-3")
    rollouts = trainer.collector.collect(0, Metrics(trainer.engine))
    minibatches = prepared(trainer, rollouts)
    assert rollouts.advantages.abs().max() > 0.5

    def total():
        with torch.no_grad():
            return trainer.policy.replay(rollouts, trainer.engine).logp.sum(1)

    before = total()
    for minibatch in minibatches:
        trainer.update(minibatch, Metrics(trainer.engine))
    moved = total() - before
    release(trainer)
    good = rollouts.advantages[:, 0]
    assert moved[good > 0].mean() > 0 > moved[good < 0].mean()


def test_rollouts_of_a_prompt_stay_together_in_a_random_order(trainer, batch, monkeypatch):
    unsorted = trainer.config.engine.model_copy(update={"balance": "none"})
    monkeypatch.setattr(trainer.preparation, "config", trainer.config.model_copy(update={"engine": unsorted}))
    kept = batch.select(torch.arange(8).repeat(3))
    kept.group = torch.arange(6).repeat_interleave(4) + 40
    kept.rewards, kept.accuracy = torch.rand(24, 1), torch.arange(24.0)  # a name for each
    orders = []
    for step in (0, 0, 1, 2):
        (minibatch,) = prepared(trainer, kept, step)
        assert [len(micro) for micro in minibatch] == [3] * 8
        orders.append(torch.cat([micro.accuracy for micro in minibatch]).tolist())
        groups = [int(name) // 4 for name in orders[-1]]
        assert sorted(orders[-1]) == list(range(24)) and groups == [g for g in groups[::4] for _ in range(4)]
    assert orders[0] == orders[1] and len({tuple(order) for order in orders}) == 3


@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.quick("0", "2")
def test_the_norm_is_reported_and_what_the_optimizer_gets_is_clipped(tmp_path, stage):
    """AdamW's first moment after one step is (1 - beta1) x the clipped gradient."""
    moments = {}
    for clip in (0.0, 0.5):
        trainer = make(
            tmp_path / str(clip),
            "steps=1",
            "engine.micro_batch=16",
            f"optim.clip_grad_norm={clip}",
            f"engine.zero_stage={stage}",
        )
        trainer.train()
        inner = trainer.engine._engine.optimizer
        state = getattr(inner, "optimizer", inner).state
        moments[clip] = math.sqrt(sum(float(s["exp_avg"].double().square().sum()) for s in state.values())) / 0.1
        release(trainer)
    norms = [metrics(tmp_path / str(clip))[0]["grad_norm"] for clip in (0.0, 0.5)]
    assert norms[0] > 1
    assert norms == pytest.approx([moments[0.0]] * 2, rel=1e-4)
    assert moments[0.5] == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize(
    ("schedule", "warmup", "values"),
    [
        ("constant", 0, [1, 1, 1, 1]),
        ("constant", 2, [0.5, 1, 1, 1]),
        ("linear", 0, [1, 0.75, 0.5, 0.25, 0]),
        ("linear", 2, [0.5, 1, 1, 0.5, 0, 0]),
        ("cosine", 0, [1, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2, 0, 0]),
    ],
)
def test_learning_rates_by_hand(schedule, warmup, values):
    found = [learning_rate(i, lr=2.0, warmup=warmup, schedule=schedule, total=4) for i in range(len(values))]
    assert found == pytest.approx([2 * v for v in values], abs=1e-12)


def test_bad_steps_in_a_row_end_the_run_and_name_the_rollouts(tmp_path):
    trainer = make(tmp_path, "steps=9", "engine.max_bad_steps=2", "optim.ema=0.5")
    usual = trainer.losses
    bad = {1: math.nan, 3: math.nan, 4: math.inf}

    def losses(micro, totals):
        found, stats = usual(micro, totals)
        return {name: part * bad.get(trainer.step, 1.0) for name, part in found.items()}, stats

    trainer.losses = losses
    named = (
        "2 updates in a row .* its loss of algorithm.type=grpo is not finite; lower optim.lr.*bad-step-5-rank0.jsonl"
    )
    with pytest.raises(UserError, match=named):
        trainer.train()
    release(trainer)
    assert trainer.engine.updates == 2 and trainer.step == 4
    assert trainer.ema.updates == 2  # an update that was skipped moves no average
    rows = [json.loads(line) for line in (tmp_path / "bad-step-5-rank0.jsonl").read_text().splitlines()]
    assert len(rows) == 16 and all(0 <= row["rewards"][0] <= 1 and row["prompt"] for row in rows)


def test_a_run_that_learns_nothing_says_so_and_ends(tmp_path, capsys):
    """Rewards that are all equal teach nothing: it says so after a fifth of the limit."""
    trainer = make(tmp_path, "steps=12", "rollout.max_idle_steps=10", task=Fixed(lambda sample: 0.25))
    before = trainer.policy.module.state_dict()
    before = {name: value.clone() for name, value in before.items()}
    with pytest.raises(UserError, match="step 10: nothing was learned in 10 steps in a row.*mark 0.25.*max_idle_steps"):
        trainer.train()
    assert trainer.step == 10 and all(v.equal(before[n]) for n, v in trainer.policy.module.state_dict().items())
    release(trainer)
    told = [line for line in capsys.readouterr().out.splitlines() if "nothing was learned" in line]
    assert len(told) == 1 and told[0].startswith("step 2: nothing was learned in 2 steps in a row")


def test_tables_of_training_show_whole_groups_and_their_films(tmp_path):
    """Of four groups of four the first one is shown where three samples are wanted, in every second step."""
    options = ["steps=3", "log={samples_every: 2, samples: 3}", "action.film=true"]
    train(tmp_path, *options, base=parts.ROBOTS)
    written = sorted(path.name for path in (tmp_path / "samples").glob("train-*"))
    assert written == [f"train-000002-{number:03d}.mp4" for number in range(4)] + ["train-000002.html"]
    page = (tmp_path / "samples" / "train-000002.html").read_text()
    prompts = re.findall(r'data-name="prompt"><pre>(.*?)</pre>', page, re.DOTALL)
    assert page.count("<video") == len(prompts) == 4 and len(set(prompts)) == 1


def test_only_idle_steps_in_a_row_count():
    standstill = ZeroGradientMonitor(3)
    said = [standstill.judge(step, {"grad_norm": norm}) for step, norm in enumerate([0.0, 1e-9, 0.0, 0.0])]
    assert [text is not None for text in said] == [True, False, True, False]
    with pytest.raises(UserError, match="step 4: nothing was learned in 3 steps"):
        standstill.judge(4, {"grad_norm": 0.0})


def test_groups_without_a_signal_are_told_where_only_terms_move_the_weights():
    """The gradient is not 0, for a loss term has one; it is said once for each two steps or more in a row."""
    standstill = ZeroGradientMonitor(10)
    shares = [1.0, 1.0, 1.0, 0.99, 1.0, 1.0]
    said = [
        standstill.judge(step, {"grad_norm": 0.5, "advantages/zero_variance_groups": share})
        for step, share in enumerate(shares)
    ]
    assert [text is not None for text in said] == [False, True, False, False, False, True]
    assert said[1].startswith("step 1: all rollouts of each group had equal rewards in 2 steps in a row")
    flat = {"grad_norm": 0.0, "advantages/zero_variance_groups": 1.0}
    standstill = ZeroGradientMonitor(10)
    assert "gradient was 0" in [standstill.judge(step, flat) for step in range(2)][1]  # one of the two is enough
    standstill = ZeroGradientMonitor(10)  # an algorithm without groups
    assert [standstill.judge(step, {"grad_norm": 0.5}) for step in range(4)] == [None] * 4


def test_what_could_not_be_measured_is_not_kept_as_the_best():
    kept = Checkpoint(best=True)
    assert checkpoint_score({"evaluation/accuracy": -2.0}, kept) == -2.0
    assert checkpoint_score({"evaluation/n": 0.0}, kept) == -math.inf


def test_an_evaluation_without_a_score_has_no_accuracy(tmp_path, capsys):
    options = ["evaluation.prompts=4", "evaluation.max_unscored=1", "checkpoint.best=true"]
    trainer = make(tmp_path, *options, task=Fixed(lambda sample: math.nan))
    trainer.step = 1
    result = trainer.evaluate()
    release(trainer)
    assert "evaluation/accuracy" not in result and trainer.accuracies == {} and not (tmp_path / "best").exists()
    assert "no held-out accuracy (100.0% could not be scored)" in capsys.readouterr().out


def test_too_much_of_an_evaluation_that_is_not_scored_ends_the_run(tmp_path):
    """Three of four held-out prompts have no accuracy; the fourth has 0.5."""
    task = Fixed(lambda sample: 0.5 if sample.prompt.id == "3" else math.nan)
    trainer = make(tmp_path, "evaluation.prompts=4", "evaluation.max_unscored=0.75", task=task)
    result = trainer.evaluate()
    assert result["evaluation/unscored"] == 0.75 and result["evaluation/accuracy"] == 0.5
    release(trainer)
    trainer = make(tmp_path / "less", "evaluation.prompts=4", "evaluation.max_unscored=0.74", task=task)
    with pytest.raises(UserError, match="75% of 4 held-out rollouts could not be scored.*max_unscored=0.74"):
        trainer.evaluate()
    release(trainer)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.quick("1")
def test_offload_changes_nothing(tmp_path, stage):
    for kind in ["none", "optimizer", *(["all"] if stage == 3 else [])]:
        train(
            tmp_path / kind, "steps=2", "engine.micro_batch=16", f"engine.zero_stage={stage}", f"engine.offload={kind}"
        )
        assert distance(final(tmp_path / "none"), final(tmp_path / kind)) < 1e-6


def test_bf16_trains(tmp_path):
    trainer = train(tmp_path, "steps=3", "engine.zero_stage=1", "model.dtype=bfloat16", "optim.lr=1e-2")
    assert trainer.engine.updates == 3
    assert all(math.isfinite(r["loss"]) and r["grad_norm"] > 0 for r in metrics(tmp_path) if "loss" in r)
    assert {v.dtype for v in final(tmp_path).values()} == {torch.bfloat16}


DYNAMIC = ["rollout.dynamic_sampling.max_rounds=3"]


def sampled(folder, mark, *more):
    trainer = make(folder, *DYNAMIC, *more, task=Fixed(mark))
    rounds, usual = [], trainer.collector.rounds.make

    def make_round(step, version):
        rounds.append(usual(step, version))
        return rounds[-1]

    trainer.collector.rounds.make = make_round
    kept = trainer.collector.collect(0, Metrics(trainer.engine))
    prepared(trainer, kept)
    release(trainer)
    return trainer, rounds, kept


def dull(count):
    """The ids of the first `count` prompts that are drawn."""
    order = Permutation()
    order.start(64, 0)
    return {str(i) for i in order.draw(count)}


def test_dynamic_sampling_refills_the_batch(tmp_path):
    first = dull(6)
    trainer, rounds, kept = sampled(tmp_path / "run", lambda s: 1.0 if s.prompt.id in first else spread(s))
    assert len(rounds) == 3 and trainer.collector.draws.drawn == 12  # 0, 2 and 4 informative groups of 4
    assert len(kept) == 16 and not first & {s.prompt.id for s in kept.samples}
    assert kept.advantages[:, 0].reshape(4, 4).abs().sum(1).min() > 0
    assert kept.group.tolist() == [g for g in (6, 7, 8, 9) for _ in range(4)]


def test_dynamic_sampling_stops_when_full(tmp_path):
    trainer, rounds, kept = sampled(tmp_path, spread)
    assert len(rounds) == 1 and trainer.collector.draws.drawn == 4 and len(kept) == 16


def test_dynamic_sampling_goes_on_with_what_it_has(tmp_path):
    first = dull(11)
    trainer, rounds, kept = sampled(tmp_path / "run", lambda s: 1.0 if s.prompt.id in first else spread(s))
    assert len(rounds) == 3 and trainer.collector.draws.drawn == 12 and len(kept) == 16
    assert (kept.advantages[:, 0].reshape(4, 4).abs().sum(1) > 0).tolist() == [True, False, False, False]


def test_groups_outside_the_wanted_accuracy_teach_nothing(tmp_path):
    """Every group is informative but too hard, so that all places are filled with groups that were turned down."""
    _, rounds, kept = sampled(tmp_path, spread, "rollout.dynamic_sampling.low=0.99")
    assert len(rounds) == 3 and len(kept) == 16
    assert kept.advantages[:, 0].tolist() == [0.0] * 16
