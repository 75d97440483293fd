"""Simulators that fail, in a run: their episodes are lost and counted, and a run that has none left ends by name."""

import pytest

from mmrl.errors import UserError
from tests.whole_runs.parts import ROBOTS, metrics, train

pytestmark = pytest.mark.usefixtures("alone")


def run(folder, kind, *arguments, **options):
    told = ", ".join(f"{name}: {value}" for name, value in {"kind": kind, **options}.items())
    hostile = ["task.simulator=tests.sims.hostile:Hostile", f"task.options={{{told}}}", "evaluation.before=false"]
    with pytest.warns(RuntimeWarning, match="lost its episode"):
        train(folder, *hostile, *arguments, base=ROBOTS)
    return [row for row in metrics(folder) if "loss" in row]


KINDS = [("raise", "reset"), ("raise", "step"), ("nan state", "step")]
QUICK = [("grpo", "nan state", "step"), ("ppo", "raise", "reset")]
CASES = [(method, *kind) for method in ("grpo", "ppo") for kind in KINDS]


@pytest.mark.parametrize(
    ("method", "kind", "at"), [c if c in QUICK else pytest.param(*c, marks=pytest.mark.slow) for c in CASES]
)
def test_a_step_that_loses_all_its_episodes_is_counted_and_the_run_goes_on(tmp_path, method, kind, at):
    rows = run(tmp_path, kind, f"algorithm.type={method}", "steps=3", at=at, after=1 if at == "reset" else 0, times=1)
    lost = [row["simulator/dropped"] for row in rows]
    assert len(rows) == 3 and sum(lost) > 0 and max(row["unscored"] for row in rows) > 0
    assert all(row["updates_skipped"] == 0 for row in rows)


LASTING = [
    "raise",
    *(pytest.param(k, marks=pytest.mark.slow) for k in ("stands still", "never ends", "infinite reward")),
]


@pytest.mark.parametrize("kind", LASTING)
def test_a_simulator_that_fails_for_ever_ends_the_run_by_name(tmp_path, kind):
    with pytest.raises(UserError, match=r"no rollout could be scored in 3 steps in a row \(unscored by reward: .*100%"):
        run(tmp_path, kind, "steps=9")
    rows = [row for row in metrics(tmp_path) if "loss" in row]
    assert len(rows) == 3 and all(row["unscored"] == 1 for row in rows)
