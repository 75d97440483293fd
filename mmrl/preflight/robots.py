"""All probes of a job in a simulator, in their order."""

from __future__ import annotations

from collections.abc import Iterator

from mmrl.config import Config
from mmrl.policies.vla.action_ranges import check_statistics
from mmrl.policies.vla.settings import Actions
from mmrl.policies.vla.statistics import load_action_statistics
from mmrl.preflight.alarms import Alarm, Findings
from mmrl.preflight.prompts import sampled
from mmrl.preflight.simulators import Complaints, probe_chunk, probe_instructions, probe_starts, probe_success
from mmrl.protocols.parts import Policy, get_demonstrations
from mmrl.sims import VectorSim
from mmrl.sims.vector.transitions import action_bounds_of
from mmrl.tasks.manipulation.settings import ManipulationSettings
from mmrl.tasks.manipulation.task import Manipulation

ROWS, TASKS, STEPS = 4, 3, 64  # environments, tasks that are tried, and random actions of an episode
DEMONSTRATED = 8  # episodes that the policy reads


def probe_robots(
    config: Config, settings: ManipulationSettings, task: Manipulation, policy: Policy | None, findings: Findings
) -> None:
    """Adds what is wrong with statistics, starts, success, chunks and demonstrations."""
    complaints = Complaints()
    findings.add(probe_chunk(config.section("action").chunk, settings.options))
    with (
        findings.guarded("simulator"),
        complaints.collected(),
        task.make_simulator(min(ROWS, settings.rows)) as sim,
    ):
        findings.add(_ranges(config.section("action"), sim))
        for name in settings.tasks[:TASKS]:
            findings.add(probe_starts(sim, name))
            findings.add(probe_success(sim, name, STEPS))
    findings.add(complaints.alarms)
    if settings.demonstrations is None:
        return
    with findings.guarded("demonstrations"):
        episodes = sampled(get_demonstrations(task, task.train))
        findings.add(probe_instructions(episodes))
        if policy is not None:
            first = episodes[:DEMONSTRATED]
            policy.demonstrate(first, list(range(len(first))))


def _ranges(action: Actions, sim: VectorSim) -> Iterator[Alarm]:
    """Finds statistics that do not fit the simulator. Raises UserError for those that cannot be read."""
    simulator = sim.simulator
    scale = load_action_statistics(action, simulator.action_dim)
    if scale is not None:
        for remark in check_statistics(str(action.statistics), scale, action_bounds_of(simulator)):
            yield Alarm("simulator", "warned", remark)
