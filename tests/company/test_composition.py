"""Methods drawn by chance and put together: their loss is finite, and depends neither on how rollouts are cut into
micro-batches nor on the order in which groups come. Which ones may be put together, the configuration says itself."""

import random

import pytest
import torch
import yaml

from mmrl.cli.methods import decisions_of, methods, needs_of
from mmrl.errors import UserError
from mmrl.measurements.answers import GreedyRewards, ReferenceRewards, ViewAnswers
from mmrl.measurements.chains import CandidateCompletions, Completions
from mmrl.prompts.counterfactual_views import Mirrored, ShuffledFrames
from mmrl.rollouts import PARTS, Column, DecisionColumn, FurtherResponses
from mmrl.settings import choose
from mmrl.terms.shapers.segments import SegmentValues
from mmrl.terms.term import Shaper, Term
from tests.joints.parts import Table, close

COUNT = 36  # combinations for each kind of decision
DECISIONS = ("text token", "denoising step", "action token")
# What a method must be given, and what keeps it from being at rest in so small a batch.
OPTIONS = {
    "band": "fact: length, high: 2",
    "best_of_group": "count: 3",
    "bucket_std": "by: level",
    "divergence_mask": "bound: 0.1",
    "gated": "gates: [two]",
    "constrained": "prices: {two: 0.3}",
    "projected": "auxiliary: two",
    "pass_at_k": "k: 2",
    "pass_at_k_analytic": "k: 2",
    "quantile_bucket_std": "count: 2",
    "sequence_mask": "bound: 0.3",
    "stratified": "by: length",
    "token_budget": "budget: 15",
    "covariance_clip": "share: 0.2, low: -5",
    "view_information": "view: {type: no_text}",
    "modes": "n: 1",
    "set_diversity": "n: 1",
}
# Methods whose options make others of them, by the key that they are options of.
VARIANTS = {
    "terms": [
        "{type: kl, against: ema}",
        "{type: kl, against: old}",
        "{type: kl, against: {type: old, direction: reverse}, estimator: k1}",
        "{type: kl, against: {type: view, view: {type: no_text}}}",
        "{type: kl, weighting: difficulty}",
        "{type: kl, against: old, estimator: absolute, weighting: {type: covariance, share: 0.3}}",
        "{type: likelihood, of: all, under: {type: no_text}}",
        "{type: likelihood, of: own_positive, doubt: 1}",
    ],
    "shaping": ["{type: entropy, sure: {}, bonus: clarity, centred: true}"],
}
BASES = {"terms": Term, "shaping": Shaper}
CHANCE = {"covariance_clip", "token_budget", "boundary_chance", "perturbation"}  # who draw by the place in the batch
TITLES = {
    "surrogate": "surrogate", "baseline": "baseline", "scale of advantages": "scale", "components": "components",
    "transform of rewards": "transforms", "loss term": "terms", "advantage shaper": "shaping", "mask": "masks",
}  # fmt: skip
LISTS = {"transforms": 0.5, "terms": 1.2, "shaping": 0.8, "masks": 0.6}  # how many of them on average
ALGORITHMS = ("grpo", "grpo", "grpo", "grpo", "preference", "mixed_preference", "discriminative")


def catalogue(decision):
    """The methods for a kind of decision, by the key that they are options of."""
    found = {key: [] for key in TITLES.values()}
    for base, name, kind in methods():
        if base.title in TITLES and (needs := needs_of(kind)) is not None and decision in decisions_of(needs):
            found[TITLES[base.title]].append(name)
        elif base.title == "components":
            found["components"].append(name)
    for key, variants in VARIANTS.items():
        made = ((variant, choose(BASES[key], yaml.safe_load(variant))) for variant in variants)
        found[key] += [variant for variant, method in made if decision in decisions_of(method.needs)]
    return found


CATALOGUES = {decision: catalogue(decision) for decision in DECISIONS}


def drawn(decision, seed):
    """Names by key, and the overrides that say so."""
    chance, found = random.Random(seed), CATALOGUES[decision]
    algorithm = chance.choice(ALGORITHMS) if decision != "denoising step" else "grpo"
    names = {}
    for key, known in found.items():
        if key in LISTS:
            count = min(3, int(chance.expovariate(1 / LISTS[key]))) if known else 0
            names[key] = chance.sample(known, min(count, len(known)))
        else:
            names[key] = [chance.choice(known)]
    if algorithm != "grpo":
        names = {"terms": names["terms"], "masks": names["masks"]}
    reduce = chance.choice(["token_mean", "sequence_mean", "sequence_sum", "constant"])
    options = [f"type: {algorithm}", f"reduce: {reduce}", "epochs: 2"]
    for key, chosen in names.items():
        written = [
            name if name.startswith("{") else f"{{type: {name}{', ' + OPTIONS[name] if name in OPTIONS else ''}}}"
            for name in chosen
        ]
        options.append(f"{key}: [{', '.join(written)}]" if key in LISTS else f"{key}: {written[0]}")
    return names, f"algorithm={{{', '.join(options)}}}"


def table(decision):
    """Three groups of four rollouts, of one to three decisions; one is not scored, one is cut off."""
    chance = random.Random(5)
    lengths = [chance.randint(1, 3) for _ in range(12)]

    def column(low, high):
        return [[chance.uniform(low, high) for _ in range(n)] for n in lengths]

    columns = {"logp": column(-3, -0.1), "view": column(-4, -0.1)}
    if decision == "denoising step":
        columns |= {"prediction": column(-1, 1), "std": column(0.4, 0.6)}
    else:
        columns |= {"entropy": column(0.1, 2), "square_sum": column(0.2, 0.9)}
        columns |= {"numbers": [[float(chance.randint(0, 2)) for _ in range(n)] for n in lengths]}
    rewards = [[chance.choice([0.0, 1.0]), chance.random()] for _ in range(12)]
    rewards[6] = [float("nan")] * 2
    return Table(
        columns.pop("logp"),
        group=[row // 4 for row in range(12)],
        rewards=rewards,
        accuracy=[float(r[0] > 0) for r in rewards],
        truncated=[row == 9 for row in range(12)],
        metadata=[{"level": row % 2} for row in range(12)],
        responses=[chance.choice(["two", "one more", "a third"]) for _ in range(12)],
        **columns,
    )


BASE = ["rollout.prompts=3", "rollout.group_size=4", "task.names=[one, two]", "task.weights=[1, 0.5]"]


def learned(given, monkeypatch, decision, algorithm, order, micro_batch):
    made = given(table(decision), *BASE, algorithm, f"engine.micro_batch={micro_batch}")
    rollouts = made.table.rollouts(order)
    worth = torch.linspace(-1, 20, 48).sin().view(12, 4)[order]  # of the steps of chains
    rollouts.extras[Completions().name] = Column(worth[:, : 1 + rollouts.mask.shape[1]])
    rollouts.extras[CandidateCompletions().name] = Column(worth[:, : rollouts.mask.shape[1]])
    rollouts.extras[PARTS] = DecisionColumn(torch.arange(rollouts.mask.shape[1]).remainder(2).repeat(12, 1))
    # What the collector would have measured
    rollouts.extras[SegmentValues().gains.name] = DecisionColumn(worth[:, : rollouts.mask.shape[1]])
    rollouts.extras[GreedyRewards().name] = Column(torch.full((12, 2), 0.3))
    said = [["two", "a third", "two", "none"] for _ in range(12)]
    for view in (Mirrored(), ShuffledFrames()):
        rollouts.extras[ViewAnswers(view).name] = FurtherResponses(torch.full((12,), 0.4), said)
    # The task of these tests knows a rollout by its response, and here those are words.
    monkeypatch.setattr(ReferenceRewards, "measure", lambda self, rollouts, context: Column(torch.full((12,), 0.35)))
    made.prepare(rollouts)
    chance = random.Random(9)
    made.move(logp=[[chance.uniform(-0.4, 0.4) for _ in range(3)] for _ in range(12)])
    loss = made.learn()
    gradients = {name: found.clone() for name, found in made.trainer.engine.gradients[-1].items()}
    made.close()
    return loss, gradients


def valid(given, decision, count):
    """The first `count` combinations that the configuration takes, and how many it did not."""
    found, refused, seed = [], 0, 0
    while len(found) < count:
        names, algorithm = drawn(decision, seed)
        seed += 1
        try:
            given(table(decision), *BASE, algorithm).close()
            found.append((names, algorithm))
        except UserError as error:
            assert "\n" not in str(error), error
            refused += 1
    return found, refused


@pytest.mark.parametrize("decision", DECISIONS)
def test_methods_compose(given, monkeypatch, decision):
    combinations, refused = valid(given, decision, COUNT)
    assert refused < 4 * COUNT  # most of what is drawn means something
    rows = list(range(12))
    mixed = [row for group in (2, 0, 1) for row in range(4 * group, 4 * group + 4)]
    moved = 0
    for names, algorithm in combinations:
        loss, gradients = learned(given, monkeypatch, decision, algorithm, rows, 64)
        assert torch.isfinite(torch.tensor(loss)), algorithm
        assert all(found.isfinite().all() for found in gradients.values()), algorithm
        moved += any(bool((found != 0).any()) for found in gradients.values())
        cut, same = learned(given, monkeypatch, decision, algorithm, rows, 4)
        close(cut, loss, atol=1e-4)
        for name, found in gradients.items():
            close(same[name], found, atol=1e-4)
        if not CHANCE & {name for chosen in names.values() for name in chosen}:
            loss_mixed, gradients_mixed = learned(given, monkeypatch, decision, algorithm, mixed, 64)
            close(loss_mixed, loss, atol=1e-4)
            for name, found in gradients.items():
                close(gradients_mixed[name], found, atol=1e-4)
    assert moved > 0.9 * COUNT


def test_every_method_is_drawn_somewhere():
    """Of the draws alone; what the configuration then takes is another matter."""
    for decision in DECISIONS:
        seen = {
            (key, name) for seed in range(800) for key, chosen in drawn(decision, seed)[0].items() for name in chosen
        }
        known = {(key, name) for key, names in CATALOGUES[decision].items() for name in names}
        assert known == seen
    assert len({pair for c in CATALOGUES.values() for key, names in c.items() for pair in names}) > 50


# --- on policy ---

AT_REST = [
    "geometric",
    "mirror_descent",
    "log_clip",
    "sqrt_clip",
    "unclipped",
    "query_trust_region",
    "boundary_chance",
    "ratio_variance",
    "{type: sequence_mask, bound: 0.1}",
    "clip",
    "dual_clip",
    "cispo",
    "{type: divergence_mask, bound: 0.1}",
    "gaussian_weight",
    "soft",
]


@pytest.mark.parametrize("surrogate", AT_REST)
@pytest.mark.parametrize("reduce", ["token_mean", "sequence_mean", "sequence_sum", "constant"])
def test_before_the_first_move_the_gradient_is_that_of_reinforce(given, surrogate, reduce):
    found = []
    for kind in (surrogate, "reinforce"):
        made = given(table("text token"), *BASE, f"algorithm.surrogate={kind}", f"algorithm.reduce={reduce}")
        made.prepare()
        made.learn()
        found.append(made.gradient())
    close(found[0], found[1])
    assert found[0].abs().sum() > 0
