"""Distillation of denoising steps: the teacher's velocity on the student's own states, from the YAML keys to numbers
worked out from the two networks' predictions."""

import pytest
import torch

from mmrl.config import load
from mmrl.errors import UserError
from mmrl.tasks.image_generation.tiny.model import build_digits
from mmrl.training.metrics import Metrics
from tests.joints.parts import close
from tests.whole_runs.parts import IMAGES, gradient, make, metrics, release, train, under

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    build_digits(folder, seed=5)
    return folder


def prepared(folder, *options):
    trainer = make(folder, *options, base=IMAGES)
    made = Metrics(trainer.engine)
    rollouts = trainer.collector.next(0, made)
    parts, _ = trainer.preparation.minibatches(rollouts, 0, torch.Generator().manual_seed(0), made)
    return trainer, parts[0][0]


def weighted(trainer, micro, estimator, squares):
    """What the estimator makes of the mean squared distance of velocities, by decision."""
    if estimator == "velocity":
        return squares
    steps = trainer.policy.sampler.stochastic_coefficients(torch.stack([record.points for record in micro.inputs]))
    return steps.a_v.square() * squares / (2 * steps.std.square())


@pytest.mark.parametrize("estimator", ["velocity", "exact"])
def test_the_loss_is_the_distance_from_the_teacher_on_the_students_states(tmp_path, teacher, estimator):
    """The teacher is guided with 3, the student with 1: guidance is distilled too."""
    taught = f"{{path: {teacher}, guidance: 3.0}}"
    algorithm = f"algorithm={{type: distillation, teacher: {taught}, estimator: {estimator}}}"
    trainer, micro = prepared(tmp_path, algorithm)
    policy = trainer.policy
    guided, plain = (policy.teachers.policy(str(teacher), scale) for scale in (3.0, None))
    ours, theirs, unguided = (p.replay(micro, p.module).prediction for p in (policy, guided, plain))
    assert (theirs - unguided).abs().max() > 1e-3 and policy.denoising.guidance == 1
    squares = (ours - theirs).square().flatten(2).mean(2)
    expected = weighted(trainer, micro, estimator, squares)
    probe = under(trainer, trainer.config)
    losses, statistics = probe.losses(micro, probe.algorithm.denominators(micro))
    close(statistics["distillation/kl"], expected, atol=1e-5)
    close(sum(losses.values()).detach(), expected.mean(), atol=1e-5)
    step = 1e-3  # against the gradient the distance falls by its squared norm
    slope = gradient(probe, micro)
    trained = [p for p in policy.module.parameters() if p.requires_grad]
    with torch.no_grad():
        at = 0
        for p in trained:
            p -= step / slope.norm() ** 2 * slope[at : at + p.numel()].view_as(p)
            at += p.numel()
        nearer = policy.replay(micro, policy.module)
        squares = (nearer.prediction - theirs).square().flatten(2).mean(2)
    fallen = expected.mean() - weighted(trainer, micro, estimator, squares).mean()
    assert float(fallen) == pytest.approx(step, rel=0.1)
    release(trainer)


def test_a_student_comes_nearer_to_its_teacher(tmp_path, teacher):
    taught = f"algorithm={{type: distillation, teacher: {{path: {teacher}}}, estimator: velocity}}"
    train(tmp_path, taught, "steps=8", "optim.lr=0.003", "rollout.group_size=1", "rollout.prompts=8", base=IMAGES)
    distances = [row["distillation/kl"] for row in metrics(tmp_path) if "loss" in row]
    assert len(distances) == 8 and distances[-1] < 0.9 * distances[0]


def test_a_reference_beside_a_teacher_is_refused(tmp_path, teacher):
    terms = "terms: [{type: kl, estimator: exact}]"
    taught = f"algorithm={{type: distillation, teacher: {{path: {teacher}}}, estimator: velocity, {terms}}}"
    with pytest.raises(UserError, match="takes the place of the reference"):
        prepared(tmp_path, taught)
    with pytest.raises(UserError, match=r"teacher\.path=nowhere/at/all") as refused:
        prepared(tmp_path, "algorithm={type: distillation, teacher: {path: nowhere/at/all}, estimator: velocity}")
    assert "model.path" not in str(refused.value)
    with pytest.raises(UserError, match="estimator=exact has one direction"):
        options = "estimator: exact, direction: forward"
        load(IMAGES, [f"run_dir={tmp_path}", f"algorithm={{type: distillation, teacher: {{path: x}}, {options}}}"])
