"""The records that flow through a training step: a prompt, a scored sample, and the batch of rollouts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor


@dataclass(frozen=True)
class Video:
    """A video: `frames` of one size, in order, shown at `fps` frames a second."""

    frames: tuple[Image.Image, ...]
    fps: float = 2.0

    @property
    def shape(self) -> tuple[int, int, int]:
        """Number of frames, width and height."""
        return (len(self.frames), *self.frames[0].size)

    def times(self) -> dict[str, Any]:
        """Returns the metadata of the frames as transformers and vLLM expect it: number, frames a second, seconds, and
        indices."""
        num_frames = len(self.frames)
        return {
            "total_num_frames": num_frames,
            "fps": self.fps,
            "duration": num_frames / self.fps,
            "frames_indices": list(range(num_frames)),
        }


@dataclass(frozen=True)
class Message:
    """One message of a conversation: texts, images and videos, in order."""

    role: str  # system, user, assistant or tool
    parts: tuple[str | Image.Image | Video, ...]

    @property
    def images(self) -> tuple[Image.Image, ...]:
        return tuple(part for part in self.parts if isinstance(part, Image.Image))

    @property
    def videos(self) -> tuple[Video, ...]:
        return tuple(part for part in self.parts if isinstance(part, Video))

    @property
    def text(self) -> str:
        """Its texts, concatenated."""
        return "".join(part for part in self.parts if isinstance(part, str))


@dataclass(frozen=True)
class Prompt:
    """One prompt for a policy.

    `text` may hold `<image>` once per image and `<video>` once per video, to mark their positions; without any marker
    images come first, in order, and videos after them. `answer` is for verifiers, `metadata` for rewards and tables.
    `messages`, if any, replace system, text, images and videos, and `tools` are the JSON schemas of functions for the
    chat template. `before_start` is the prompt before an environment began a conversation with it.
    """

    id: str
    text: str
    images: tuple[Image.Image, ...] = ()
    answer: Any = None
    system: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    videos: tuple[Video, ...] = ()
    before_start: Prompt | None = None

    def map_images(self, transform: Callable[[Image.Image], Image.Image]) -> Prompt:
        """Returns the prompt with `transform` applied to every image and every video frame: first to those of
        `messages`, in order, then to those of `images` and of `videos`."""

        def transform_part(part: str | Image.Image | Video) -> str | Image.Image | Video:
            if isinstance(part, Video):
                return transform_video(part)
            return part if isinstance(part, str) else transform(part)

        def transform_video(video: Video) -> Video:
            return replace(video, frames=tuple(transform(frame) for frame in video.frames))

        messages = tuple(replace(m, parts=tuple(transform_part(part) for part in m.parts)) for m in self.messages)
        images = tuple(transform(image) for image in self.images)
        videos = tuple(transform_video(video) for video in self.videos)
        return replace(self, messages=messages, images=images, videos=videos)

    @property
    def seen_images(self) -> tuple[Image.Image, ...]:
        """The images that a policy reads, in order: those of `messages` if there are any, else `images`."""
        return tuple(i for message in self.messages for i in message.images) if self.messages else self.images

    @property
    def seen_videos(self) -> tuple[Video, ...]:
        """The videos that a policy reads, in order: those of `messages` if there are any, else `videos`."""
        return tuple(v for message in self.messages for v in message.videos) if self.messages else self.videos


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation: the policy's response, and the environment's answer to it."""

    response: str
    observation: tuple[Message, ...] = ()  # what the policy reads next; empty in the last turn
    reward: float = 0.0  # from the environment
    tool: str | None = None  # name of the tool that the response called
    error: str | None = None  # why the environment could not execute the response
    facts: dict[str, Any] = field(default_factory=dict)  # the environment's info, for rewards, metrics and tables


@dataclass(frozen=True)
class Conversation:
    """A conversation of a policy and an environment.

    end: why it ended: "environment" (the environment ended it), "turns" or "length" (it reached the limit of turns or
    of tokens), or "lost" (the environment failed; the rollout gets no reward and is not trained on).
    """

    messages: tuple[Message, ...]  # before the first turn
    turns: tuple[Turn, ...]
    end: str
    problem: str = ""  # what went wrong, where it was lost


@dataclass(frozen=True)
class Episode:
    """The outcome of one episode in a simulator."""

    instruction: str
    success: bool  # at any time during the episode
    success_at_end: bool
    length: int  # executed actions
    reward: float  # the simulator's, summed over the episode
    lost: bool = False  # the simulator failed; the rollout gets no reward and is not trained on
    frames: NDArray[np.uint8] | None = None  # [frame, height, width, 3], where they were requested
    reasoning: float | None = None  # mean number of latents sampled before a chunk; None: the head samples none


@dataclass(frozen=True)
class Spans:
    """Rewards of parts of a response (process rewards). A reward function may return them instead of a number.

    values: (begin, end, value), sorted and without overlap; end is excluded. unit: what begin and end count:
    "characters" of `Sample.response`, "turns" of the conversation, "decisions", such as denoising steps, or
    "policy_steps" of a robot's episode. total: the reward of the whole rollout; None: computed from the values by the
    reward's option `total`.
    """

    values: Sequence[tuple[int, int, float]]
    total: float | None = None
    unit: str = "characters"


@dataclass(frozen=True)
class Sample:
    """The input of a reward function: a prompt with its response, image, video or episode. In a conversation `response`
    is the last response, and `response_length` counts the tokens of all responses."""

    prompt: Prompt
    response: str = ""
    response_length: int = 0  # tokens, the end token included
    truncated: bool = False  # reached max_response_length without an end token
    max_response_length: int = 0
    image: Tensor | None = None  # [channel, height, width] fp32 on the CPU, 0 to 1 in gamut, as decoded: not clamped
    frames: Tensor | None = None  # of a video [frame, channel, height, width], otherwise as `image`
    episode: Episode | None = None
    conversation: Conversation | None = None
    prompt_opens_think: bool | None = None  # whether the rendered prompt ended in <think>; None: unknown
    forwards: int = 0  # forward passes that generated it, of a model that may decode several tokens in one
    # By reward name, filled in for rewards that return spans; copies made by `replace` have none.
    spans: dict[str, Spans] = field(default_factory=dict, init=False, compare=False, repr=False)


# Values of `Rollouts.origin`. FRESH: sampled in this step. DEMONSTRATION: the known answer. REPLAYED: from an earlier
# step. EXTRA: sampled in this step by a source of `rollout.extras`. PROPOSED: a chunk that was not executed.
FRESH, DEMONSTRATION, REPLAYED, EXTRA, PROPOSED = range(5)
TEXT, IMAGE = range(2)  # parts of a response that contains an image
OBJECTIVE = "objective"  # key in `Rollouts.extras`: 0 where a mask excludes a decision from the objective, else 1
PARTS = "parts"  # key in `Rollouts.extras`: TEXT or IMAGE for each decision, where responses contain images


def column(pad: float | None = None) -> Any:
    """Returns a dataclass field for an optional tensor [rollout, ...]. pad: the value that `Record.concat` pads the
    second dimension with, where its length varies between batches; None: it does not vary."""
    return field(default=None, metadata={"pad": pad})


@dataclass
class Record:
    """Columns of a batch: lists, tensors and further records, all indexed by rollout first."""

    def select(self, index: Tensor) -> Self:
        """Returns the rollouts at `index` ([n] int64, or [rollout] bool), in that order."""
        if index.dtype == torch.bool:
            index = index.nonzero().flatten()
        rows = index.tolist()
        return replace(self, **{f.name: _select_rows(vars(self)[f.name], index, rows) for f in fields(self)})

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """Concatenates batches of rollouts. Fields with a `pad` value are padded to the longest batch.

        Raises ValueError naming a field that is None in some of the batches only.
        """
        return cls(**{f.name: _concat_column(f, [vars(part)[f.name] for part in parts]) for f in fields(cls)})


ExtraKind = TypeVar("ExtraKind", bound=Record)
BY_DECISION = ("advantages",)  # columns [rollout, decision] without a pad value


@dataclass
class Rollouts(Record):
    """A batch of rollouts of any policy: B rollouts, at most T decisions each, K reward components.

    `inputs` is private to the policy that made the batch (tokens and images, latents, observations). Fields that are
    filled in later are None until then. `extras` holds records of single policies and algorithms by name.
    """

    samples: list[Sample]  # B
    inputs: list[Any]  # B, private to the policy
    group: Tensor  # [rollout] int64, which prompt a rollout answers
    mask: Tensor = field(metadata={"pad": 0})  # [rollout, decision] bool, True where a decision counts
    rewards: Tensor | None = column()  # [rollout, component] float32, NaN where a component could not be scored
    accuracy: Tensor | None = column()  # [rollout] float32, the task's measure of success, NaN where unknown
    origin: Tensor | None = (
        column()
    )  # [rollout] int64: FRESH, DEMONSTRATION, REPLAYED, EXTRA or PROPOSED; None: all fresh
    prompt: Tensor | None = column()  # [rollout] int64, the prompt's index in the task's training source
    filler: Tensor | None = column()  # [rollout] bool, True where dynamic sampling kept a group without signal
    version: Tensor | None = column()  # [rollout] int64, the training step of the oldest weights that made it
    advantages: Tensor | None = column()  # [rollout, decision] float32
    # [rollout, decision] float32, under the policy that made the rollout. Before the updates NaN for rollouts of the
    # first minibatch, unless `Needs.statistics` requires them.
    old_logp: Tensor | None = column(0)
    old_entropy: Tensor | None = column(0)  # [rollout, decision] float32, under the same policy
    old_square_sum: Tensor | None = column(0)  # [rollout, decision] float32, sum of its squared probabilities
    old_prediction: Tensor | None = column(0)  # [rollout, decision, ...] float32, its `Replay.prediction`
    behaviour_logp: Tensor | None = column(0)  # [rollout, decision] float32, as computed by the engine that sampled it
    ref_logp: Tensor | None = column(0)  # [rollout, decision] float32, under the reference policy
    ref_prediction: Tensor | None = column(0)  # [rollout, decision, ...] float32, the reference's `Replay.prediction`
    nodes: Tensor | None = column(-1)  # [rollout, decision] int64: rollouts with equal ids share the decision
    extras: dict[str, Record] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def recorded(self) -> Tensor:
        """Returns which rollouts are recorded steps of episodes, whose prompts hold the rest of the episode (an
        `mmrl.protocols.trajectory.EpisodeTail`), [rollout] bool."""
        return torch.tensor(["tail" in sample.prompt.metadata for sample in self.samples], dtype=torch.bool)

    def extra(self, name: str, kind: type[ExtraKind]) -> ExtraKind:
        """Returns the entry `name` of `extras`. Raises TypeError where it is missing or not of class `kind`."""
        record = self.extras.get(name)
        if not isinstance(record, kind):
            raise TypeError(
                f"the rollouts have no {kind.__name__} as {name}; they have {', '.join(self.extras) or 'no extras'}"
            )
        return record

    def by_step(self, inputs: list[list[Any]]) -> Rollouts:
        """Splits rollouts into their steps. Returns each step as a rollout that is its own group.

        All steps have the same number of decisions. inputs: the inputs of each step, as a list for each rollout; only
        steps that are listed are returned. Columns [rollout, ...] are repeated for the steps of a rollout.
        """
        indices = [(rollout, step) for rollout, steps in enumerate(inputs) for step in range(len(steps))]
        row, step = torch.tensor(indices, dtype=torch.int64).view(-1, 2).unbind(1)
        max_steps = max(1, *map(len, inputs))
        single_steps = _keep_step(self.select(row), step, max_steps)
        flat_inputs = [step_inputs for steps in inputs for step_inputs in steps]
        return replace(single_steps, inputs=flat_inputs, group=torch.arange(len(indices)))


class Extra(Record, ABC):
    """A record of `Rollouts.extras` that may be unknown for some rollouts."""

    @abstractmethod
    def blank(self, rollouts: Rollouts) -> Self:
        """Returns a record of this class for other rollouts, with the value "unknown" everywhere."""


@dataclass
class Column(Extra):
    """A column of `Rollouts.extras` with a value for each rollout, computed by a part of an algorithm."""

    values: Tensor  # [rollout, ...], of the same shape in every batch

    def blank(self, rollouts: Rollouts) -> Column:
        """Returns a column of NaN, or of 0 for integers."""
        return Column(_unknown_like(self.values, len(rollouts)))


@dataclass
class DecisionColumn(Extra):
    """A column of `Rollouts.extras` with a value for each decision, computed by a part of an algorithm."""

    values: Tensor = field(metadata={"pad": 0})  # [rollout, decision, ...]

    def blank(self, rollouts: Rollouts) -> DecisionColumn:
        """Returns a column of 0."""
        shape = (*rollouts.mask.shape, *self.values.shape[2:])
        return DecisionColumn(torch.zeros(shape, dtype=self.values.dtype))


@dataclass
class FurtherResponses(Extra):
    """Further responses to the prompt of each rollout, and their mean accuracy; NaN where none could be scored."""

    accuracy: Tensor  # [rollout] float32
    responses: list[list[str]]

    def blank(self, rollouts: Rollouts) -> FurtherResponses:
        return FurtherResponses(_unknown_like(self.accuracy, len(rollouts)), [[] for _ in range(len(rollouts))])


def _unknown_like(values: Tensor, num_rollouts: int) -> Tensor:
    """Returns a tensor [num_rollouts, ...] shaped otherwise like `values`, filled with NaN, or 0 for integers."""
    fill = torch.nan if values.is_floating_point() else 0
    return torch.full((num_rollouts, *values.shape[1:]), fill, dtype=values.dtype)


Value = TypeVar("Value")


def require(value: Value | None, name: str) -> Value:
    """Returns `value`. Raises ValueError with `name` where it is None."""
    if value is None:
        raise ValueError(f"{name} are needed here, but are None: no earlier part of the step has filled them in")
    return value


def text_image_parts(num_rollouts: int, num_text: int, num_decisions: int) -> Tensor:
    """Returns [rollout, decision] int64: TEXT for the first `num_text` decisions of each rollout, then IMAGE."""
    index = torch.arange(num_decisions)
    return torch.full_like(index, IMAGE).where(index >= num_text, TEXT).repeat(num_rollouts, 1)


def get_alternatives(rollouts: Rollouts) -> Tensor | None:
    """Returns [rollout, decision, k] int64: the ids of k alternatives to each decision, whose log-probabilities the
    replay shall return too. None where `extras` has no "alternatives"."""
    record = rollouts.extras.get("alternatives")
    return record.values if isinstance(record, DecisionColumn) else None


def part_mask(rollouts: Rollouts, part: int) -> Tensor:
    """Returns [rollout, decision] bool: True for decisions that belong to `part`, which is TEXT or IMAGE."""
    return decision_parts(rollouts) == part


def decision_parts(rollouts: Rollouts) -> Tensor:
    """Returns [rollout, decision] int64: TEXT or IMAGE for each decision. Raises TypeError for rollouts whose responses
    contain no images."""
    return rollouts.extra(PARTS, DecisionColumn).values


def fill_in_columns(part: Rollouts, other: Rollouts) -> Rollouts:
    """Returns `part` with all columns that `other` has, so that both can be concatenated. A column that `part` lacks is
    filled with NaN, -1 for integers or False for bool; a record of `extras` with its `blank`."""
    filled: dict[str, Any] = {}
    for name in ("rewards", "accuracy", "prompt", "filler", "version", "behaviour_logp", "old_logp"):
        column = vars(other)[name]
        if column is not None and vars(part)[name] is None:
            shape = part.mask.shape if name.endswith("logp") else (len(part), *column.shape[1:])
            value = torch.nan if column.is_floating_point() else False if column.dtype == torch.bool else -1
            filled[name] = torch.full(shape, value, dtype=column.dtype)
    records = {name: record for name, record in other.extras.items() if isinstance(record, Extra)}
    extras = {name: record.blank(part) for name, record in records.items()} | part.extras
    return replace(part, **filled, extras=extras)


def fill_in_nodes(fresh: Rollouts, parts: Sequence[Rollouts]) -> list[Rollouts]:
    """Returns `parts` with the column `nodes`, and sets that of `fresh`, if any of the parts has it. Rollouts that
    share no decision with others get one node id, their row, for all of their decisions."""
    if all(part.nodes is None for part in parts):
        return list(parts)
    first, with_nodes = len(fresh), []
    fresh.nodes = unshared_nodes(fresh) if fresh.nodes is None else fresh.nodes
    for part in parts:
        with_nodes.append(replace(part, nodes=unshared_nodes(part, first)) if part.nodes is None else part)
        first += len(part)
    return with_nodes


def unshared_nodes(rollouts: Rollouts, first: int = 0) -> Tensor:
    """Returns the node ids of rollouts that share no decision, [rollout, decision] int64: the row, plus `first`."""
    return torch.arange(first, first + len(rollouts))[:, None].repeat(1, rollouts.mask.shape[1])


@dataclass
class Steps(Record):
    """Columns of `Rollouts.extras["steps"]` for a critic of rollouts with at most S steps. The critic gives each step
    one value; a step is a call of a robot's policy, a turn, or a single decision. Each step has T / S decisions, or
    those that `index` assigns to it."""

    mask: Tensor = field(metadata={"pad": 0})  # [rollout, step] bool, True while the episode ran
    rewards: Tensor = field(metadata={"pad": 0})  # [rollout, step] float32, the simulator's
    values: Tensor = field(metadata={"pad": 0})  # [rollout, step] float32, the critic's value before the step
    terminated: Tensor = field(metadata={"pad": 0})  # [rollout, step] bool, True where the step ended the episode
    bootstrap: Tensor = field(metadata={"pad": 0})  # [rollout, step] float32, the value of the state at the time limit
    returns: Tensor | None = column(0)  # [rollout, step] float32, the critic's targets
    moment: Tensor | None = column(0)  # [rollout, step] int64, the time of a step, where steps may have the same time
    index: Tensor | None = column(0)  # [rollout, decision] int64, the step of a decision, where steps differ in length
    begin: Tensor | None = column(0)  # [rollout, step] int64, the first decision of a step, where `index` is set

    @classmethod
    def from_decisions(cls, mask: Tensor, values: Tensor, moment: Tensor | None = None) -> Steps:
        """Returns steps of one decision each. The last step of a rollout terminates it, and rewards are 0, since only
        the task rewards such rollouts.

        mask: [rollout, decision] bool. values: [rollout, decision], the critic's. moment: [rollout, decision], the time
        of each decision; None: decisions have their order as time."""
        zeros = torch.zeros(mask.shape, dtype=values.dtype)
        last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))
        return cls(mask.clone(), zeros, values.where(mask, 0.0), last, zeros.clone(), moment=moment)

    def merge(self, index: Tensor) -> Steps:
        """Merges steps of one decision each into longer ones. The value of a merged step is that of its first decision,
        its reward the sum.

        index: [rollout, decision] int64, the merged step of each decision. It starts at 0 and rises by 0 or 1 from one
        decision under the mask to the next."""
        index = index.where(self.mask, 0)
        num_steps = int(index.max()) + 1 if index.numel() else 1
        shape, width = (len(index), num_steps), index.shape[1]
        column = torch.arange(width).expand_as(index).where(self.mask, width)  # `width`: of no step
        begin = torch.full(shape, width).scatter_reduce(1, index, column, "amin")
        mask, begin = begin < width, begin.clamp(max=max(0, width - 1))
        values = self.values.gather(1, begin).where(mask, 0.0)
        rewards = self.rewards.new_zeros(shape).scatter_add(1, index, self.rewards.where(self.mask, 0.0))
        last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))
        return Steps(mask, rewards, values, last, torch.zeros_like(values), index=index, begin=begin)

    def at_step_starts(self, values: Tensor) -> Tensor:
        """Selects the values of each step's first decision, [rollout, decision] -> [rollout, step]. Values that are
        [rollout, step] already, where steps have no `begin`, are returned as they are."""
        return values if self.begin is None else values.gather(1, self.begin.to(values.device))

    def by_decision(self, values: Tensor, num_decisions: int) -> Tensor:
        """Repeats the value of a step for each of its decisions, [rollout, step] -> [rollout, decision]."""
        if self.index is not None:
            return values.gather(1, self.index.to(values.device))
        return values.repeat_interleave(num_decisions // values.shape[1], 1)


@dataclass
class Turns(Record):
    """Columns of rollouts that are conversations of at most N turns; `Rollouts.extras["turns"]`."""

    number: Tensor = field(metadata={"pad": 0})  # [rollout, decision] int64, the turn that a decision belongs to
    mask: Tensor = field(metadata={"pad": 0})  # [rollout, turn] bool, True where there was a turn
    rewards: Tensor = field(metadata={"pad": 0})  # [rollout, turn] float32, the environment's


@dataclass
class MatchingTargets:
    """Predictions for the finished sample of a denoising chain with noise added to it again, [rollout, decision, ...]
    each. Losses on flow-matching errors read them; see `core.surrogates.contrast`."""

    noisy: Tensor  # the sample with noise added
    prediction: Tensor  # the policy's, with its gradient
    old: Tensor  # the prediction of the policy that sampled the rollouts
    data: Tensor  # the sample without noise
    sigma: Tensor  # [rollout, decision] the noise level
    signal: Tensor  # [rollout, decision] the factor of the sample in `noisy`
    noise_space: bool  # whether the network predicts the noise; otherwise the velocity
    source: Tensor | None = None  # [rollout, 1, ...] latents of the image that was edited, where there was one


@dataclass
class Replay:
    """Log-probabilities of rollouts recomputed under the current weights, and further columns, [rollout, decision]
    float32 each. Columns that only some policies or methods have are in `extras`, see `ReplayColumn`."""

    logp: Tensor
    entropy: Tensor | None = None  # None where it is constant (a Gaussian step of fixed variance)
    square_sum: Tensor | None = None  # sum of squared probabilities, for discrete decisions
    log_ratio: Tensor | None = None  # set where the policy has a more exact form than logp - old_logp
    divergence: Tensor | None = None  # exact KL to the old policy, if available, with its gradient
    reference_kl: Tensor | None = None  # exact KL to the reference policy, where rollouts.ref_prediction is set
    prediction: Tensor | None = None  # [rollout, decision, ...] detached, for comparison with old and reference
    std: Tensor | None = None  # of a Gaussian step
    weight: Tensor | None = None  # detached, of the decision in the loss; None: all alike
    value: Tensor | None = None  # [rollout, step], of a policy with a critic
    extras: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any]) -> Replay:
        """Builds a replay from columns by name. Names that are no field go into `extras`; None counts as missing."""
        field_names = {f.name for f in fields(cls)}
        present = {name: values for name, values in columns.items() if values is not None}
        extras = {name: values for name, values in present.items() if name not in field_names}
        return cls(**{name: values for name, values in present.items() if name in field_names}, extras=extras)

    def column(self, name: str) -> Any:
        """Returns the field `name`, or else the entry of `extras`; None where there is neither."""
        return self.extras.get(name) if name not in vars(self) else vars(self)[name]


T = TypeVar("T")


@dataclass(frozen=True)
class ReplayColumn(Generic[T]):
    """The name of a column of `Replay.extras`, with the type of its values."""

    name: str

    def get(self, replay: Replay) -> T | None:
        """Returns the column of a replay; None where the policy does not compute it."""
        column: T | None = replay.extras.get(self.name)
        return column

    def of(self, replay: Replay) -> T:
        """Returns the column of a replay. Raises ValueError where the policy does not compute it."""
        return require(self.get(replay), f"{self.name} of a replay")


ALTERNATIVES = ReplayColumn[Tensor]("alternatives")  # [rollout, decision, k] log-probabilities
SEGMENTS = ReplayColumn[Tensor]("segments")  # int64, the unit of level "segment" that a decision belongs to
# int64, the policy step of its episode in which a decision was made; None: a rollout is one step
POLICY_STEPS = ReplayColumn[Tensor]("policy_steps")
MOMENTS = ReplayColumn[Tensor]("moment")  # int64, the time of a decision, where a critic values several
IMAGES = ReplayColumn[Tensor]("images")  # [rollout, channel, height, width] with their gradient, 0 to 1 in gamut
MATCHING = ReplayColumn[MatchingTargets]("matching")  # of a policy whose decisions compare final samples
OLD_CROSS_ENTROPY = ReplayColumn[Tensor]("old_cross_entropy")  # to the whole distribution in rollouts.old_prediction
REFERENCE_LOG_RATIO = ReplayColumn[Tensor]("reference_log_ratio")  # where it is more exact than logp - ref_logp
REFERENCE_ERROR = ReplayColumn[Tensor]("reference_error")  # squared distance from the reference policy's prediction
# Fraction of the recorded experts that the trainer's router would not have picked for the previous token; NaN where
# nothing was recorded
ROUTING_DIFFERS = ReplayColumn[Tensor]("routing_differs")


def old_logp(micro: Rollouts, replay: Replay) -> Tensor:
    """Returns [rollout, decision] log-probabilities under the policy that sampled the rollouts, on the device of
    `replay`. Where `micro.old_logp` is None, in the first update of a step, they are the replay's, detached."""
    return replay.logp.detach() if micro.old_logp is None else micro.old_logp.to(replay.logp.device)


def log_ratio(micro: Rollouts, replay: Replay) -> Tensor:
    """Returns [rollout, decision] log pi - log pi_old with its gradient: `replay.log_ratio` where the policy computes
    it more exactly than the difference of the two."""
    return replay.logp - old_logp(micro, replay) if replay.log_ratio is None else replay.log_ratio


def _select_rows(value: Any, index: Tensor, rows: list[int]) -> Any:
    """Selects rows of one column. index: [n] int64. rows: the same numbers as a list, for columns that are lists."""
    if isinstance(value, list):
        return [value[row] for row in rows]
    if isinstance(value, dict):
        return {name: record.select(index) for name, record in value.items()}
    return None if value is None else value[index]


def _keep_step(record: ExtraKind, step: Tensor, max_steps: int) -> ExtraKind:
    """Returns `record` with the decisions of one step in each row.

    Columns [row, max_steps x decisions] become [row, decisions]. step: [row] int64, the step to keep. max_steps: number
    of steps of the longest rollout.
    """
    columns: dict[str, Any] = {}
    for f in fields(record):
        value = vars(record)[f.name]
        if isinstance(value, dict):
            columns[f.name] = {name: _keep_step(nested, step, max_steps) for name, nested in value.items()}
        elif isinstance(value, Tensor) and (f.metadata.get("pad") is not None or f.name in BY_DECISION):
            by_step = value.unflatten(1, (max_steps, value.shape[1] // max_steps))
            columns[f.name] = by_step[torch.arange(len(step)), step]
    return replace(record, **columns)


def _concat_column(column: Field[Any], values: list[Any]) -> Any:
    """Concatenates one column of several batches: lists, mappings of records, or tensors, padded where the field has a
    `pad` value. Raises ValueError where it is None in some of the batches only."""
    if isinstance(values[0], list):
        return [item for value in values for item in value]
    if isinstance(values[0], dict):
        return {name: type(record).concat([value[name] for value in values]) for name, record in values[0].items()}
    if all(value is None for value in values):
        return None
    if any(value is None for value in values):
        raise ValueError(f"{column.name} is set in some of the batches and None in others; set it in all or in none")
    pad = column.metadata.get("pad")
    return torch.cat(values if pad is None else pad_to_longest(values, pad))


def pad_to_longest(values: Sequence[Tensor], pad: float) -> list[Tensor]:
    """Returns tensors [row, n, ...] padded with `pad` to the largest n."""
    width = max(value.shape[1] for value in values)
    # F.pad takes (before, after) of each dimension, the last one first
    return [F.pad(v, (*[0] * (2 * (v.dim() - 2)), 0, width - v.shape[1]), value=pad) for v in values]
