"""Configurations of verl, EasyR1, TRL, ms-swift, flow_grpo and RLinf, in the shapes in which they are published, become
ours: the converted file loads, and its values are those that were written."""

import pytest

from mmrl.cli.external.files import python_settings, read_settings
from mmrl.cli.external.recipes import LIBRARIES, RULES, convert_external, external_key_table
from mmrl.cli.main import main
from mmrl.config import load
from mmrl.errors import UserError

VERL = """
set -x
ENGINE=${1:-vllm}
MODEL=Qwen/Qwen2.5-VL-7B-Instruct
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=rloo \\
    data.train_files=/data/geo3k/train.parquet \\
    data.val_files=/data/geo3k/test.parquet \\
    data.train_batch_size=512 \\
    data.max_prompt_length=1024 \\
    data.max_response_length=2048 \\
    data.filter_overlong_prompts=True \\
    data.image_key=images \\
    actor_rollout_ref.model.path=$MODEL \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=128 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=10 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.01 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.actor.clip_ratio_high=0.28 \\
    actor_rollout_ref.actor.entropy_coeff=0 \\
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm \\
    actor_rollout_ref.rollout.name=$ENGINE \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
    actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.rollout.val_kwargs.n=4 \\
    actor_rollout_ref.ref.fsdp_config.param_offload=True \\
    algorithm.kl_ctrl.kl_coef=0.001 \\
    +trainer.val_before_train=True \\
    trainer.logger='["console","wandb"]' \\
    trainer.project_name='geo' \\
    trainer.save_freq=-1 \\
    trainer.test_freq=5 \\
    trainer.total_training_steps=60 \\
    trainer.total_epochs=15 $@
"""
EASYR1 = """
data: {train_files: hiyouga/geometry3k@train, val_files: hiyouga/geometry3k@test, prompt_key: problem,
  answer_key: label, image_key: images, rollout_batch_size: 64, max_prompt_length: 2048, max_response_length: 1024,
  max_pixels: 4194304,
  format_prompt: ./examples/format_prompt/math.jinja, seed: 1}
algorithm: {adv_estimator: grpo, disable_kl: true, use_kl_loss: true, kl_coef: 1.0e-2, online_filtering: true,
  filter_low: 0.01, filter_high: 0.99}
worker:
  actor: {global_batch_size: 16, micro_batch_size_per_device_for_update: 4, max_grad_norm: 0.5,
    model: {model_path: "", enable_gradient_checkpointing: true, freeze_vision_tower: true},
    optim: {lr: 2.0e-6, weight_decay: 1.0e-2}, fsdp: {enable_full_shard: true}}
  rollout: {n: 5, temperature: 0.9, gpu_memory_utilization: 0.5}
  reward: {reward_function: "./examples/reward_function/math.py:compute_score"}
trainer: {max_steps: null, val_freq: -1, save_freq: 7, save_limit: 3}
"""
TRL = """
accelerate launch --config_file=zero3.yaml --num_processes 4 grpo_vlm.py \\
  --model_name_or_path Qwen/Qwen2.5-VL-3B-Instruct --dataset_name lmms-lab/multimodal-open-r1-8k-verified \\
  --num_generations 4 --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --steps_per_generation 16 \\
  --learning_rate 1e-5 --lr_scheduler_type cosine --warmup_ratio 0.1 --max_steps 50 --bf16 --gradient_checkpointing \\
  --reward_funcs think_format_reward accuracy_reward --reward_weights 0.2 0.8 --beta 0.04 --epsilon 0.2 \\
  --epsilon_high 0.28 --loss_type dr_grpo --scale_rewards none --importance_sampling_level sequence \\
  --mask_truncated_completions --use_peft --lora_r 64 --lora_alpha 128 --lora_target_modules "q_proj" "v_proj" \\
  --use_vllm --vllm_mode server --output_dir out/grpo --top_p 0.95 --log_completions --vllm_odd 3
"""
SWIFT = """
CUDA_VISIBLE_DEVICES=0,1 \\
NPROC_PER_NODE=2 \\
swift rlhf \\
    --rlhf_type grpo \\
    --model Qwen/Qwen2.5-VL-7B-Instruct \\
    --external_plugins examples/train/grpo/plugin/plugin.py \\
    --reward_funcs external_r1v_acc format \\
    --train_type full \\
    --freeze_vit true \\
    --torch_dtype bfloat16 \\
    --dataset 'AI-ModelScope/clevr_cogen_a_train#1000' \\
    --max_completion_length 256 \\
    --per_device_train_batch_size 8 \\
    --num_generations 8 \\
    --temperature 1.2 \\
    --deepspeed zero3_offload \\
    --system 'Think first.' \\
    --attn_impl flash_attn \\
    --dynamic_sample false
"""
FLOW = """
import ml_collections
import os
import imp

base = imp.load_source("base", os.path.join(os.path.dirname(__file__), "base.py"))

def shared():
    config = base.get_config()
    config.pretrained.model = "stabilityai/stable-diffusion-3.5-medium"
    config.use_lora = True
    config.sample.batch_size = 8
    config.reward_fn = {"jpeg_compressibility": 1}
    return config

def geneval_fast():
    gpu_number = 32
    config = shared()
    config.dataset = os.path.join(os.getcwd(), "dataset/geneval")
    config.sample.num_steps = 10
    config.sample.eval_num_steps = 40
    config.sample.guidance_scale = 4.5
    config.resolution = 512
    config.sample.train_batch_size = 9
    config.sample.num_image_per_prompt = 24
    config.sample.num_batches_per_epoch = int(
        48/(gpu_number*config.sample.train_batch_size/config.sample.num_image_per_prompt))
    assert config.sample.num_batches_per_epoch % 2 == 0, "even"
    config.train.batch_size = config.sample.train_batch_size
    config.train.gradient_accumulation_steps = config.sample.num_batches_per_epoch//2
    config.train.num_inner_epochs = 1
    config.train.clip_range = 1e-5
    config.train.beta = 0.02
    config.sample.global_std = True
    config.sample.noise_level = 0.8
    config.sample.sde_window_size = 3
    config.sample.sde_window_range = (0, config.sample.num_steps//2)
    config.sample.sde_type = "cps"
    config.train.ema = True
    config.save_freq = 60 # epoch
    config.eval_freq = 30
    config.save_dir = f"logs/geneval/{config.resolution}"
    config.reward_fn = {"geneval": 0.5, "pickscore": 1.0}
    config.prompt_fn = "geneval"
    config.per_prompt_stat_tracking = True
    return config

def get_config(name):
    return globals()[name]()
"""
RLINF = """
defaults:
  - env/train: libero_10_grpo
  - env/eval: libero_10
runner: {task_type: embodied, max_epochs: 300, max_steps: -1, val_check_interval: -1, save_interval: 25,
  logger: {experiment_name: oft, logger_backends: [tensorboard]}}
algorithm: {group_size: 8, num_group_envs: 8, rollout_epoch: 16, adv_type: grpo, loss_type: grpo,
  loss_agg_func: token-mean, kl_beta: 0.0, entropy_bonus: 0, clip_ratio_high: 0.28, clip_ratio_low: 0.2,
  clip_ratio_c: 3.0, reward_coef: 5.0, filter_rewards: true, rewards_lower_bound: 0.5, rewards_upper_bound: 4.5,
  sampling_params: {temperature_train: 1.6, top_k: -1, top_p: 1.0}}
env: {group_name: EnvGroup, channel: {name: env_buffer_list}}
rollout: {channel: {name: "${env.channel.name}"}, model_dir: /models/oft}
actor:
  checkpoint_load_path: /models/oft
  micro_batch_size: 32
  global_batch_size: 16384
  seed: 1234
  model: {model_name: openvla_oft, num_action_chunks: 8, use_proprio: false, unnorm_key: libero_10_no_noops,
    center_crop: true, precision: bf16, gradient_checkpointing: true}
  optim: {lr: 2.0e-5, adam_beta1: 0.9, adam_beta2: 0.99, adam_eps: 1.0e-05, clip_grad: 0.5}
critic: {use_critic_model: false}
"""


def converted(folder, text, name, function=""):
    (folder / name).write_text(text)
    ours = convert_external(folder / (name + function))
    (folder / "ours.yaml").write_text(ours.text(name))
    return ours, load(folder / "ours.yaml")


def terms(config):
    return [(term.type, term.coefficient.value, term.estimator) for term in config.algorithm.terms]


def bounds(config):
    return config.algorithm.surrogate.low.value, config.algorithm.surrogate.high.value


def test_a_script_of_verl(tmp_path):
    ours, config = converted(tmp_path, VERL, "verl.sh")
    rollout, algorithm = config.rollout, config.algorithm
    assert (rollout.prompts, rollout.group_size, rollout.max_prompt_length) == (512, 5, 1024)
    assert rollout.max_response_length.value == 2048 and algorithm.minibatches == 4  # 512 prompts in updates of 128
    assert (algorithm.baseline.type, algorithm.scale.type, algorithm.reduce) == ("leave_one_out", "none", "constant")
    assert bounds(config) == (0.2, 0.28) and terms(config) == [("kl", 0.01, "k3")]  # its own default below
    assert (rollout.generator.type, rollout.generator.memory) == ("vllm_colocated", 0.6)
    assert (config.model.path, config.optim.lr) == ("Qwen/Qwen2.5-VL-7B-Instruct", 1e-6)
    data = config.task.data
    assert (data.type, str(data.train), str(data.eval)) == (
        "files",
        "/data/geo3k/train.parquet",
        "/data/geo3k/test.parquet",
    )
    assert (config.steps, config.evaluation.every, config.checkpoint.every) == (60, 5, 0)
    assert config.evaluation.before and config.log.wandb == "geo" and config.engine.micro_batch == 10
    assert ours.unmatched["actor_rollout_ref.rollout.val_kwargs.n"].startswith("evaluation is greedy")
    assert {"data.filter_overlong_prompts", "actor_rollout_ref.ref.fsdp_config.param_offload"} <= set(ours.unmatched)


def test_a_file_of_easyr1_and_its_script(tmp_path):
    ours, config = converted(tmp_path, EASYR1, "config.yaml")
    assert (config.rollout.prompts, config.rollout.group_size, config.algorithm.minibatches) == (64, 5, 4)
    assert terms(config) == []  # disable_kl
    assert (config.algorithm.surrogate.type, *bounds(config)) == ("dual_clip", 0.2, 0.3)  # its own defaults
    low_high = config.rollout.dynamic_sampling
    assert (low_high.low, low_high.high, config.rollout.temperature.value) == (0.01, 0.99, 0.9)
    data = config.task.data
    assert (data.type, data.name, data.train_split, data.eval_split) == (
        "huggingface",
        "hiyouga/geometry3k",
        "train",
        "test",
    )
    assert (data.problem_field, data.answer_field) == ("problem", "label")
    assert config.model.processor == {"max_pixels": 4194304} and list(config.model.freeze) == ["vision"]
    assert config.engine.zero_stage == 3 and config.optim.clip_grad_norm == 0.5 and config.checkpoint.keep == 3
    reward = config.task.rewards[0]
    assert (reward.name, reward.signature) == ("examples.reward_function.math:compute_score", "easyr1")
    assert ours.unmatched["data.format_prompt"] == "is task.instruction and task.system here"
    script = "python3 -m verl.trainer.main \\\n  config=config.yaml worker.rollout.n=7 worker.actor.optim.lr=5e-7\n"
    _, changed = converted(tmp_path, script, "run.sh")
    assert (changed.rollout.group_size, changed.optim.lr, changed.rollout.prompts) == (7, 5e-7, 64)


def test_the_arguments_of_trl(tmp_path):
    ours, config = converted(tmp_path, TRL, "grpo.sh")
    assert config.rollout.prompts == 32  # 2 x 4 processes x 16 responses, in groups of 4
    assert (config.rollout.group_size, config.engine.micro_batch, config.algorithm.minibatches) == (4, 2, 2)
    assert (config.algorithm.reduce, config.algorithm.scale.type, config.algorithm.level) == (
        "constant",
        "none",
        "sequence",
    )
    assert bounds(config) == (0.2, 0.28) and terms(config) == [("kl", 0.04, "k3")]
    assert (config.optim.schedule, config.optim.warmup_steps, config.steps) == ("cosine", 5, 50)
    assert [(spec.name, spec.weight) for spec in config.task.rewards] == [("think_answer", 0.2), ("math", 0.8)]
    assert config.task.accuracy.name == "math"
    lora = config.model.lora
    assert (lora.rank, lora.alpha, list(lora.targets)) == (64, 128, ["q_proj", "v_proj"])
    assert (config.model.dtype, config.rollout.generator.type, config.run_dir) == (
        "bfloat16",
        "vllm_server",
        "out/grpo",
    )
    assert (config.rollout.top_p, config.rollout.allow_truncated_sampling) == (0.95, True)
    assert [mask.type for mask in config.algorithm.masks] == ["truncated"]
    assert set(ours.unmatched) == {"config_file", "vllm_odd"}


def test_a_script_of_ms_swift(tmp_path):
    ours, config = converted(tmp_path, SWIFT, "grpo.sh")
    assert (config.rollout.prompts, config.rollout.group_size, config.rollout.temperature.value) == (2, 8, 1.2)
    assert config.model.lora is None and list(config.model.freeze) == ["vision"]
    assert (config.model.dtype, config.model.attention) == ("bfloat16", "flash_attention_2")
    assert (config.engine.zero_stage, config.engine.offload) == (3, "all")
    assert terms(config) == [("kl", 0.04, "k3")] and config.algorithm.reduce == "sequence_mean"  # its own defaults
    assert config.task.data.name == "AI-ModelScope/clevr_cogen_a_train" and config.task.system == "Think first."
    first, second = config.task.rewards
    assert (first.name, first.signature, second.name) == ("rewards:external_r1v_acc", "trl", "think_answer")
    assert config.task.accuracy.name == "rewards:external_r1v_acc"
    assert any("external_r1v_acc is your own function" in comment for comment in ours.comments)


def test_a_function_of_flow_grpo(tmp_path):
    with pytest.raises(
        UserError, match=r"name one as .*grpo.py:FUNCTION, where FUNCTION is one of shared, geneval_fast"
    ):
        converted(tmp_path, FLOW, "grpo.py")
    ours, config = converted(tmp_path, FLOW, "grpo.py", ":geneval_fast")
    # 48 / (32 x 9 / 24) = 4 batches of 9 images on 32 GPUs are 1152 images, 48 prompts; 2 of the 4 are accumulated.
    assert (config.rollout.prompts, config.rollout.group_size, config.algorithm.minibatches) == (48, 24, 2)
    denoising = config.section("denoising")
    assert (denoising.steps, denoising.evaluation_steps, denoising.guidance) == (10, 40, 4.5)
    assert (denoising.likelihood.transition.type, denoising.likelihood.transition.noise) == ("cps", 0.8)
    window = denoising.likelihood.window
    assert (window.type, window.size, window.first, window.last) == ("random", 3, 0, 5)
    assert bounds(config) == (1e-5, 1e-5) and terms(config) == [("kl", 0.02, "exact")]
    assert (config.algorithm.scale.type, config.optim.ema, config.optim.lr) == ("batch_std", 0.9, 3e-4)
    assert (config.model.path, config.model.lora.rank) == ("stabilityai/stable-diffusion-3.5-medium", 32)
    assert [(spec.name, spec.weight) for spec in config.task.rewards] == [("geneval", 0.5), ("pickscore", 1.0)]
    data = config.task.data
    assert (data.format, str(data.train), str(data.eval)) == (
        "geneval",
        "dataset/geneval/train_metadata.jsonl",
        "dataset/geneval/test_metadata.jsonl",
    )
    assert (config.run_dir, config.evaluation.every, config.checkpoint.every) == ("logs/geneval/512", 30, 60)
    assert "per_prompt_stat_tracking" in ours.unmatched


def test_nothing_of_a_python_file_is_run(tmp_path):
    lines = ("config.a = open('x', 'w')", "config.b = 2 ** 3", "config.c = config.d or 1", "return config")
    text = "def one():\n" + "".join(f"    {line}\n" for line in lines)
    found = python_settings(text, None, "one.py")
    assert found == {"a": "open('x', 'w')", "b": "2 ** 3", "c": "config.d or 1"}


def test_a_robot_of_rlinf(tmp_path):
    ours, config = converted(tmp_path, RLINF, "libero.yaml")
    assert (config.rollout.prompts, config.rollout.group_size) == (128, 8)  # 8 groups at once, 16 times
    assert (config.rollout.dynamic_sampling.low, config.rollout.dynamic_sampling.high) == (0.1, 0.9)  # of rewards of 5
    surrogate = config.algorithm.surrogate
    assert (surrogate.type, surrogate.cap, *bounds(config)) == ("dual_clip", 3.0, 0.2, 0.28)
    action = config.section("action")
    assert (action.head.decoding, action.chunk, action.statistics_key) == ("bidirectional", 8, "libero_10_no_noops")
    assert (action.center_crop, action.statistics, config.model.path) == (0.9, "/models/oft", "/models/oft")
    assert config.task.tasks == tuple(f"libero_10/{index}" for index in range(10))
    assert (config.optim.lr, config.optim.betas, config.optim.eps) == (2e-5, (0.9, 0.99), 1e-5)
    assert (config.steps, config.evaluation.every, config.checkpoint.every, config.seed) == (300, 0, 25, 1234)
    assert ours.unmatched["actor.global_batch_size"].startswith("is algorithm.minibatches")
    assert read_settings(tmp_path / "libero.yaml")["rollout.channel.name"] == "env_buffer_list"
    with pytest.raises(
        UserError, match="mmrl has no simulator for the suite maniskill_carrot; choose one of libero_spatial"
    ):
        converted(tmp_path, RLINF.replace("libero_10_grpo", "maniskill_carrot"), "other.yaml")
    with pytest.raises(UserError, match="the policy openpi cannot be converted"):
        converted(tmp_path, RLINF.replace("openvla_oft", "openpi"), "other.yaml")


def test_a_divergence_in_the_reward_and_whitened_advantages_of_verl(tmp_path):
    text = VERL.replace("=rloo", "=reinforce_plus_plus_baseline").replace("use_kl_loss=True", "use_kl_loss=False")
    text = text.replace("algorithm.kl_ctrl", "algorithm.use_kl_in_reward=True algorithm.kl_ctrl")
    _, config = converted(tmp_path, text, "verl.sh")
    (transform,) = config.algorithm.transforms
    assert (transform.type, transform.kl.coefficient.value, terms(config)) == ("kl_penalty", 0.001, [])
    assert (config.algorithm.scale.type, [one.type for one in config.algorithm.shapers]) == ("none", ["whitening"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            VERL.replace("=rloo", "=remax"),
            "adv_estimator=remax cannot be converted; choose one of grpo, rloo, gae, reinforce",
        ),
        (VERL.replace("low_var_kl", "mse"), "kl_loss_type=mse cannot be converted"),
        (
            TRL.replace("--num_generations 4", "--num_generations 5"),
            "is not a multiple of num_generations=5",
        ),
    ],
)
def test_what_has_nothing_like_it_is_refused_in_one_line(tmp_path, text, words):
    with pytest.raises(UserError) as error:
        converted(tmp_path, text, "theirs.sh")
    assert words in str(error.value) and "theirs.sh" in str(error.value) and "\n" not in str(error.value)


def test_the_command_writes_it_and_knows_other_files_apart(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text(EASYR1)
    with pytest.raises(SystemExit) as ended:
        main(["convert", str(tmp_path / "config.yaml"), "--out", str(tmp_path / "ours.yaml")])
    assert ended.value.code == 0 and "keys have no counterpart" in capsys.readouterr().out
    assert load(tmp_path / "ours.yaml").rollout.group_size == 5
    (tmp_path / "notes.sh").write_text("echo hello\n")
    with pytest.raises(SystemExit) as ended:
        main(["convert", str(tmp_path / "notes.sh")])
    assert ended.value.code == 2 and "is not a configuration of verl, EasyR1, TRL" in capsys.readouterr().err


def test_every_rule_of_the_table_exists_and_every_rule_is_used():
    named = {entry[2] for entry in external_key_table().values() if len(entry) > 2}
    assert named == set(RULES)
    systems = {key.partition(":")[0] for key in external_key_table() if ":" in key}
    assert systems <= {library.name for library in LIBRARIES}
