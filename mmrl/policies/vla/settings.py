"""Settings of vision-language-action models: the `action` section, its heads, and what their decisions support."""

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
    Proposing,
    StateActionEncoding,
    Stepwise,
)
from mmrl.protocols.offers import Offer
from mmrl.protocols.requirements import Capabilities
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
    """The interface of a backbone for building heads."""

    @property
    def width(self) -> int: ...

    def requires_grad_(self, requires_grad: bool = True, /) -> object: ...

    def flow_head(
        self, settings: FlowActions | TaughtFlow | FrozenFlow, action: Actions, action_dim: int, state_dim: int
    ) -> nn.Module: ...

    def l1_head(self, settings: L1Actions, action: Actions, action_dim: int) -> nn.Module: ...


class ActionHead(Choice):
    """A head that turns the backbone's reading into a chunk of actions, and scores chunks."""

    title: ClassVar[str] = "action head"
    kinds: ClassVar[dict[str, str]] = {
        "token": "mmrl.policies.vla.settings:TokenActions",
        "flow": "mmrl.policies.vla.settings:FlowActions",
        "regression": "mmrl.policies.vla.settings:RegressionActions",
        "bridge": "mmrl.policies.vla.settings:BridgeActions",
        "gaussian": "mmrl.policies.vla.settings:GaussianActions",
        "l1": "mmrl.policies.vla.settings:L1Actions",
        "invertible": "mmrl.policies.vla.settings:InvertibleActions",
        "latent": "mmrl.policies.vla.settings:LatentActions",
        "steered": "mmrl.policies.vla.heads.steered_settings:SteeredActions",
        "residual": "mmrl.policies.vla.heads.mixture_settings:ResidualActions",
        "horizons": "mmrl.policies.vla.heads.mixture_settings:HorizonActions",
    }
    test: ClassVar[str] = "tests/policies/vla/test_policy.py"
    type: str = "token"
    has_temperature: ClassVar[bool] = True  # whether rollout.temperature and evaluation.temperature mean something
    shaping: ClassVar[tuple[str, ...]] = ()  # options that the saved weights depend on
    states_suffice: ClassVar[bool] = False  # whether it can read the robot's state alone, without a backbone
    teachable: ClassVar[bool] = True  # whether chunks that it did not make can be scored
    bounded: ClassVar[bool] = True  # whether its actions are clipped to [-1, 1] before they are scaled for the robot

    @property
    def together(self) -> bool:
        """True where the head reads prompt and queries in one bidirectional pass, which only OpenVLA-OFT can."""
        return False

    @property
    def demonstrable(self) -> bool:
        """True where demonstrated chunks can be scored beside those of rollouts."""
        return self.teachable

    @property
    def core(self) -> ActionHead:
        """The head of the checkpoint: of a head that is built around another one, that other one."""
        return self

    def check_chunk(self, chunk: int) -> None:  # noqa: B027  (most heads make any)
        """Raises ValueError in one line for a chunk length that the head does not support."""

    @abstractmethod
    def build(self, action: Actions, backbone: HeadBackbone, action_dim: int, state_dim: int) -> nn.Module:
        """Builds the head's network. Raises UserError where it does not fit the backbone.

        action_dim, state_dim: numbers of an action and of the robot's state."""

    @property
    @abstractmethod
    def offers(self) -> frozenset[Offer]:
        """The abilities of its decisions; see `mmrl.protocols.offers`."""


Level = Literal["token", "action", "chunk"]


class TokenActions(ActionHead):
    """Predicts every number of an action as a token, the number of its bin."""

    source: ClassVar[str] = "OpenVLA, arXiv 2406.09246; bidirectional: OpenVLA-OFT, arXiv 2502.19645"
    type: str = "token"
    shaping: ClassVar[tuple[str, ...]] = ("decoding", "bins")
    level: Level = option("token", "what one decision is: one number of one action, an action, or the chunk")
    decoding: Literal["parallel", "autoregressive", "bidirectional"] = option(
        "parallel",
        "one token after the other (autoregressive), or all at once, from learned queries (parallel) or from zero "
        "embeddings with bidirectional attention (bidirectional)",
    )
    bins: int = option(256, "values of one number; the last ids of the vocabulary", ge=3)

    @property
    def together(self) -> bool:
        return self.decoding == "bidirectional"

    def build(self, action: Actions, backbone: HeadBackbone, action_dim: int, state_dim: int) -> nn.Module:
        return load_attribute("mmrl.policies.vla.heads.head:TokenHead")(self, action, backbone, action_dim, state_dim)

    @property
    def offers(self) -> frozenset[Offer]:
        return frozenset({"entropy", "tokens", "single_sample_kl", "reference_ratio"})


class ActionLikelihood(Likelihood):
    """A definition of the decisions of a flow over actions."""

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
    """The steps of the chain inside the window, each a Gaussian of the whole chunk."""

    @property
    def offers(self) -> frozenset[Offer]:
        offered: set[Offer] = {"divergence", "gaussian", "velocity", "reference_ratio"}
        return frozenset(offered if self.transition.unscaled else offered | {"single_sample_kl", "step_density"})


class ActionMatching(MatchingLikelihood, ActionLikelihood):
    """The chunk is one decision, whose log-ratio is the fall of the flow-matching error (FPO)."""

    @property
    def offers(self) -> frozenset[Offer]:
        return frozenset({"matching", "velocity", "single_sample_kl", "reference_ratio"})


class ActionContrast(Draws, ActionLikelihood):
    """The errors of implicit policies on both sides of the old one, for algorithm.type=contrast. Every draw is a
    decision; actions that were not executed have no part in it."""

    equation: ClassVar[str] = (
        "noisy = (1 - s) data + s noise, s of Beta(1.5, 1); a policy's error is that of noisy - s v from data"
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
    def _rises(self) -> LearnedNoise:
        if not 0 < self.range[0] <= self.range[1]:
            raise ValueError(f"range must be positive and rise, got {self.range}")
        return self

    @property
    def offers(self) -> frozenset[Offer]:
        return frozenset({"entropy", "single_sample_kl", "reference_ratio"})


class ActionFlow(ActionHead):
    """An expert denoises the chunk; LeRobot's SmolVLA, pi0 and pi0.5 bring their own."""

    source: ClassVar[str] = "pi0, arXiv 2410.24164"
    type: str = "flow"
    has_temperature: ClassVar[bool] = False
    shaping: ClassVar[tuple[str, ...]] = ("width", "depth")
    evaluation_steps: int = option(40, "denoising steps of a chunk in evaluation", unit="steps", ge=1)
    width: int = option(128, "width of the action expert; a policy with its own expert ignores it", ge=1)
    depth: int = option(3, "blocks of the expert", ge=1)


class FlowActions(ActionFlow):
    """An expert denoises the chunk; `likelihood` defines its decisions."""

    steps: int = option(10, "denoising steps of a chunk in training", unit="steps", ge=1)
    likelihood: ActionLikelihood = option(ActionChain(), "what a decision is: how its log-probability is computed")

    @property
    def demonstrable(self) -> bool:
        return isinstance(self.likelihood, ActionMatching)

    def build(self, action: Actions, backbone: HeadBackbone, action_dim: int, state_dim: int) -> nn.Module:
        return backbone.flow_head(self, action, action_dim, state_dim)

    @property
    def offers(self) -> frozenset[Offer]:
        return self.likelihood.offers


class TaughtFlow(ActionFlow):
    """An expert that learns chunks from demonstrations, by flow matching."""

    draws: int = option(4, "noise levels and noises a chunk", ge=1)
    reduction: Literal["mean", "sum"] = option("mean", "over the elements of a chunk")

    @property
    def likelihood(self) -> ActionMatching:
        return ActionMatching(draws=self.draws, reduction=self.reduction)

    def build(self, action: Actions, backbone: HeadBackbone, action_dim: int, state_dim: int) -> nn.Module:
        return backbone.flow_head(self, action, action_dim, state_dim)

    @property
    def offers(self) -> frozenset[Offer]:
        return frozenset({"matching"})


class FrozenFlow(ActionFlow):
    """An expert that denoises a chunk from the noise that it is given."""

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


class LaplaceActions(ActionHead):
    """Actions with a median and a learned scale."""

    equation: ClassVar[str] = (
        "log p(a) = -|a - median| / scale - log(2 scale); sampled and scored at temperature x scale"
    )
    source: ClassVar[str] = "RIPT-VLA, arXiv 2505.17016"
    level: Level = option("token", "what one decision is: one number of one action, an action, or the chunk")
    scale: float = option(0.1, "scale of the Laplace distribution before training", gt=0)

    @property
    def offers(self) -> frozenset[Offer]:
        return frozenset({"entropy", "single_sample_kl", "reference_ratio"})


class RegressionActions(LaplaceActions):
    """The chunk's median and a learned scale, one query an action."""

    type: str = "regression"

    def build(self, action: Actions, backbone: HeadBackbone, action_dim: int, state_dim: int) -> nn.Module:
        return load_attribute("mmrl.policies.vla.heads.head:RegressionHead")(
            self, action, action_dim, state_dim, backbone.width
        )


class BridgeActions(LaplaceActions):
    """The chunk's median and a learned scale, read from every layer of the backbone."""

    source: ClassVar[str] = "VLA-Adapter, arXiv 2509.09372"
    type: str = "bridge"
    shaping: ClassVar[tuple[str, ...]] = ("width", "depth", "queries")
    width: int = option(128, "of the bridge", ge=1)
    depth: int = option(3, "blocks, one for each of the backbone's last layers", ge=1)
    queries: int = option(16, "queries that the backbone reads", ge=1)

    def build(self, action: Actions, backbone: HeadBackbone, action_dim: int, state_dim: int) -> nn.Module:
        return load_attribute("mmrl.policies.vla.heads.head:BridgeHead")(
            self, action, action_dim, state_dim, backbone.width
        )


class NormalActions(ActionHead):
    """Actions around a mean, with a spread of their own."""

    equation: ClassVar[str] = (
        "log p(a) = -(a - mean)^2 / (2 std^2) - log(std sqrt(2 pi)); sampled and scored at temperature x std"
    )
    level: Level = option("action", "what one decision is: one number of one action, an action, or the chunk")
    std: float = option(0.6, "standard deviation, before training", gt=0)
    fixed: bool = option(False, "the standard deviation is not trained")
    least_std: float = option(
        0.0,
        "a learned standard deviation that is less counts as this: what demonstrations hardly vary would otherwise "
        "weigh most in every ratio",
        ge=0,
    )

    @property
    def offers(self) -> frozenset[Offer]:
        offered: set[Offer] = {"divergence", "single_sample_kl", DifferentiableActions}
        return frozenset(offered if self.fixed else offered | {"entropy"})


class GaussianActions(NormalActions):
    """The chunk's mean, by a perceptron, and a learned spread. It needs no backbone: it may read nothing but the
    robot's state."""

    source: ClassVar[str] = "ManiSkill's PPO, arXiv 2410.00425, after CleanRL"
    type: str = "gaussian"
    states_suffice: ClassVar[bool] = True
    shaping: ClassVar[tuple[str, ...]] = ("width", "layers")
    width: int = option(256, "width of the MLP's hidden layers", ge=1)
    layers: int = option(3, "hidden layers of the perceptron; 0: the mean is linear", ge=0)
    last_gain: float = option(0.01, "size of the last layer's weights, before training", gt=0)

    def build(self, action: Actions, backbone: HeadBackbone, action_dim: int, state_dim: int) -> nn.Module:
        return load_attribute("mmrl.policies.vla.heads.gaussian:GaussianHead")(
            self, action, action_dim, state_dim, backbone.width
        )


class L1Actions(NormalActions):
    """OpenVLA-OFT's own L1 regression head, from a converted checkpoint: evaluated at temperature 0 it makes the
    published actions, and rollouts are drawn around them."""

    source: ClassVar[str] = "OpenVLA-OFT, arXiv 2502.19645; the standard deviation around its actions is mmrl's own"
    test: ClassVar[str] = "tests/policies/vla/test_oft.py"
    type: str = "l1"
    bounded: ClassVar[bool] = False
    std: float = option(0.1, "standard deviation, before training", gt=0)

    @property
    def together(self) -> bool:
        return True

    def build(self, action: Actions, backbone: HeadBackbone, action_dim: int, state_dim: int) -> nn.Module:
        return backbone.l1_head(self, action, action_dim)


class InvertibleActions(ActionHead):
    """A flow over two copies of the chunk that runs backwards exactly, and so knows its likelihood. As `gaussian` it
    may read nothing but the robot's state."""

    equation: ClassVar[str] = (
        "x += v(y, t) / T; y += v(x, t) / T; x = p x + (1 - p) y; y = p y + (1 - p) x; action = (x + y) / 2; "
        "log p(x, y) = log N(noise; 0, (temperature x scale)^2) - 2 T D log p"
    )
    source: ClassVar[str] = "after GenPO, arXiv 2505.18763; reconstructed from its abstract and equations"
    test: ClassVar[str] = "tests/policies/vla/test_invertible.py"
    type: str = "invertible"
    states_suffice: ClassVar[bool] = True
    shaping: ClassVar[tuple[str, ...]] = ("width", "layers", "steps", "mix", "scale")
    steps: int = option(5, "of the flow", unit="steps", ge=1)
    mix: float = option(0.9, "p: how much of a copy stays itself at each step", gt=0.5, lt=1)
    scale: float = option(0.5, "standard deviation of the noise", gt=0)
    apart: float = option(0.05, "how far the copies of a demonstrated chunk are moved apart", gt=0)
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


class LatentActions(NormalActions):
    """Before a chunk the policy draws latents one after the other, and decides after each whether that is enough; the
    chunk's mean reads them. Latents and exits are decisions beside the actions. As `gaussian` it may read nothing but
    the robot's state."""

    equation: ClassVar[str] = (
        "z_k ~ N(mu(h, z_<k), (temperature x latent_std)^2); after it reasoning ends with chance "
        "sigmoid(exit(h, z_<=k) / temperature), and after `steps` latents anyway; "
        "a ~ N(mean(h, z), (temperature x std)^2). Demonstrations: log p(a | h, z), with z drawn from the policy, "
        "through which the gradient goes"
    )
    source: ClassVar[str] = "after AVA-VLA; reconstructed from a description of it"
    test: ClassVar[str] = "tests/policies/vla/test_latent.py"
    type: str = "latent"
    states_suffice: ClassVar[bool] = True
    shaping: ClassVar[tuple[str, ...]] = ("width", "layers", "steps", "latent", "latent_std", "early_exit")
    steps: int = option(4, "latents before a chunk, at most", ge=1)
    latent: int = option(8, "numbers of a latent", ge=1)
    latent_std: float = option(
        0.3, "standard deviation of a latent; it is not learned: noise in latents only disturbs what is shown", gt=0
    )
    early_exit: bool = option(True, "reasoning may end before `steps` latents; else it never does")
    exit_chance: float = option(0.2, "probability before training that reasoning ends after a latent", gt=0, lt=1)
    width: int = option(256, "of the perceptrons' hidden layers", ge=1)
    layers: int = option(2, "hidden layers of each perceptron", ge=1)
    last_gain: float = option(
        0.01, "size of the last layers' weights, before training; of the one that makes latents it is 1", gt=0
    )

    def build(self, action: Actions, backbone: HeadBackbone, action_dim: int, state_dim: int) -> nn.Module:
        return load_attribute("mmrl.policies.vla.heads.latent:LatentHead")(
            self, action, action_dim, state_dim, backbone.width
        )


class AdvantageLabels(Section):
    """Words behind the instruction that say how an action turned out."""

    good: str = option(
        "Advantage: positive",
        "prompt of actions with a return above the critic's value, and of the policy's own actions",
    )
    bad: str = option("Advantage: negative", "prompt of the other actions")


class Actions(Section):
    """Options of actions."""

    head: ActionHead = option(TokenActions(), "head that predicts them")
    chunk: int = option(5, "actions executed before the next observation", unit="actions", ge=1)
    proprioception: bool = option(True, "the robot's state is an input of the policy")
    privileged: int = option(
        0,
        "how many of the last numbers of the simulator's state are for a critic alone, such as positions of objects "
        "(task.options.privileged of the tabletop)",
        ge=0,
    )
    standardise: bool = option(
        False, "standardise the state by its mean and deviation under random actions, which are kept with the model"
    )
    prompt: str | None = option(None, "with {instruction}; default: the backbone's own")
    labels: AdvantageLabels | None = option(
        None, "the prompt says whether a good action is wanted, as algorithm.type=advantage_conditioned teaches it"
    )
    center_crop: float = option(
        1.0, "area of OpenVLA's images that is kept; 0.9 for checkpoints trained on random crops", gt=0, le=1
    )
    resize: Literal["model", "openvla"] = option(
        "model",
        "how OpenVLA's images come to its size. model: as its preprocessor_config.json says; openvla: through JPEG "
        "and a Lanczos filter, as the data that its LIBERO checkpoints learned from, and OpenVLA's own evaluations",
    )
    statistics: str | None = option(
        None,
        "OpenVLA's dataset_statistics.json, LeRobot's meta/stats.json, openpi's norm_stats.json, or a folder with one; "
        "default: actions are within [-1, 1]",
    )
    statistics_key: str | None = option(
        None, "which data set of it, or of a LeRobot checkpoint that holds several; default: the only one"
    )
    normalisation: Literal["quantiles", "min_max", "mean_std"] | None = option(
        None,
        "numbers of action.statistics that stand for -1 and 1: q01 and q99, min and max, or mean - std and mean + std; "
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
        "cameras of the simulator whose images the policy sees, in this order; default: all of them, side by side in "
        "one image",
        min_length=1,
    )
    camera_features: list[str] | None = option(
        None,
        "of a LeRobot policy: its name (observation.images.NAME) for each of `cameras`, in their order, those left out "
        "being empty; default: all of its images, in the checkpoint's order",
        min_length=1,
    )
    film: bool = option(
        False,
        "keep an image of every action in evaluation, and of every policy step of rollouts that training tables show",
    )

    @model_validator(mode="after")
    def _head_makes_the_chunk(self) -> Actions:
        self.head.check_chunk(self.chunk)
        return self

    @model_validator(mode="after")
    def _prompt_has_an_instruction(self) -> Actions:
        if self.prompt is not None and "{instruction}" not in self.prompt:
            raise ValueError(f"prompt must hold {{instruction}}, got {self.prompt!r}")
        return self


class TaughtActions(Actions):
    """Options of actions that are learned from demonstrations."""

    head: ActionHead = option(
        TokenActions(),
        "head that predicts them",
        kinds={**ActionHead.kinds, "flow": "mmrl.policies.vla.settings:TaughtFlow"},
    )


class EpisodePrompts(Section):
    """Options of prompts."""

    max_prompt_length: int = option(1024, "longest prompt, image tokens included", unit="tokens", ge=1)


class EpisodeRollouts(WorkerSampling, EpisodePrompts):
    """Options of episodes."""


class EpisodeSampling(EpisodeRollouts):
    """Options of sampling actions."""

    temperature: Schedule = number(1.0, "scale of the head's randomness in rollouts and replay", gt=0)


class EpisodeEngine(UnevenEngine):
    """Options of replaying episodes."""

    steps_at_once: int | None = option(
        None,
        "policy steps of a micro-batch that are computed at once; where it has more, each part is computed again "
        "in the backward pass: less memory, more time; default: all",
        unit="policy steps",
        ge=1,
    )


class EpisodeEvaluation(Section):
    """Options of sampling actions in evaluation."""

    temperature: float = option(0.0, "0: the likeliest actions", ge=0)
    decoding: Literal["both", "greedy", "sampled"] = option(
        "both",
        "what mmrl eval plays. greedy: at `temperature`; sampled: at that of rollouts; both: all episodes twice",
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
        action = tree.get("action")
        tree_of_head = action.get("head", {}) if isinstance(action, Mapping) else {}
        head = kind_of(ActionHead, tree_of_head, ("action", "head"))  # type: ignore[type-abstract]
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
        action: Actions = config.section("action")
        added: frozenset[Offer] = frozenset(
            {"lengths", "critic", Stepwise, EpisodeStoring, Proposing, StateActionEncoding}
        )
        shown: frozenset[Offer] = frozenset({"demonstrations", ExpertLabelling} if action.head.demonstrable else ())
        labelled: frozenset[Offer] = frozenset({AdvantageLabelling} if action.labels is not None else ())
        offers = action.head.offers | added | shown | labelled
        # Under ZeRO-3 every forward pass gathers weights, but ranks play episodes of different lengths.
        return Capabilities(f"action.head.type={action.head.type}", offers, zero_stages=(0, 1, 2), groups=("critic",))

    def check(self, config: JobConfig) -> None:
        rollout = config.rollout
        action: Actions = config.section("action")
        if isinstance(rollout, WorkerSampling) and rollout.workers is not None:
            temperature = rollout.temperature if isinstance(rollout, EpisodeSampling) else None
            rollout.workers.check(config.needs, action.head.offers, temperature)
        if self.lora is not None and action.head.core is not action.head:
            raise ValueError(
                f"model.lora trains the backbone, which action.head.type={action.head.type} holds still with its base; "
                "remove it"
            )
        if config.algorithm.collects == "demonstrations" and not action.head.teachable:
            raise ValueError(
                f"action.head.type={action.head.type} learns from episodes, for a demonstrated chunk does not say from "
                f"which noise it comes; train its base with action.head.type={action.head.core.type}"
            )
        taught = config.algorithm.collects == "demonstrations"
        if taught and action.labels is not None and AdvantageLabelling not in config.needs.offers:
            raise ValueError(
                f"action.labels: algorithm.type={config.algorithm.type} does not say which actions are good; use "
                "advantage_conditioned, or remove it"
            )
        if plain(config.task).get("demonstrations") and "demonstrations" not in (
            *config.needs.offers,
            config.algorithm.collects,
        ):
            raise ValueError(
                "nothing learns from task.demonstrations: add rollout.extras=[{type: demonstrations, prompts: 32}] and "
                "algorithm.terms=[likelihood], or use algorithm.type=supervised"
            )
        contrasts = isinstance(action.head, FlowActions) and isinstance(action.head.likelihood, ActionContrast)
        if contrasts and "contrast" not in config.needs.offers:
            raise ValueError(
                "action.head.likelihood.type=contrast compares implicit policies and gives no likelihood of the "
                f"present one, which algorithm.type={config.algorithm.type} needs; use chain, matching or learned"
            )

    def memory_model(self, config: JobConfig, path: str) -> MemoryModel | None:
        return load_attribute("mmrl.policies.vla.memory_estimate:memory_model")(self, config, path)

    def load(self, config: JobConfig, task: object, path: str) -> Policy:
        return load_attribute("mmrl.policies.vla.loading:load")(config, task, path)
