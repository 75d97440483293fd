"""CoCoEdit's regulariser: what of an edit should stay, and what should change; by hand, and from the YAML key."""

import numpy as np
import pytest
import torch

from mmrl import build
from mmrl.collection.collector import Collector
from mmrl.config import validate
from mmrl.engine import Ranks
from mmrl.errors import UserError
from mmrl.rollouts import MatchingTargets, Prompt, Replay, Rollouts, Sample
from mmrl.settings import choose
from mmrl.tasks.image_generation.tiny import pipeline
from mmrl.terms.term import Term
from mmrl.training.metrics import Metrics
from mmrl.training.preparation import Preparation

# One channel, 2 x 2 cells, of which the first column may change. Half of the noise is left: x - v / 2 is the data.
MASK = torch.tensor([[1, 0], [1, 0]])
SOURCE = torch.tensor([[0.0, 1.0], [0.0, 0.0]]).double()


def replayed(noisy, prediction, old, *, noise_space=False):
    cells = [torch.tensor(part).double()[None, None, None] for part in (noisy, prediction, old)]
    half = torch.tensor([[0.5]]).double()
    matching = MatchingTargets(
        *cells, data=torch.zeros_like(cells[0]), sigma=half, signal=half, noise_space=noise_space,
        source=SOURCE[None, None, None],
    )  # fmt: skip
    matching.prediction = matching.prediction.requires_grad_()
    return Replay(torch.zeros(1, 1).double(), extras={"matching": matching})


def micro(advantage, mask=MASK):
    sample = Sample(Prompt("p", "edit", metadata={} if mask is None else {"region": mask}))
    found = Rollouts([sample], [None], torch.zeros(1, dtype=torch.long), torch.ones(1, 1, dtype=torch.bool))
    found.advantages = torch.tensor([[advantage]]).double()
    return found


NOISY, V, OLD = [[0.5, 1.5], [0.5, 0.5]], [[1.0, 0.0], [0.0, 2.0]], [[0.0, 0.0], [0.0, 1.0]]
# x - v / 2 is 0 and 1.5 above, 0.5 and -0.5 below.
STAYED = (0.5**2 + 0.5**2) / 2  # in the second column, from 1 and 0
CHANGED = (0.0**2 + 0.5**2) / 2  # in the first


@pytest.mark.parametrize(("advantage", "good"), [(5.0, 1.0), (-5.0, 0.0), (1.0, 0.6), (-9.0, 0.0)])
def test_by_hand(advantage, good):
    term = choose(Term, {"type": "region", "keep": 2.0, "change": 3.0, "near": 0.05, "far": 0.8})
    told = replayed(NOISY, V, OLD)
    values, stats = term.values(micro(advantage), told)
    expected = 2 * good * (STAYED - 0.05) + 3 * (1 - good) * (0.8 - CHANGED)
    assert values.item() == pytest.approx(expected, abs=1e-12)
    assert stats["region/stayed"].item() == pytest.approx(STAYED)
    assert stats["region/changed"].item() == pytest.approx(CHANGED)
    values.sum().backward()
    # The data's slope by v is -1/2; outside the mask it is 0.5 and -0.5 from the source, inside 0 and 0.5.
    slope = torch.tensor([[0.0, 0.5], [0.0, -0.5]]).double() * 2 * good * -0.5
    slope += torch.tensor([[0.0, 0.0], [0.5, 0.0]]).double() * -3 * (1 - good) * -0.5
    torch.testing.assert_close(told.extras["matching"].prediction.grad[0, 0, 0], slope)


def test_a_step_down_the_gradient_keeps_what_should_stay_and_changes_what_should():
    """Whatever the signs above: of a good edit the one distance falls, of a bad one the other rises."""
    for advantage, name, sign in ((5.0, "stayed", -1), (-5.0, "changed", 1)):
        told = replayed(NOISY, V, OLD)
        term = choose(Term, {"type": "region", "far": 2.0})
        values, before = term.values(micro(advantage), told)
        values.sum().backward()
        moved = (told.extras["matching"].prediction - 0.1 * told.extras["matching"].prediction.grad)[0, 0, 0].tolist()
        _, after = term.values(micro(advantage), replayed(NOISY, moved, OLD))
        assert sign * (after[f"region/{name}"] - before[f"region/{name}"]).item() > 0.004


def test_thresholds_are_where_it_stops():
    for options in ({"near": STAYED + 0.01, "change": 0.0}, {"far": CHANGED - 0.01, "keep": 0.0}):
        told = replayed(NOISY, V, OLD)
        values, _ = choose(Term, {"type": "region", **options}).values(micro(0.5), told)
        values.sum().backward()
        assert values.item() == 0 and not told.extras["matching"].prediction.grad.any()


def test_predicted_noise():
    term = choose(Term, {"type": "region", "change": 0.0})
    _, stats = term.values(micro(5.0), replayed(NOISY, V, OLD, noise_space=True))
    assert stats["region/stayed"].item() == pytest.approx((2.0**2 + 1.0**2) / 2)  # 3 and -1: over a signal of 1/2


def test_a_latent_may_change_where_a_pixel_of_it_may():
    fine = torch.zeros(4, 4, dtype=torch.bool)
    fine[0, 1] = fine[3, 0] = True  # in the first column of latents, above and below
    term = choose(Term, {"type": "region"})
    _, stats = term.values(micro(0.0, fine), replayed(NOISY, V, OLD))
    assert stats["region/stayed"].item() == pytest.approx(STAYED)
    none, stats = term.values(micro(0.0, torch.zeros(4, 4)), replayed(NOISY, V, OLD))
    assert stats["region/changed"].item() == 0 and none.isfinite().all()
    with pytest.raises(UserError, match="prompt 'p' has no metadata 'region', the mask of pixels"):
        term.values(micro(0.0, None), replayed(NOISY, V, OLD))
    with pytest.raises(
        UserError, match=r"metadata 'region' must be a mask \[height, width\] for the term region, got \[1, 2, 2\]"
    ):
        term.values(micro(0.0, MASK[None]), replayed(NOISY, V, OLD))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("kontext")
    pipeline.build_edits(str(folder), seed=0)
    return folder


def tree_of(folder, likelihood="contrast", **more):
    return {
        "run_dir": "unset",
        "model": {"type": "diffusion", "path": str(folder), "text_tokens": 8, "decoding": "whole"},
        "task": {"type": "image_generation", "data": {"type": "edits", "train_size": 20, "eval_size": 4}},
        "rollout": {"prompts": 2, "group_size": 2},
        "denoising": {"resolution": 16, "steps": 3, "evaluation_steps": 3, "likelihood": {"type": likelihood}},
        "algorithm": {"type": likelihood, "terms": [{"type": "region", "keep": 2.0}]},
        "engine": {"micro_batch": 4},
        **more,
    }


def drawn(folder, likelihood="contrast"):
    config = validate(tree_of(folder, likelihood), "test")
    task = build.build_task(config)
    policy = build.build_policy(config, task)
    ranks = Ranks()
    batch = Collector(config, policy, task, ranks, None).next(0, Metrics(ranks))
    return config, policy, task, batch


@pytest.mark.parametrize("likelihood", ["contrast", "matching"])
def test_the_source_is_that_of_the_prompt_and_the_gradient_is_the_terms(folder, likelihood):
    config, policy, task, batch = drawn(folder, likelihood)
    batch.rewards = torch.rand(batch.rewards.shape, generator=torch.Generator().manual_seed(0))
    ranks = Ranks()
    preparation = Preparation(config, policy, task, ranks, None, None)
    minibatches, _ = preparation.minibatches(batch, 0, torch.Generator().manual_seed(0), Metrics(ranks))
    (part,) = minibatches
    assert len(part) == 1  # both prompts in one micro-batch
    term, seen = config.algorithm.terms[0], 0
    for rows in part:
        told = policy.replay(rows, policy.module)
        values, _ = term.values(rows, told)
        for i, sample in enumerate(rows.samples):
            pixels = torch.from_numpy(np.array(sample.prompt.images[0].convert("RGB"))).permute(2, 0, 1)[None] / 255
            source = policy.family.to_latents(pixels)
            torch.testing.assert_close(told.extras["matching"].source[i], source, atol=1e-6, rtol=0)
            alone = rows.select(torch.tensor([i]))
            torch.testing.assert_close(
                term.values(alone, policy.replay(alone, policy.module))[0], values[i : i + 1], atol=1e-5, rtol=1e-5
            )
            before, after = (sample.prompt.metadata[key] for key in ("source", "expected"))
            cells = (before != after).any(0).view(8, 2, 8, 2).any(3).any(1)
            matching = told.extras["matching"]
            for k in range(values.shape[1]):
                good = (rows.advantages[i, k] / 10 + 0.5).clamp(0, 1)
                made = matching.noisy[i, k] - matching.sigma[i, k] * matching.prediction[i, k]
                stay = ((made - source[0]) * ~cells).square().sum() / (3 * (~cells).sum())
                move = ((made - source[0]) * cells).square().sum() / (3 * cells.sum())
                expected = 2 * good * stay + (1 - good) * (0.1 - move).clamp(min=0)
                torch.testing.assert_close(values[i, k], expected, atol=1e-5, rtol=1e-5)
                seen += 1
        values.sum().backward()
    assert seen == 4 * values.shape[1]
    assert any(p.grad is not None and bool(p.grad.any()) for p in policy.module.parameters())


def test_what_can_not_be_compared_is_one_line(folder, tmp_path):
    with pytest.raises(UserError, match=r"algorithm.terms.0 \(region\) needs images to compare with those"):
        chain = tree_of(tmp_path / "nothing", "chain")
        chain["algorithm"]["type"] = "grpo"
        validate(chain, "test")
    told = replayed(NOISY, V, OLD)
    told.extras["matching"].source = None  # of a model that draws from words
    with pytest.raises(UserError, match="does not edit images, so the term region has no source image"):
        choose(Term, {"type": "region"}).values(micro(0.0), told)
