"""Settings of vision-language-action models: the section `action`, action heads, and what their decisions support."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from pydantic import model_validator

from mmrl.engine.settings import UnevenEngine
from mmrl.generation.settings import WorkerSampling
from mmrl.policies.settings import Collects, LoRA, ModelSettings, Sections
from mmrl.protocols.abilities import (
    AdvantageLabelling,
    DifferentiableActions,
    EpisodeStoring,
    ExpertLabelling,
    OffPolicyLearning,
    Stepwise,
)
from mmrl.protocols.offers import Offer
from mmrl.protocols.requirements import Capabilities
from mmrl.protocols.teachers import Taught
from mmrl.samplers.settings import ChainLikelihood, Draws, Likelihood, MatchingLikelihood
from mmrl.schedules.schedule import Schedule, number
from mmrl.settings import Choice, Section, kind_of, load_attribute, option, plain

if TYPE_CHECKING:
    from torch import nn

    from mmrl.engine.memory import MemoryModel
    from mmrl.protocols.job import JobConfig
    from mmrl.protocols.parts import Policy

PROMPT = "What action should the robot take to {}?"


class HeadBackbone(Protocol):
    """The interface of a backbone from which settings build a head; see `mmrl.policies.vla.backbones.backbone`."""

    @property
    def width(self) -> int:
        """The width of hidden states."""
        ...

    def requires_grad_(self, requires_grad: bool = True, /) -> object: ...

    def flow_head(
        self, settings: FlowActions | TaughtFlow | FrozenFlow, action: Actions, action_dim: int, state_dim: int
    ) -> nn.Module: ...

    def l1_head(self, settings: NormalActions, action: Actions, action_dim: int) -> nn.Module: ...


class ActionHead(Choice):
    """Settings of an action head: the network that samples chunks of actions from the backbone's hidden states, and
    scores them. A chunk is the actions that are executed before the next observation."""

    title: ClassVar[str] = "action head"
    kinds: ClassVar[dict[str, str]] = {
        "token": "mmrl.policies.vla.settings:TokenActions",
        "flow": "mmrl.policies.vla.settings:FlowActions",
        "regression": "mmrl.policies.vla.heads.laplace_settings:RegressionActions",
        "bridge": "mmrl.policies.vla.heads.laplace_settings:BridgeActions",
        "gaussian": "mmrl.policies.vla.heads.gaussian_settings:GaussianActions",
        "squashed_gaussian": "mmrl.policies.vla.heads.gaussian_settings:SquashedGaussianActions",
        "l1": "mmrl.policies.vla.heads.gaussian_settings:L1Actions",
        "invertible": "mmrl.policies.vla.settings:InvertibleActions",
        "latent": "mmrl.policies.vla.heads.gaussian_settings:LatentActions",
        "steered": "mmrl.policies.vla.heads.steered_settings:SteeredActions",
        "residual": "mmrl.policies.vla.heads.mixture_settings:ResidualActions",
        "horizons": "mmrl.policies.vla.heads.mixture_settings:HorizonActions",
    }
    test: ClassVar[str] = "tests/policies/vla/test_policy.py"
    type: str = "token"
    has_temperature: ClassVar[bool] = True  # whether the head has rollout.temperature and evaluation.temperature
    architecture_keys: ClassVar[tuple[str, ...]] = ()  # options that the saved weights depend on
    accepts_state_only: ClassVar[bool] = False  # whether it can read the robot's state alone, without a backbone
    scores_demonstrations: ClassVar[bool] = True  # whether it can score chunks that it did not sample
    bounded: ClassVar[bool] = True  # whether its actions are clipped to [-1, 1] before they are scaled for the robot

    @property
    def bidirectional(self) -> bool:
        """True if prompt and action tokens are encoded in one bidirectional pass, which only OpenVLA-OFT supports."""
        return False

    @property
    def mixes_demonstrations(self) -> bool:
        """True if one batch may hold demonstrated chunks and sampled ones."""
        return self.scores_demonstrations

    @property
    def checkpoint_head(self) -> ActionHead:
        """The settings of the head that the checkpoint holds: the base, if this head is built around a base head, else
        self."""
        return self

    def check_chunk(self, chunk: int) -> None:  # noqa: B027  (most heads support any length)
        """Raises ValueError for a chunk length that the head does not support."""

    @abstractmethod
    def build(self, action: Actions, backbone: HeadBackbone, action_dim: int, state_dim: int) -> nn.Module:
        """Builds the head's network. action_dim, state_dim: sizes of an action and of the robot's state. Raises
        UserError if it does not fit the backbone."""

    @property
    @abstractmethod
    def offers(self) -> frozenset[Offer]:
        """The abilities of its decisions; see `mmrl.protocols.offers`."""


Level = Literal["token", "action", "chunk"]


class TokenActions(ActionHead):
    """Predicts each number of an action as a token, which stands for a bin of [-1, 1]."""

    source: ClassVar[str] = "OpenVLA, arXiv 2406.09246; bidirectional: OpenVLA-OFT, arXiv 2502.19645"
    type: str = "token"
    architecture_keys: ClassVar[tuple[str, ...]] = ("decoding", "bins")
    level: Level = option("token", "what a decision is: one number of an action, an action, or the chunk")
    decoding: Literal["parallel", "autoregressive", "bidirectional"] = option(
        "parallel",
        "autoregressive: one token after the other; parallel: all at once, from learned queries; bidirectional: all at "
        "once, from zero embeddings with bidirectional attention",
    )
    bins: int = option(256, "bins of a number; their tokens are the last ids of the vocabulary", ge=3)

    @property
    def bidirectional(self) -> bool:
        return self.decoding == "bidirectional"

    def build(self, action: Actions, backbone: HeadBackbone, action_dim: int, state_dim: int) -> nn.Module:
        return load_attribute("mmrl.policies.vla.heads.head:TokenHead")(self, action, backbone, action_dim, state_dim)

    @property
    def offers(self) -> frozenset[Offer]:
        return frozenset({"entropy", "tokens", "single_sample_kl", "reference_ratio"})


class ActionLikelihood(Likelihood):
    """The decisions of a flow-matching head, and how they are scored."""

    type: str = "chain"
    kinds: ClassVar[dict[str, str]] = {
        "chain": "mmrl.policies.vla.settings:ActionChain",
        "matching": "mmrl.policies.vla.settings:ActionMatching",
        "contrast": "mmrl.policies.vla.settings:ActionContrast",
        "learned": "mmrl.policies.vla.settings:LearnedNoise",
    }

    @property
    @abstractmethod
    def offers(self) -> frozenset[Offer]:
        """The abilities of its decisions; see `mmrl.protocols.offers`."""


class ActionChain(ChainLikelihood, ActionLikelihood):
    """Each denoising step inside the window is a decision: a Gaussian over the whole chunk."""

    @property
    def offers(self) -> frozenset[Offer]:
        offers: set[Offer] = {"divergence", "gaussian", "velocity", "reference_ratio"}
        return frozenset(offers if self.transition.unscaled else offers | {"single_sample_kl", "step_density"})


class ActionMatching(MatchingLikelihood, ActionLikelihood):
    """The chunk is one decision, whose log-ratio is the decrease of its flow-matching error (FPO)."""

    @property
    def offers(self) -> frozenset[Offer]:
        return frozenset({"matching", "velocity", "single_sample_kl", "reference_ratio"})


class ActionContrast(Draws, ActionLikelihood):
    """Errors of two implicit policies, one on each side of the old policy, for algorithm.type=contrast. Each sampled
    noise level is a decision; actions that were not executed are masked."""

    equation: ClassVar[str] = (
        "noisy = (1 - s) data + s noise, s of Beta(1.5, 1); a policy's error is the distance of noisy - s v from data"
    )
    source: ClassVar[str] = "DiffusionNFT, arXiv 2509.16117, over chunks of actions"
    test: ClassVar[str] = "tests/policies/vla/test_contrast.py"
    type: str = "contrast"

    @property
    def offers(self) -> frozenset[Offer]:
        return frozenset({"contrast", "velocity"})


class LearnedNoise(ActionLikelihood):
    """A network predicts the standard deviation of each step, and the whole chain is one decision (ReinFlow)."""

    source: ClassVar[str] = "ReinFlow, arXiv 2505.22094"
    test: ClassVar[str] = "tests/policies/vla/test_policy.py"
    type: str = "learned"
    range: tuple[float, float] = option((0.08, 0.16), "range of the learned standard deviation")

    @model_validator(mode="after")
    def _range_is_valid(self) -> LearnedNoise:
        if not 0 < self.range[0] <= self.range[1]:
            raise ValueError(f"range must hold two positive numbers, the smaller one first, not {list(self.range)}")
        return self

    @property
    def offers(self) -> frozenset[Offer]:
        return frozenset({"entropy", "single_sample_kl", "reference_ratio"})


class ActionFlow(ActionHead):
    """A transformer, the action expert, denoises the chunk. LeRobot's SmolVLA, pi0 and pi0.5 have their own."""

    source: ClassVar[str] = "pi0, arXiv 2410.24164"
    type: str = "flow"
    has_temperature: ClassVar[bool] = False
    architecture_keys: ClassVar[tuple[str, ...]] = ("width", "depth")
    evaluation_steps: int = option(40, "denoising steps of a chunk in evaluation", unit="steps", ge=1)
    width: int = option(128, "width of the action expert; a policy with its own expert ignores it", ge=1)
    depth: int = option(3, "blocks of the action expert; a policy with its own expert ignores it", ge=1)


class FlowActions(ActionFlow):
    """An action expert denoises the chunk; `likelihood` says what a decision is."""

    steps: int = option(10, "denoising steps of a chunk in training", unit="steps", ge=1)
    likelihood: ActionLikelihood = option(ActionChain(), "what a decision is: how its log-probability is computed")

    @property
    def mixes_demonstrations(self) -> bool:
        return isinstance(self.likelihood, ActionMatching)

    def build(self, action: Actions, backbone: HeadBackbone, action_dim: int, state_dim: int) -> nn.Module:
        return backbone.flow_head(self, action, action_dim, state_dim)

    @property
    def offers(self) -> frozenset[Offer]:
        return self.likelihood.offers


class TaughtFlow(ActionFlow):
    """An action expert that learns from demonstrations by flow matching."""

    draws: int = option(4, "noise levels, each with noise, that are sampled for a chunk", ge=1)
    reduction: Literal["mean", "sum"] = option("mean", "how the error is reduced over the elements of a chunk")

    @property
    def likelihood(self) -> ActionMatching:
        return ActionMatching(draws=self.draws, reduction=self.reduction)

    def build(self, action: Actions, backbone: HeadBackbone, action_dim: int, state_dim: int) -> nn.Module:
        return backbone.flow_head(self, action, action_dim, state_dim)

    @property
    def offers(self) -> frozenset[Offer]:
        return frozenset({"matching"})


class FrozenFlow(ActionFlow):
    """A frozen action expert, which denoises the noise that another head outputs; see `SteeredActions`."""

    evaluation_steps: int = option(
        10, "denoising steps of a chunk, in rollouts and evaluation alike", unit="steps", ge=1
    )

    @property
    def likelihood(self) -> ActionMatching:
        return ActionMatching()

    def build(self, action: Actions, backbone: HeadBackbone, action_dim: int, state_dim: int) -> nn.Module:
        return backbone.flow_head(self, action, action_dim, state_dim)

    @property
    def offers(self) -> frozenset[Offer]:
        return frozenset()


class NormalActions(ActionHead):
    """Gaussian actions, with a predicted mean and a standard deviation that does not depend on the observation."""

    equation: ClassVar[str] = (
        "log p(a) = -(a - mean)^2 / (2 std^2) - log(std sqrt(2 pi)); sampled and scored at temperature x std"
    )
    level: Level = option("action", "what a decision is: one number of an action, an action, or the chunk")
    std: float = option(0.6, "standard deviation, before training", gt=0)
    fixed: bool = option(False, "the standard deviation is not trained")
    least_std: float = option(
        0.0,
        "lower bound of the standard deviation: numbers that hardly vary in demonstrations would otherwise dominate "
        "every ratio",
        ge=0,
    )

    @property
    def offers(self) -> frozenset[Offer]:
        offers: set[Offer] = {"divergence", "single_sample_kl", DifferentiableActions}
        return frozenset(offers if self.fixed else offers | {"entropy"})


class InvertibleActions(ActionHead):
    """A flow over two copies of the chunk that is exactly invertible, so that its likelihood is exact. As `gaussian` it
    may read the robot's state alone."""

    equation: ClassVar[str] = (
        "x += v(y, t) / T; y += v(x, t) / T; x = p x + (1 - p) y; y = p y + (1 - p) x; action = (x + y) / 2; "
        "log p(x, y) = log N(noise; 0, (temperature x scale)^2) - 2 T D log p"
    )
    source: ClassVar[str] = "after GenPO, arXiv 2505.18763; reconstructed from its abstract and equations"
    test: ClassVar[str] = "tests/policies/vla/test_invertible.py"
    type: str = "invertible"
    accepts_state_only: ClassVar[bool] = True
    architecture_keys: ClassVar[tuple[str, ...]] = ("width", "layers", "steps", "mix", "scale")
    steps: int = option(5, "steps of the flow", unit="steps", ge=1)
    mix: float = option(0.9, "p: weight of a copy itself when the two are mixed at each step", gt=0.5, lt=1)
    scale: float = option(0.5, "standard deviation of the noise", gt=0)
    apart: float = option(
        0.05, "standard deviation of the opposite noise that is added to the two copies of a demonstrated chunk", gt=0
    )
    width: int = option(256, "width of the MLP's hidden layers", ge=1)
    layers: int = option(3, "hidden layers of the perceptron", ge=1)
    last_gain: float = option(0.01, "size of the last layer's weights, before training", gt=0)

    def build(self, action: Actions, backbone: HeadBackbone, action_dim: int, state_dim: int) -> nn.Module:
        return load_attribute("mmrl.policies.vla.heads.invertible:InvertibleHead")(
            self, action, action_dim, state_dim, backbone.width
        )

    @property
    def offers(self) -> frozenset[Offer]:
        return frozenset({"single_sample_kl"})


class AdvantageLabels(Section):
    """Text behind the instruction that says whether the action was better or worse than expected."""

    good: str = option(
        "Advantage: positive",
        "prompt of actions with a return above the critic's value, and of the policy's own actions",
    )
    bad: str = option("Advantage: negative", "prompt of the other actions")


class Actions(Section):
    """The section `action`: the action head, its inputs and outputs, and the simulator's side of episodes."""

    head: ActionHead = option(TokenActions(), "head that predicts actions")
    chunk: int = option(5, "actions executed before the next observation", unit="actions", ge=1)
    proprioception: bool = option(True, "the robot's state is an input of the policy")
    privileged: int = option(
        0,
        "how many numbers at the end of the simulator's state only a critic reads, such as positions of objects "
        "(task.options.privileged of the tabletop)",
        ge=0,
    )
    standardise: bool = option(
        False,
        "standardise the state by its mean and standard deviation under random actions, which are saved with the model",
    )
    prompt: str | None = option(None, "template that holds {instruction}; default: the model's own")
    labels: AdvantageLabels | None = option(
        None, "text in the prompt that asks for a good or a bad action; algorithm.type=advantage_conditioned trains it"
    )
    center_crop: float = option(
        1.0, "area of OpenVLA's images that is kept; 0.9 for checkpoints trained on random crops", gt=0, le=1
    )
    resize: Literal["model", "openvla"] = option(
        "model",
        "how OpenVLA's images are resized. model: as its preprocessor_config.json says; openvla: through JPEG and a "
        "Lanczos filter, as in the training data of its LIBERO checkpoints and in OpenVLA's own evaluations",
    )
    statistics: str | None = option(
        None,
        "OpenVLA's dataset_statistics.json, LeRobot's meta/stats.json, openpi's norm_stats.json, or a folder with one; "
        "default: actions are within [-1, 1]",
    )
    statistics_key: str | None = option(
        None, "data set in action.statistics, or in a LeRobot checkpoint that holds several; default: the only one"
    )
    normalisation: Literal["quantiles", "min_max", "mean_std"] | None = option(
        None,
        "statistics that become -1 and 1: q01 and q99, min and max, or mean - std and mean + std; "
        "default: q01 and q99, or min and max where there are none",
    )
    replace_statistics: bool = option(
        False, "action.statistics replaces those of a LeRobot checkpoint, as for a fine-tune on another data set"
    )
    horizon: int = option(
        100, "longest episode; algorithm.reduce=constant divides by its decisions", unit="actions", ge=1
    )
    cameras: list[str] | None = option(
        None,
        "cameras of the simulator whose images the model gets, in this order; default: all, side by side in one image",
        min_length=1,
    )
    camera_features: list[str] | None = option(
        None,
        "LeRobot policies: the policy's name (observation.images.NAME) for each of `cameras`, in their order; images "
        "that are not named stay empty; default: all of its images, in the checkpoint's order",
        min_length=1,
    )
    film: bool = option(
        False,
        "keep an image of every action in evaluation, and of every policy step of the rollouts in training's tables",
    )

    @model_validator(mode="after")
    def _head_makes_the_chunk(self) -> Actions:
        self.head.check_chunk(self.chunk)
        return self

    @model_validator(mode="after")
    def _prompt_has_an_instruction(self) -> Actions:
        if self.prompt is not None and "{instruction}" not in self.prompt:
            raise ValueError(f"prompt={self.prompt!r} must hold {{instruction}}, where the robot's instruction goes")
        return self


class TaughtActions(Actions):
    """The section `action` of jobs that learn from demonstrations."""

    head: ActionHead = option(
        TokenActions(),
        "head that predicts actions",
        kinds={**ActionHead.kinds, "flow": "mmrl.policies.vla.settings:TaughtFlow"},
    )


class EpisodePrompts(Section):
    """The section `rollout` of jobs that play no episodes."""

    max_prompt_length: int = option(1024, "longest prompt, image tokens included", unit="tokens", ge=1)


class EpisodeRollouts(WorkerSampling, EpisodePrompts):
    """The section `rollout` of jobs that play episodes."""


class EpisodeSampling(EpisodeRollouts):
    """The section `rollout` of jobs whose head has a temperature."""

    temperature: Schedule = number(1.0, "scale of the head's randomness in rollouts and replay", gt=0)


class EpisodeEngine(UnevenEngine):
    """The section `engine` of jobs that replay episodes."""

    steps_at_once: int | None = option(
        None,
        "policy steps of a micro-batch that are computed at once; where it has more, each part is computed again "
        "in the backward pass: less memory, more time; default: all",
        unit="policy steps",
        ge=1,
    )


class EpisodeEvaluation(Section):
    """The section `evaluation` of jobs whose head has a temperature."""

    temperature: float = option(0.0, "scale of the head's randomness; 0: the likeliest actions", ge=0)
    decoding: Literal["both", "greedy", "sampled"] = option(
        "both",
        "how mmrl eval samples. greedy: at `temperature`; sampled: at rollout.temperature; both: each episode is "
        "played twice",
    )


class VisionLanguageActionModel(ModelSettings):
    """A vision-language model with an action head that plays episodes in a simulator."""

    type: str = "vision_language_action"
    attention: Literal["sdpa", "eager", "flash_attention_2"] = option("sdpa", "implementation of attention")
    freeze: list[Literal["vision", "connector", "language"]] = option([], "parts of the backbone that are not trained")
    lora: LoRA | None = option(None, "train low-rank adapters in place of the backbone's weights")
    processor: dict[str, Any] = option({}, "keyword arguments of AutoProcessor.from_pretrained, such as max_pixels")

    @classmethod
    def sections(cls, tree: Mapping[str, Any], collects: Collects) -> Sections:
        """Returns the sections that depend on the head and on what the algorithm collects; only heads with a
        temperature have one in `rollout` and `evaluation`."""
        action = tree.get("action")
        head_tree = action.get("head", {}) if isinstance(action, Mapping) else {}
        # the class that action.head.type selects
        head = kind_of(ActionHead, head_tree, ("action", "head"))  # type: ignore[type-abstract]
        sections: Sections = {"action": Actions, "rollout": EpisodePrompts, "engine": EpisodeEngine}
        if collects == "demonstrations":
            sections["action"] = TaughtActions
        else:
            sections["rollout"] = EpisodeRollouts
        if head.has_temperature:
            sections["evaluation"] = EpisodeEvaluation
            if collects != "demonstrations":
                sections["rollout"] = EpisodeSampling
        return sections

    def capabilities(self, config: JobConfig) -> Capabilities:
        """Returns what the decisions of the head and the policy support; see `ModelSettings.capabilities`."""
        action: Actions = config.section("action")
        offers = {*action.head.offers, "lengths", "critic", Stepwise, EpisodeStoring, OffPolicyLearning}
        if action.head.mixes_demonstrations:
            offers |= {"demonstrations", ExpertLabelling}
        if action.labels is not None:
            offers.add(AdvantageLabelling)
        # A head around a base head stores decisions that only a head around the same base can score.
        if action.head.checkpoint_head is action.head:
            offers.add(Taught)
        # Under ZeRO-3 every forward pass gathers weights, but ranks play episodes of different lengths.
        return Capabilities(
            f"action.head.type={action.head.type}", frozenset(offers), zero_stages=(0, 1, 2), groups=("critic",)
        )

    def check(self, config: JobConfig) -> None:
        """Raises ValueError for settings of other sections that the head or the policy does not support."""
        rollout = config.rollout
        action: Actions = config.section("action")
        if isinstance(rollout, WorkerSampling) and rollout.workers is not None:
            temperature = rollout.temperature if isinstance(rollout, EpisodeSampling) else None
            rollout.workers.check(config.needs, action.head.offers, temperature)
        if self.lora is not None and action.head.checkpoint_head is not action.head:
            raise ValueError(
                f"model.lora trains the backbone, which action.head.type={action.head.type} freezes with its base "
                "head; remove model.lora"
            )
        from_demonstrations = config.algorithm.collects == "demonstrations"
        if from_demonstrations and not action.head.scores_demonstrations:
            raise ValueError(
                f"action.head.type={action.head.type} cannot learn from demonstrations, since the noise of a "
                f"demonstrated chunk is not known; train its base with "
                f"action.head.type={action.head.checkpoint_head.type}"
            )
        if from_demonstrations and action.labels is not None and AdvantageLabelling not in config.needs.offers:
            raise ValueError(
                f"action.labels: algorithm.type={config.algorithm.type} does not say which actions are good; use "
                "algorithm.type=advantage_conditioned, or remove action.labels"
            )
        if plain(config.task).get("demonstrations") and "demonstrations" not in (
            *config.needs.offers,
            config.algorithm.collects,
        ):
            raise ValueError(
                "task.demonstrations is set, but nothing learns from it: add "
                "rollout.extras=[{type: demonstrations, prompts: 32}] and algorithm.terms=[likelihood], or use "
                "algorithm.type=supervised"
            )
        contrasts = isinstance(action.head, FlowActions) and isinstance(action.head.likelihood, ActionContrast)
        if contrasts and "contrast" not in config.needs.offers:
            raise ValueError(
                "action.head.likelihood.type=contrast compares implicit policies and gives no likelihood of "
                f"the current one, which algorithm.type={config.algorithm.type} needs; use chain, matching or learned"
            )

    def memory_model(self, config: JobConfig, path: str) -> MemoryModel | None:
        return load_attribute("mmrl.policies.vla.memory_estimate:memory_model")(self, config, path)

    @property
    def frozen(self) -> VisionLanguageActionModel:
        return self.model_copy(update={"lora": None, "freeze": []})

    def load(self, config: JobConfig, task: object, path: str) -> Policy:
        return load_attribute("mmrl.policies.vla.loading:load")(config, task, path)

    def load_teacher(self, config: JobConfig, task: object, path: str) -> Policy:
        return load_attribute("mmrl.policies.vla.loading:load_teacher")(config, task, path)
