"""Distillation of robot policies: a teacher scores the student's own episodes, from the YAML keys to numbers worked out
from the two networks' outputs."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mmrl import build
from mmrl.config import load
from mmrl.errors import UserError
from mmrl.policies.vla.heads.codec import ActionStatistics
from mmrl.policies.vla.saved import WEIGHTS
from mmrl.policies.vla.teachers import check_reads_alike
from mmrl.training.metrics import Metrics
from tests.joints.parts import close
from tests.whole_runs.parts import ROBOTS, build_robot, distance, gradient, make, metrics, release, train, under

pytestmark = pytest.mark.usefixtures("alone")
FLOW = "{type: flow, steps: 3, width: 32, depth: 1, likelihood: {transition: flow_sde, reduction: sum}}"
TAUGHT = {
    "token": ("action.head={type: token, bins: 8}",),
    "gaussian": ("action.head={type: gaussian, width: 16, layers: 1}",),
    "flow": (f"action.head={FLOW.replace('width: 32', 'width: 48')}",),
}
LEARNS = {**TAUGHT, "flow": (f"action.head={FLOW}",)}


def distilled(folder, **options):
    given = "".join(f", {key}: {value}" for key, value in options.items())
    return f"algorithm={{type: distillation, teacher: {{path: {folder}}}{given}}}"


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """Folders of trained policies by their kind of head; the flow is wider than the student's."""
    folders = {}
    for kind, options in TAUGHT.items():
        folder = tmp_path_factory.mktemp(kind)
        train(folder, "seed=5", "steps=2", "optim.lr=0.03", "task.rewards=[{name: random}]", *options, base=ROBOTS)
        folders[kind] = folder / "final"
    return folders


def prepared(folder, *options):
    """A trainer, and the micro-batch of its first step with unequal lengths of episodes."""
    trainer = make(folder, "engine.micro_batch=16", "task.train_size=60", *options, base=ROBOTS)
    made = Metrics(trainer.engine)
    rollouts = trainer.collector.next(0, made)
    parts, _ = trainer.preparation.minibatches(rollouts, 0, torch.Generator().manual_seed(0), made)
    assert len({int(row) for row in rollouts.mask.sum(1)}) > 1
    return trainer, parts[0][0]


def opened(folder, *options):
    """The policy that a job with these options would start from."""
    config = load(ROBOTS, [f"run_dir={folder}", "model.build=null", f"model.path={folder}", *options])
    return build.build_policy(config, build.build_task(config))


@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("kind", ["token", "gaussian", "flow"])
def test_sampled_actions_are_compared_with_the_teacher_s_likelihoods(tmp_path, teachers, kind, direction):
    """The loss is the mean over executed decisions, its gradient that of torch through the student's log p."""
    trainer, micro = prepared(tmp_path, distilled(teachers[kind], direction=direction), *LEARNS[kind])
    policy, teacher = trainer.policy, opened(teachers[kind], *TAUGHT[kind])
    ours = policy.replay(micro, policy.module).logp[micro.mask]
    with torch.no_grad():
        theirs = teacher.replay(micro, teacher.module).logp[micro.mask]
    gap = ours - theirs
    assert gap.abs().max() > 0.01
    weight = gap.detach() if direction == "reverse" else -(theirs - ours.detach()).clamp(-20, 20).exp()
    probe = under(trainer, trainer.config)
    _, statistics = probe.losses(micro, probe.algorithm.denominators(micro))
    shown = gap if direction == "reverse" else weight * gap
    close(statistics["distillation/kl"][micro.mask], shown.detach(), atol=1e-4)
    loss = (weight * (ours if direction == "reverse" else gap)).mean()
    trained = [p for p in policy.module.parameters() if p.requires_grad]
    slopes = torch.autograd.grad(loss, trained, allow_unused=True)
    right = torch.cat([slope.flatten() for slope in slopes if slope is not None])
    assert right.norm() > 1e-3
    close(gradient(probe, micro), right, atol=1e-4 * float(right.norm()))
    release(trainer)


@pytest.mark.parametrize("estimator", ["velocity", "exact"])
def test_denoising_steps_are_compared_with_a_wider_teacher_s(tmp_path, teachers, estimator):
    trainer, micro = prepared(tmp_path, distilled(teachers["flow"], estimator=estimator), *LEARNS["flow"])
    policy, teacher = trainer.policy, opened(teachers["flow"], *TAUGHT["flow"])
    count = [sum(p.numel() for p in one.module.head.parameters()) for one in (policy, teacher)]
    assert count[1] > count[0]
    with torch.no_grad():
        ours, theirs = (one.replay(micro, one.module).prediction[micro.mask] for one in (policy, teacher))
    steps = [policy_step for episode in micro.inputs for policy_step in episode]
    valid = torch.stack([step.valid for step in steps]).repeat_interleave(policy.module.head.decisions, 0)
    assert not valid.all()  # the end of an episode cuts a chunk short: its other actions do not count
    squares = (ours - theirs).square()[..., 0] * valid
    expected = squares.sum(1)  # likelihood.reduction=sum
    if estimator == "exact":
        points = torch.stack([step.sampled["points"] for step in steps]).flatten()
        at = policy.module.head.sampler.stochastic_coefficients(points)
        expected *= at.a_v.flatten().square() / (2 * at.std.flatten().square())
    assert expected.max() > 1e-3
    probe = under(trainer, trainer.config)
    losses, statistics = probe.losses(micro, probe.algorithm.denominators(micro))
    close(statistics["distillation/kl"][micro.mask], expected, atol=1e-5)
    close(sum(losses.values()).detach(), expected.mean(), atol=1e-5)
    release(trainer)


def test_a_student_learns_what_its_teacher_does_and_goes_on_exactly(tmp_path, teachers):
    """Rewards do not matter: the student comes nearer to the teacher, also after it was stopped."""
    options = (distilled(teachers["token"]), "rollout.group_size=1", "rollout.prompts=16", "optim.lr=0.01")
    train(tmp_path / "whole", *options, "steps=12", base=ROBOTS)
    distances = [row["distillation/kl"] for row in metrics(tmp_path / "whole") if "loss" in row]
    assert len(distances) == 12 and sum(distances[-3:]) < 0.7 * sum(distances[:3])
    train(tmp_path / "parts", *options, "steps=5", "checkpoint.every=5", base=ROBOTS)
    train(tmp_path / "parts", *options, "steps=12", "checkpoint.every=5", base=ROBOTS, resume=True)
    whole, parts = (load_file(tmp_path / run / "final" / WEIGHTS) for run in ("whole", "parts"))
    assert distance(whole, parts) == 0
    again = [row["distillation/kl"] for row in metrics(tmp_path / "parts") if "loss" in row]
    assert again == distances


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("action.head={type: token, bins: 4}",), r"trained with action\.head\.bins=8, the model has 4"),
        (("action.head.type=gaussian",), r"trained with action\.head\.type=token, the model has gaussian"),
        (("action.chunk=2",), r"trained with action\.chunk=4, the model has 2"),
        (("action.proprioception=false",), r"trained with action\.proprioception=True, the model has False"),
    ],
)
def test_a_teacher_of_other_decisions_is_refused_before_the_first_step(tmp_path, teachers, options, message):
    with pytest.raises(UserError, match=rf"algorithm\.teacher: teacher .*{message}"):
        make(tmp_path, distilled(teachers["token"]), *options, base=ROBOTS)


def test_a_model_whose_head_no_run_trained_is_no_teacher(tmp_path):
    """It would teach what random numbers say."""
    build_robot(tmp_path / "untrained", 0)
    with pytest.raises(UserError, match=r"untrained has no trained action head of type token; take the folder final"):
        make(tmp_path / "run", distilled(tmp_path / "untrained"), base=ROBOTS)


def test_what_a_teacher_of_actions_does_not_have_is_named(tmp_path, teachers):
    taught = (
        f"algorithm={{type: distillation, teacher: {{path: {teachers['flow']}, guidance: 2}}, estimator: velocity}}"
    )
    with pytest.raises(UserError, match=r"teacher\.guidance is for models that denoise images"):
        make(tmp_path, taught, *LEARNS["flow"], base=ROBOTS)
    with pytest.raises(UserError, match="teachers that judge its tokens"):
        load(ROBOTS, [f"run_dir={tmp_path}", distilled(teachers["token"], estimator="full")])


def test_a_teacher_that_reads_observations_otherwise_is_refused(tmp_path, teachers):
    """Its words have other numbers."""
    folder = tmp_path / "other"
    folder.mkdir()
    for file in teachers["token"].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "small_vla.json").read_text())
    config["words"] = config["words"][::-1]
    (folder / "small_vla.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"makes other inputs \(.+\) of an observation"):
        train(tmp_path / "run", distilled(folder), base=ROBOTS)


def test_a_teacher_for_another_robot_is_refused(tmp_path, teachers):
    """Its actions stand for other movements: 1 is 2 in the robot's units."""
    student, teacher = (opened(teachers["token"], *TAUGHT["token"]) for _ in range(2))
    check_reads_alike("X", student, teacher)
    teacher.normalizer = ActionStatistics(q01=np.array([-2.0]), q99=np.array([2.0]), mask=np.array([True]))
    with pytest.raises(UserError, match="teacher X converts actions to the robot's units by other statistics"):
        check_reads_alike("X", student, teacher)


def test_a_student_that_keeps_no_images_has_no_teacher(tmp_path, teachers):
    student = opened(teachers["token"], *TAUGHT["token"])
    student.caches_prefixes = True
    with pytest.raises(UserError, match=r"train a part of the backbone \(model\.freeze\)"):
        student.teachers.check(str(teachers["token"]), None)


MIDDLE = [
    "model.build=mmrl.tasks.manipulation.tiny_model:build_states",
    "task={type: manipulation, simulator: gymnasium, tasks: [default], rows: 64}",
    "task.options={env: 'tests.sims.middle:mmrl/Middle-v0', instruction: reach the middle, image: null, state: state, "
    "success: is_success, max_steps: 8}",
    "action={head: {type: gaussian}, chunk: 1, proprioception: true}",
    "engine.micro_batch=64",
    "evaluation={every: 0, before: true, prompts: 200}",
]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_student_learns_what_its_teacher_can_without_rewards(tmp_path, seed):
    """Success on 200 held-out starts of a Gymnasium environment. The control is a teacher that has learned nothing."""
    ends = {}
    trained = ("steps=15", "optim={lr: 2e-3}", "rollout={prompts: 8, group_size: 16}", f"seed={seed + 10}")
    train(tmp_path / "teacher", *MIDDLE, *trained, base=ROBOTS)
    train(tmp_path / "control", *MIDDLE, "steps=1", "optim={lr: 1e-12}", f"seed={seed + 20}", base=ROBOTS)
    for name in ("teacher", "control"):
        options = (distilled(tmp_path / name / "final"), "steps=15", "optim={lr: 3e-3}", f"seed={seed}")
        train(tmp_path / f"from {name}", *MIDDLE, *options, "rollout={prompts: 128, group_size: 1}", base=ROBOTS)
        seen = [
            row["evaluation/accuracy"] for row in metrics(tmp_path / f"from {name}") if "evaluation/accuracy" in row
        ]
        ends[name] = (seen[0], seen[-1])
    assert ends["teacher"][1] > ends["teacher"][0] + 0.5 and ends["control"][1] < ends["control"][0] + 0.1
