"""The trust region of whole chains, from the key to the loss and its gradient by every decision: of a robot's looks and
of images, in a table of numbers and with real policies."""

import math
from dataclasses import replace

import pytest
import torch

from mmrl import build
from mmrl.config import load
from mmrl.errors import UserError
from mmrl.trainer import Trainer
from tests.joints.parts import GIVEN, Ledger, Log, Table, close
from tests.whole_runs.parts import IMAGES, ROBOTS, gradient, under

ONE = ["rollout.prompts=1", "algorithm.scale=none", "algorithm.epochs=2"]
RATIOS = [[1.1, 0.8, 1.2, 0.9], [1.5, 0.7]]  # advantages 1 and -1; two looks of two steps, and one
MOVED = [[0.4, -0.2, 0.1, 0.2], [-0.5, 0.1]]  # means of the steps
LOOKS = [[0, 0, 1, 1], [0, 0]]
# |moved|^2 / (2 x 0.25) = 2 moved^2 with a width of 0.5: 0.32, 0.08; 0.02, 0.08; and 0.5, 0.02.
KL = [[0.32, 0.08, 0.02, 0.08], [0.50, 0.02]]
SUMS = [[0.40, 0.40, 0.10, 0.10], [0.52, 0.52]]


def table(looks=LOOKS, **columns):
    zeros, wide = ([[value] * len(row) for row in RATIOS] for value in (0.0, 0.5))
    own = {} if looks is None else {"policy_steps": looks}
    logp = [[-1.0] * len(row) for row in RATIOS]
    return Table(logp, rewards=[2.0, 0.0], prediction=zeros, std=wide, **own, **columns)


def moved(given, surrogate, *overrides, table=None, **options):
    """After an update that has moved ratios and means."""
    made = given(table, *ONE, f"algorithm.surrogate={surrogate}", *overrides, **options)
    made.prepare()
    logp = [[math.log(ratio) for ratio in row] for row in RATIOS]
    return made.move(logp=logp, prediction=MOVED)


def by_hand(kept, price):
    """The sum of the values, and the slopes by log-ratios and by means: -r A where kept, and 4 price x moved."""
    signed = zip(RATIOS, kept, (1, -1), strict=True)
    gains = [[-r * sign * k for r, k in zip(ratios, keeps, strict=True)] for ratios, keeps, sign in signed]
    costs = [[price * kl for kl in row] for row in KL]
    slopes = [[4 * price * m for m in row] for row in MOVED]
    return sum(map(sum, gains)) + sum(map(sum, costs)), gains, slopes


def padded(rows):
    return [[*row, *[0.0] * (4 - len(row))] for row in rows]


def check(made, kept, price, decisions=6):
    loss, gains, slopes = by_hand(kept, price)
    close(made.learn(), loss / decisions)
    close(made.gradient() * decisions, padded(gains))
    close(made.gradient("prediction") * decisions, padded(slopes))


# The first rollout has looks of 0.40 and 0.10, the second one of 0.52; as one chain the first would be at 0.50.
ROBOT = [
    ("price: 2", [1, 1, 1, 1], [1, 1], 2.0),
    ("bound: 0.6, price: 0", [1, 1, 1, 1], [1, 1], 0.0),
    ("bound: 0.51, price: 0", [1, 1, 1, 1], [0, 0], 0.0),
    ("bound: 0.45, price: 0", [1, 1, 1, 1], [0, 0], 0.0),  # no look of the first is beyond it
    ("bound: 0.35, price: 0", [0, 0, 1, 1], [0, 0], 0.0),  # no single step of the first is beyond it
    ("bound: 0.09, price: 3", [0, 0, 0, 0], [0, 0], 3.0),  # what is left out has its price still
]


@pytest.mark.parametrize(("options", "first", "second", "price"), ROBOT)
def test_looks_of_a_robot(given, options, first, second, price):
    made = moved(given, f"{{type: trajectory_trust_region, {options}}}", table=table())
    check(made, [first, second], price)
    found = made.metrics.result()
    close(found["surrogate/trajectory_kl"], sum(map(sum, SUMS)) / 6)
    close(found["surrogate/dropped"], 1 - sum(first + second) / 6)


# As images: chains of 0.50 and 0.52.
CHAINS = [
    ("price: 2", [1, 1, 1, 1], [1, 1], 2.0),
    ("bound: 0.53, price: 0", [1, 1, 1, 1], [1, 1], 0.0),
    ("bound: 0.51, price: 1", [1, 1, 1, 1], [0, 0], 1.0),
    ("bound: 0.45, price: 0", [0, 0, 0, 0], [0, 0], 0.0),
]


@pytest.mark.parametrize(("options", "first", "second", "price"), CHAINS)
def test_an_image_is_one_chain(given, options, first, second, price):
    made = moved(given, f"{{type: trajectory_trust_region, {options}}}", table=table(looks=None))
    with torch.no_grad():
        made.module.prediction[1, 2:4] = 9.0  # of decisions that there are not
    check(made, [first, second], price)
    close(made.metrics.result()["surrogate/trajectory_kl"], (4 * 0.50 + 2 * 0.52) / 6)


def test_the_price_is_one_by_itself(given):
    check(moved(given, "trajectory_trust_region", table=table()), [[1] * 4, [1] * 2], 1.0)


@pytest.mark.parametrize("looks", [LOOKS, None])
def test_before_the_first_move_it_is_the_policy_gradient(given, looks):
    made = given(table(looks=looks), *ONE, "algorithm.surrogate={type: trajectory_trust_region, bound: 1e-6, price: 5}")
    made.prepare()
    close(made.learn(), (-4 + 2) / 6, atol=1e-7)
    assert (made.gradient() * 6 == torch.tensor([[-1.0, -1, -1, -1], [1, 1, 0, 0]])).all()
    assert not made.gradient("prediction").any()
    found = made.metrics.result()
    assert found["surrogate/ratio"] == 1 and found["surrogate/ratio_gap_max"] == 0
    assert found["surrogate/trajectory_kl"] == 0 and found["surrogate/dropped"] == 0


@pytest.mark.parametrize("options", ["bound: 0.35, price: 2", "price: 3"])
@pytest.mark.parametrize("reduce", ["token_mean", "sequence_mean", "sequence_sum", "constant"])
def test_micro_batches_and_ranks_change_nothing(given, options, reduce):
    """A rank of two that hold the same has half of the loss."""
    rows = []
    for size, world in ((64, 1), (1, 1), (1, 2)):
        keys = [f"algorithm.reduce={reduce}", f"engine.micro_batch={size}", f"rollout.prompts={world}"]
        made = moved(given, f"{{type: trajectory_trust_region, {options}}}", *keys, table=table(), world=world)
        rows.append((made.learn() * world, made.gradient() * world, made.gradient("prediction") * world))
        made.close()
    for other in rows[1:]:
        for one, same in zip(rows[0], other, strict=True):
            close(same, one)


def test_weights_of_decisions_are_not_those_of_their_divergence(given):
    """Weights of the sampling engine's gap: 0.5 for the first rollout, 1 for the second."""
    rows = table()
    generator = "rollout.generator={type: vllm_colocated, correction: {max_gap: 9}}"
    made = given(rows, *ONE, "algorithm.surrogate={type: trajectory_trust_region, price: 2}", generator)
    rollouts = rows.rollouts()
    rollouts.behaviour_logp = rows.padded([[-1.0 - math.log(0.5)] * 4, [-1.0] * 2])
    made.prepare(rollouts)
    made.move(logp=[[math.log(ratio) for ratio in row] for row in RATIOS], prediction=MOVED)
    _, gains, slopes = by_hand([[1] * 4, [1] * 2], 2.0)
    made.learn()
    close(made.gradient() * 6, padded([[0.5 * gain for gain in gains[0]], gains[1]]))
    close(made.gradient("prediction") * 6, padded(slopes))


def test_the_price_follows_the_divergence(given):
    price = "{type: multiplier, metric: surrogate/trajectory_kl, target: 0.01, k_i: 2, start: 0.5}"
    surrogate = f"algorithm.surrogate={{type: trajectory_trust_region, price: {price}}}"
    made = given(table(), *ONE, surrogate, "steps=2")
    usual, updates = made.trainer.update, []

    def update(minibatch, metrics):
        """Between the two updates of a step the means are moved."""
        if len(updates) % 2:
            with torch.no_grad():
                made.module.prediction[:2, :4] = updates[-1] + torch.tensor(padded(MOVED))
        updates.append(made.module.prediction[:2, :4].clone())
        return usual(minibatch, metrics)

    made.trainer.update = update
    made.trainer.train()
    mean = sum(map(sum, SUMS)) / 6 / 2  # over two updates
    prices = [0.5, 0.5 + 2 * (mean - 0.01)]
    for step, (row, price) in enumerate(zip(made.trainer.run.rows, prices, strict=True)):
        close(row["surrogate/trajectory_kl"], mean)
        close(row["control/algorithm.surrogate.price"], price)
        _, _, slopes = by_hand([[1] * 4, [1] * 2], price)
        close(made.gradient("prediction", update=2 * step + 1) * 6, padded(slopes))


# --- refused ---


def test_decisions_without_an_exact_divergence_are_refused():
    with pytest.raises(UserError) as refused:
        load(ROBOTS, ["run_dir=r", "algorithm.surrogate=trajectory_trust_region"])
    assert "needs the exact divergence of each decision" in str(refused.value) and "\n" not in str(refused.value)


def test_what_bounds_nothing_is_refused():
    surrogate = "algorithm.surrogate={type: trajectory_trust_region, price: %s}"
    with pytest.raises(UserError, match="leave the divergence unlimited"):
        load(GIVEN, ["run_dir=r", surrogate % "0"])
    load(GIVEN, ["run_dir=r", surrogate % "{type: multiplier, metric: surrogate/trajectory_kl, target: 0.1}"])


# --- real policies ---

# Steps of dance_sde at noise 0.5 from sigmas 1, 0.75, 0.5, 0.25: std^2 = 0.5^2 x 0.25, and what a prediction counts for
# in the mean, (1 + 0.5^2 (1 - s) / (2 s)) x 0.25.
SIGMAS = (1.0, 0.75, 0.5, 0.25)
WORTH = [((1 + 0.25 * (1 - s) / (2 * s)) * 0.25) ** 2 / (2 * 0.0625) for s in SIGMAS]
TRANSITION = "transition: {type: dance_sde, noise: 0.5}"
FLOW = "action.head={type: flow, width: 32, depth: 1, steps: 4, likelihood: {%s, %s}}"
REGION = "algorithm.surrogate={type: trajectory_trust_region, %s}"
ALL = "window: {type: all, last: 4}"  # the last step is usually not drawn
WINDOWS = [(ALL, 4, WORTH), ("window: {type: all, first: 1, last: 3}", 2, WORTH[1:3])]


def test_the_worth_of_predictions_by_hand():
    """In numbers: 0.25^2 / 0.125 at sigma 1, 0.2604167^2 / 0.125 at 0.75."""
    close(torch.tensor(WORTH), torch.tensor([0.5, 0.5425347, 0.6328125, 0.9453125]))


class Direct(Ledger):
    """The module itself, whatever it is called with."""

    def __call__(self, *given, **named):
        return self.module(*given, **named)


def make(folder, *overrides, base):
    """The trainer of a real policy."""
    config = load(base, [f"run_dir={folder}", "kernels.backend=torch", *overrides])
    torch.manual_seed(config.seed)
    task = build.build_task(config)
    policy = build.build_policy(config, task)
    engine = Direct(policy.module, config.optim.lr)
    return Trainer(config, policy, task, engine, Log(folder, "", writes=False))


def known(trainer, batch, gaps):
    """The batch, with an old policy whose predictions differ by `gaps` [rollout, decision] in every element."""
    with torch.no_grad():
        now = trainer.policy.replay(batch, trainer.policy.module)
    apart = gaps.view(*gaps.shape, *[1] * (now.prediction.dim() - 2))
    return replace(batch, old_logp=now.logp, old_prediction=now.prediction + apart)


def judged(trainer, batch):
    parts, stats = trainer.losses(batch, trainer.algorithm.denominators(batch))
    (loss,) = parts.values()
    return float(loss.detach()), stats


def worth_of(gaps, worth):
    return torch.tensor(worth) * gaps.square()


@pytest.mark.parametrize(("window", "steps", "worth"), WINDOWS)
def test_two_looks_of_a_robot_by_hand(tmp_path, window, steps, worth):
    """The second look ends in the middle of its chunk: the actions that were not executed have no divergence."""
    trainer = make(tmp_path, FLOW % (TRANSITION, window), REGION % "price: 3", base=ROBOTS)
    batch = trainer.policy.rollout([trainer.task.train[i] for i in range(2)], 2, [1, 2, 3, 4], step=0)
    executed = torch.zeros(4, 2)
    for row, episode in enumerate(batch.inputs):
        executed[row, : len(episode)] = torch.stack([look.valid.float().mean() for look in episode])
    assert batch.mask.shape == (4, 2 * steps) and executed[0, 1] > 0 and ((executed > 0) & (executed < 1)).any()
    gaps = torch.tensor([0.3, -0.1]).repeat_interleave(steps).repeat(4, 1)
    batch = known(trainer, batch, gaps)
    each = worth_of(gaps, [*worth, *worth]) * executed.repeat_interleave(steps, 1)
    whole = each.unflatten(1, (2, steps)).sum(2)
    assert executed[0, 0] == 1 and float(whole[0, 0]) == pytest.approx(0.09 * sum(worth))
    mean = float(each.sum() / batch.mask.sum())
    batch.advantages = torch.zeros(batch.mask.shape)
    loss, stats = judged(trainer, batch)
    close(stats["surrogate/trajectory_kl"], whole.repeat_interleave(steps, 1))
    assert loss == pytest.approx(3 * mean, rel=1e-4)

    # Beyond a bound between the two looks there is nothing but the price, whatever the advantages.
    batch.advantages = torch.tensor([5.0, 0.0]).repeat_interleave(steps).repeat(4, 1)
    between = under(trainer, load(ROBOTS, ["run_dir=r", FLOW % (TRANSITION, window), REGION % "price: 3, bound: 0.02"]))
    loss, stats = judged(between, batch)
    assert (stats["surrogate/dropped"] == (whole > 0.02).float().repeat_interleave(steps, 1)).all()
    assert (whole[:, 0] > 0.02).all() and (whole[:, 1] < 0.02).all()
    assert loss == pytest.approx(3 * mean, rel=1e-4)


def test_looks_taken_apart_are_chains_of_their_own(tmp_path):
    trainer = make(tmp_path, FLOW % (TRANSITION, ALL), base=ROBOTS)
    batch = trainer.policy.rollout([trainer.task.train[0]], 2, [1, 2], step=0)
    with torch.no_grad():
        whole = trainer.policy.replay(batch, trainer.policy.module)
        apart = trainer.policy.replay(trainer.policy.by_step(batch), trainer.policy.module)
    assert whole.extras["policy_steps"].tolist() == [[0] * 4 + [1] * 4] * 2
    assert apart.extras["policy_steps"].tolist() == [[0] * 4] * 4


def test_a_gaussian_chunk_is_compared_as_a_whole(tmp_path):
    """The head has no divergence before the first update; then it is that of all its decisions at a look, from the old
    policy's: log(s / s') + (s'^2 + moved^2) / (2 s^2) - 1 / 2, with s = 0.6, s' = 0.3 and means that are 0.3 apart."""
    each = math.log(2) + 0.18 / 0.72 - 0.5
    head = "action.head={type: gaussian, width: 16, layers: 1, std: 0.6}"
    trainer = make(tmp_path, head, REGION % "price: 2", base=ROBOTS)
    batch = trainer.policy.rollout([trainer.task.train[0]], 2, [1, 2], step=0)
    batch.advantages = torch.zeros(batch.mask.shape)
    loss, stats = judged(trainer, batch)
    assert loss == 0 and not stats["surrogate/trajectory_kl"].any()
    executed = batch.mask.unflatten(1, (2, 4)).sum(2)
    with torch.no_grad():
        old = trainer.policy.replay(batch, trainer.policy.module).prediction.clone()
    old += torch.tensor([0.3, math.log(0.5)])
    batch = replace(batch, old_logp=torch.zeros(batch.mask.shape), old_prediction=old)
    loss, stats = judged(trainer, batch)
    close(stats["surrogate/trajectory_kl"], each * executed.repeat_interleave(4, 1), atol=1e-5)
    assert loss == pytest.approx(2 * each, rel=1e-4)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("at_once", ["null", "1", "3"])
def test_an_image_by_hand(tmp_path, reduction, at_once):
    """Also where its steps are replayed a few at a time, so that parts hold pieces of chains."""
    likelihood = f"denoising.likelihood={{{TRANSITION}, reduction: {reduction}, {ALL}}}"
    keys = [likelihood, f"engine.steps_at_once={at_once}", REGION % "price: 2"]
    trainer = make(tmp_path, *keys, base=IMAGES)
    batch = trainer.policy.rollout([trainer.task.train[0]], 2, [1, 2], step=0)
    gaps = torch.tensor([[0.3, 0.1, 0.2, 0.1], [0.1, 0.0, 0.1, 0.0]])
    batch = known(trainer, batch, gaps)
    sigmas = trainer.policy.sampler.grid.sigmas.tolist()
    assert sigmas == pytest.approx([*SIGMAS, 0.0])
    each = worth_of(gaps, WORTH) * (1 if reduction == "mean" else math.prod(trainer.policy.shape))
    batch.advantages = torch.zeros(batch.mask.shape)
    loss, stats = judged(trainer, batch)
    torch.testing.assert_close(
        stats["surrogate/trajectory_kl"], each.sum(1, keepdim=True).expand(2, 4), rtol=1e-4, atol=0
    )
    assert loss == pytest.approx(2 * float(each.mean()), rel=1e-4)


@pytest.mark.parametrize(("base", "keys"), [(ROBOTS, [FLOW % (TRANSITION, ALL)]), (IMAGES, [])])
def test_the_first_update_is_the_policy_gradient(tmp_path, base, keys):
    trainer = make(tmp_path, *keys, base=base)
    batch = trainer.policy.rollout([trainer.task.train[i] for i in range(2)], 2, [1, 2, 3, 4], step=0)
    batch.advantages = torch.linspace(-1, 1, 4)[:, None].expand(batch.mask.shape)
    found = {}
    for surrogate in ("{type: trajectory_trust_region, price: 7, bound: 1e-9}", "reinforce"):
        probe = under(trainer, load(base, ["run_dir=r", *keys, f"algorithm.surrogate={surrogate}"]))
        found[surrogate] = gradient(probe, batch)
        stats = probe.losses(batch, probe.algorithm.denominators(batch))[1]
        assert (stats["surrogate/ratio"][batch.mask] == 1).all()
    region, plain = found.values()
    assert torch.equal(region, plain) and plain.abs().max() > 0


def test_a_step_down_the_price_brings_chains_back(tmp_path):
    """The gradient of the cost goes through the policy's own predictions, to less divergence."""
    trainer = make(tmp_path, FLOW % (TRANSITION, ALL), REGION % "price: 1", base=ROBOTS)
    batch = trainer.policy.rollout([trainer.task.train[0]], 2, [1, 2], step=0)
    batch = known(trainer, batch, torch.full(batch.mask.shape, 0.2))
    batch.advantages = torch.zeros(batch.mask.shape)
    before, _ = judged(trainer, batch)
    parts, _ = trainer.losses(batch, trainer.algorithm.denominators(batch))
    trained = [p for p in trainer.policy.module.parameters() if p.requires_grad]
    slopes = torch.autograd.grad(sum(parts.values()), trained, allow_unused=True)
    with torch.no_grad():
        for parameter, slope in zip(trained, slopes, strict=True):
            parameter -= 0 if slope is None else 1e-2 * slope
    after, _ = judged(trainer, batch)
    assert after < 0.999 * before
