"""The policy of vision-language-action models: it plays episodes in a simulator and scores their actions."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from einops import rearrange
from numpy.typing import NDArray
from torch import Tensor, nn

from mmrl.engine.flops import CallMeter, PolicyWork, Tally
from mmrl.errors import UserError
from mmrl.policies.models import NetworkCall, TrainingEngine
from mmrl.policies.parts import map_with_checkpointing
from mmrl.policies.vla.action_ranges import check_demonstrations
from mmrl.policies.vla.backbones.backbone import Backbone
from mmrl.policies.vla.critic import Critic
from mmrl.policies.vla.episodes import (
    EpisodeRecord,
    Episodes,
    PolicyStep,
    build_trajectory,
    collect_steps,
    count_units,
    make_step_record,
    seed_and_task,
    stack_samples,
)
from mmrl.policies.vla.heads.codec import ActionNormalizer
from mmrl.policies.vla.heads.head import EXTRA, ActionSampling, EncodedPrefix, Head, SampledChunks
from mmrl.policies.vla.off_policy import OffPolicyAccess, pad_chunks, stack_observations, to_robot_units
from mmrl.policies.vla.saved import save
from mmrl.policies.vla.settings import Actions
from mmrl.policies.vla.states import StateStatistics
from mmrl.policies.vla.teachers import ActionTeachers
from mmrl.protocols.abilities import ChunkChoice
from mmrl.protocols.trajectory import Trajectory
from mmrl.report.settings import Log
from mmrl.rollouts import (
    MATCHING,
    POLICY_STEPS,
    MatchingTargets,
    Prompt,
    Replay,
    Rollouts,
    Sample,
    Steps,
)
from mmrl.samplers.chain import derive_seed
from mmrl.schedules.schedule import Schedule
from mmrl.sims import Observation, Step, VectorSim, play

MAX_UNSCALED = 1.01  # largest absolute value of a demonstrated action without statistics: 1, and room for rounding
log = logging.getLogger(__name__)
States = TypeVar("States", Tensor, NDArray[np.float32])  # [n, state]


@dataclass(frozen=True)
class PolicyStepBatch:
    """A batch of policy steps, as `Network.score` reads them."""

    inputs: dict[str, Tensor]  # of the backbone
    state: Tensor  # [step, state]
    sampled: SampledChunks
    valid: Tensor  # [step, chunk] bool, which actions were executed
    old: Tensor | None  # "prediction" under the policy that sampled; see `Head.score`
    reference: Tensor | None  # "prediction" under the reference policy


class Network(nn.Module):
    """Backbone, action head and critic: the module that the engine wraps."""

    def __init__(self, backbone: Backbone, head: Head, critic: Critic | None, privileged: int = 0) -> None:
        """privileged: how many numbers at the end of the state only the critic may read."""
        super().__init__()
        self.backbone, self.head, self.critic, self.privileged = backbone, head, critic, privileged

    def policy_state(self, state: States) -> States:
        """Returns the part of states [n, state] that the policy itself may read."""
        return state[:, : state.shape[1] - self.privileged]

    def forward(self, parts: Sequence[PolicyStepBatch]) -> dict[str, Tensor]:
        """Scores the policy steps of all `parts`, one part at a time. Returns the fields of `score`, concatenated over
        the parts."""
        fields = map_with_checkpointing(self.score, parts)
        return {name: torch.cat([part[name] for part in fields]) for name in fields[0]}

    def score(self, batch: PolicyStepBatch) -> dict[str, Tensor]:
        """Scores policy steps: returns the fields of `Head.score`, and "value" [step] if there is a critic."""
        prefix = self.encode(batch.inputs)
        fields = self.head.score(
            prefix, self.policy_state(batch.state), batch.sampled, batch.valid, batch.old, batch.reference
        )
        return fields if self.critic is None else {**fields, "value": self.critic(prefix, batch.state)}

    def encode(self, inputs: dict[str, Tensor]) -> EncodedPrefix:
        """Runs the backbone on collated inputs, or restores its cached output."""
        if "hidden" in inputs:  # a key of cached inputs only
            return self.backbone.cached_prefix(inputs)
        return self.backbone.encode(inputs, every_layer=self.head.every_layer)


@dataclass(frozen=True)
class PlayOptions:
    """Options of playing episodes."""

    temperature: float
    training: bool  # whether policy steps are recorded, to be scored later
    num_filmed: int = 0  # the first episodes, which keep images after every action (training: after every chunk)
    step: int = 0  # finished training steps
    with_expert: bool = False  # whether the actions of the simulator's expert are recorded at every policy step


class VisionLanguageActionPolicy:
    """Plays episodes in a simulator and scores their actions.

    A prompt is a start state: metadata["seed"] and metadata["task"]. The rollouts of a group have the same start state,
    so their first observations are equal; each rollout samples its actions with its own seed. A policy step is one call
    of the network, which outputs a chunk of actions. Steps after the end of an episode are masked.
    """

    def __init__(
        self,
        network: Network,
        action: Actions,
        sim: VectorSim,
        *,
        temperature: Schedule,
        evaluation_temperature: float = 0.0,
        normalizer: ActionNormalizer | None = None,
        state_statistics: StateStatistics | None = None,
        steps_at_once: int | None = None,
        log: Log | None = None,
        watched: bool = False,
        stores_episodes: bool = False,
    ) -> None:
        """temperature: in rollouts; heads without a temperature ignore it. normalizer: converts actions to the robot's
        units; None: the robot takes actions in [-1, 1]. state_statistics: standardise the state; None: it is read as it
        is. steps_at_once: see `replay`. log: which steps have tables of samples, whose episodes are filmed if
        `action.film` is set. watched: whether all episodes are filmed, because the task needs the images.
        stores_episodes: whether rollouts keep what `trajectories` returns."""
        self.module, self.action, self.sim = network, action, sim
        self.watched, self.stores_episodes = watched, stores_episodes
        self.steps_at_once, self.log = steps_at_once, log or Log(samples_every=0)
        self.normalizer, self.state_statistics, self._warned_of_ranges = normalizer, state_statistics, False
        self.temperature, self.evaluation_temperature = temperature, evaluation_temperature
        self.choice: ChunkChoice | None = None
        self.teachers = ActionTeachers(self, network.head)
        labels = action.labels
        # texts in the prompt that call an action good or bad; empty: prompts have none
        self.advantage_labels = ("", "") if labels is None else (labels.good, labels.bad)
        self._last_counters = Counter(sim.counters)
        self.module.eval()  # dropout would make replay differ from sampling
        tally = Tally()
        CallMeter(network, tally)  # hooks itself into the network and adds the FLOPs of its calls to the tally
        # `_play` calls parts of the network, not the network itself, so it needs a meter of its own
        self._play_meter, self.work = CallMeter(None, tally), PolicyWork([tally], count_units)
        # Whether rollouts store encoded prefixes instead of images. With a frozen backbone prefixes never change, and a
        # head that reads only their last layer leaves little to store.
        self.caches_prefixes = network.backbone.frozen and network.head.last_layer_only

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def max_decisions(self) -> int:
        """The number of decisions of the longest episode."""
        max_policy_steps = math.ceil(self.action.horizon / self.action.chunk)
        return max_policy_steps * self.module.head.decisions

    # --- start states to episodes ---

    def rollout(self, prompts: Sequence[Prompt], group_size: int, seeds: Sequence[int], *, step: int = 0) -> Rollouts:
        """Plays `group_size` episodes from each prompt. seeds: one for each rollout, prompt by prompt.

        What a group shares, such as the window of scored denoising steps, depends on its first seed and on the training
        step, `step`."""
        starts = [prompt for prompt in prompts for _ in range(group_size)]
        group_seeds = [seed for seed in seeds[::group_size] for _ in range(group_size)]
        num_filmed = len(starts) if self.watched else num_filmed_rollouts(self.action, self.log, step, group_size)
        options = PlayOptions(self.temperature.value, training=True, num_filmed=num_filmed, step=step)
        records = self._play(starts, seeds, group_seeds, options)
        rollouts = self.make_rollouts([r.sample for r in records], [r.policy_steps for r in records])
        rollouts.mask &= ~torch.tensor([r.lost for r in records])[:, None]
        rollouts.group = torch.arange(len(prompts)).repeat_interleave(group_size)
        if self.module.critic is not None:
            rollouts.extras["steps"] = collect_steps(records)
        return rollouts

    def respond(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Sample]:
        """Plays one episode from each prompt at the temperature of evaluation."""
        num_filmed = len(prompts) if self.action.film or self.watched else 0
        options = PlayOptions(self.evaluation_temperature, training=False, num_filmed=num_filmed)
        return [record.sample for record in self._play(prompts, seeds, seeds, options)]

    @torch.no_grad()
    def act(self, observation: Observation, seeds: Sequence[int], temperature: float) -> NDArray[np.float64]:
        """Chooses one chunk for each row of an observation that may come from a real robot, as in an episode. seeds:
        one for each row. Returns [row, chunk, action] in the robot's units."""
        state = self.robot_state(observation).to(self.device)
        prefix = self.module.encode(self.collate(self.prepare(observation)))
        sampling = ActionSampling(list(seeds), temperature, training=False)
        actions = self.off_policy.act(prefix, state, sampling)["actions"]
        return to_robot_units(actions, self.normalizer)

    def view(self, rollouts: Rollouts, change: Callable[[Prompt], Prompt]) -> Rollouts:
        """Raises UserError: observations come from the simulator, so a changed prompt cannot be replayed."""
        raise UserError(
            "views of prompts are not for model.type=vision_language_action; remove the options that need them"
        )

    def demonstrate(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> Rollouts:
        """Makes rollouts of demonstrations: each prompt becomes one policy step whose chunk an expert executed.

        Metadata of a prompt: "observation", an `Observation` of one row, and "actions" [chunk or fewer, action] in the
        robot's units. seeds: one for each prompt. Raises UserError for prompts without actions, and for actions beyond
        [-1, 1] if there are no statistics to normalise them."""
        missing = next((p.id for p in prompts if "actions" not in p.metadata), None)
        if missing is not None:
            raise UserError(
                f"prompt {missing} has no demonstrated actions: algorithm.type=supervised needs task.demonstrations"
            )
        batch = stack_observations([prompt.metadata["observation"] for prompt in prompts])
        chunks = [prompt.metadata["actions"] for prompt in prompts]
        actions, valid = pad_chunks(chunks, self.action.chunk, self.sim.simulator.action_dim)
        if self.normalizer is not None:
            if not self._warned_of_ranges:
                self._warned_of_ranges = warn_of_ranges(self.normalizer, actions[valid.numpy()])
            actions = self.normalizer.from_robot(actions).astype(np.float32)
        else:
            max_abs = np.abs(actions).max(axis=(1, 2))
            if max_abs.max() > MAX_UNSCALED:
                raise UserError(
                    f"the actions of prompt {prompts[int(max_abs.argmax())].id} reach {max_abs.max():.4g}, but without "
                    "action.statistics they must lie in [-1, 1]; set action.statistics to the data set's statistics"
                )
        sampled = self.module.head.encode_demonstrations(torch.from_numpy(actions), seeds)
        labels = [prompt.metadata.get("label", "") for prompt in prompts]
        inputs, state = self.prepare(batch, labels), self.robot_state(batch)
        policy_steps = []
        for i in range(len(prompts)):
            row_sampled = {name: values[i] for name, values in sampled.items()}
            policy_steps.append([PolicyStep(inputs[i], state[i], row_sampled, valid[i])])
        return self.make_rollouts([Sample(prompt) for prompt in prompts], policy_steps, single=True)

    def label_with_expert(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> list[Prompt]:
        """Plays an episode from each prompt, as in a rollout, and asks the simulator's expert at each policy step which
        actions it would execute from there (DAgger). Returns the observations with these actions, as prompts for
        `demonstrate`. Raises UserError if the simulator has no expert."""
        options = PlayOptions(self.temperature.value, training=False, with_expert=True)
        return [label for record in self._play(prompts, seeds, seeds, options) for label in record.labels]

    def set_engine(self, engine: TrainingEngine) -> None:
        """Does nothing, since no part of this policy depends on the engine."""

    def counts(self) -> dict[str, float]:
        """Returns counts of the simulator since the last call: action numbers that were not finite, dropped episodes,
        restarted workers."""
        new = {name: total - self._last_counters[name] for name, total in self.sim.counters.items()}
        self._last_counters = Counter(self.sim.counters)
        return {f"simulator/{name.removesuffix('_episodes')}": float(count) for name, count in new.items()}

    def save(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Saves the backbone in its library's own format, head and critic as `vla.safetensors`, and the settings as
        `vla.json`."""
        module = self.module
        save(folder, module.backbone, module.head, self.action, state, self.state_statistics)

    # --- episodes to likelihoods ---

    def replay(self, rollouts: Rollouts, model: NetworkCall, *, reference: bool = False) -> Replay:
        """Scores every decision with `model` (`self.module` or the engine that wraps it); fields are 0 where decisions
        are masked.

        The policy steps of all episodes form one batch, or several parts of `steps_at_once` policy steps, which the
        backward pass computes again. If the simulator lost all episodes before their first step, a masked step with a
        black image is scored, so that fields and shapes are the same as for other batches. reference: whether `model`
        is the reference policy."""
        if not any(rollouts.inputs):
            episodes = Episodes([[self._blank_step()], *([] for _ in rollouts.inputs[1:])], self.device)
        elif isinstance(rollouts.inputs, Episodes):
            episodes = rollouts.inputs
        else:
            episodes = rollouts.inputs = Episodes(rollouts.inputs, self.device)
        decisions = self.module.head.decisions
        shape = (len(episodes), rollouts.mask.shape[1] // decisions)
        # True if all rollouts have equally many policy steps, such as one each: then no padding is needed.
        dense = len(episodes.flat) == len(rollouts) * shape[1]

        def to_grid(values: Tensor) -> Tensor:
            """Arranges values [policy step, ...] as [rollout, step, ...]."""
            if dense:
                return values.unflatten(0, shape)
            padded = values.new_zeros(*shape, *values.shape[1:])
            return padded.index_put((episodes.row, episodes.step), values)[: len(rollouts)]

        def at_policy_steps(values: Tensor | None) -> Tensor | None:
            """Selects the values of existing policy steps, [policy step, decision of a step, ...], from values
            [rollout, decision, ...]."""
            if values is None:
                return None
            by_policy_step = rearrange(values.to(self.device), "b (s d) ... -> b s d ...", d=decisions)
            return by_policy_step.flatten(0, 1) if dense else by_policy_step[episodes.row, episodes.step]

        # The reference policy needs no old prediction, which some of the rollouts may lack.
        old = None if reference else at_policy_steps(rollouts.old_prediction)
        ref = at_policy_steps(rollouts.ref_prediction)
        size = self.steps_at_once or len(episodes.flat)
        parts = []
        for first in range(0, len(episodes.flat), size):
            rows = slice(first, first + size)
            sampled = {name: values[rows] for name, values in episodes.sampled.items()}
            inputs = self.collate([policy_step.observation for policy_step in episodes.flat[rows]])
            part_old, part_ref = (None if values is None else values[rows] for values in (old, ref))
            part = PolicyStepBatch(inputs, episodes.state[rows], sampled, episodes.valid[rows], part_old, part_ref)
            parts.append(part)
        by_policy_step = dict(model(parts))
        value = by_policy_step.pop("value", None)
        fields: dict[str, Any] = {}
        for name, values in by_policy_step.items():
            fields[name] = rearrange(to_grid(values), "b s d ... -> b (s d) ...")
        if "noisy" in fields:
            fields[MATCHING.name] = matching_targets(fields)
        if "std" in fields:
            fields["std"] = fields["std"].where(fields["std"] > 0, 1)  # not 0 at padding, since losses divide by it
        step_index = torch.arange(shape[1], device=self.device).repeat_interleave(decisions).expand(len(rollouts), -1)
        columns = {name.removeprefix(EXTRA): field for name, field in fields.items()}
        value = None if value is None else to_grid(value)
        return Replay.from_columns({**columns, POLICY_STEPS.name: step_index, "value": value})

    def trajectories(self, rollouts: Rollouts) -> list[Trajectory | None]:
        """Returns the episode of each rollout. None stands for rollouts that the simulator lost or that are not
        episodes."""
        trajectories: list[Trajectory | None] = []
        for sample, steps in zip(rollouts.samples, rollouts.inputs, strict=True):
            if sample.episode is None or sample.episode.lost:
                trajectories.append(None)
            else:
                trajectories.append(build_trajectory(steps, success=sample.episode.success))
        return trajectories

    def actions(self, rollouts: Rollouts) -> Tensor:
        """Returns the current policy's likeliest actions for all observations in `rollouts`, [policy step, chunk,
        action], with a gradient."""
        policy_steps = [policy_step for episode in rollouts.inputs for policy_step in episode]
        state = torch.stack([policy_step.state for policy_step in policy_steps]).to(self.device)
        prefix = self.module.encode(self.collate([policy_step.observation for policy_step in policy_steps]))
        seeds = [0] * len(policy_steps)  # at temperature 0 only flows, which denoise noise, depend on them
        sampling = ActionSampling(seeds, temperature=0.0, training=False)
        return self.module.head.act(prefix, self.module.policy_state(state), sampling)["actions"]

    def lengths(self, rollouts: Rollouts) -> Tensor:
        """Returns the number of policy steps of each rollout, [rollout] int64."""
        return torch.tensor([len(episode) for episode in rollouts.inputs])

    def by_step(self, rollouts: Rollouts) -> Rollouts:
        """Splits rollouts into policy steps: each becomes a rollout of its own, episode by episode."""
        return rollouts.by_step([[[policy_step] for policy_step in episode] for episode in rollouts.inputs])

    @property
    def off_policy(self) -> OffPolicyAccess:
        """Encodings of stored observations and actions, and new chunks at stored observations."""
        return OffPolicyAccess(self)

    # --- details ---

    @torch.no_grad()
    def _play(
        self, starts: Sequence[Prompt], seeds: Sequence[int], group_seeds: Sequence[int], options: PlayOptions
    ) -> list[EpisodeRecord]:
        """Plays an episode from each start. When the episode in a row of the simulator ends, the row gets the next
        start. The network runs only for rows with a running episode. seeds, group_seeds: one for each start."""
        sim, head, critic = self.sim, self.module.head, self.module.critic
        records = [EpisodeRecord(prompt, samples_latents=head.samples_latents) for prompt in starts]
        episode_of_row = list(range(min(len(sim), len(starts))))
        waiting = iter(range(len(episode_of_row), len(starts)))
        sim.reset(*zip(*(seed_and_task(starts[i]) for i in episode_of_row), strict=True))
        step_counts = Counter[int]()

        def next_start(row: int) -> tuple[int, str] | None:
            """Assigns the next waiting episode to `row`: returns its seed and task, None if no episode waits."""
            episode = next(waiting, None)
            if episode is None:
                return None
            episode_of_row[row] = episode
            return seed_and_task(starts[episode])

        def act(observation: Observation, rows: NDArray[np.int64]) -> tuple[list[NDArray], Any]:
            """Returns chunks [row, length, action] that `play` executes one after another, and the context for
            `record_steps`. rows: the simulator's rows that need a chunk."""
            episodes = [episode_of_row[row] for row in rows]
            for episode, row in zip(episodes, rows, strict=True):
                if not step_counts[episode]:
                    records[episode].begin(observation, row, episode < options.num_filmed)
            selected = observation.select(rows)
            prepared, state = self.prepare(selected), self.robot_state(selected).to(self.device)
            # each policy step of an episode has noise of its own
            step_seeds = [derive_seed(seeds[episode], step_counts[episode]) for episode in episodes]
            step_counts.update(episodes)
            if options.with_expert:
                expert_actions = sim.expert(np.isin(np.arange(len(sim)), rows), length=self.action.chunk)
                for i, (episode, row) in enumerate(zip(episodes, rows, strict=True)):
                    records[episode].add_label(selected.select(np.array([i])), expert_actions[row])
            row_group_seeds = [group_seeds[episode] for episode in episodes]
            sampling = ActionSampling(step_seeds, options.temperature, options.training, row_group_seeds, options.step)
            inputs = self.collate(prepared)
            with self._play_meter.call(state, inputs):
                prefix = self.module.encode(inputs)
                sampled = self.off_policy.act(prefix, state, sampling)
            values = [0.0] * len(rows) if critic is None else critic(prefix, state).tolist()
            actions = np.zeros((len(sim), *sampled["actions"].shape[1:]))  # 0 for rows without a running episode
            actions[rows] = to_robot_units(sampled["actions"], self.normalizer)
            one_by_one = options.num_filmed and not options.training  # with an image after each action
            chunks = np.split(actions, actions.shape[1], axis=1) if one_by_one else [actions]
            sampled = {name: values.cpu() for name, values in sampled.items()}
            return chunks, (prepared, state.cpu(), sampled, values, selected, actions[rows].astype(np.float32))

        def record_steps(rows: NDArray[np.int64], steps: list[Step], context: Any) -> None:
            """Records the simulator's results for the chunks of `act`. context: the second value that `act`
            returned."""
            row_records = [records[episode_of_row[row]] for row in rows]
            for step in steps:
                for record, row in zip(row_records, rows, strict=True):
                    record.add_step(step, row, episode_of_row[row] < options.num_filmed)
            prepared, state, sampled, values, observation, actions = context
            if head.samples_latents:
                for record, num_latents in zip(row_records, head.num_latents(sampled).tolist(), strict=True):
                    record.num_latents.append(num_latents)
            if options.training:
                last = steps[-1]  # the only one: in training a chunk is executed in one call
                valid = torch.from_numpy(last.valid[rows])
                for i, (record, row) in enumerate(zip(row_records, rows, strict=True)):
                    stored = make_step_record(observation, actions, i, last, row) if self.stores_episodes else None
                    row_sampled = {name: column[i] for name, column in sampled.items()}
                    record.policy_steps.append(PolicyStep(prepared[i], state[i], row_sampled, valid[i], stored))
                    record.values.append(values[i])
                self._set_bootstrap_values(last, dict(zip(rows, row_records, strict=True)))

        play(sim, act, record_steps, max_chunks=self.action.horizon, following=next_start)
        return records

    def _set_bootstrap_values(self, step: Step, records: dict[int, EpisodeRecord]) -> None:
        """Sets `bootstrap`, the critic's value of the final observation, of episodes that terminated or were truncated
        in this step. records: by row of the simulator."""
        ended = [row for row in records if step.ended[row] and not step.dropped[row]]
        if self.module.critic is None or not ended:
            return
        final = step.observation.select(ended)
        prefix = self.module.encode(self.collate(self.prepare(final))) if self.module.critic.needs_prefix else None
        values = self.module.critic(prefix, self.robot_state(final).to(self.device))
        for row, value in zip(ended, values.tolist(), strict=True):
            records[row].bootstrap = value

    @torch.no_grad()
    def _blank_step(self) -> PolicyStep:
        """Returns a policy step with a black image whose actions are all masked."""
        blank = blank_observation(self.sim, 1)
        prepared, state = self.prepare(blank), self.robot_state(blank).to(self.device)
        sampling = ActionSampling([0], self.temperature.value, groups=[0])
        sampled = self.module.head.act(
            self.module.encode(self.collate(prepared)), self.module.policy_state(state), sampling
        )
        row_sampled = {name: values[0].cpu() for name, values in sampled.items()}
        valid = torch.zeros(self.action.chunk, dtype=torch.bool)
        return PolicyStep(prepared[0], state[0].cpu(), row_sampled, valid)

    def robot_state(self, observation: Observation) -> Tensor:
        """Returns the robot's states [row, state], standardised if the policy has statistics of them."""
        state = observation.state
        return torch.from_numpy(state if self.state_statistics is None else self.state_statistics.standardize(state))

    def prepare(self, observation: Observation, labels: Sequence[str] | None = None) -> list[Any]:
        """Preprocesses each row of an observation: returns rows of `Backbone.prepare`, or of `Backbone.cache_rows` if
        prefixes are cached.

        labels: text behind each instruction; None: the label of good actions, if the job has labels."""
        backbone, template = self.module.backbone, self.action.prompt
        if labels is None:
            labels = [self.advantage_labels[0]] * len(observation)
        texts = []
        for instruction, label in zip(observation.instructions, labels, strict=True):
            text = f"{instruction} {label}".rstrip()
            texts.append(backbone.format_prompt(text) if template is None else template.format(instruction=text))
        cameras = self.action.cameras
        images = [observation.images] if cameras is None else [observation.image(camera) for camera in cameras]
        prepared = backbone.prepare(images, texts, self.module.policy_state(observation.state))
        if not self.caches_prefixes:
            return prepared
        with torch.no_grad():
            return backbone.cache_rows(backbone.encode(backbone.collate(prepared, self.device), every_layer=False))

    def collate(self, prepared: list[Any]) -> dict[str, Tensor]:
        """Collates rows of `prepare` to the inputs of `Network.encode`."""
        backbone = self.module.backbone
        collate = backbone.collate_cached if self.caches_prefixes else backbone.collate
        return collate(prepared, self.device)

    def make_rollouts(
        self, samples: list[Sample], policy_steps: list[list[PolicyStep]], *, single: bool = False
    ) -> Rollouts:
        """Makes rollouts of episodes. The mask [episode, step x decision] is True for decisions of executed actions.

        single: whether each rollout is one policy step outside an episode, such as a demonstration, from which a critic
        does not learn."""
        head = self.module.head
        max_steps = max(1, *map(len, policy_steps))
        mask = torch.zeros(len(policy_steps), max_steps, head.decisions, dtype=torch.bool)
        for row, episode in enumerate(policy_steps):
            if not episode:  # lost at once: its mask stays False
                continue
            valid = torch.stack([policy_step.valid for policy_step in episode])
            mask[row, : len(episode)] = head.decision_mask(valid, stack_samples(episode))
        group = torch.arange(len(policy_steps))
        rollouts = Rollouts(samples=samples, inputs=policy_steps, group=group, mask=mask.flatten(1))
        if single and self.module.critic is not None:
            zeros = torch.zeros(len(samples), 1)
            rollouts.extras["steps"] = Steps(
                mask=zeros.bool(),
                rewards=zeros,
                values=zeros.clone(),
                terminated=zeros.bool(),
                bootstrap=zeros.clone(),
            )
        return rollouts


def warn_of_ranges(normalizer: ActionNormalizer, actions: NDArray[np.float32]) -> bool:
    """Logs a warning if demonstrated actions [n, action] lie outside the range of the policy's actions. Returns whether
    a warning was logged."""
    warnings = list(check_demonstrations(normalizer, actions.astype(np.float64)))
    for warning in warnings:
        log.warning(warning)
    return bool(warnings)


def blank_observation(sim: VectorSim, rows: int) -> Observation:
    """Returns an observation with `rows` black images and states of 0."""
    simulator = sim.simulator
    images = np.zeros((rows, *simulator.image_shape), np.uint8)
    state = np.zeros((rows, simulator.state_dim), np.float32)
    return Observation(images, state, ["nothing"] * rows, sim.cameras)


def distinguishes_labels(policy: VisionLanguageActionPolicy, label: str, other: str) -> bool:
    """Returns whether two labels behind an instruction lead to different inputs of the model."""
    inputs = policy.collate(policy.prepare(blank_observation(policy.sim, 2), [label, other]))
    return any(not torch.equal(values[0], values[1]) for values in inputs.values())


def num_filmed_rollouts(action: Actions, log: Log, step: int, group_size: int) -> int:
    """Returns how many rollouts of training step `step` are filmed: as many whole groups as the table of samples after
    this step shows, or 0 if no table follows it."""
    if not action.film or not log.samples_every or (step + 1) % log.samples_every:
        return 0
    return math.ceil(log.samples / group_size) * group_size


def matching_targets(fields: dict[str, Tensor]) -> MatchingTargets:
    """Moves the fields that `FlowHead` adds for `ActionContrast` out of `fields` and returns them as matching targets.
    At padding all fields are 0, so their errors are 0 too."""
    sigma = fields.pop("sigma")
    return MatchingTargets(
        noisy=fields.pop("noisy"),
        prediction=fields.pop("velocity"),
        old=fields.pop("old_velocity"),
        data=fields.pop("data"),
        sigma=sigma,
        signal=1 - sigma,
        noise_space=False,
    )
