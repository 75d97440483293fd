"""Settings of diffusion and flow models of images and videos."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import model_validator

from mmrl.errors import UserError
from mmrl.generation.settings import WorkerSampling
from mmrl.policies.settings import Collects, LoRA, ModelSettings, Sections
from mmrl.protocols.abilities import Completing, Latent, Segmented
from mmrl.protocols.offers import Offer
from mmrl.protocols.requirements import Capabilities
from mmrl.protocols.teachers import Taught
from mmrl.samplers.settings import (
    ChainLikelihood,
    Draws,
    Euler,
    Likelihood,
    MatchingLikelihood,
    Tail,
    check_draw_range,
)
from mmrl.settings import Section, load_attribute, option

if TYPE_CHECKING:
    from mmrl.engine.memory import MemoryModel
    from mmrl.protocols.job import JobConfig
    from mmrl.protocols.parts import Policy

MatchingWeight = Literal["one", "sigma", "sigma_squared", "elbo"]


class ImageLikelihood(Likelihood):
    """The decisions of an image, and how their likelihood is computed."""

    type: str = "chain"
    kinds: ClassVar[dict[str, str]] = {
        "chain": "mmrl.policies.diffusion.settings:ImageChain",
        "matching": "mmrl.policies.diffusion.settings:ImageMatching",
        "contrast": "mmrl.policies.diffusion.settings:ImageContrast",
        "last_steps": "mmrl.policies.diffusion.settings:ImageLastSteps",
    }

    @property
    @abstractmethod
    def offers(self) -> frozenset[Offer]:
        """The quantities that this likelihood provides and algorithms may require; see `mmrl.protocols.offers`."""


class ImageChain(ChainLikelihood, ImageLikelihood):
    """Decisions are the denoising steps inside the window, each a sample of a Gaussian; with `branching`, steps of a
    tree of chains."""

    tail: Tail = option(Euler(), "solver of the deterministic steps")
    branching: tuple[int, ...] = option((), "children at each step of the window; their product is rollout.group_size")
    chunks: tuple[int, ...] = option((), "lengths of the chunks that algorithm.level=segment averages over (GCPO)")
    shared_states: bool = option(
        False,
        "at every step of the window all rollouts of a group sample from one shared state, see `trunk`",
    )
    trunk: Literal["candidate", "ode"] = option(
        "candidate",
        "the next shared state of a group with shared_states. candidate: that of a random rollout of the group (SPO); "
        "ode: that of a deterministic step, so that every step branches off one deterministic chain (TempFlow-GRPO)",
    )

    old: Literal["sampled", "replayed"] | None = option(
        None,
        "where the old policy's predictions come from. sampled: kept from sampling, which needs no forward pass and, "
        "with guidance, saves the first update its unconditional pass; replayed: computed again in the micro-batches "
        "of training. Default: sampled in float32, where both agree to rounding, replayed in bfloat16. The first ratio "
        "is exactly 1 with either",
    )

    @model_validator(mode="after")
    def _options_fit(self) -> ImageChain:
        """Raises ValueError for branching and chunks below 1, and for options that exclude each other."""
        for name, numbers in (("branching", self.branching), ("chunks", self.chunks)):
            if any(n < 1 for n in numbers):
                raise ValueError(f"{name}={list(numbers)} must be a list of numbers of at least 1")
        if self.shared_states and self.branching:
            raise ValueError("branching and shared_states exclude each other; remove one of them")
        if self.trunk == "ode" and not self.shared_states:
            raise ValueError("trunk=ode has an effect only with shared_states=true; set that too, or remove trunk")
        if self.old == "sampled" and (self.branching or self.shared_states):
            raise ValueError("old=sampled does not work with branching or shared_states; set old=replayed")
        return self

    def keeps_predictions(self, dtype: str) -> bool:
        """Returns whether rollouts keep the network's predictions from sampling. dtype: the number format of the
        network's weights, such as "bfloat16"."""
        if self.branching or self.shared_states:
            return False
        return self.old == "sampled" or (self.old is None and dtype == "float32")

    @property
    def offers(self) -> frozenset[Offer]:
        """The quantities that chains provide; see `ImageLikelihood.offers`. Unscaled transitions have no density of a
        step."""
        offered: set[Offer] = {"divergence", "gaussian", "velocity", "reference_ratio", Latent, Completing}
        offered |= {"candidates" if self.shared_states else "separate_chains"}
        if not self.transition.unscaled:
            offered.add("step_density")
        return frozenset(offered | {Segmented} if self.chunks else offered)


class ImageMatching(MatchingLikelihood, ImageLikelihood):
    """Decisions are noise levels; the negative (flow-)matching error of the final image is their log-likelihood."""

    draw_range: tuple[float, float] = option(
        (0.02, 0.98), "range of the uniform random number from which a noise level is computed"
    )
    weight: MatchingWeight = option("one", "w(s)")
    shared: bool | None = option(
        None,
        "all images of a group get the same noise levels and noises; default: true for preference losses, whose pairs "
        "share both (Diffusion-DPO), else false",
    )

    @model_validator(mode="after")
    def _range_is_valid(self) -> ImageMatching:
        check_draw_range(self.draw_range)
        return self

    @property
    def offers(self) -> frozenset[Offer]:
        return frozenset({"matching", "velocity", "reference_ratio", "source"})


class ImageContrast(Draws, ImageLikelihood):
    """Decisions are noise levels, with the matching errors of two implicit policies: the new policy mixed with the old
    one and extrapolated from it, for algorithm.type=contrast (DiffusionNFT)."""

    source: ClassVar[str] = "DiffusionNFT, arXiv 2509.16117"
    test: ClassVar[str] = "tests/policies/diffusion/test_policy.py"
    type: str = "contrast"
    draw_range: tuple[float, float] = option(
        (0.02, 0.98), "range of the uniform random number from which a noise level is computed"
    )

    @model_validator(mode="after")
    def _range_is_valid(self) -> ImageContrast:
        check_draw_range(self.draw_range)
        return self

    @property
    def offers(self) -> frozenset[Offer]:
        return frozenset({"contrast", "velocity", "source"})


class ImageLastSteps(ImageLikelihood):
    """The decision is the image, with a gradient through its last denoising steps, for differentiable rewards. It has
    no likelihood."""

    equation: ClassVar[str] = "x_0 of the last `steps` deterministic steps"
    source: ClassVar[str] = "ReFL, arXiv 2304.05977; DRaFT-K, arXiv 2309.17400"
    test: ClassVar[str] = "tests/joints/test_reward_gradient.py"
    type: str = "last_steps"
    steps: int = option(1, "last denoising steps through which the gradient flows", unit="steps", ge=1)

    @property
    def offers(self) -> frozenset[Offer]:
        return frozenset({"image_gradient"})


def refuse_estimate(kind: str, path: str) -> None:
    """Raises UserError if `path` is a pipeline: memory is not estimated for model types with two networks. kind: the
    value of `model.type`."""
    if not load_attribute("mmrl.policies.diffusion.loading:is_small")(path):
        raise UserError(
            f"memory cannot be estimated for model.type={kind}, which has two networks; start a short run instead"
        )


class Drawing(Section):
    """Settings of sampling images in evaluation, and of their prompts; all jobs with images have them."""

    evaluation_steps: int = option(40, "denoising steps of an image in evaluation", unit="steps", ge=1)
    resolution: int | tuple[int, int] | None = option(
        None,
        "size of images and videos in pixels: one side of a square, or height and width; default: the model's own",
        unit="pixels",
    )
    evaluation_resolution: int | tuple[int, int] | None = option(
        None, "size of images and videos in evaluation; default: as in training", unit="pixels"
    )
    frames: int | None = option(None, "frames of a video, for video models; default: the model's own", ge=1)
    evaluation_guidance: float | None = option(None, "classifier-free guidance in evaluation; default: as in training")
    guidance_interval: tuple[float, float] = option(
        (0.0, 1.0), "sigmas (noise levels) between which guidance is applied"
    )
    embedded_guidance: float = option(3.5, "guidance scale that guidance-distilled networks (FLUX) take as an input")
    negative_prompt: str = option("", "prompt of the unconditional pass, which guidance leads away from")
    prompt_cache: int = option(256, "prompts whose embeddings are cached in memory", ge=1)


class Denoising(Drawing):
    """Settings of sampling images in training, and of their likelihood."""

    steps: int = option(10, "denoising steps of an image in training", unit="steps", ge=1)
    likelihood: ImageLikelihood = option(ImageChain(), "what a decision is: how its log-probability is computed")
    guidance: float = option(
        1.0,
        "classifier-free guidance in rollouts and replay; 1: none. The gradient goes through the conditional pass "
        "alone, as in flow_grpo: it is not the gradient of the guided likelihood",
        ge=0,
    )


class ImageEngine(Section):
    """Settings of the replay of images and videos."""

    steps_at_once: int | None = option(
        None,
        "denoising steps of a micro-batch that are replayed in one forward pass; with fewer than all, each part is "
        "computed again in the backward pass: less memory, more time; default: all",
        unit="steps",
        ge=1,
    )


class DenoisingDemonstrations(Drawing):
    """Settings of supervised fine-tuning on given images (demonstrations)."""

    draws: int = option(4, "noisy copies of each image, each with a noise level and noise of its own", ge=1)
    draw_range: tuple[float, float] = option(
        (0.02, 0.98), "range of the uniform random number from which a noise level is computed"
    )
    weight: MatchingWeight = option("one", "w(s) of the matching error")
    reduction: Literal["mean", "sum"] = option("mean", "how errors of the elements of a latent are combined")
    prompt_dropout: float = option(
        0.0, "share of training images without their prompt, which classifier-free guidance needs", ge=0, lt=1
    )
    guidance: float = option(1.0, "classifier-free guidance in evaluation; 1: none", ge=0)

    @model_validator(mode="after")
    def _range_is_valid(self) -> DenoisingDemonstrations:
        check_draw_range(self.draw_range)
        return self

    @property
    def likelihood(self) -> ImageMatching:
        """The matching likelihood of these options."""
        return ImageMatching(draws=self.draws, draw_range=self.draw_range, weight=self.weight, reduction=self.reduction)


class DiffusionModel(ModelSettings):
    """A diffusion or flow model: a diffusers pipeline, or a small network of mmrl's own. Each denoising step is one
    decision."""

    type: str = "diffusion"
    attention: Literal["sdpa", "eager", "flash_attention_2"] = option("sdpa", "implementation of attention")
    lora: LoRA | None = option(None, "train low-rank adapters in place of the weights")
    base: str | None = option(
        None, "base pipeline of the LoRA at model.path, if its files do not name it: a folder or hub name"
    )
    family: str | None = option(
        None,
        "package.module:Class for a pipeline that mmrl does not support, a subclass of "
        "mmrl.policies.diffusion.families.pipeline:Pipeline or of a shipped family; default: by the pipeline's class",
    )
    text_tokens: int | None = option(
        None,
        "tokens of a prompt that the text encoder with the largest limit (T5, Qwen) reads; default: as in the pipeline",
        unit="tokens",
        ge=1,
    )
    encoders: Literal["visit", "stay"] = option(
        "visit", "visit: text encoders are moved to the GPU only while they encode; stay: they stay there"
    )
    embeddings: str | None = option(
        None, "folder of prompt embeddings that `mmrl embed` wrote, with which text encoders are not loaded"
    )
    decoding: Literal["whole", "sliced", "tiled"] = option(
        "sliced",
        "how the VAE decodes. whole: all images of a batch at once; sliced: one image or video at a time; tiled: "
        "overlapping tiles of it, with blended seams, which needs less memory for large ones",
    )
    activation_checkpointing: bool = option(False, "recompute activations in the backward pass: less memory, more time")

    @classmethod
    def sections(cls, tree: Mapping[str, Any], collects: Collects) -> Sections:
        """Returns the sections `denoising`, `engine` and, if the algorithm samples, `rollout`; see
        `ModelSettings.sections`."""
        if collects == "demonstrations":
            return {"denoising": DenoisingDemonstrations, "engine": ImageEngine}
        return {"denoising": Denoising, "engine": ImageEngine, "rollout": WorkerSampling}

    def capabilities(self, config: JobConfig) -> Capabilities:
        """Returns what the decisions of `denoising.likelihood` support; see `ModelSettings.capabilities`."""
        denoising = config.section("denoising")
        if isinstance(denoising, DenoisingDemonstrations):
            return Capabilities(f"model.type={self.type}", frozenset({"matching", "reference_ratio", "steering"}))
        likelihood: ImageLikelihood = denoising.likelihood
        return Capabilities(
            f"denoising.likelihood.type={likelihood.type}",
            likelihood.offers | {"views", "reference_rollouts", "steering", Taught},
        )

    def check(self, config: JobConfig) -> None:
        """Raises ValueError for a likelihood that does not fit the algorithm, the group size or asynchronous
        workers."""
        denoising = config.section("denoising")
        likelihood = denoising.likelihood if isinstance(denoising, Denoising) else None
        if isinstance(config.rollout, WorkerSampling) and config.rollout.workers is not None:
            assert likelihood is not None
            config.rollout.workers.check(config.needs, likelihood.offers)
            if (
                isinstance(likelihood, ImageChain)
                and likelihood.old == "sampled"
                and config.rollout.workers.async_steps
            ):
                raise ValueError(
                    "denoising.likelihood.old=sampled needs rollouts of the current weights, but with "
                    f"rollout.workers.async_steps={config.rollout.workers.async_steps} they are sampled by older ones; "
                    "set old=replayed"
                )
        if isinstance(likelihood, ImageContrast) and "contrast" not in config.needs.offers:
            raise ValueError(
                f"denoising.likelihood.type={likelihood.type} gives no likelihood of the policy, which "
                f"algorithm.type={config.algorithm.type} needs; set it to chain or matching"
            )
        if isinstance(likelihood, ImageLastSteps):
            if "image_gradient" not in config.needs.offers:
                raise ValueError(
                    f"denoising.likelihood.type={likelihood.type} gives no likelihood, which algorithm.type="
                    f"{config.algorithm.type} needs; set it to chain or matching"
                )
            if likelihood.steps > denoising.steps:
                raise ValueError(
                    f"denoising.likelihood.steps={likelihood.steps} is more than denoising.steps={denoising.steps}; "
                    f"set it to at most {denoising.steps}"
                )
        if isinstance(likelihood, ImageChain) and likelihood.branching:
            leaves = math.prod(likelihood.branching)
            if leaves != config.group_size:
                raise ValueError(
                    f"denoising.likelihood.branching={list(likelihood.branching)} makes trees of {leaves} leaves; "
                    f"set rollout.group_size={leaves}"
                )

    def memory_model(self, config: JobConfig, path: str) -> MemoryModel | None:
        if load_attribute("mmrl.policies.diffusion.loading:is_small")(path):
            return None
        return load_attribute("mmrl.policies.diffusion.memory_estimate:memory_model")(self, config, path)

    def load(self, config: JobConfig, task: object, path: str) -> Policy:
        """Loads the policy at `path`. Rollouts keep the network's predictions (`keep_predictions`) if the likelihood
        can use them, sampling has the current weights, and the old policy would otherwise need a forward pass. If
        `shared` of a matching likelihood is None, the algorithm decides."""
        denoising = config.section("denoising")
        engine: ImageEngine = config.engine
        likelihood = denoising.likelihood if isinstance(denoising, Denoising) else None
        useful = config.needs.old and (config.algorithm.updates > 1 or denoising.guidance != 1)
        # With asynchronous steps sampling has older weights, and its predictions are of no use
        is_async = config.generator is not None and config.generator.steps_ahead > 0
        kept_by_chain = isinstance(likelihood, ImageChain) and likelihood.keeps_predictions(self.dtype)
        keep = useful and not is_async and kept_by_chain
        if isinstance(likelihood, ImageMatching) and likelihood.shared is None:
            matching = likelihood.model_copy(update={"shared": config.algorithm.pairs_decisions})
            denoising = denoising.model_copy(update={"likelihood": matching})
        family = load_attribute("mmrl.policies.diffusion.loading:load")(path, self)
        return load_attribute("mmrl.policies.diffusion.policy:DiffusionPolicy")(
            family, denoising, keep_predictions=keep, steps_at_once=engine.steps_at_once
        )
