"""Converts recipes of SimpleVLA-RL (scripts) and cosmos-rl (TOML) for robots, and earlier configurations of mmrl, into
current configurations."""

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
from mmrl.cli.external.files import Settings, flatten, number
from mmrl.cli.former_kinds import with_current_names
from mmrl.config import validate
from mmrl.errors import UserError
from mmrl.settings import recipes

# The number of tasks in each suite.
LIBERO_SUITES = {"libero_spatial": 10, "libero_object": 10, "libero_goal": 10, "libero_10": 10, "libero_90": 90}
HORIZON = 512  # the most actions in an episode, in SimpleVLA-RL and in cosmos-rl
INFRASTRUCTURE = "how memory and processes are shared out; see engine and configs/scaling.md"


@dataclass
class Converted:
    """A configuration of another system, converted into mmrl's.

    settings: mmrl's settings by dotted keys. comments: lines for the top of the file. unmatched: keys of the other
    system that have no counterpart in mmrl, each with the reason or "".
    """

    settings: dict[str, Any] = field(default_factory=dict)
    comments: list[str] = field(default_factory=list)
    unmatched: dict[str, str] = field(default_factory=dict)

    @property
    def tree(self) -> dict[str, Any]:
        """Returns `settings` as nested mappings: {"a.b": 1} becomes {"a": {"b": 1}}."""
        tree: dict[str, Any] = {}
        for key, value in self.settings.items():
            *parents, last = key.split(".")
            node = tree
            for name in parents:
                node = node.setdefault(name, {})
            node[last] = value
        return tree

    def text(self, origin: str) -> str:
        """Returns the YAML text of the configuration, with comments at the top. origin: the file it was converted from.

        Raises UserError if it is not a valid configuration.
        """
        validate(self.tree, f"{origin} as converted")
        lines = [f"# Converted from {origin}.", *(f"# {comment}" for comment in self.comments)]
        if self.unmatched:
            lines.append("# Without a counterpart here:")
            lines += [f"#   {key}" + (f": {reason}" if reason else "") for key, reason in self.unmatched.items()]
        return "\n".join(lines) + "\n" + yaml.safe_dump(self.tree, sort_keys=False, default_flow_style=None)


# The key of mmrl that gets the value, or a function (value, converted, source) that writes into `converted`.
Rule = str | Callable[[Any, Converted, Settings], None]


def convert_former(path: Path) -> str:
    """Reads a configuration of an earlier mmrl and returns its text with current names of modules, classes, types and
    recipes. Comments stay. Raises UserError if the file cannot be read or is not a mapping."""
    try:
        old_text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {error}") from None
    text = re.sub(
        r"\b(extends|warm_start): *([\w./-]+)\.yaml",
        lambda match: _recipe(match, path.parent),
        moved.update_names(old_text),
    )
    try:
        if not isinstance(yaml.safe_load(text), dict):
            raise UserError(f"{path}: expected a mapping at the top level, such as lines of KEY: VALUE")
        return with_current_names(text)
    except yaml.YAMLError as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None


def _recipe(match: re.Match[str], folder: Path) -> str:
    """Returns `KEY: NAME` of a shipped recipe for a match of `KEY: PATH/NAME.yaml`; the matched text where that file
    exists in `folder`, or no shipped recipe has the name."""
    name = Path(match[2]).name
    exists = (folder / f"{match[2]}.yaml").is_file()
    return f"{match[1]}: {name}" if not exists and name in recipes.shipped() else match[0]


def convert_robot_recipe(path: Path) -> Converted:
    """Converts a robot recipe of cosmos-rl (.toml) or SimpleVLA-RL (a shell script).

    Raises UserError if the file cannot be read or is neither.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {error}") from None
    if path.suffix == ".toml":
        try:
            source = flatten(tomllib.loads(text))
        except tomllib.TOMLDecodeError as error:
            raise UserError(f"{path}: {error}") from None
        return convert_with_rules(source, COSMOS, COSMOS_INFRASTRUCTURE, path, "vla.vla_type", "cosmos-rl")
    source = script_settings(text)
    if "actor_rollout_ref.model.vla" not in source:
        raise UserError(
            f"{path} is not a configuration of verl, EasyR1, TRL, ms-swift, flow_grpo, RLinf, SimpleVLA-RL or "
            "cosmos-rl, so it cannot be converted; configs/coming_from.md lists their keys and mmrl's"
        )
    return convert_with_rules(
        source, SIMPLEVLA, SIMPLEVLA_INFRASTRUCTURE, path, "actor_rollout_ref.model.vla", "SimpleVLA-RL"
    )


def convert_with_rules(
    source: Settings,
    rules: Mapping[str, Rule],
    infrastructure_prefixes: tuple[str, ...],
    path: Path,
    required_key: str,
    system: str,
) -> Converted:
    """Converts the settings of a robot recipe by one rule for each key.

    source: the settings in the recipe by dotted keys. rules: the key of mmrl that gets the value, or a function
    that sets keys. infrastructure_prefixes: beginnings of keys about memory and processes. path: the file, for the run
    directory and messages. required_key: a key that every robot recipe of `system` sets. Keys without a rule go to
    `unmatched`. Raises UserError if `required_key` is missing.
    """
    if required_key not in source:
        raise UserError(
            f"{path}: {required_key} is not set, so this is not a recipe of {system} for a robot; no others can be "
            "converted"
        )
    converted = Converted(settings={"run_dir": f"runs/{path.stem}", **ROBOT_SETTINGS})
    for key, value in source.items():
        rule = rules.get(key)
        if isinstance(rule, str):
            converted.settings[rule] = value
        elif rule is not None:
            try:
                rule(value, converted, source)
            except UserError as error:
                raise UserError(f"{path}: {key}: {error}") from None
        elif key.startswith(infrastructure_prefixes):
            converted.unmatched[key] = INFRASTRUCTURE
        else:
            converted.unmatched[key] = ""
    for key, value in converted.settings.items():
        if isinstance(value, str) and "$" in value:
            converted.comments.append(f"{key}={value}: the script does not set this variable; write the value here.")
    return converted


# --- files of other systems ---


def script_settings(text: str) -> Settings:
    """Returns the KEY=VALUE arguments in a shell script. Variables that the script sets are filled in; others stay as
    $NAME."""
    variables = dict(re.findall(r"^\s*(?:export\s+)?([A-Za-z_]\w*)=(\S*)\s*(?:#.*)?$", text, re.MULTILINE))
    values = {name: value.strip("\"'") for name, value in variables.items()}

    def fill_variables(value: str) -> str:
        """Replaces $NAME and ${NAME} by the variable's value, if the script sets it."""
        return re.sub(r"\$\{?([A-Za-z_]\w*)\}?", lambda match: values.get(match[1], match[0]), value)

    source: Settings = {}
    for key, value in re.findall(r"^\s*\+*([a-z_]+(?:\.\w+)+)=(.*?)\s*\\?$", text, re.MULTILINE):
        tokens = shlex.split(fill_variables(fill_variables(value)))  # twice: a variable may contain another one
        source[key] = yaml.safe_load(tokens[0]) if tokens else None
    return {key: number(value) for key, value in source.items()}


# --- rules for SimpleVLA-RL and cosmos-rl ---

ROBOT_SETTINGS: dict[str, Any] = {
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


def set_suite(value: str, converted: Converted, source: Settings) -> None:
    """Sets the task and the evaluation: all tasks of a LIBERO suite, evaluated on their 50 published initial states.

    Raises UserError if `value` is not a LIBERO suite.
    """
    if value not in LIBERO_SUITES:
        raise UserError(f"mmrl has no simulator for the suite {value}; choose one of {', '.join(LIBERO_SUITES)}")
    converted.settings |= {
        "task.options": {"suites": [value], **converted.settings["task.options"]},
        "task.tasks": [f"{value}/{i}" for i in range(LIBERO_SUITES[value])],
        "task.eval_size": 50 * LIBERO_SUITES[value],
        "evaluation.prompts": 50 * LIBERO_SUITES[value],
    }
    converted.comments.append(
        "Training starts from random initial states; the published ones, on which the recipe trains, are for "
        "evaluation only."
    )


def set_policy_type(value: str, converted: Converted, source: Settings) -> None:
    """Sets the action head of OpenVLA or OpenVLA-OFT. Raises UserError for any other policy."""
    heads = {"openvla-oft": "bidirectional", "openvla": "autoregressive"}
    if value not in heads:
        raise UserError(f"a policy of type {value} cannot be converted; choose one of {', '.join(heads)}")
    converted.settings["action.head"] = {"type": "token", "decoding": heads[value]}


def set_weights(value: str, converted: Converted, source: Settings) -> None:
    converted.settings |= {"model.path": value, "action.statistics": value}
    converted.comments.append(f"action.statistics={value} must be a folder with dataset_statistics.json.")


def set_cameras(value: int, converted: Converted, source: Settings) -> None:
    """Sets the cameras of the policy: the front one, or with value 2 also the one at the gripper.

    Raises UserError if `value` is neither 1 nor 2.
    """
    if value not in (1, 2):
        raise UserError(f"the policy cannot read {value} images, since LIBERO has two cameras; set 1 or 2")
    if value == 2:
        cameras = ["agentview", "robot0_eye_in_hand"]
        converted.settings |= {
            "action.cameras": cameras,
            "task.options": converted.settings["task.options"] | {"cameras": cameras},
        }


def set_crop(value: bool, converted: Converted, source: Settings) -> None:
    converted.settings |= {"action.center_crop": 0.9 if value else 1.0, "action.resize": "openvla"}


def term_rule(name: str) -> Rule:
    """Returns a rule that adds the loss term `name` with the value as coefficient; a value of 0 adds none."""

    def add(value: float, converted: Converted, source: Settings) -> None:
        if value:
            converted.settings.setdefault("algorithm.terms", []).append({"type": name, "coefficient": value})

    return add


def set_estimator(value: str, converted: Converted, source: Settings) -> None:
    """Sets baseline and scale from the name of the advantage estimator. Raises UserError for an unknown one."""
    if value not in ("grpo", "rloo"):
        raise UserError(f"the estimator {value} cannot be converted; choose grpo or rloo")
    if value == "rloo":
        converted.settings |= {"algorithm.baseline": "leave_one_out", "algorithm.scale": "none"}


# --- SimpleVLA-RL ---


def set_dynamic_sampling(value: bool, converted: Converted, source: Settings) -> None:
    """Enables dynamic sampling if the value is true, with the bounds on a group's accuracy."""
    if value:
        low, high = source.get("data.accuracy_lower_bound", 0.0), source.get("data.accuracy_upper_bound", 1.0)
        converted.settings["rollout.dynamic_sampling"] = {"low": low, "high": high}


def set_minibatches(value: int, converted: Converted, source: Settings) -> None:
    """Sets the number of minibatches from their size in episodes."""
    episodes = int(source["data.train_batch_size"]) * int(source["data.n_samples"])
    converted.settings["algorithm.minibatches"] = max(1, episodes // int(value))


def ignore(value: object, converted: Converted, source: Settings) -> None:
    """Sets nothing: another key sets the same."""


A, R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
SIMPLEVLA: dict[str, Rule] = {
    "data.task_suite_name": set_suite,
    "data.n_samples": "rollout.group_size",
    "data.train_batch_size": "rollout.prompts",
    "data.filter_accuracy": set_dynamic_sampling,
    "data.accuracy_lower_bound": ignore,
    "data.accuracy_upper_bound": ignore,
    "actor_rollout_ref.model.path": set_weights,
    "actor_rollout_ref.model.vla": set_policy_type,
    "actor_rollout_ref.model.action_chunks_len": "action.chunk",
    "actor_rollout_ref.model.action_token_len": ignore,  # mmrl takes the size of an action from the simulator
    A + "optim.lr": "optim.lr",
    A + "ppo_mini_batch_size": set_minibatches,
    A + "traj_mini_batch_size": "engine.micro_batch",
    A + "grad_clip": "optim.clip_grad_norm",
    A + "clip_ratio_low": "algorithm.surrogate.low",
    A + "clip_ratio_high": "algorithm.surrogate.high",
    A + "entropy_coeff": term_rule("entropy"),
    A + "num_images_in_input": set_cameras,
    R + "num_images_in_input": set_cameras,
    R + "use_proprio": "action.proprioception",
    R + "temperature": "rollout.temperature",
    R + "unnorm_key": "action.statistics_key",
    R + "center_crop": set_crop,
    R + "task_suite_name": ignore,
    R + "pretrained_checkpoint": ignore,
    R + "num_steps_wait": ignore,  # mmrl's simulator waits as many steps
    "algorithm.adv_estimator": set_estimator,
    "algorithm.kl_ctrl.kl_coef": term_rule("kl"),
    "trainer.test_freq": "evaluation.every",
    "trainer.save_freq": "checkpoint.every",
    "trainer.default_local_dir": "run_dir",
}
SIMPLEVLA_INFRASTRUCTURE = (
    *(f"{A}fsdp", f"{A}ppo_micro", f"{A}ppo_max", f"{A}use_dynamic", f"{R}gpu", f"{R}micro", f"{R}val_micro"),
    *(f"{R}log_prob", f"{R}tensor", f"{R}free", "actor_rollout_ref.ref.", "trainer.n_gpus", "trainer.nnodes"),
    *("actor_rollout_ref.model.enable_gradient", "actor_rollout_ref.model.use_remove"),
)

# --- cosmos-rl ---


def set_prompts_and_group(value: int, converted: Converted, source: Settings) -> None:
    """Sets prompts and group size from the rollouts of a step on each replica."""
    replicas, group = source.get("policy.parallelism.n_init_replicas", 1), source["rollout.n_generation"]
    converted.settings |= {"rollout.prompts": int(value) * int(replicas) // int(group), "rollout.group_size": group}


def set_dual_clip(value: float, converted: Converted, source: Settings) -> None:
    converted.settings |= {"algorithm.surrogate.type": "dual_clip", "algorithm.surrogate.cap": value}


COSMOS: dict[str, Rule] = {
    "train.output_dir": "run_dir",
    "train.epsilon": "optim.eps",
    "train.optm_lr": "optim.lr",
    "train.optm_weight_decay": "optim.weight_decay",
    "train.optm_betas": "optim.betas",
    "train.optm_warmup_steps": "optim.warmup_steps",
    "train.optm_grad_norm_clip": "optim.clip_grad_norm",
    "train.param_dtype": "model.dtype",
    "train.train_batch_per_replica": set_prompts_and_group,
    "rollout.n_generation": ignore,
    "policy.model_name_or_path": set_weights,
    "train.train_policy.dataset.subset": set_suite,
    "train.train_policy.temperature": ignore,
    "rollout.sampling_config.temperature": "rollout.temperature",
    "train.train_policy.epsilon_low": "algorithm.surrogate.low",
    "train.train_policy.epsilon_high": "algorithm.surrogate.high",
    "train.train_policy.lower_bound_ratio": set_dual_clip,
    "train.train_policy.kl_beta": term_rule("kl"),
    "train.train_policy.mu_iterations": "algorithm.epochs",
    "train.train_policy.mini_batch": "engine.micro_batch",
    "train.ckpt.save_freq": "checkpoint.every",
    "validation.freq": "evaluation.every",
    "vla.vla_type": set_policy_type,
    "vla.use_proprio": "action.proprioception",
    "vla.num_images_in_input": set_cameras,
    "vla.training_chunk_size": "engine.steps_at_once",
    "vla.num_envs": "task.rows",
}
COSMOS_INFRASTRUCTURE = (
    *("policy.parallelism", "rollout.parallelism", "train.fsdp", "train.compile", "train.async_tp", "rollout.gpu"),
    *("train.master_dtype", "train.transfer_dtype", "policy.model_gradient", "rollout.enforce", "rollout.enable"),
)
