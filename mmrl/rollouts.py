"""The records that flow through a training step: a prompt, a scored sample, and the batch of rollouts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor


@dataclass(frozen=True)
class Video:
    """A moving image: `frames` of one size, in order, `fps` of them a second."""

    frames: tuple[Image.Image, ...]
    fps: float = 2.0

    @property
    def shape(self) -> tuple[int, int, int]:
        """Frames, width and height."""
        return (len(self.frames), *self.frames[0].size)

    def times(self) -> dict[str, Any]:
        """When its frames are shown, by the names of transformers and vLLM."""
        count = len(self.frames)
        indices = list(range(count))
        return {"total_num_frames": count, "fps": self.fps, "duration": count / self.fps, "frames_indices": indices}


@dataclass(frozen=True)
class Message:
    """What one side of a conversation says: texts, images and clips, in order."""

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
        """Its texts, one after the other."""
        return "".join(part for part in self.parts if isinstance(part, str))


@dataclass(frozen=True)
class Prompt:
    """One question put to a policy.

    `text` may hold `<image>` once per image and `<video>` once per clip, at the place where it belongs; without any
    marker the images come first, in order, and the clips after them. `answer` is what a verifier compares with;
    `metadata` is for rewards and tables. `messages`, where there are any, are what the policy reads in place of system,
    text, images and videos, and `tools` are the JSON schemas of functions that its chat template shows it.
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

    def redrawn(self, change: Callable[[Image.Image], Image.Image]) -> Prompt:
        """With every image and every frame changed, one after the other."""
        images = tuple(change(image) for image in self.images)
        clips = tuple(replace(clip, frames=tuple(change(frame) for frame in clip.frames)) for clip in self.videos)
        return replace(self, images=images, videos=clips)


@dataclass(frozen=True)
class Turn:
    """One response of a conversation, and what the environment made of it."""

    response: str
    observation: tuple[Message, ...] = ()  # what the policy read next; nothing in the last turn
    reward: float = 0.0  # the environment's own
    tool: str | None = None  # that the response called
    error: str | None = None  # why the environment could not do what the response asked for
    facts: dict[str, Any] = field(default_factory=dict)  # of the environment, for rewards, metrics and tables


@dataclass(frozen=True)
class Conversation:
    """Turns of a policy and an environment. end: "environment" (that ended it), "turns" or "length" (a limit was
    reached), "lost" (the environment failed; nothing of this conversation counts)."""

    messages: tuple[Message, ...]  # that it began with
    turns: tuple[Turn, ...]
    end: str
    problem: str = ""  # what went wrong, where it was lost


@dataclass(frozen=True)
class Episode:
    """What became of one attempt in a simulator. Lengths count executed actions."""

    instruction: str
    success: bool  # at any time
    success_at_end: bool
    length: int
    reward: float  # the simulator's own, summed
    lost: bool = False  # the simulator failed; nothing of this episode counts
    frames: NDArray[np.uint8] | None = None  # [frame, height, width, 3], where they were asked for
    reasoning: float | None = None  # latents that were drawn before a chunk, on average; None: by a head that has none


@dataclass(frozen=True)
class Sample:
    """What a reward function sees of one rollout: the prompt, and the response, image or episode it led to. Of a
    conversation `response` is the last one, and `response_length` counts the tokens of all."""

    prompt: Prompt
    response: str = ""
    response_length: int = 0  # tokens, the end token included
    truncated: bool = False  # reached max_response_length without an end token
    max_response_length: int = 0
    image: Tensor | None = None  # [channel, height, width] fp32 on the CPU, 0 to 1 in gamut, as decoded: not clamped
    frames: Tensor | None = None  # of a clip [frame, channel, height, width], otherwise as `image`
    episode: Episode | None = None
    conversation: Conversation | None = None
    forwards: int = 0  # times that a model had to be asked for it, where that may be fewer than there are tokens


FRESH, DEMONSTRATION, REPLAYED, EXTRA = range(4)  # origins of a rollout
TEXT, IMAGE = range(2)  # parts of a response that draws: what is written about the image, and the image
PARTS = "parts"  # `Rollouts.extras` has them under this name, by decision, where responses have parts


def column(pad: float | None = None) -> Any:
    """A field of a record that is filled in later: a tensor whose first dimension is the rollout. pad: its second
    dimension has its own length in every batch, and this fills up the shorter ones; None: all have the same."""
    return field(default=None, metadata={"pad": pad})


@dataclass
class Record:
    """Columns of a batch: lists, tensors and further records, all of them by rollout."""

    def select(self, index: Tensor) -> Self:
        """The rollouts at `index` ([n] int64, or [rollout] bool), in that order."""
        if index.dtype == torch.bool:
            index = index.nonzero().flatten()
        rows = index.tolist()
        return replace(self, **{f.name: _picked(vars(self)[f.name], index, rows) for f in fields(self)})

    @classmethod
    def concat(cls, parts: Sequence[Self]) -> Self:
        """All rollouts of `parts`, padded as their fields say. A field must be filled in all parts or in none.

        Raises ValueError naming a field for which that does not hold.
        """
        return cls(**{f.name: _joined(f, [vars(part)[f.name] for part in parts]) for f in fields(cls)})


ExtraKind = TypeVar("ExtraKind", bound=Record)
BY_DECISION = ("advantages",)  # columns by decision that are not padded


@dataclass
class Rollouts(Record):
    """A batch of rollouts, whatever the policy: B rollouts, at most T decisions each, K reward components.

    `inputs` belongs to the policy that made the batch (tokens and images, latents, observations); nobody else looks
    inside. Fields that are filled in later are None until then. `extras` holds what only some policies and algorithms
    know of, by name, each a record of its own.
    """

    samples: list[Sample]  # B
    inputs: list[Any]  # B, private to the policy
    group: Tensor  # [rollout] int64, which prompt a rollout answers
    mask: Tensor = field(metadata={"pad": 0})  # [rollout, decision] bool, True where a decision counts
    rewards: Tensor | None = column()  # [rollout, component] float32, NaN where a component could not be scored
    accuracy: Tensor | None = column()  # [rollout] float32, the task's own measure of success, NaN where unknown
    origin: Tensor | None = column()  # [rollout] int64: FRESH, DEMONSTRATION, REPLAYED or EXTRA; None: all fresh
    prompt: Tensor | None = column()  # [rollout] int64, the prompt's index in the task's training source
    filler: Tensor | None = column()  # [rollout] bool, True where dynamic sampling found nothing better; None: nowhere
    version: Tensor | None = column()  # [rollout] int64, finished steps behind the oldest weights that made it
    advantages: Tensor | None = column()  # [rollout, decision] float32
    # [rollout, decision] float32, under the policy that made the rollout. Before the updates NaN for those that are
    # learned from first, unless `Needs.statistics` ask for them.
    old_logp: Tensor | None = column(0)
    old_entropy: Tensor | None = column(0)  # [rollout, decision] float32, under it
    old_square_sum: Tensor | None = column(0)  # [rollout, decision] float32, sum of squared probabilities under it
    old_prediction: Tensor | None = column(0)  # [rollout, decision, ...] float32, what `Replay.prediction` was then
    behaviour_logp: Tensor | None = column(0)  # [rollout, decision] float32, as the engine that sampled it has it
    ref_logp: Tensor | None = column(0)  # [rollout, decision] float32, under the reference policy
    ref_prediction: Tensor | None = column(0)  # [rollout, decision, ...] float32, what it is under the reference policy
    nodes: Tensor | None = column(-1)  # [rollout, decision] int64: equal ids in a group made that decision together
    extras: dict[str, Record] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.samples)

    def extra(self, name: str, kind: type[ExtraKind]) -> ExtraKind:
        """A record of `extras`. Raises TypeError where there is none of this kind."""
        found = self.extras.get(name)
        if not isinstance(found, kind):
            raise TypeError(
                f"the rollouts have no {kind.__name__} as {name}; they have {', '.join(self.extras) or 'no extras'}"
            )
        return found

    def by_step(self, inputs: list[list[Any]]) -> Rollouts:
        """Every step of every rollout as a rollout of its own, and a group of its own; a step is as many decisions as
        each of them has. inputs: of every step of every rollout; those that it does not name are left out.

        What is known of a rollout is known of each of its steps.
        """
        places = [(b, s) for b, steps in enumerate(inputs) for s in range(len(steps))]
        row, step = torch.tensor(places, dtype=torch.int64).view(-1, 2).unbind(1)
        most = max(1, *map(len, inputs))
        found = self.select(row)
        cut = _cut(found, step, most)
        return replace(cut, inputs=[one for steps in inputs for one in steps], group=torch.arange(len(places)))


class Extra(Record, ABC):
    """A record of `Rollouts.extras` that may be unknown of some rollouts."""

    @abstractmethod
    def blank(self, rollouts: Rollouts) -> Self:
        """A record like this one of rollouts that nothing is known of."""


@dataclass
class Column(Extra):
    """Something that a part of an algorithm knows of each rollout; in `Rollouts.extras`, by a name of its own."""

    values: Tensor  # [rollout, ...], of the same shape in every batch

    def blank(self, rollouts: Rollouts) -> Column:
        """NaN, or 0 where there is none."""
        return Column(_unknown(self.values, len(rollouts)))


@dataclass
class DecisionColumn(Extra):
    """Something that a part of an algorithm knows of each decision; in `Rollouts.extras`, by a name of its own."""

    values: Tensor = field(metadata={"pad": 0})  # [rollout, decision, ...]

    def blank(self, rollouts: Rollouts) -> DecisionColumn:
        """0 everywhere."""
        shape = (*rollouts.mask.shape, *self.values.shape[2:])
        return DecisionColumn(torch.zeros(shape, dtype=self.values.dtype))


@dataclass
class FurtherAnswers(Extra):
    """Further responses to the prompt of each rollout, and their mean accuracy, NaN where none could be judged."""

    accuracy: Tensor  # [rollout] float32
    responses: list[list[str]]

    def blank(self, rollouts: Rollouts) -> FurtherAnswers:
        return FurtherAnswers(_unknown(self.accuracy, len(rollouts)), [[] for _ in range(len(rollouts))])


def _unknown(like: Tensor, rollouts: int) -> Tensor:
    empty = torch.nan if like.is_floating_point() else 0
    return torch.full((rollouts, *like.shape[1:]), empty, dtype=like.dtype)


Given = TypeVar("Given")


def given(value: Given | None, name: str) -> Given:
    """The value. Raises ValueError naming it where there is none."""
    if value is None:
        raise ValueError(f"{name} are asked for, and were not filled in")
    return value


def text_and_image(rollouts: int, text: int, decisions: int) -> Tensor:
    """[rollout, decision] int64: the first `text` of so many decisions are TEXT, and the others IMAGE."""
    place = torch.arange(decisions)
    return torch.full_like(place, IMAGE).where(place >= text, TEXT).repeat(rollouts, 1)


def alternatives_of(rollouts: Rollouts) -> Tensor | None:
    """[rollout, decision, k] int64: what might have been decided at each decision, of which a replay shall say how
    likely it is, where rollouts bring that along in `extras`."""
    found = rollouts.extras.get("alternatives")
    return found.values if isinstance(found, DecisionColumn) else None


def in_part(rollouts: Rollouts, part: int) -> Tensor:
    """[rollout, decision] bool: which decisions are in a part of their response, TEXT or IMAGE."""
    return parts_of(rollouts) == part


def parts_of(rollouts: Rollouts) -> Tensor:
    """[rollout, decision] int64: TEXT or IMAGE. Raises TypeError for responses that have no parts."""
    return rollouts.extra(PARTS, DecisionColumn).values


def alike(part: Rollouts, fresh: Rollouts) -> Rollouts:
    """`part` with the columns that `fresh` has: NaN where numbers are unknown, -1 and False for others; of decisions
    0."""
    filled: dict[str, Any] = {}
    for name in ("rewards", "accuracy", "prompt", "filler", "version", "behaviour_logp", "old_logp"):
        like = vars(fresh)[name]
        if like is not None and vars(part)[name] is None:
            shape = part.mask.shape if name.endswith("logp") else (len(part), *like.shape[1:])
            value = torch.nan if like.is_floating_point() else False if like.dtype == torch.bool else -1
            filled[name] = torch.full(shape, value, dtype=like.dtype)
    known = {name: record for name, record in fresh.extras.items() if isinstance(record, Extra)}
    extras = {name: record.blank(part) for name, record in known.items()} | part.extras
    return replace(part, **filled, extras=extras)


def with_nodes(fresh: Rollouts, parts: Sequence[Rollouts]) -> list[Rollouts]:
    """`parts` with nodes of their own where they bring none, and `fresh` too, if any part has some: rollouts that share
    no decision have the id of their row at each."""
    if all(part.nodes is None for part in parts):
        return list(parts)
    first, made = len(fresh), []
    fresh.nodes = _rows_as_nodes(fresh, 0) if fresh.nodes is None else fresh.nodes
    for part in parts:
        made.append(replace(part, nodes=_rows_as_nodes(part, first)) if part.nodes is None else part)
        first += len(part)
    return made


def _rows_as_nodes(rollouts: Rollouts, first: int) -> Tensor:
    return torch.arange(first, first + len(rollouts))[:, None].repeat(1, rollouts.mask.shape[1])


@dataclass
class Steps(Record):
    """What a critic needs of rollouts whose decisions are made in an environment, in at most S steps of T / S decisions
    each; `Rollouts.extras["steps"]`."""

    mask: Tensor = field(metadata={"pad": 0})  # [rollout, step] bool, True where the episode was still on
    rewards: Tensor = field(metadata={"pad": 0})  # [rollout, step] float32, the simulator's own
    values: Tensor = field(metadata={"pad": 0})  # [rollout, step] float32, what the critic expected before the step
    terminated: Tensor = field(metadata={"pad": 0})  # [rollout, step] bool, the episode ended in it of its own
    bootstrap: Tensor = field(metadata={"pad": 0})  # [rollout, step] float32, the value of where the time limit cut it
    returns: Tensor | None = column(0)  # [rollout, step] float32, what the critic shall learn
    moment: Tensor | None = column(0)  # [rollout, step] int64, when it was, where several may be at once, in any order

    @classmethod
    def of_decisions(cls, mask: Tensor, values: Tensor, moment: Tensor | None = None) -> Steps:
        """Of rollouts in which every decision is a step, and the last one ends them; nobody but the task rewards.

        mask, values: [rollout, decision]; what counts has no gaps. moment: likewise, when each was made; None: one
        after the other."""
        blank = torch.zeros(mask.shape, dtype=values.dtype)
        last = torch.arange(mask.shape[1]) == mask.sum(1, keepdim=True) - 1
        return cls(mask.clone(), blank, values.where(mask, 0.0), last, blank.clone(), moment=moment)


@dataclass
class Turns(Record):
    """Of rollouts that are conversations, in at most N turns each; `Rollouts.extras["turns"]`."""

    number: Tensor = field(metadata={"pad": 0})  # [rollout, decision] int64, the turn that a decision belongs to
    mask: Tensor = field(metadata={"pad": 0})  # [rollout, turn] bool, True where there was a turn
    rewards: Tensor = field(metadata={"pad": 0})  # [rollout, turn] float32, the environment's own


@dataclass
class MatchingTargets:
    """What final samples are compared with at a noise level, [rollout, decision, ...] each; see
    `core.surrogates.contrast`."""

    noisy: Tensor  # the sample with noise
    prediction: Tensor  # of the policy, with its gradient
    old: Tensor  # of the policy that made the rollouts
    data: Tensor  # the sample itself
    sigma: Tensor  # [rollout, decision] the noise level
    signal: Tensor  # [rollout, decision] how much of the sample is left in `noisy`
    noise_space: bool  # whether the noise is predicted, rather than the velocity
    source: Tensor | None = None  # [rollout, 1, ...] the latents of the image that was edited, where there was one


@dataclass
class Replay:
    """What a policy says of a batch of rollouts now; all [rollout, decision], float32. What only some policies or
    methods know is in `extras`, see `ReplayColumn`."""

    logp: Tensor
    entropy: Tensor | None = None  # None where it is constant (a Gaussian step of fixed variance)
    square_sum: Tensor | None = None  # sum of squared probabilities, of decisions with a finite choice
    log_ratio: Tensor | None = None  # given where the policy has a more exact form than logp - old_logp
    divergence: Tensor | None = None  # exact KL to the old policy, where there is one, with its gradient
    reference_kl: Tensor | None = None  # exact, to the reference policy, where rollouts.ref_prediction is given
    prediction: Tensor | None = None  # [rollout, decision, ...] detached: what old and reference are compared by
    std: Tensor | None = None  # of a Gaussian step
    weight: Tensor | None = None  # detached, of the decision in the loss; None: all alike
    value: Tensor | None = None  # [rollout, step], of a policy with a critic
    extras: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, columns: Mapping[str, Any]) -> Replay:
        """A replay of columns by name: its own fields, and those of `extras`; None where one is not known."""
        own = {f.name for f in fields(cls)}
        known = {name: values for name, values in columns.items() if values is not None}
        extras = {name: values for name, values in known.items() if name not in own}
        return cls(**{name: values for name, values in known.items() if name in own}, extras=extras)

    def column(self, name: str) -> Any:
        """A field, or a column of `extras`; None where it is not known."""
        return self.extras.get(name) if name not in vars(self) else vars(self)[name]


T = TypeVar("T")


@dataclass(frozen=True)
class ReplayColumn(Generic[T]):
    """A column of `Replay.extras`, by its name."""

    name: str

    def get(self, replay: Replay) -> T | None:
        """The column; None where the policy does not give it."""
        found: T | None = replay.extras.get(self.name)
        return found

    def of(self, replay: Replay) -> T:
        """The column. Raises ValueError where the policy does not give it."""
        return given(self.get(replay), f"{self.name} of a replay")


ALTERNATIVES = ReplayColumn[Tensor]("alternatives")  # [rollout, decision, k], how likely those of the rollouts are
SEGMENTS = ReplayColumn[Tensor]("segments")  # int64, the unit of level "segment" that a decision belongs to
LOOKS = ReplayColumn[Tensor]("looks")  # int64, at which look of its episode a decision was made; none: a rollout is one
MOMENTS = ReplayColumn[Tensor]("moment")  # int64, when a decision was made, where a critic is asked about several
IMAGES = ReplayColumn[Tensor]("images")  # [rollout, channel, height, width] with their gradient, 0 to 1 in gamut
MATCHING = ReplayColumn[MatchingTargets]("matching")  # of a policy whose decisions compare final samples
OLD_CROSS_ENTROPY = ReplayColumn[Tensor]("old_cross_entropy")  # to the whole distribution in rollouts.old_prediction
REFERENCE_LOG_RATIO = ReplayColumn[Tensor]("reference_log_ratio")  # where it is more exact than logp - ref_logp
REFERENCE_ERROR = ReplayColumn[Tensor]("reference_error")  # squared distance from the reference policy's prediction
# Fraction of the recorded experts that the trainer's router would not have picked for the previous token; NaN where
# nothing was recorded
ROUTING_DIFFERS = ReplayColumn[Tensor]("routing_differs")


def old_logp(micro: Rollouts, replay: Replay) -> Tensor:
    """[rollout, decision] log-likelihoods under the policy that made the rollouts, on the device of `replay`. Before
    the first update, where that is the policy that is trained, it is what this says now, without a gradient."""
    return replay.logp.detach() if micro.old_logp is None else micro.old_logp.to(replay.logp.device)


def log_ratio(micro: Rollouts, replay: Replay) -> Tensor:
    """[rollout, decision] log pi / pi_old, with its gradient, in the exact form that a policy has for it, if it has."""
    return replay.logp - old_logp(micro, replay) if replay.log_ratio is None else replay.log_ratio


def _picked(value: Any, index: Tensor, rows: list[int]) -> Any:
    if isinstance(value, list):
        return [value[row] for row in rows]
    if isinstance(value, dict):
        return {name: record.select(index) for name, record in value.items()}
    return None if value is None else value[index]


def _cut(record: Any, step: Tensor, steps: int) -> Any:
    """`record`, whose rows are steps by now, with only the decisions, or the step, of each row's own `step` [row].
    steps: of the longest rollout."""
    found: dict[str, Any] = {}
    for f in fields(record):
        value = vars(record)[f.name]
        if isinstance(value, dict):
            found[f.name] = {name: _cut(own, step, steps) for name, own in value.items()}
        elif isinstance(value, Tensor) and (f.metadata.get("pad") is not None or f.name in BY_DECISION):
            parts = value.unflatten(1, (steps, value.shape[1] // steps))
            found[f.name] = parts[torch.arange(len(step)), step]
    return replace(record, **found)


def _joined(column: Any, values: list[Any]) -> Any:
    if isinstance(values[0], list):
        return [item for value in values for item in value]
    if isinstance(values[0], dict):
        return {name: type(record).concat([value[name] for value in values]) for name, record in values[0].items()}
    if all(value is None for value in values):
        return None
    if any(value is None for value in values):
        raise ValueError(f"{column.name} is filled in some of the batches and None in others")
    pad = column.metadata.get("pad")
    return torch.cat(values if pad is None else widened(values, pad))


def widened(values: Sequence[Tensor], pad: float) -> list[Tensor]:
    """Tensors [row, n, ...] with the same n, the longest, filled up with `pad`."""
    width = max(value.shape[1] for value in values)
    return [F.pad(v, (*[0] * (2 * (v.dim() - 2)), 0, width - v.shape[1]), value=pad) for v in values]
