"""Distances between sets of images: FID and KID by hand, and what each subset of a batch adds."""

import numpy as np
import pytest
import torch

from mmrl.core.distances import frechet, kernel_distance, replacement_gains
from mmrl.errors import UserError
from mmrl.rewards import RewardSet
from mmrl.rewards.settings import RewardSpec
from mmrl.rollouts import Prompt, Sample
from tests.joints.parts import Table, close, job

HERE = "tests.rewards.test_sets"
REAL = torch.tensor([0.0, 0.2, 0.6, 1.0]).view(4, 1, 1, 1)


def flat():
    return lambda images: images.flatten(1)


def real():
    return REAL


def one():
    return REAL[0]


def reward(**options):
    spec = RewardSpec(name="set_distance", options={"features": f"{HERE}:flat", "reference": f"{HERE}:real", **options})
    return RewardSet([spec])


def samples(values, prompts):
    return [
        Sample(Prompt(prompt, "?"), image=torch.full((1, 1, 1), value))
        for value, prompt in zip(values, prompts, strict=True)
    ]


def test_frechet_by_hand():
    """In one dimension (m - m')^2 + (s - s')^2; means 1 and 4, deviations 1 and 2 of three members each."""
    one, other = torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([[2.0], [4.0], [6.0]])
    close(frechet(one, other), 9 + 1)
    close(frechet(one, one), 0.0)
    close(frechet(one[:1], other), 16 + 4)  # one member has no spread


def test_frechet_of_more_dimensions_is_that_of_a_matrix_root():
    from scipy.linalg import sqrtm

    random = torch.Generator().manual_seed(0)
    one, other = torch.randn(40, 5, generator=random), 0.5 + 2 * torch.randn(30, 5, generator=random)
    a, b = one.double().numpy(), other.double().numpy()
    spread, wanted = np.cov(a.T), np.cov(b.T)
    root = sqrtm(spread @ wanted).real
    expected = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(spread + wanted - 2 * root)
    assert float(frechet(one, other)) == pytest.approx(expected, rel=1e-6)
    assert float(frechet(one[:3], other)) > 0  # a covariance without full rank


def test_kernel_distance_by_brute_force():
    random = torch.Generator().manual_seed(1)
    x, y = torch.randn(4, 3, generator=random), torch.randn(5, 3, generator=random)

    def k(a, b):
        return (float(a @ b) / 3 + 1) ** 3

    inside = [sum(k(a, b) for i, a in enumerate(s) for j, b in enumerate(s) if i != j) for s in (x, y)]
    expected = inside[0] / 12 + inside[1] / 20 - 2 * sum(k(a, b) for a in x for b in y) / 20
    assert float(kernel_distance(x, y)) == pytest.approx(expected, rel=1e-5)


def test_a_subset_earns_what_it_adds_in_the_place_of_another():
    """The distance is the sum, 10 of (1, 2, 3, 4) in subsets (1, 2), (3), (4): with the third twice in place of the
    first it is 3 + 4 + 4 = 11, in place of the second 1 + 2 + 4 + 4 = 11; so its gain is 10 - 11."""
    features, member = torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.tensor([0, 0, 1, 2])
    gains = replacement_gains(features, member, lambda rows: rows.double().sum())
    # first: (1 + 2 + 1 + 2 + 4 = 10, 1 + 2 + 1 + 2 + 3 = 9); second: (3 + 3 + 4 = 10, 1 + 2 + 3 + 3 = 9)
    close(gains, [0.5, 0.5, 0.5, -1.0])
    assert replacement_gains(features, torch.zeros(4), lambda rows: rows.sum()).tolist() == [0.0] * 4


def test_images_that_bring_the_batch_nearer_earn_more():
    """Prompts a and b have two images each; the second ones widen a set that is too narrow. By the mean alone, with
    values that are one number."""
    found = reward().score(samples([0.5, 0.1, 0.5, 0.9], "aabb"), torch.tensor([0, 0, 1, 1]))[:, 0]

    def fid(values):
        return float(frechet(torch.tensor(values)[:, None], REAL.flatten(1)))

    whole = fid([0.5, 0.1, 0.5, 0.9])
    close(found, [whole - fid([0.5, 0.5, 0.5, 0.5]), whole - fid([0.1, 0.9, 0.1, 0.9])] * 2, atol=1e-6)
    assert found[1] > 0 > found[0]
    kid = reward(metric="kid", credit="whole").score(samples([0.5, 0.1, 0.5, 0.9], "aabb"))[:, 0]
    expected = -float(kernel_distance(torch.tensor([[0.5], [0.1], [0.5], [0.9]]), REAL.flatten(1)))
    close(kid, [expected] * 4, atol=1e-6)


def test_an_image_without_finite_pixels_is_left_out():
    found = reward(credit="whole").score(samples([0.5, float("nan"), 0.1, 0.9], "abcd"))[:, 0]
    expected = -float(frechet(torch.tensor([[0.5], [0.1], [0.9]]), REAL.flatten(1)))
    assert found[1].isnan()
    close(found[[0, 2, 3]], [expected] * 3, atol=1e-6)


def test_it_reaches_the_advantages_through_the_keys(tmp_path):
    """Two prompts with two rollouts each: members compete within their group."""
    options = f"{{features: '{HERE}:flat', reference: '{HERE}:real'}}"
    made = job(
        tmp_path,
        Table([[-1.0]] * 4, group=[0, 0, 1, 1]), "algorithm.scale=none",
        f"task.rewards=[{{name: set_distance, options: {options}}}]",
    )  # fmt: skip
    made.trainer.policy.table.sample = lambda row, prompt=None: samples(
        [[0.5, 0.1, 0.5, 0.9][row]], [prompt.id if prompt else "x"]
    )[0]
    made.trainer.task.accuracy = lambda samples: torch.zeros(len(samples))
    batch = made.next()
    expected = reward().score(samples([0.5, 0.1, 0.5, 0.9], "aabb"))[:, 0]
    close(batch.rewards[:, 0], expected)
    apart = float(expected[1] - expected[0]) / 2
    close(made.prepare(batch).advantages, [[-apart], [apart], [-apart], [apart]], atol=1e-6)


def test_digits_have_features_and_a_reference():
    spec = RewardSpec(
        name="set_distance",
        options={
            "features": "mmrl.tasks.image_generation.data.digits:digit_features",
            "reference": "mmrl.tasks.image_generation.data.digits:real_digits",
            "credit": "whole",
        },
    )
    from mmrl.tasks.image_generation.data import digits

    real = [Sample(Prompt(str(i), "?"), image=one) for i, one in enumerate(digits.real_digits()[:200])]
    noise = [Sample(s.prompt, image=torch.rand(1, 8, 8)) for s in real]
    same = [Sample(s.prompt, image=real[0].image) for s in real]
    near, far, collapsed = (float(RewardSet([spec]).score(one)[0, 0]) for one in (real, noise, same))
    assert near > 0.5 * far and near > 0.5 * collapsed and near < 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"metric": "is"}, "metric must be fid or kid"),
        ({"credit": "single"}, "credit must be replacement or whole"),
        ({"reference": f"{HERE}:one"}, r"must return at least two images, \[image, channel, height, width\]"),
        ({"features": f"{HERE}:real"}, "must return a function or nn.Module, not Tensor"),
    ],
)
def test_what_can_not_be_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        reward(**options)


def test_samples_that_do_not_fit_are_named():
    with pytest.raises(
        UserError, match="'set_distance': a distance between sets of images .* needs at least two images"
    ):
        reward().score(samples([0.5], "a"))
    with pytest.raises(
        UserError, match=r"an image of shape \[1, 2, 2\] cannot be compared with reference images of \[1, 1, 1\]"
    ):
        reward().score([Sample(Prompt("a", "?"), image=torch.zeros(1, 2, 2))] * 2)
    options = {"features": f"{HERE}:flat", "reference": f"{HERE}:real"}
    with pytest.raises(ValueError, match="does not accept batch_size"):
        RewardSet([RewardSpec(name="set_distance", batch_size=4, options=options)])
