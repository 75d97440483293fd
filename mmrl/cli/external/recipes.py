"""Converts configurations of verl, EasyR1, TRL, ms-swift, flow_grpo and RLinf into mmrl's, key by key.

`mmrl/settings/external_keys.json` maps each of their keys to [library, key of mmrl, rule]. The rule is the name of a
function in RULES, for keys whose value must be converted too. A key a.b.c is looked up as a.b.c, b.c and c, in this
order; an entry LIBRARY:KEY takes precedence over KEY. Messages about unknown keys read the same table.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmrl import settings as settings_package
from mmrl.cli.convert import INFRASTRUCTURE, ROBOT_SETTINGS, Converted, Settings, set_crop, set_suite
from mmrl.cli.external import part_rules as parts
from mmrl.cli.external import rules
from mmrl.cli.external.files import read_settings
from mmrl.cli.external.rules import Rule
from mmrl.errors import UserError

_KEY_PATTERN = re.compile(r"^[a-z_]+(\.[a-z_]+)*$")


@dataclass(frozen=True)
class Library:
    """Another library whose configurations can be converted.

    signature_keys: a file with one of these keys is the library's; a name that ends with a dot stands for every key
    that begins with it.
    defaults: its default values that differ from mmrl's, by key. fixed: settings of mmrl that every converted file
    gets. skipped_prefixes: beginnings of keys that have no counterpart in mmrl, with the reason.
    """

    name: str
    signature_keys: tuple[str, ...]
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    skipped_prefixes: Mapping[str, str] = field(default_factory=dict)

    def matches(self, settings: Settings) -> bool:
        """Returns whether the settings of a file have one of the library's signature keys. A signature that ends with a
        dot stands for all keys that begin with it."""
        return any(
            key.startswith(signature) if signature.endswith(".") else key == signature
            for key in settings
            for signature in self.signature_keys
        )


EVALUATION = "evaluation is greedy; evaluation.temperature"
ROBOT_SKIPPED = {
    "cluster.": INFRASTRUCTURE,
    "hydra.": "",
    "env.eval.": "task.eval_size and evaluation.prompts",
    "critic.": "",
}
QUESTION_SETTINGS: dict[str, Any] = {"task.type": "visual_qa", "engine.zero_stage": 2}
A, R = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
LIBRARIES = (
    Library(
        "verl",
        ("actor_rollout_ref.",),
        {
            "data.train_batch_size": 1024,
            f"{A}ppo_mini_batch_size": 256,
            f"{A}clip_ratio": 0.2,
            f"{A}loss_agg_mode": "token-mean",
            f"{A}kl_loss_coef": 1e-3,
            f"{A}optim.lr": 1e-6,
            f"{R}n": 1,
            "algorithm.norm_adv_by_std_in_grpo": True,
        },
        QUESTION_SETTINGS,
        {
            "actor_rollout_ref.ref.": INFRASTRUCTURE,
            "critic.": "the critic of algorithm.type=ppo is a head of the policy",
            "reward_model.": "rewards are in task.rewards",
            "ray_init.": INFRASTRUCTURE,
            f"{R}val_kwargs.": EVALUATION,
        },
    ),
    Library(
        "EasyR1",
        ("worker.",),
        {
            "worker.actor.clip_ratio_low": 0.2,
            "worker.actor.clip_ratio_high": 0.3,
            "worker.actor.clip_ratio_dual": 3.0,
            "worker.rollout.n": 1,
            "worker.rollout.name": "vllm",
        },
        QUESTION_SETTINGS,
        {
            "worker.ref.": INFRASTRUCTURE,
            "worker.critic.": "the critic of algorithm.type=ppo is a head of the policy",
            "worker.rollout.val_override_config.": EVALUATION,
        },
    ),
    Library("RLinf", ("runner.", "actor.model.num_action_chunks"), {}, ROBOT_SETTINGS, ROBOT_SKIPPED),
    Library(
        "flow_grpo",
        ("pretrained.", "sample."),
        {
            "sample.noise_level": 0.7,
            "train.learning_rate": 3e-4,
            "train.clip_range": 1e-4,
            "train.beta": 0.0,
            "num_epochs": 100_000,
        },
        {"model.type": "diffusion", "task.type": "image_generation", "engine.zero_stage": 1},
    ),
    Library(
        "ms-swift",
        ("rlhf_type", "train_type", "tuner_type", "swift_version"),
        {"num_generations": 8, "beta": 0.04, "epsilon": 0.2, "loss_type": "grpo", "max_completion_length": 512},
        QUESTION_SETTINGS,
    ),
    Library(
        "TRL",
        ("num_generations", "model_name_or_path", "max_completion_length"),
        {
            "num_generations": 8,
            "beta": 0.0,
            "epsilon": 0.2,
            "loss_type": "dapo",
            "learning_rate": 1e-6,
            "per_device_train_batch_size": 8,
            "max_completion_length": 256,
        },
        QUESTION_SETTINGS,
    ),
)


def library_of(settings: Settings) -> Library | None:
    """Returns the library whose configuration `settings` are; None if no library matches."""
    if "actor_rollout_ref.model.vla" in settings or "extends" in settings:
        return None  # SimpleVLA-RL, and mmrl's own
    return next((library for library in LIBRARIES if library.matches(settings)), None)


def convert_external(path: Path) -> Converted | None:
    """Converts a configuration file of one of LIBRARIES. Returns None if it belongs to none of them.

    Raises UserError if the file cannot be read, or has a value without a counterpart in mmrl.
    """
    settings = read_settings(path)
    library = library_of(settings)
    if library is None:
        return None
    try:
        return convert_settings(library, settings, Path(str(path).replace(".py:", "_")).stem)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def convert_settings(library: Library, settings: Settings, name: str) -> Converted:
    """Converts the settings of a library. settings: by dotted keys. name: the run directory below runs/, if none is
    set."""
    table = external_key_table()
    converted = Converted(settings={"run_dir": f"runs/{name}", **library.fixed})
    defaults = {key: value for key, value in library.defaults.items() if not _present(key, settings)}
    complete = settings | defaults
    converted.comments.append(f"Converted from {library.name}: check task, data and rewards.")
    if defaults:
        assignments = ", ".join(f"{key}={value}" for key, value in defaults.items())
        converted.comments.append(f"{library.name}'s defaults of keys that the file leaves out: {assignments}.")
    for key, value in complete.items():
        _convert_key(library, key, value, converted, complete, table)
    if library.name == "RLinf":
        _set_robot(complete, converted)
    _fill_in_missing(library, converted)
    return converted


def external_key_table() -> dict[str, list[str]]:
    """Reads the table of other libraries' keys: [library, mmrl's key], or [library, mmrl's key, name of a rule]."""
    file = Path(settings_package.__file__).with_name("external_keys.json")
    table: dict[str, list[str]] = json.loads(file.read_text())
    return table


def _present(key: str, settings: Settings) -> bool:
    """Returns whether the settings have a key with the last part of `key`, or one that takes its place."""
    last = key.rpartition(".")[2]
    alternatives = {"clip_ratio": "clip_ratio_low", "epsilon": "epsilon_low", "num_epochs": "max_steps"}
    names = (last, alternatives.get(last))
    return any(other.rpartition(".")[2] in names for other in settings)


def _convert_key(
    library: Library, key: str, value: Any, converted: Converted, settings: Settings, table: Mapping[str, list[str]]
) -> None:
    """Converts one key of another library: into a key of mmrl, by a rule, or to the unmatched keys.

    settings: all settings of the file by dotted keys. table: see `external_key_table`.
    """
    reason = next((reason for prefix, reason in library.skipped_prefixes.items() if key.startswith(prefix)), None)
    entry = _entry(library, key, table) if reason is None else None
    if reason is not None:
        converted.unmatched[key] = reason
    elif entry is None:
        converted.unmatched[key] = ""
    elif len(entry) > 2:  # [library, mmrl's key, name of a rule]; most have no rule
        RULES[entry[2]](value, converted, settings)
    elif _KEY_PATTERN.match(entry[1]):
        if value is not None:
            converted.settings[entry[1]] = value
    else:
        converted.unmatched[key] = f"is {entry[1]} here" if value not in (None, False) else ""


def _entry(library: Library, key: str, table: Mapping[str, list[str]]) -> list[str] | None:
    """Returns the table's entry for the longest suffix of a dotted key; None if it has none."""
    parts = key.split(".")
    suffixes = [".".join(parts[start:]) for start in range(len(parts))]
    names = [name for suffix in suffixes for name in (f"{library.name}:{suffix}", suffix)]
    return next((table[name] for name in names if name in table), None)


def _fill_in_missing(library: Library, converted: Converted) -> None:
    """Adds data and rewards where the file names none, each with a comment that asks the user to replace them. Adds a
    comment for each value with a variable that the file does not set."""
    if library.fixed.get("task.type") == "visual_qa":
        data = converted.settings.setdefault("task.data", {})
        if "type" not in data:
            data |= {"type": "files", "train": "train.jsonl", "eval": "eval.jsonl"}
            converted.comments.append("task.data: the file names no data; write the paths of your questions here.")
        if data["type"] == "files" and "eval" not in data:
            data["eval"] = data["train"]
            converted.comments.append("task.data.eval is the training file; replace it by held-out questions.")
        if "task.rewards" not in converted.settings:
            converted.settings |= {"task.rewards": [{"name": "math"}], "task.accuracy": {"name": "math"}}
            converted.comments.append(
                f"task.rewards: the file names none; {library.name} chooses them by the data set. Check that math fits."
            )
    for key, value in converted.settings.items():
        if isinstance(value, str) and "$" in value:
            converted.comments.append(f"{key}={value}: the file does not set this variable; write the value here.")


def _set_robot(settings: Settings, converted: Converted) -> None:
    """Sets the simulator and the policy of an embodied RLinf recipe. Raises UserError if mmrl has no such simulator or
    policy."""
    suite_name = settings.get("env.train.task_suite_name") or _default_environment(settings.get("defaults"))
    if suite_name is None:
        raise UserError(
            "`defaults` names no training environment (env/train: NAME), so this is not a robot recipe of RLinf; its "
            "other recipes cannot be converted"
        )
    set_suite(re.sub(r"_(grpo|ppo).*$", "", str(suite_name)), converted, settings)
    converted.settings["action.head"] = {"type": "token", "decoding": _token_decoding(settings)}
    converted.settings.setdefault("action.center_crop", 1.0)


def _default_environment(defaults: Any) -> str | None:
    """Returns the training environment among Hydra's defaults: `env/train: NAME`, or `env/NAME@env.train`."""
    for default in defaults if isinstance(defaults, list) else []:
        if isinstance(default, Mapping) and "env/train" in default:
            return str(default["env/train"])
        if isinstance(default, str) and default.startswith("env/") and default.endswith("@env.train"):
            return default.removeprefix("env/").removesuffix("@env.train")
    return None


def _token_decoding(settings: Settings) -> str:
    """Returns how RLinf's policy decodes action tokens. Raises UserError for a policy that mmrl does not have."""
    model = str(next((value for key, value in settings.items() if key.endswith(("model_name", "model_type"))), ""))
    decodings = {"openvla_oft": "bidirectional", "openvla": "autoregressive"}
    if model not in decodings:
        problem = f"the policy {model} cannot be converted" if model else "model_type is not set"
        raise UserError(f"{problem}; set model_type or model_name to one of {', '.join(decodings)}")
    return decodings[model]


RULES: dict[str, Rule] = {
    "ignore": rules.ignore,
    "set_minibatches": rules.set_minibatches,
    "set_trl_batch": rules.set_trl_batch,
    "set_flow_grpo_batch": rules.set_flow_grpo_batch,
    "note_epochs": rules.note_epochs,
    "set_steps": rules.set_steps,
    "set_warmup_ratio": rules.set_warmup_ratio,
    "set_warmup_steps": rules.set_warmup_steps,
    "evaluation_interval": rules.interval_rule("evaluation.every"),
    "checkpoint_interval": rules.interval_rule("checkpoint.every"),
    "set_estimator": rules.set_estimator,
    "set_advantage_scale": rules.set_advantage_scale,
    "set_global_std": rules.set_global_std,
    "set_loss_reduction": rules.set_loss_reduction,
    "set_loss_type": rules.set_loss_type,
    "set_clip_range": rules.set_clip_range,
    "set_dual_clip": rules.set_dual_clip,
    "add_k3_kl": rules.add_k3_kl,
    "add_exact_kl": rules.add_exact_kl,
    "add_kl_loss": rules.add_kl_loss,
    "add_kl": rules.add_kl,
    "set_kl_in_reward": rules.set_kl_in_reward,
    "add_entropy": rules.add_entropy,
    "set_ratio_level": rules.set_ratio_level,
    "set_dynamic_sampling": rules.set_dynamic_sampling,
    "set_truncation_mask": rules.set_truncation_mask,
    "top_p": rules.truncation_rule("top_p"),
    "top_k": rules.truncation_rule("top_k"),
    "set_dtype": parts.set_dtype,
    "set_attention": parts.set_attention,
    "set_lora": parts.set_lora,
    "freeze_vision": parts.freeze_rule("vision"),
    "freeze_connector": parts.freeze_rule("connector"),
    "freeze_language": parts.freeze_rule("language"),
    "set_zero_stage": parts.set_zero_stage,
    "set_full_shard": parts.set_full_shard,
    "set_offload": parts.set_offload,
    "set_generator": parts.set_generator,
    "train_files": parts.data_files_rule("train"),
    "eval_files": parts.data_files_rule("eval"),
    "set_dataset": parts.set_dataset,
    "prompt_column": parts.column_rule("problem_field", "prompt", "problem"),
    "answer_column": parts.column_rule("answer_field", "answer"),
    "image_column": parts.column_rule("image_field", "images"),
    "set_flow_grpo_prompts": parts.set_flow_grpo_prompts,
    "set_rewards": parts.set_rewards,
    "verl_reward_function": parts.reward_function_rule("verl", "custom_reward_function.name", "compute_score"),
    "easyr1_reward_function": parts.reward_function_rule("easyr1", "reward_function_name", "main"),
    "set_betas": parts.set_betas,
    "set_lr_schedule": parts.set_lr_schedule,
    "set_transition": parts.set_transition,
    "set_window": parts.set_window,
    "set_trained_steps": parts.set_trained_steps,
    "set_ema": parts.set_ema,
    "set_resolution": parts.set_resolution,
    "evaluate_before": rules.switch_rule(evaluation__before=True),
    "set_robot_prompts": parts.set_robot_prompts,
    "set_robot_weights": parts.set_robot_weights,
    "set_crop": set_crop,
    "set_run_dir": parts.set_run_dir,
    "set_wandb": parts.set_wandb,
    "set_pixel_bounds": parts.set_pixel_bounds,
}
