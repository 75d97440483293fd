"""Converts recipes of SimpleVLA-RL (scripts) and cosmos-rl (TOML) for robots, and earlier configurations of mmrl, into
present configurations."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mmrl import moved
from mmrl.cli.external_files import Settings, flat, number
from mmrl.cli.former_kinds import with_present_kinds
from mmrl.config import validate
from mmrl.errors import UserError
from mmrl.settings import recipes

SUITES = {"libero_spatial": 10, "libero_object": 10, "libero_goal": 10, "libero_10": 10, "libero_90": 90}
HORIZON = 512  # actions of an episode, in both systems


@dataclass
class Converted:
    """A converted configuration. ours: mmrl's settings by dotted keys. remarks: comments for its user. without: keys of
    the other system that have no counterpart, with the reason where there is one."""

    ours: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    without: dict[str, str] = field(default_factory=dict)

    @property
    def tree(self) -> dict[str, Any]:
        tree: dict[str, Any] = {}
        for key, value in self.ours.items():
            *above, last = key.split(".")
            node = tree
            for name in above:
                node = node.setdefault(name, {})
            node[last] = value
        return tree

    def text(self, origin: str) -> str:
        """Returns the YAML text, with remarks as comments. Raises UserError if it is not a valid configuration."""
        validate(self.tree, f"{origin} as converted")
        lines = [f"# Converted from {origin}.", *(f"# {remark}" for remark in self.remarks)]
        if self.without:
            lines.append("# Without a counterpart here:")
            lines += [f"#   {key}" + (f": {why}" if why else "") for key, why in self.without.items()]
        return "\n".join(lines) + "\n" + yaml.safe_dump(self.tree, sort_keys=False, default_flow_style=None)


Rule = str | Callable[[Any, Converted, Settings], None]


def convert_former(path: Path) -> str:
    """Returns the text of an earlier mmrl configuration with present names of modules, classes, kinds and recipes;
    comments stay. Raises UserError for a file that can not be read or is not a mapping."""
    try:
        before = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {error}") from None
    text = re.sub(
        r"\b(extends|warm_start): *([\w./-]+)\.yaml",
        lambda match: _recipe(match, path.parent),
        moved.update_names(before),
    )
    try:
        if not isinstance(yaml.safe_load(text), dict):
            raise UserError(f"{path}: expected a mapping at the top level")
        return with_present_kinds(text)
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None


def _recipe(match: re.Match[str], folder: Path) -> str:
    """Returns the matched key with the name of a shipped recipe in place of the former path of its file."""
    name = Path(match[2]).name
    exists = (folder / f"{match[2]}.yaml").is_file()
    return f"{match[1]}: {name}" if not exists and name in recipes.shipped() else match[0]


def convert(path: Path) -> Converted:
    """Converts a robot recipe of cosmos-rl (.toml) or SimpleVLA-RL (a shell script). Raises UserError for others."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {error}") from None
    if path.suffix == ".toml":
        try:
            settings = flat(tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise UserError(f"{path}: {error}") from None
        return applied(settings, COSMOS, MEMORY_OF_COSMOS, path, "vla.vla_type", "cosmos-rl")
    settings = script(text)
    if "actor_rollout_ref.model.vla" not in settings:
        raise UserError(
            f"{path}: no configuration of verl, EasyR1, TRL, ms-swift, flow_grpo, RLinf or SimpleVLA-RL, nor a "
            "TOML of cosmos-rl; configs/coming_from.md has their keys and mmrl's"
        )
    return applied(settings, SIMPLEVLA, MEMORY_OF_SIMPLEVLA, path, "actor_rollout_ref.model.vla", "SimpleVLA-RL")


def applied(
    settings: Settings, rules: Mapping[str, Rule], memory: tuple[str, ...], path: Path, needed: str, system: str
) -> Converted:
    """Applies the rule of each key to it: a name copies the value, a function sets several keys. Keys without a rule
    are listed as without a counterpart. Raises UserError where `needed` is missing."""
    if needed not in settings:
        raise UserError(f"{path}: {needed} is not set, so this is not a recipe of {system} for a robot")
    converted = Converted(ours={"run_dir": f"runs/{path.stem}", **COMMON})
    for key, value in settings.items():
        rule = rules.get(key)
        if isinstance(rule, str):
            converted.ours[rule] = value
        elif rule is not None:
            rule(value, converted, settings)
        elif key.startswith(memory):
            converted.without[key] = "how memory and processes are shared out; see engine and configs/scaling.md"
        else:
            converted.without[key] = ""
    for key, value in converted.ours.items():
        if isinstance(value, str) and "$" in value:
            converted.remarks.append(f"{key}={value}: the script does not say what that is.")
    return converted


# --- files of other systems ---


def script(text: str) -> Settings:
    """Returns the overrides of a script's command, with the script's variables filled in. Others stay as $NAME."""
    variables = dict(re.findall(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(\S*)\s*(?:#.*)?$", text, re.MULTILINE))
    values = {name: value.strip("\"'") for name, value in variables.items()}

    def filled(value: str) -> str:
        return re.sub(r"\$\{?([A-Za-z_]\w*)\}?", lambda match: values.get(match[1], match[0]), value)

    settings: Settings = {}
    for key, value in re.findall(r"^\s*\+*([a-z_]+(?:\.\w+)+)=(.*?)\s*\\?$", text, re.MULTILINE):
        tokens = shlex.split(filled(filled(value)))
        settings[key] = yaml.safe_load(tokens[0]) if tokens else None
    return {key: number(value) for key, value in settings.items()}


# --- rules of both ---

COMMON: dict[str, Any] = {
    "model.type": "vision_language_action",
    "model.dtype": "bfloat16",
    "task.type": "manipulation",
    "task.simulator": "libero",
    "task.options": {"image_size": 256, "step_limit": "simplevla"},
    "action.horizon": HORIZON,
    "action.proprioception": False,
    "engine.zero_stage": 1,
    "engine.micro_batch": 1,
    "engine.steps_at_once": 4,  # all policy steps of an episode at once do not fit with a 7B model
}


def suite(value: str, converted: Converted, settings: Settings) -> None:
    """Sets task and evaluation of one of LIBERO's suites, all its tasks with their 50 published starts."""
    if value not in SUITES:
        raise UserError(f"the suite {value} has no simulator here; there are {', '.join(SUITES)}")
    converted.ours |= {
        "task.options": {"suites": [value], **converted.ours["task.options"]},
        "task.tasks": [f"{value}/{i}" for i in range(SUITES[value])],
        "task.eval_size": 50 * SUITES[value],
        "evaluation.prompts": 50 * SUITES[value],
    }
    converted.remarks.append(
        "Training starts are drawn from seeds; the published ones, on which the recipe trains, are for evaluation only."
    )


def kind_of_policy(value: str, converted: Converted, settings: Settings) -> None:
    heads = {"openvla-oft": "bidirectional", "openvla": "autoregressive"}
    if value not in heads:
        raise UserError(f"a policy of kind {value} can not be converted; there are {', '.join(heads)}")
    converted.ours["action.head"] = {"type": "token", "decoding": heads[value]}


def weights(value: str, converted: Converted, settings: Settings) -> None:
    converted.ours |= {"model.path": value, "action.statistics": value}
    converted.remarks.append(f"action.statistics={value} must be a folder with dataset_statistics.json.")


def images(value: int, converted: Converted, settings: Settings) -> None:
    """Sets one or two cameras of LIBERO."""
    if value not in (1, 2):
        raise UserError(f"num_images_in_input={value}: LIBERO has two cameras")
    if value == 2:
        cameras = ["agentview", "robot0_eye_in_hand"]
        converted.ours |= {
            "action.cameras": cameras,
            "task.options": converted.ours["task.options"] | {"cameras": cameras},
        }


def crop(value: bool, converted: Converted, settings: Settings) -> None:
    converted.ours |= {"action.center_crop": 0.9 if value else 1.0, "action.resize": "openvla"}


def term(name: str) -> Rule:
    def add(value: float, converted: Converted, settings: Settings) -> None:
        if value:
            converted.ours.setdefault("algorithm.terms", []).append({"type": name, "coefficient": value})

    return add


def estimator(value: str, converted: Converted, settings: Settings) -> None:
    if value not in ("grpo", "rloo"):
        raise UserError(f"advantages by {value} can not be converted; there are grpo and rloo")
    if value == "rloo":
        converted.ours |= {"algorithm.baseline": "leave_one_out", "algorithm.scale": "none"}


# --- SimpleVLA-RL ---


def dynamic_sampling(value: bool, converted: Converted, settings: Settings) -> None:
    if value:
        low, high = settings.get("data.accuracy_lower_bound", 0.0), settings.get("data.accuracy_upper_bound", 1.0)
        converted.ours["rollout.dynamic_sampling"] = {"low": low, "high": high}


def updates(value: int, converted: Converted, settings: Settings) -> None:
    episodes = int(settings["data.train_batch_size"]) * int(settings["data.n_samples"])
    converted.ours["algorithm.minibatches"] = max(1, episodes // int(value))


def nothing(value: object, converted: Converted, settings: Settings) -> None:
    """Sets nothing: another key says the same."""


A, R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
SIMPLEVLA: dict[str, Rule] = {
    "data.task_suite_name": suite,
    "data.n_samples": "rollout.group_size",
    "data.train_batch_size": "rollout.prompts",
    "data.filter_accuracy": dynamic_sampling,
    "data.accuracy_lower_bound": nothing,
    "data.accuracy_upper_bound": nothing,
    "actor_rollout_ref.model.path": weights,
    "actor_rollout_ref.model.vla": kind_of_policy,
    "actor_rollout_ref.model.action_chunks_len": "action.chunk",
    "actor_rollout_ref.model.action_token_len": nothing,  # the simulator's
    A + "optim.lr": "optim.lr",
    A + "ppo_mini_batch_size": updates,
    A + "traj_mini_batch_size": "engine.micro_batch",
    A + "grad_clip": "optim.clip_grad_norm",
    A + "clip_ratio_low": "algorithm.surrogate.low",
    A + "clip_ratio_high": "algorithm.surrogate.high",
    A + "entropy_coeff": term("entropy"),
    A + "num_images_in_input": images,
    R + "num_images_in_input": images,
    R + "use_proprio": "action.proprioception",
    R + "temperature": "rollout.temperature",
    R + "unnorm_key": "action.statistics_key",
    R + "center_crop": crop,
    R + "task_suite_name": nothing,
    R + "pretrained_checkpoint": nothing,
    R + "num_steps_wait": nothing,  # the simulator waits so long too
    "algorithm.adv_estimator": estimator,
    "algorithm.kl_ctrl.kl_coef": term("kl"),
    "trainer.test_freq": "evaluation.every",
    "trainer.save_freq": "checkpoint.every",
    "trainer.default_local_dir": "run_dir",
}
MEMORY_OF_SIMPLEVLA = (
    *(f"{A}fsdp", f"{A}ppo_micro", f"{A}ppo_max", f"{A}use_dynamic", f"{R}gpu", f"{R}micro", f"{R}val_micro"),
    *(f"{R}log_prob", f"{R}tensor", f"{R}free", "actor_rollout_ref.ref.", "trainer.n_gpus", "trainer.nnodes"),
    *("actor_rollout_ref.model.enable_gradient", "actor_rollout_ref.model.use_remove"),
)

# --- cosmos-rl ---


def batch(value: int, converted: Converted, settings: Settings) -> None:
    replicas, group = settings.get("policy.parallelism.n_init_replicas", 1), settings["rollout.n_generation"]
    converted.ours |= {"rollout.prompts": int(value) * int(replicas) // int(group), "rollout.group_size": group}


def double_clip(value: float, converted: Converted, settings: Settings) -> None:
    converted.ours |= {"algorithm.surrogate.type": "dual_clip", "algorithm.surrogate.cap": value}


COSMOS: dict[str, Rule] = {
    "train.output_dir": "run_dir",
    "train.epsilon": "optim.eps",
    "train.optm_lr": "optim.lr",
    "train.optm_weight_decay": "optim.weight_decay",
    "train.optm_betas": "optim.betas",
    "train.optm_warmup_steps": "optim.warmup_steps",
    "train.optm_grad_norm_clip": "optim.clip_grad_norm",
    "train.param_dtype": "model.dtype",
    "train.train_batch_per_replica": batch,
    "rollout.n_generation": nothing,
    "policy.model_name_or_path": weights,
    "train.train_policy.dataset.subset": suite,
    "train.train_policy.temperature": nothing,
    "rollout.sampling_config.temperature": "rollout.temperature",
    "train.train_policy.epsilon_low": "algorithm.surrogate.low",
    "train.train_policy.epsilon_high": "algorithm.surrogate.high",
    "train.train_policy.lower_bound_ratio": double_clip,
    "train.train_policy.kl_beta": term("kl"),
    "train.train_policy.mu_iterations": "algorithm.epochs",
    "train.train_policy.mini_batch": "engine.micro_batch",
    "train.ckpt.save_freq": "checkpoint.every",
    "validation.freq": "evaluation.every",
    "vla.vla_type": kind_of_policy,
    "vla.use_proprio": "action.proprioception",
    "vla.num_images_in_input": images,
    "vla.training_chunk_size": "engine.steps_at_once",
    "vla.num_envs": "task.rows",
}
MEMORY_OF_COSMOS = (
    *("policy.parallelism", "rollout.parallelism", "train.fsdp", "train.compile", "train.async_tp", "rollout.gpu"),
    *("train.master_dtype", "train.transfer_dtype", "policy.model_gradient", "rollout.enforce", "rollout.enable"),
)
