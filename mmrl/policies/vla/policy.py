"""Vision-language-action models as policies: start states to episodes, episodes to likelihoods."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn

from mmrl.errors import UserError
from mmrl.policies.models import NetworkCall, TrainingEngine
from mmrl.policies.parts import by_parts
from mmrl.policies.vla.backbones.backbone import Backbone
from mmrl.policies.vla.critic import Critic
from mmrl.policies.vla.heads.codec import Units
from mmrl.policies.vla.heads.head import EXTRA, ActionSampling, Chosen, Head, Reading
from mmrl.policies.vla.settings import Actions
from mmrl.policies.vla.states import StateStatistics
from mmrl.report.settings import Log
from mmrl.rollouts import LOOKS, MATCHING, Episode, MatchingTargets, Prompt, Replay, Rollouts, Sample, Steps
from mmrl.runtime.files import share
from mmrl.samplers.chain import mixed
from mmrl.schedules.schedule import Schedule
from mmrl.settings import plain
from mmrl.sims import Observation, Step, VectorSim, play

DESCRIPTION, WEIGHTS = "vla.json", "vla.safetensors"
Numbers = TypeVar("Numbers", Tensor, NDArray[np.float32])  # of states


@dataclass(frozen=True)
class PolicyStep:
    """One look of one episode: what was seen, what was chosen, and which actions of the chunk were executed."""

    seen: Any  # of the backbone's `prepare`; or, from a frozen one, its last layer [token, width]
    state: Tensor  # [state], the numbers for the critic alone included
    chosen: Chosen  # without the leading dimension
    valid: Tensor  # [chunk] bool


class Episodes(list[list[PolicyStep]]):
    """Looks by rollout, with what `replay` makes of them stacked, which is the same each time that a minibatch is
    learned from; what was seen is collated again, for it may be large."""

    def __init__(self, episodes: list[list[PolicyStep]], device: torch.device) -> None:
        """There is at least one look."""
        super().__init__(episodes)
        self.flat = [look for episode in episodes for look in episode]
        places = [(b, s) for b, episode in enumerate(episodes) for s in range(len(episode))]
        self.row, self.step = torch.tensor(places, device=device).unbind(1)
        self.state = torch.stack([look.state for look in self.flat]).to(device)
        self.valid = torch.stack([look.valid for look in self.flat]).to(device)
        self.chosen = {name: values.to(device) for name, values in chosen_of(self.flat).items()}


def chosen_of(looks: Sequence[PolicyStep]) -> Chosen:
    """What was chosen in at least one look, stacked."""
    return {name: torch.stack([look.chosen[name] for look in looks]) for name in looks[0].chosen}


@dataclass(frozen=True)
class PolicyStepBatch:
    """Looks as the network takes them. inputs: of the backbone, of as many looks as `valid` has rows; old, reference:
    other policies' predictions, where there are any."""

    inputs: dict[str, Tensor]
    state: Tensor  # [look, state]
    chosen: Chosen
    valid: Tensor  # [look, chunk] bool
    old: Tensor | None
    reference: Tensor | None


class Network(nn.Module):
    """Backbone, action head and critic: the module that the engine wraps."""

    def __init__(self, backbone: Backbone, head: Head, critic: Critic | None, privileged: int = 0) -> None:
        """privileged: how many of the last numbers of a state only the critic may read."""
        super().__init__()
        self.backbone, self.head, self.critic, self.privileged = backbone, head, critic, privileged

    def own(self, state: Numbers) -> Numbers:
        """What the policy itself may read of states [n, state]."""
        return state[:, : state.shape[1] - self.privileged]

    def forward(self, parts: Sequence[PolicyStepBatch]) -> dict[str, Tensor]:
        """What `Head.score` says of all looks, and "value" [look] where there is a critic; a part at a time."""
        scored = by_parts(self.score, parts)
        return {name: torch.cat([one[name] for one in scored]) for name in scored[0]}

    def score(self, looks: PolicyStepBatch) -> dict[str, Tensor]:
        reading = self.read(looks.inputs)
        scored = self.head.score(reading, self.own(looks.state), looks.chosen, looks.valid, looks.old, looks.reference)
        return scored if self.critic is None else {**scored, "value": self.critic(reading, looks.state)}

    def read(self, inputs: dict[str, Tensor]) -> Reading:
        if "hidden" in inputs:
            return self.backbone.recall(inputs)
        return self.backbone.read(inputs, every_layer=self.head.every_layer)


class EpisodeRecord:
    """An episode, filled in while it is played."""

    def __init__(self, prompt: Prompt, instruction: str, lost: bool, *, reasons: bool) -> None:
        """reasons: whether the head draws latents before a chunk."""
        self.prompt, self.instruction, self.lost, self.reasons = prompt, instruction, lost, reasons
        self.success = self.success_at_end = self.terminated = False
        self.length, self.bootstrap = 0, 0.0
        self.looks: list[PolicyStep] = []
        self.values: list[float] = []  # by look
        self.reasoning: list[int] = []  # by look, how many latents were drawn
        self.rewards: list[float] = []  # by step of the simulator
        self.frames: list[NDArray[np.uint8]] = []

    def moved(self, step: Step, row: int, film: bool) -> None:
        valid = step.valid[row]
        self.lost |= bool(step.dropped[row])
        if valid.any():
            self.success_at_end = bool(step.success[row][valid][-1])
            self.success |= bool(step.success[row].any())
            self.terminated |= bool(step.terminated[row].any())
            self.length += int(valid.sum())
            if film:
                self.frames.append(step.final_observation.images[row])
        self.rewards.append(float(step.reward[row].sum()))

    @property
    def sample(self) -> Sample:
        episode = Episode(
            self.instruction,
            self.success,
            self.success_at_end,
            self.length,
            sum(self.rewards),
            self.lost,
            np.stack(self.frames) if self.frames else None,
            mean_or_nan(self.reasoning) if self.reasons else None,
        )
        return Sample(self.prompt, response="success" if self.success else "failure", episode=episode)


def mean_or_nan(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else math.nan


@dataclass(frozen=True)
class PlayOptions:
    """How episodes are played. training: whether looks are recorded, to be scored. film: of how many episodes images
    are kept, the first ones: of every action, but while training of every look, so that the simulator moves as it
    otherwise does. step: finished training steps."""

    temperature: float
    training: bool
    film: int = 0
    step: int = 0


class VisionLanguageActionPolicy:
    """Plays episodes in a simulator and says how likely its actions were.

    A prompt is a start state: metadata["seed"] and metadata["task"]. The rollouts of a group have equal seeds, so their
    first observations are equal; what differs is each rollout's own noise. Every look at the scene decides on a chunk
    of actions, and once the episode is over nothing counts any more.
    """

    def __init__(
        self,
        network: Network,
        action: Actions,
        sim: VectorSim,
        *,
        temperature: Schedule,
        evaluation_temperature: float = 0.0,
        statistics: Units | None = None,
        states: StateStatistics | None = None,
        steps_at_once: int | None = None,
        log: Log | None = None,
        watched: bool = False,
    ) -> None:
        """temperature: of rollouts, as it is when they are made; heads that have none do not look at it. steps_at_once:
        see `replay`. log: which steps have tables, whose episodes are filmed where `action.film` is set. watched: all
        episodes are filmed, for the task looks at them."""
        self.module, self.action, self.sim = network, action, sim
        self.watched = watched
        self.steps_at_once, self.log = steps_at_once, log or Log(samples_every=0)
        self.statistics, self.states = statistics, states
        self.temperature, self.evaluation_temperature = temperature, evaluation_temperature
        self._counted = Counter(sim.counters)
        self.module.eval()  # dropout would make replay differ from sampling
        self.keeps_readings = network.backbone.frozen and network.head.context_only

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def max_decisions(self) -> int:
        return -(-self.action.horizon // self.action.chunk) * self.module.head.decisions

    # --- start states to episodes ---

    def rollout(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], *, step: int = 0) -> Rollouts:
        """Play `group_size` episodes a prompt. seeds: one a rollout, prompt by prompt. What a group shares, such as the
        window of its chains, comes from its first seed and training step `step`."""
        starts = [p for p in prompts for _ in range(group_size)]
        groups = [seed for seed in seeds[::group_size] for _ in range(group_size)]
        film = len(starts) if self.watched else self._filmed(step, group_size)
        how = PlayOptions(self.temperature.value, training=True, film=film, step=step)
        records = self._play(starts, seeds, groups, how)
        made = self._rollouts([r.sample for r in records], [r.looks for r in records])
        made.mask &= ~torch.tensor([r.lost for r in records])[:, None]
        made.group = torch.arange(len(prompts)).repeat_interleave(group_size)
        if self.module.critic is not None:
            made.extras["steps"] = steps_of(records)
        return made

    def respond(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Sample]:
        """One episode a prompt at the temperature of evaluation."""
        film = len(prompts) if self.action.film or self.watched else 0
        how = PlayOptions(self.evaluation_temperature, training=False, film=film)
        return [record.sample for record in self._play(prompts, seeds, seeds, how)]

    def view(self, rollouts: Rollouts, change: Callable[[Prompt], Prompt]) -> Rollouts:
        """Raises UserError: what an episode was shown came from the simulator, not from its prompt."""
        raise UserError("views of prompts are not for model.type=vision_language_action; remove what asks for them")

    def demonstrate(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> Rollouts:
        """Single looks with the chunk that an expert then executed, from metadata: "observation", an `Observation` of
        one row, and "actions" [up to chunk, action] in the robot's units."""
        missing = next((p.id for p in prompts if "actions" not in p.metadata), None)
        if missing is not None:
            raise UserError(
                f"prompt {missing} shows no actions to learn from: algorithm.type=supervised needs task.demonstrations"
            )
        seen = [p.metadata["observation"] for p in prompts]
        together = Observation(
            np.concatenate([o.images for o in seen]),
            np.concatenate([o.state for o in seen]),
            [o.instructions[0] for o in seen],
            seen[0].cameras,
        )
        chunk, size = self.action.chunk, self.sim.simulator.action_dim
        actions = np.zeros((len(prompts), chunk, size), np.float32)
        valid = torch.zeros(len(prompts), chunk, dtype=torch.bool)
        for i, prompt in enumerate(prompts):
            shown = prompt.metadata["actions"][:chunk]
            actions[i, : len(shown)], valid[i, : len(shown)] = shown, True
        if self.statistics is not None:
            actions = self.statistics.from_robot(actions).astype(np.float32)
        elif (most := np.abs(actions).max(axis=(1, 2))).max() > 1.01:
            raise UserError(
                f"the actions of prompt {prompts[int(most.argmax())].id} reach {most.max():.4g}: without "
                "action.statistics they must lie in [-1, 1]"
            )
        chosen = self.module.head.teach(torch.from_numpy(actions), seeds)
        inputs, state = self._look(together), self._state(together)
        looks = [
            [PolicyStep(inputs[i], state[i], {k: v[i] for k, v in chosen.items()}, valid[i])]
            for i in range(len(prompts))
        ]
        return self._rollouts([Sample(prompt) for prompt in prompts], looks)

    def trained_by(self, engine: TrainingEngine) -> None:
        """It has nothing to keep step with."""

    def counts(self) -> dict[str, float]:
        """What went wrong in the simulator since this was last asked: action numbers that were not finite, episodes
        dropped, workers restarted."""
        new = {name: total - self._counted[name] for name, total in self.sim.counters.items()}
        self._counted = Counter(self.sim.counters)
        return {f"simulator/{name.removesuffix('_episodes')}": float(count) for name, count in new.items()}

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Backbone in its library's own format, head and critic beside it as `vla.safetensors`, with the
        settings in `vla.json`."""
        save(folder, self.module, self.action, state, self.states)

    # --- episodes to likelihoods ---

    def replay(self, rollouts: Rollouts, model: NetworkCall, *, reference: bool = False) -> Replay:
        """What `model` (`self.module` or the engine around it) says of every decision. What does not count holds 0.

        Takes the looks of all episodes in one batch, or `steps_at_once` of them at a time, which a backward pass then
        computes again. Where the simulator lost all of them before their first look, a blank image is scored in their
        place: what is said of them then has the fields and shapes that other batches have."""
        if not any(rollouts.inputs):
            episodes = Episodes([[self._blank_look()], *([] for _ in rollouts.inputs[1:])], self.device)
        elif isinstance(rollouts.inputs, Episodes):
            episodes = rollouts.inputs
        else:
            episodes = rollouts.inputs = Episodes(rollouts.inputs, self.device)
        decisions = self.module.head.decisions
        shape = (len(episodes), rollouts.mask.shape[1] // decisions)
        # No look is missing, as where each is a rollout of its own.
        dense = len(episodes.flat) == len(rollouts) * shape[1]

        def spread(values: Tensor) -> Tensor:
            if dense:
                return values.unflatten(0, shape)
            blank = values.new_zeros(*shape, *values.shape[1:])
            return blank.index_put((episodes.row, episodes.step), values)[: len(rollouts)]

        def at_looks(values: Tensor | None) -> Tensor | None:
            if values is None:
                return None
            by_look = rearrange(values.to(self.device), "b (s d) ... -> b s d ...", d=decisions)
            return by_look.flatten(0, 1) if dense else by_look[episodes.row, episodes.step]

        # The reference is asked for itself; what the old policy predicted may be known of some of the rollouts only.
        old = None if reference else at_looks(rollouts.old_prediction)
        before = at_looks(rollouts.ref_prediction)
        size = self.steps_at_once or len(episodes.flat)
        parts = []
        for first in range(0, len(episodes.flat), size):
            rows = slice(first, first + size)
            own = {name: values[rows] for name, values in episodes.chosen.items()}
            others = [None if values is None else values[rows] for values in (old, before)]
            inputs = self._collate([look.seen for look in episodes.flat[rows]])
            parts.append(PolicyStepBatch(inputs, episodes.state[rows], own, episodes.valid[rows], *others))
        scored = dict(model(parts))
        value = scored.pop("value", None)
        fields: dict[str, Any] = {n: rearrange(spread(v), "b s d ... -> b (s d) ...") for n, v in scored.items()}
        if "noisy" in fields:
            fields[MATCHING.name] = matching_of(fields)
        if "std" in fields:
            fields["std"] = fields["std"].where(fields["std"] > 0, 1)  # of looks that do not exist
        numbers = torch.arange(shape[1], device=self.device).repeat_interleave(decisions).expand(len(rollouts), -1)
        columns = {name.removeprefix(EXTRA): known for name, known in fields.items()}
        return Replay.of({**columns, LOOKS.name: numbers, "value": None if value is None else spread(value)})

    def actions(self, rollouts: Rollouts) -> Tensor:
        """[look, chunk, action], what the head would choose now at every look, at temperature 0, with its gradient."""
        looks = [look for episode in rollouts.inputs for look in episode]
        state = torch.stack([look.state for look in looks]).to(self.device)
        reading = self.module.read(self._collate([look.seen for look in looks]))
        how = ActionSampling([0] * len(looks), temperature=0.0, training=False)
        return self.module.head.act(reading, self.module.own(state), how)["actions"]

    def lengths(self, rollouts: Rollouts) -> Tensor:
        """[rollout] int64: looks."""
        return torch.tensor([len(looks) for looks in rollouts.inputs])

    def by_step(self, rollouts: Rollouts) -> Rollouts:
        """Every look as a rollout of its own, episode by episode."""
        return rollouts.by_step([[[look] for look in episode] for episode in rollouts.inputs])

    # --- details ---

    @torch.no_grad()
    def _play(
        self, starts: Sequence[Prompt], seeds: Sequence[int], groups: Sequence[int], how: PlayOptions
    ) -> list[EpisodeRecord]:
        records = []
        for i in range(0, len(starts), len(self.sim)):
            part = slice(i, i + len(self.sim))
            options = replace(how, film=max(0, how.film - i))
            records += self._play_at_once(starts[part], seeds[part], groups[part], options)
        return records

    def _filmed(self, step: int, group_size: int) -> int:
        """Of how many rollouts the table shows that is due when step `step` + 1 has finished."""
        if not self.action.film or not self.log.samples_every or (step + 1) % self.log.samples_every:
            return 0
        return -(-self.log.samples // group_size) * group_size

    def _play_at_once(
        self, starts: Sequence[Prompt], seeds: Sequence[int], groups: Sequence[int], how: PlayOptions
    ) -> list[EpisodeRecord]:
        """At most as many episodes as the simulator has rows. Only those that are still on are looked at."""
        sim, head, critic = self.sim, self.module.head, self.module.critic
        observation = sim.reset([p.metadata["seed"] for p in starts], [p.metadata["task"] for p in starts])
        running = sim.running
        records = [
            EpisodeRecord(p, observation.instructions[i], not running[i], reasons=head.reasons)
            for i, p in enumerate(starts)
        ]
        for i, record in enumerate(records[: how.film]):
            record.frames.append(observation.images[i])
        looks = Counter[int]()

        def act(observation: Observation, rows: NDArray[np.int64]) -> tuple[list[NDArray], Any]:
            shown = observation.select(rows)
            seen, state = self._look(shown), self._state(shown).to(self.device)
            reading = self.module.read(self._collate(seen))
            own = [mixed(seeds[row], looks[row]) for row in rows]  # each look of an episode has noise of its own
            looks.update(rows.tolist())
            shared = [groups[row] for row in rows]
            chosen = head.act(
                reading, self.module.own(state), ActionSampling(own, how.temperature, how.training, shared, how.step)
            )
            values = [0.0] * len(rows) if critic is None else critic(reading, state).tolist()
            actions = self._robot_actions(chosen["actions"], rows)
            by_action = how.film and not how.training
            parts = np.split(actions, actions.shape[1], axis=1) if by_action else [actions]
            return parts, (seen, state.cpu(), {name: value.cpu() for name, value in chosen.items()}, values)

        def tell(rows: NDArray[np.int64], steps: list[Step], kept: Any) -> None:
            for step in steps:
                for row in rows:
                    records[row].moved(step, row, row < how.film)
            seen, state, chosen, values = kept
            if head.reasons:
                for row, count in zip(rows, head.reasoning_steps(chosen).tolist(), strict=True):
                    records[row].reasoning.append(count)
            if how.training:
                valid = torch.from_numpy(steps[-1].valid[rows])
                picked = zip(*(column.unbind() for column in chosen.values()), strict=True)
                looks_now = zip(rows, seen, state.unbind(), picked, valid.unbind(), values, strict=True)
                for row, saw, numbers, choice, executed, value in looks_now:
                    look = PolicyStep(saw, numbers, dict(zip(chosen, choice, strict=True)), executed)
                    records[row].looks.append(look)
                    records[row].values.append(value)
                self._value_ends(steps[-1], rows, records)

        play(sim, act, tell, max_chunks=self.action.horizon)
        return records

    def _value_ends(self, moved: Step, rows: NDArray[np.int64], records: list[EpisodeRecord]) -> None:
        """What the critic expects behind the ends of episodes that have just ended, or that the time limit has cut."""
        ended = [row for row in rows if moved.ended[row] and not moved.dropped[row]]
        if self.module.critic is None or not ended:
            return
        shown = moved.final_observation.select(ended)
        reading = self.module.read(self._collate(self._look(shown))) if self.module.critic.reads else None
        values = self.module.critic(reading, self._state(shown).to(self.device))
        for row, value in zip(ended, values.tolist(), strict=True):
            records[row].bootstrap = value

    @torch.no_grad()
    def _blank_look(self) -> PolicyStep:
        """A look at a black image, of which nothing counts."""
        simulator = self.sim.simulator
        images = np.zeros((1, *simulator.image_shape), np.uint8)
        state = np.zeros((1, simulator.state_dim), np.float32)
        shown = Observation(images, state, ["nothing"], self.sim.cameras)
        seen, numbers = self._look(shown), self._state(shown).to(self.device)
        how = ActionSampling([0], self.temperature.value, groups=[0])
        chosen = self.module.head.act(self.module.read(self._collate(seen)), self.module.own(numbers), how)
        executed = torch.zeros(self.action.chunk, dtype=torch.bool)
        return PolicyStep(seen[0], numbers[0].cpu(), {name: value[0].cpu() for name, value in chosen.items()}, executed)

    def _state(self, observation: Observation) -> Tensor:
        """[row, state], standardised where the policy does that."""
        state = observation.state
        return torch.from_numpy(state if self.states is None else self.states.standardised(state))

    def _robot_actions(self, actions: Tensor, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """[rows, chunk, action] in the units of `statistics`, or in [-1, 1] -> [environments, chunk, action] in the
        robot's."""
        numbers = actions.float().cpu().numpy().astype(np.float64)
        numbers[~np.isfinite(numbers)] = np.nan  # the simulator counts them; a clamp would make infinity an action
        numbers = numbers.clip(-1, 1) if self.statistics is None else self.statistics.to_robot(numbers)
        everyone = np.zeros((len(self.sim), *numbers.shape[1:]))
        everyone[rows] = numbers
        return everyone

    def _look(self, observation: Observation) -> list[Any]:
        """What is kept of each row: the prompt as the model takes it, or what a frozen backbone says of it."""
        backbone, own = self.module.backbone, self.action.prompt
        texts = [backbone.ask(i) if own is None else own.format(instruction=i) for i in observation.instructions]
        named = self.action.cameras
        images = [observation.images] if named is None else [observation.image(camera) for camera in named]
        seen = backbone.prepare(images, texts, self.module.own(observation.state))
        if not self.keeps_readings:
            return seen
        with torch.no_grad():
            return backbone.keep(backbone.read(backbone.collate(seen, self.device), every_layer=False))

    def _collate(self, seen: list[Any]) -> dict[str, Tensor]:
        backbone = self.module.backbone
        collate = backbone.collate_kept if self.keeps_readings else backbone.collate
        return collate(seen, self.device)

    def _rollouts(self, samples: list[Sample], looks: list[list[PolicyStep]]) -> Rollouts:
        head = self.module.head
        most = max(1, *map(len, looks))
        mask = torch.zeros(len(looks), most, head.decisions, dtype=torch.bool)
        for b, episode in enumerate(looks):
            if not episode:  # lost at once: a look of zeros, of which nothing counts
                continue
            counted = head.decided(torch.stack([look.valid for look in episode]), chosen_of(episode))
            mask[b, : len(episode)] = counted
        return Rollouts(samples=samples, inputs=looks, group=torch.arange(len(looks)), mask=mask.flatten(1))


def steps_of(records: Sequence[EpisodeRecord]) -> Steps:
    """What returns are computed from, by look."""
    blank = torch.zeros(len(records), max(1, *(len(record.looks) for record in records)))
    steps = Steps(blank.bool(), blank.clone(), blank.clone(), blank.bool(), blank.clone())
    for b, record in enumerate(records):
        n = len(record.looks)
        steps.mask[b, :n] = not record.lost
        steps.rewards[b, :n] = torch.tensor(record.rewards)
        steps.values[b, :n] = torch.tensor(record.values)
        if n and not record.lost:
            steps.terminated[b, n - 1] = record.terminated
            steps.bootstrap[b, n - 1] = record.bootstrap
    return steps


def matching_of(fields: dict[str, Tensor]) -> MatchingTargets:
    """What `FlowHead` says of noisy chunks, which leaves `fields`. Looks that do not exist have errors of 0."""
    sigma = fields.pop("sigma")
    noisy, v, old, data = (fields.pop(name) for name in ("noisy", "velocity", "old_velocity", "data"))
    return MatchingTargets(
        noisy=noisy, prediction=v, old=old, data=data, sigma=sigma, signal=1 - sigma, noise_space=False
    )


def save(
    folder: Path, network: Network, action: Actions, state: dict[str, Tensor], states: StateStatistics | None
) -> None:
    """state: of `network`."""
    own = {name: value.contiguous() for name, value in state.items() if not name.startswith("backbone.")}
    network.backbone.save(folder, below("backbone.", state))
    rest = network.head.save(folder, below("head.", own))
    others = {name: value for name, value in own.items() if not name.startswith("head.")}
    save_file({**others, **{f"head.{name}": value for name, value in rest.items()}}, folder / WEIGHTS)
    told = plain(action) | ({} if states is None else {"states": states.to_json()})
    (folder / DESCRIPTION).write_text(json.dumps(told, indent=2))
    share(folder)


def below(part: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(part): value for name, value in state.items() if name.startswith(part)}
