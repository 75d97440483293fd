"""Rules that convert settings of other libraries about the model, data, rewards, denoising and robots.

A rule is a function (value, converted, source), as in `rules`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mmrl.cli.convert import Converted, Settings, set_weights
from mmrl.cli.external.rules import Rule, get_setting
from mmrl.errors import UserError

# The names in mmrl of the values of sde_type in flow_grpo.
TRANSITIONS = {"sde": "flow_sde", "cps": "cps", "dance": "dance_sde"}
# The names in mmrl of rewards of TRL, ms-swift and flow_grpo.
REWARDS = {
    "accuracy_reward": "math",
    "accuracy": "math",
    "think_format_reward": "think_answer",
    "format": "think_answer",
    "clipscore": "clip_similarity",
    "jpeg_compressibility": "jpeg_compressibility",
    "jpeg_incompressibility": "jpeg_incompressibility",
    "aesthetic": "aesthetic",
    "pickscore": "pickscore",
    "geneval": "geneval",
    "ocr": "ocr",
}
DATA = "task.data"


# --- model and engine ---


def set_dtype(value: Any, converted: Converted, source: Settings) -> None:
    """Sets model.dtype to bfloat16 or float32. No value and "auto" set nothing; other types go to the unmatched
    keys."""
    dtypes = {"bf16": "bfloat16", "bfloat16": "bfloat16", "true": "bfloat16", "fp32": "float32", "float32": "float32"}
    name = dtypes.get(str(value).lower().removeprefix("torch."))
    if name is None and value not in (False, None, "auto", "no"):
        converted.unmatched["dtype"] = f"{value}; model.dtype is bfloat16 or float32"
    elif name is not None:
        converted.settings["model.dtype"] = name


def set_attention(value: Any, converted: Converted, source: Settings) -> None:
    """Sets model.attention; an implementation that mmrl does not have is left out."""
    implementations = {
        "flash_attn": "flash_attention_2",
        "flash_attention_2": "flash_attention_2",
        "sdpa": "sdpa",
        "eager": "eager",
    }
    if value in implementations:
        converted.settings["model.attention"] = implementations[value]


def set_lora(value: Any, converted: Converted, source: Settings) -> None:
    """Sets the LoRA of TRL (use_peft), ms-swift (train_type=lora), verl (lora_rank) and flow_grpo (use_lora)."""
    if value in (False, None, 0, "full"):
        return
    is_diffusion = "pretrained.model" in source
    # the default rank is 32 in flow_grpo, 16 in TRL (use_peft: true) and 8 in ms-swift
    rank = get_setting(source, "lora_r", "lora_rank", default=32 if is_diffusion else 16 if value is True else 8)
    targets = get_setting(source, "lora_target_modules", "target_modules", default=None)
    converted.settings["model.lora"] = {
        "rank": int(rank),
        "alpha": int(get_setting(source, "lora_alpha", default=64 if is_diffusion else 32)),
    }
    if targets not in (None, ["all-linear"]):
        converted.settings["model.lora"]["targets"] = targets
    elif is_diffusion:
        names = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
        converted.settings["model.lora"]["targets"] = list(names)


def freeze_rule(part: str) -> Rule:
    """Returns a rule that freezes a part of the model (vision, connector or language) if the value is true."""

    def freeze(value: Any, converted: Converted, source: Settings) -> None:
        if value:
            converted.settings["model.freeze"] = [*converted.settings.get("model.freeze", []), part]

    return freeze


def set_zero_stage(value: Any, converted: Converted, source: Settings) -> None:
    """Sets ZeRO stage and offload from the name of a DeepSpeed configuration file, such as zero3_offload."""
    match = re.search(r"zero_?([0-3])(_offload)?", str(value))
    if match is None:
        converted.comments.append(f"engine.zero_stage: set it to the stage in {value}.")
        return
    converted.settings["engine.zero_stage"] = int(match[1])
    if match[2]:
        converted.settings["engine.offload"] = "all" if match[1] == "3" else "optimizer"


def set_full_shard(value: Any, converted: Converted, source: Settings) -> None:
    converted.settings["engine.zero_stage"] = 3 if value else 2


def set_offload(value: Any, converted: Converted, source: Settings) -> None:
    if value and not converted.settings.get("engine.offload"):
        converted.settings |= {"engine.offload": "optimizer"}
        converted.settings.setdefault("engine.zero_stage", 2)


def set_generator(value: Any, converted: Converted, source: Settings) -> None:
    """Sets the generator from TRL's and ms-swift's use_vllm and vllm_mode, or from verl's rollout engine."""
    if value in (False, None, "hf"):
        return
    # colocated unless vllm_mode says "server"
    server = get_setting(source, "vllm_mode", default="colocate" if "vllm_mode" not in source else None) == "server"
    generator: dict[str, Any] = {"type": "vllm_server" if server else "vllm_colocated"}
    memory_share = get_setting(source, "vllm_gpu_memory_utilization", "gpu_memory_utilization")
    parallel = get_setting(
        source, "vllm_tensor_parallel_size", "tensor_model_parallel_size", "tensor_parallel_size", default=1
    )
    if memory_share is not None:
        generator["memory"] = float(memory_share)
    if server:
        generator["tensor_parallel"] = int(parallel)
    elif int(parallel) > 1:
        converted.unmatched["tensor_parallel_size"] = (
            "colocated engines have one GPU each; set rollout.generator=vllm_server for several"
        )
    converted.settings["rollout.generator"] = generator


# --- data and rewards ---


def data_files_rule(part: str) -> Rule:
    """Returns a rule that sets the questions from a file, or from NAME@SPLIT of a data set on the hub.

    part: train or eval.
    """

    def set_files(value: Any, converted: Converted, source: Settings) -> None:
        """Sets the questions from the first of the files, or from the data set, that `value` names."""
        file_names = list(value) if isinstance(value, list) else [value]
        if len(file_names) > 1:
            converted.comments.append(
                f"{DATA}.{part}: only the first of {len(file_names)} files is used; merge them into one."
            )
        data = converted.settings.setdefault(DATA, {})
        name, at, split = str(file_names[0]).partition("@")
        if at or (not re.search(r"\.(parquet|jsonl?|csv|tsv)$", name) and not name.startswith(("/", ".", "$", "~"))):
            # without @SPLIT the split is train, or test for questions to evaluate on
            data |= {"type": "huggingface", "name": name, f"{part}_split": split or {"eval": "test"}.get(part, part)}
        else:
            data |= {"type": "files", part: name}

    return set_files


def set_dataset(value: Any, converted: Converted, source: Settings) -> None:
    """Sets the data from dataset names of TRL and ms-swift: a file, or a data set on the hub with its two splits."""
    names = value if isinstance(value, list) else [value]
    name = str(names[0]).partition("#")[0].removeprefix("modelscope::").removeprefix("hf::")
    if re.search(r"\.(parquet|jsonl?|csv|tsv)$", name):
        held_out = get_setting(source, "val_dataset", default=None)
        converted.settings[DATA] = {"type": "files", "train": name, "eval": held_out or name}
        if held_out is None:
            converted.comments.append(f"{DATA}.eval is the training file; replace it by held-out questions.")
    else:
        train = get_setting(source, "dataset_train_split", default="train")
        held_out = get_setting(source, "dataset_test_split", default="test")
        converted.settings[DATA] = {"type": "huggingface", "name": name, "train_split": train, "eval_split": held_out}
    if len(names) > 1:
        converted.comments.append(f"{DATA}: only the first of {len(names)} data sets is used; merge them into one.")


def column_rule(key: str, *defaults: str) -> Rule:
    """Returns a rule that sets `key` of the data to a column's name, unless it is one of `defaults`, which mmrl
    recognises by itself."""

    def set_column(value: Any, converted: Converted, source: Settings) -> None:
        if value and value not in defaults:
            converted.settings.setdefault(DATA, {})[key] = value

    return set_column


def set_flow_grpo_prompts(value: Any, converted: Converted, source: Settings) -> None:
    """Sets the prompts of flow_grpo: the files in folder `value`, in the format that prompt_fn names.

    Raises UserError if mmrl does not read that format.
    """
    formats = {"general_ocr": "ocr" if str(value).rstrip("/").endswith("ocr") else "plain", "geneval": "geneval"}
    prompt_function = str(get_setting(source, "prompt_fn", default="general_ocr"))
    if prompt_function not in formats:
        raise UserError(f"prompt_fn={prompt_function} cannot be converted; choose one of {', '.join(formats)}")
    file_format = formats[prompt_function]
    names = ("train_metadata.jsonl", "test_metadata.jsonl") if file_format == "geneval" else ("train.txt", "test.txt")
    converted.settings[DATA] = {"type": "prompts", "format": file_format}
    converted.settings[DATA] |= {part: f"{value}/{name}" for part, name in zip(("train", "eval"), names, strict=True)}


def set_rewards(value: Any, converted: Converted, source: Settings) -> None:
    """Sets the rewards and the accuracy. value: one name or a list (TRL, ms-swift), or weights by name (flow_grpo).

    Accuracy is the first reward that judges the answer rather than its format.
    """
    weights = get_setting(source, "reward_weights", default=None)
    if isinstance(value, Mapping):
        weight_by_name = value
    else:
        weight_by_name = dict.fromkeys([value] if isinstance(value, str) else value, 1.0)
    if isinstance(weights, list):
        weight_by_name = dict(zip(weight_by_name, weights, strict=True))
    rewards = []
    for name, weight in weight_by_name.items():
        spec: dict[str, Any] = {"name": REWARDS.get(name, name)}
        if name not in REWARDS:
            spec = _function(name) | {"signature": "trl"}
            converted.comments.append(f"task.rewards: {name} is your own function; {spec['name']} must be importable.")
        rewards.append(spec | ({} if float(weight) == 1.0 else {"weight": float(weight)}))
    converted.settings["task.rewards"] = rewards
    accuracy_reward = next((spec for spec in rewards if spec["name"] != "think_answer"), rewards[0])
    converted.settings["task.accuracy"] = {key: option for key, option in accuracy_reward.items() if key != "weight"}


def _function(name: str) -> dict[str, Any]:
    """Returns the `name` option of a reward for a function written as FILE.py:FUNCTION, package.FUNCTION, or FUNCTION
    of a module `rewards`."""
    file, _, function = name.partition(".py:")
    if function:
        return {"name": f"{file.removeprefix('./').strip('/').replace('/', '.')}:{function}"}
    module, dot, function = name.rpartition(".")
    return {"name": f"{module}:{function}" if dot else f"rewards:{name}"}


def reward_function_rule(signature: str, function_key: str, default_name: str) -> Rule:
    """Returns a rule whose value is a file with a function that becomes the only reward (verl and EasyR1).

    signature: arguments that the function takes, as `task.rewards` names them. function_key: the key of verl or
    EasyR1 with the function's name. default_name: the function's name if neither that key nor the value gives it.
    """

    def set_reward(value: Any, converted: Converted, source: Settings) -> None:
        """Sets the reward and the accuracy to the function in the file `value`, if there is one."""
        if not value:
            return
        reference = str(value)
        if ".py:" not in reference:
            reference = f"{value}:{get_setting(source, function_key, default=default_name)}"
        spec = _function(reference) | {"signature": signature}
        converted.settings |= {"task.rewards": [spec], "task.accuracy": dict(spec)}
        converted.comments.append(
            f"task.rewards: {spec['name']} must be importable from the folder where you start mmrl."
        )

    return set_reward


def set_betas(value: Any, converted: Converted, source: Settings) -> None:
    """Sets both betas of Adam, whichever of the two keys comes first."""
    first, second = get_setting(source, "adam_beta1", default=0.9), get_setting(source, "adam_beta2", default=0.999)
    converted.settings["optim.betas"] = [float(first), float(second)]


def set_lr_schedule(value: Any, converted: Converted, source: Settings) -> None:
    """Sets the learning-rate schedule; one that mmrl does not have goes to the unmatched keys."""
    schedules = {"constant": "constant", "constant_with_warmup": "constant", "linear": "linear", "cosine": "cosine"}
    if value in schedules:
        converted.settings["optim.schedule"] = schedules[value]
    else:
        choices = ", ".join(dict.fromkeys(schedules.values()))
        converted.unmatched["lr_scheduler_type"] = f"{value}; optim.schedule is one of {choices}"


# --- denoising ---


def set_transition(value: Any, converted: Converted, source: Settings) -> None:
    """Sets the type and the noise level of the SDE step of flow_grpo. Raises UserError for an unknown sde_type."""
    sde_type = str(get_setting(source, "sde_type", default="sde"))
    if sde_type not in TRANSITIONS:
        raise UserError(f"sde_type={sde_type} cannot be converted; choose one of {', '.join(TRANSITIONS)}")
    noise = float(get_setting(source, "noise_level", default=0.7))
    converted.settings["denoising.likelihood.transition"] = {"type": TRANSITIONS[sde_type], "noise": noise}


def set_window(value: Any, converted: Converted, source: Settings) -> None:
    """Sets flow_grpo's random window of stochastic denoising steps, if it has a size and a range."""
    size, bounds = (
        get_setting(source, "sde_window_size", default=0),
        get_setting(source, "sde_window_range", default=None),
    )
    if size and bounds:
        converted.settings["denoising.likelihood.window"] = {
            "type": "random",
            "size": int(size),
            "first": int(bounds[0]),
            "last": int(bounds[1]),
        }


def set_trained_steps(value: Any, converted: Converted, source: Settings) -> None:
    """Sets the number of denoising steps that are trained. value: flow_grpo's timestep_fraction, 0 to 1, of the chain's
    first steps. Sets nothing if it is 1, or if flow_grpo trains on a random window, see `set_window`."""
    num_trained = int(float(value) * int(get_setting(source, "num_steps")))
    if float(value) < 1 and not get_setting(source, "sde_window_size", default=0):
        converted.settings["denoising.likelihood.window"] = {"type": "all", "last": num_trained}


def set_ema(value: Any, converted: Converted, source: Settings) -> None:
    if value:
        converted.settings["optim.ema"] = 0.9  # flow_grpo's decay; it averages every 8 updates, mmrl every update


def set_resolution(value: Any, converted: Converted, source: Settings) -> None:
    """Sets the resolution in pixels: (height, width) if both are set, else the side `value` of a square."""
    height, width = get_setting(source, "height"), get_setting(source, "width")
    converted.settings["denoising.resolution"] = [int(height), int(width)] if height and width else int(value)


# --- the run ---


def set_run_dir(value: Any, converted: Converted, source: Settings) -> None:
    """Sets run_dir from the name of the experiment, unless an output folder is set."""
    if value and get_setting(source, "default_local_dir", "save_checkpoint_path", "output_dir") is None:
        converted.settings["run_dir"] = f"runs/{value}"


def set_wandb(value: Any, converted: Converted, source: Settings) -> None:
    """Sets log.wandb to the name of the project if wandb is among the loggers."""
    if "wandb" in (value if isinstance(value, list) else str(value)):
        converted.settings["log.wandb"] = str(get_setting(source, "project_name", default="mmrl"))


def set_pixel_bounds(value: Any, converted: Converted, source: Settings) -> None:
    """Sets the image processor's bounds on the pixels of an image."""
    bounds = {name: get_setting(source, name) for name in ("min_pixels", "max_pixels")}
    converted.settings["model.processor"] = {name: int(bound) for name, bound in bounds.items() if bound}


# --- robots of RLinf ---


def set_robot_weights(value: Any, converted: Converted, source: Settings) -> None:
    """Sets the model's path, unless another key has set it: RLinf names it more than once."""
    if value and "model.path" not in converted.settings:
        set_weights(value, converted, source)


def set_robot_prompts(value: Any, converted: Converted, source: Settings) -> None:
    """Sets the initial states of a step: groups that RLinf simulates at once, times its rollout_epoch."""
    group_size = int(get_setting(source, "group_size"))
    groups = get_setting(source, "num_group_envs", default=None)
    groups_at_once = (
        int(groups) if groups is not None else int(get_setting(source, "env.train.total_num_envs")) // group_size
    )
    converted.settings["rollout.prompts"] = groups_at_once * int(get_setting(source, "rollout_epoch", default=1))
