"""All probes of a job in a simulator, in their order."""

from __future__ import annotations

from mmrl.config import Config
from mmrl.preflight.alarms import Findings
from mmrl.preflight.prompts import sampled
from mmrl.preflight.simulators import Complaints, probe_chunk, probe_instructions, probe_starts, probe_success
from mmrl.protocols.parts import Policy
from mmrl.tasks.manipulation.settings import ManipulationSettings
from mmrl.tasks.manipulation.task import Manipulation

ROWS, TASKS, STEPS = 4, 3, 64  # environments, tasks that are tried, and random actions of an episode
DEMONSTRATED = 8  # episodes that the policy reads


def probe_robots(
    config: Config, settings: ManipulationSettings, task: Manipulation, policy: Policy | None, findings: Findings
) -> None:
    """Adds what is wrong with starts, success, chunks and demonstrations."""
    complaints = Complaints()
    findings.add(probe_chunk(config.section("action").chunk, settings.options))
    with (
        findings.guarded("simulator"),
        complaints.collected(),
        task.make_simulator(min(ROWS, settings.rows)) as sim,
    ):
        for name in settings.tasks[:TASKS]:
            findings.add(probe_starts(sim, name))
            findings.add(probe_success(sim, name, STEPS))
    findings.add(complaints.alarms)
    if settings.demonstrations is None:
        return
    with findings.guarded("demonstrations"):
        episodes = sampled(task.train)
        findings.add(probe_instructions(episodes))
        if policy is not None:
            first = episodes[:DEMONSTRATED]
            policy.demonstrate(first, list(range(len(first))))
