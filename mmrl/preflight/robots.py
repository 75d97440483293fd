"""All probes of a job in a simulator, in order."""

from __future__ import annotations

from collections.abc import Iterator

from mmrl.config import Config
from mmrl.policies.vla.action_ranges import check_statistics
from mmrl.policies.vla.settings import Actions
from mmrl.policies.vla.statistics import load_action_statistics
from mmrl.preflight.alarms import Alarm, CheckReport
from mmrl.preflight.prompts import sample_prompts
from mmrl.preflight.simulators import SimulatorWarnings, probe_chunk, probe_instructions, probe_starts, probe_success
from mmrl.protocols.parts import Policy
from mmrl.sims import VectorSim
from mmrl.sims.vector.transitions import action_bounds_of
from mmrl.tasks.manipulation.settings import ManipulationSettings
from mmrl.tasks.manipulation.task import Manipulation

NUM_ENVS, NUM_TASKS, NUM_ACTIONS = 4, 3, 64  # environments, tasks that are tried, and random actions of an episode
NUM_EPISODES = 8  # episodes that the policy reads
NUM_RECORDED = 16  # episodes of a scripted expert that are recorded for each task


def probe_robots(
    config: Config, settings: ManipulationSettings, task: Manipulation, policy: Policy | None, report: CheckReport
) -> None:
    """Adds alarms about action statistics, initial states, success, chunks and demonstrations to the report. The
    policy, if there is one, replays a few demonstrations."""
    simulator_warnings = SimulatorWarnings()
    report.add(probe_chunk(config.section("action").chunk, settings.options))
    with (
        report.catch_errors("simulator"),
        simulator_warnings.collected(),
        task.make_simulator(min(NUM_ENVS, settings.rows)) as sim,
    ):
        report.add(_probe_action_ranges(config.section("action"), sim))
        for name in settings.tasks[:NUM_TASKS]:
            report.add(probe_starts(sim, name))
            report.add(probe_success(sim, name, NUM_ACTIONS))
    report.add(simulator_warnings.alarms)
    if settings.demonstrations is None:
        return
    with report.catch_errors("demonstrations"):
        episodes = sample_prompts(settings.demonstrations.sample(NUM_RECORDED).prompts(task, task.train))
        report.add(probe_instructions(episodes))
        if policy is not None:
            first = episodes[:NUM_EPISODES]
            policy.demonstrate(first, list(range(len(first))))


def _probe_action_ranges(action: Actions, sim: VectorSim) -> Iterator[Alarm]:
    """Yields alarms for action statistics (the ranges that actions are scaled to) that exceed the simulator's bounds.

    Raises UserError if the file with the statistics cannot be read.
    """
    simulator = sim.simulator
    scale = load_action_statistics(action, simulator.action_dim)
    if scale is not None:
        for remark in check_statistics(str(action.statistics), scale, action_bounds_of(simulator)):
            yield Alarm("simulator", "warned", remark)
