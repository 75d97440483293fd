"""The commands that are run on a GPU: jobs of `mmrl train` for each part, with models of real and of small sizes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TIMED = [
    "evaluation.every=0",
    "evaluation.prompts=2",
    "evaluation.before=false",
    "checkpoint.every=0",
    "checkpoint.best=false",
]
TIMED += ["checkpoint.resume=false", "log.samples_every=0"]


@dataclass(frozen=True)
class Arm:
    """A job of `mmrl train`. expects: what is predicted, written before the first run; timed: its rates are of
    interest, so it runs alone, without evaluations."""

    part: str
    name: str
    recipe: str
    overrides: list[str]
    expects: str = ""
    timed: bool = True

    def command(self, run: Path) -> list[str]:
        return [self.recipe, *(TIMED if self.timed else []), *self.overrides, f"run_dir={run}"]


def learning(small: bool) -> list[Arm]:
    """Returns recipes that a laptop learns too, whose curves should be the same on a GPU: from success alone."""
    some = ["steps=2"] if small else []
    of_tabletop = ["rollout.prompts=4", "evaluation.prompts=4"] if small else ["steps=30"]
    return [
        Arm("learning", "visual_qa_digits", "visual_qa_digits", some, ".2 -> .87 held out, as on a CPU", False),
        Arm("learning", "image_digits_flow", "image_digits_flow", some, "as on a CPU", False),
        Arm("learning", "manipulation_tabletop", "manipulation_tabletop", some + of_tabletop, "as on a CPU", False),
    ]


def language(model: Path, data: Path, small: bool) -> list[Arm]:
    """Returns GRPO on a vision-language model in the shape of Qwen2.5-VL-3B: full weights and LoRA, padded and not."""
    common = [f"model.path={model}", "steps=3", "rollout.generator={type: transformers}", "rollout.prompts=8"]
    common += [f"task.data={{type: files, train: {data}, eval: {data}}}", "rollout.dynamic_sampling=null"]
    common += ["task.rewards=[{name: random}]", "task.accuracy={name: random}"]
    if small:
        common += [
            "rollout.group_size=2",
            "rollout.max_response_length=4",
            "model.dtype=float32",
            "engine.zero_stage=0",
        ]
        common += ["model.processor=null"]
        tokens, more = 512, 256
    else:
        common += ["rollout.micro_batch=64", "rollout.max_response_length=64"]
        tokens, more = 16_384, 8192
    lora = "model.lora={rank: 64, alpha: 128}"
    by_tokens = f"engine.micro_tokens={tokens}"

    def arm(name: str, overrides: list[str], expects: str) -> Arm:
        return Arm("language", name, "visual_qa_geometry3k", [*common, *overrides], expects)

    return [
        arm("lora, packed", [lora, by_tokens], "45 % MFU in the update"),
        arm("lora, padded", [lora, "engine.micro_batch=4", "engine.packing=false"], "38 % MFU in the update"),
        arm(
            "lora, no recomputation",
            [lora, f"engine.micro_tokens={more}", "model.activation_checkpointing=false"],
            "a quarter less time",
        ),
        arm("full weights", ["engine.micro_tokens=8192"], "fits in 80 GiB"),
    ]


def images(model: Path, prompts: Path, small: bool) -> list[Arm]:
    """Returns Flow-GRPO on a Stable Diffusion 3.5 in the shape of the medium model."""
    common = [f"model.path={model}", f"model.embeddings={prompts.parent}", "steps=3", "rollout.prompts=2"]
    common += [f"task.data={{type: prompts, train: {prompts}, eval: {prompts}}}"]
    common += ["task.rewards=[{name: jpeg_compressibility}]", "task.accuracy={name: jpeg_compressibility}"]
    if small:
        common += ["rollout.group_size=2", "denoising.resolution=64", "model.dtype=float32", "engine.micro_batch=2"]
    few = ["engine.micro_batch=2", "model.activation_checkpointing=false"]
    return [
        Arm("images", "lora", "image_sd35_ocr", common, "17.4 GiB at most"),
        Arm("images", "lora, no recomputation", "image_sd35_ocr", [*common, *few], "a quarter less time in the update"),
    ]


def robots(model: Path, small: bool) -> list[Arm]:
    """Returns Flow-GRPO on a frozen vision-language model with a flow head, on the tabletop."""
    common = [f"model.path={model}", "task.simulator=tabletop", "task.tasks=[reach]", "steps=2", "action.chunk=5"]
    common += ["task.rewards=[{name: 'mmrl.tasks.manipulation.rewards:simulator'}]"]
    if small:
        common += ["task.rows=2", "rollout.prompts=2", "rollout.group_size=2", "model.dtype=float32"]
        common += ["engine.zero_stage=0", "action.head.width=32", "action.head.depth=1"]
        common += ["task.options={image_size: 32, reward: shaped}"]
    else:
        common += ["task.rows=32", "rollout.prompts=8", "task.options={image_size: 224, reward: shaped}"]
    return [Arm("robots", "flow head", "manipulation_maniskill_pickcube", common, "the simulator takes longest")]
