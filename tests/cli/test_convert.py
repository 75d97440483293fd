"""Recipes of SimpleVLA-RL and cosmos-rl become configurations of ours, key by key."""

from pathlib import Path

import pytest
import yaml

from mmrl.cli.convert import convert_robot_recipe
from mmrl.config import load
from mmrl.errors import UserError
from tests.helpers.command_line import mmrl

SCRIPT = """
export WANDB_MODE=offline
SFT_MODEL_PATH="/models/oft"
DATASET_NAME=libero_10
NUM_GPUS=8 # a node
SAMPLES=$MISSING
python -u -m verl.trainer.main_ppo \\
    data.task_suite_name=$DATASET_NAME \\
    data.num_trials_per_task=50 \\
    data.n_samples=4 \\
    data.filter_accuracy=True \\
    data.accuracy_lower_bound=0.1 \\
    data.accuracy_upper_bound=0.8 \\
    data.train_batch_size=64 \\
    actor_rollout_ref.model.path=${SFT_MODEL_PATH} \\
    actor_rollout_ref.model.vla=openvla-oft \\
    actor_rollout_ref.model.action_chunks_len=8 \\
    actor_rollout_ref.actor.optim.lr=5e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \\
    actor_rollout_ref.actor.ppo_micro_batch_size=$NUM_GPUS \\
    actor_rollout_ref.actor.clip_ratio_high=0.3 \\
    actor_rollout_ref.actor.clip_ratio_low=0.1 \\
    actor_rollout_ref.actor.entropy_coeff=0.002 \\
    actor_rollout_ref.rollout.temperature=1.6 \\
    actor_rollout_ref.rollout.unnorm_key=$DATASET_NAME \\
    actor_rollout_ref.rollout.use_proprio=True \\
    actor_rollout_ref.rollout.center_crop=True \\
    +algorithm.odd_key=3 \\
    algorithm.kl_ctrl.kl_coef=0.00 \\
    algorithm.adv_estimator=rloo \\
    trainer.default_local_dir=$CKPT/x \\
    trainer.test_freq=4
"""
TOML = """
redis = "12800"
[train]
output_dir = "./outputs/oft"
optm_lr = 5e-6
optm_betas = [0.9, 0.99]
optm_grad_norm_clip = 0.5
fsdp_offload = true
train_batch_per_replica = 128
[policy]
model_name_or_path = "someone/oft"
[policy.parallelism]
n_init_replicas = 2
[train.train_policy]
dataset.subset = "libero_spatial"
epsilon_low = 0.1
epsilon_high = 0.25
lower_bound_ratio = 10.0
kl_beta = 0.02
mu_iterations = 2
mini_batch = 16
[rollout]
n_generation = 8
[rollout.sampling_config]
temperature = 1.6
[vla]
vla_type = "openvla-oft"
use_proprio = false
num_images_in_input = 1
training_chunk_size = 16
continuous = false
"""


def written(folder, text, name):
    (folder / name).write_text(text)
    return folder / name


def test_a_script_of_simplevla(tmp_path):
    found = convert_robot_recipe(written(tmp_path, SCRIPT, "long.sh"))
    config = load(written(tmp_path, found.text("long.sh"), "ours.yaml"))
    rollout, action, algorithm = config.rollout, config.section("action"), config.algorithm
    assert (rollout.prompts, rollout.group_size, rollout.temperature.value) == (64, 4, 1.6)
    assert (rollout.dynamic_sampling.low, rollout.dynamic_sampling.high) == (0.1, 0.8)
    assert (algorithm.surrogate.low.value, algorithm.surrogate.high.value) == (0.1, 0.3)
    assert (algorithm.baseline.type, algorithm.scale.type) == ("leave_one_out", "none")
    assert algorithm.minibatches == 2  # 64 x 4 episodes in updates of 128
    assert [(term.type, term.coefficient.value) for term in algorithm.terms] == [("entropy", 0.002)]
    assert (action.head.type, action.head.decoding, action.chunk, action.horizon) == ("token", "bidirectional", 8, 512)
    assert (action.center_crop, action.statistics_key, action.proprioception) == (0.9, "libero_10", True)
    assert (config.model.path, action.statistics, config.optim.lr) == ("/models/oft", "/models/oft", 5e-6)
    assert config.task.tasks == tuple(f"libero_10/{i}" for i in range(10)) and config.evaluation.prompts == 500
    assert config.task.options == {"suites": ["libero_10"], "image_size": 256, "step_limit": "simplevla"}
    assert action.resize == "openvla" and action.cameras is None and config.evaluation.every == 4
    assert set(found.unmatched) == {
        "data.num_trials_per_task",
        "actor_rollout_ref.actor.ppo_micro_batch_size",
        "algorithm.odd_key",
    }
    assert any("run_dir=$CKPT/x: the script does not set this variable" in comment for comment in found.comments)
    assert any("published ones, on which the recipe trains" in comment for comment in found.comments)


def test_a_recipe_of_cosmos(tmp_path):
    found = convert_robot_recipe(written(tmp_path, TOML, "oft.toml"))
    text = found.text("oft.toml")
    config = load(written(tmp_path, text, "ours.yaml"))
    assert (config.rollout.prompts, config.rollout.group_size) == (32, 8)  # 2 x 128 episodes in groups of 8
    surrogate = config.algorithm.surrogate
    assert (surrogate.type, surrogate.cap, surrogate.low.value, surrogate.high.value) == ("dual_clip", 10, 0.1, 0.25)
    assert [(term.type, term.coefficient.value) for term in config.algorithm.terms] == [("kl", 0.02)]
    assert (config.algorithm.epochs, config.optim.clip_grad_norm, config.optim.betas) == (2, 0.5, (0.9, 0.99))
    assert (config.engine.micro_batch, config.engine.steps_at_once) == (16, 16)
    assert (config.run_dir, config.model.path) == ("./outputs/oft", "someone/oft")
    assert config.section("action").proprioception is False and len(config.task.tasks) == 10
    assert set(found.unmatched) == {
        "redis",
        "train.fsdp_offload",
        "policy.parallelism.n_init_replicas",
        "vla.continuous",
    }
    assert "#   vla.continuous\n" in text and "see engine and configs/scaling.md" in text


def test_a_policy_of_two_cameras(tmp_path):
    found = convert_robot_recipe(written(tmp_path, TOML.replace("in_input = 1", "in_input = 2"), "oft.toml"))
    config = load(written(tmp_path, found.text("oft.toml"), "ours.yaml"))
    both = ["agentview", "robot0_eye_in_hand"]
    assert config.section("action").cameras == both and config.task.options["cameras"] == both
    assert config.task.options["suites"] == ["libero_spatial"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.sh",
            "echo no recipe\n",
            "is not a configuration of verl, EasyR1, TRL, ms-swift, flow_grpo, RLinf, SimpleVLA-RL",
        ),
        ("a.toml", "[train]\noptm_lr = 1\n", "vla.vla_type is not set, so this is not a recipe of cosmos-rl"),
        ("a.toml", "[train\n", "a.toml: Expected"),
        (
            "a.toml",
            TOML.replace("libero_spatial", "robotwin"),
            "mmrl has no simulator for the suite robotwin; choose one of",
        ),
        ("a.toml", TOML.replace('"openvla-oft"', '"pi05"'), "a policy of type pi05 cannot be converted"),
        (
            "a.toml",
            TOML.replace("in_input = 1", "in_input = 3"),
            "num_images_in_input: the policy cannot read 3 images, since LIBERO has two cameras; set 1 or 2",
        ),
        ("a.sh", SCRIPT.replace("rloo", "gae"), "adv_estimator: the estimator gae cannot be converted"),
        ("a.toml", TOML.replace("optm_lr = 5e-6", "optm_lr = 0.0"), "a.toml as converted: optim.lr"),
    ],
)
def test_what_can_not_be_converted(tmp_path, name, text, message):
    with pytest.raises(UserError, match=message):
        convert_robot_recipe(written(tmp_path, text, name)).text(name)


def test_a_missing_file_is_one_line(tmp_path):
    done = mmrl(tmp_path, "convert", tmp_path / "absent.sh")
    assert done.code == 2 and done.err.count("\n") == 1 and "absent.sh" in done.err


def test_the_command(tmp_path):
    recipe = written(tmp_path, TOML, "oft.toml")
    shown = mmrl(tmp_path, "convert", recipe)
    kept = mmrl(tmp_path, "convert", recipe, "--out", tmp_path / "ours.yaml")
    assert shown.code == kept.code == 0 and "4 keys have no counterpart" in kept.out
    assert (tmp_path / "ours.yaml").read_text() == shown.out
    assert yaml.safe_load(shown.out)["rollout"]["prompts"] == 32


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is always full")
def test_a_command_whose_disk_is_full_is_one_line(tmp_path):
    recipe = tmp_path / "theirs.sh"
    recipe.write_text(SCRIPT)
    done = mmrl(tmp_path, "convert", recipe, "--out", "/dev/full")
    assert (done.code, done.err) == (2, "mmrl: No space left on device: nothing more is written\n")
