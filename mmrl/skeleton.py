"""Skeletons of one's own algorithms and parts of them, which train at once: `mmrl new`."""

from __future__ import annotations

import re
from pathlib import Path

from mmrl.errors import UserError

ALGORITHM = '''"""{title}: an algorithm of our own.

    mmrl train {module}.yaml        train with it
    python -m pytest test_{module}.py
"""

from mmrl.algorithms.grouped import GroupedAlgorithm
from mmrl.needs import Needs
from mmrl.settings import option


class {name}(GroupedAlgorithm):
    """The policy gradient, with advantages against the group and without a clip."""

    scale_by: float = option(1.0, "factor of every advantage", gt=0)

    @property
    def own_needs(self):
        return Needs()  # for example Needs(old=True, statistics=frozenset({{"entropy"}})); see mmrl.needs

    def advantages(self, batch):
        """[rollout], or [rollout, decision], of this rank's rollouts; `batch.fact` knows those of all ranks."""
        return self.scale_by * super().advantages(batch)

    def loss(self, micro, replay):
        """Values to minimise and statistics to average, [rollout, decision]."""
        advantages = micro.advantages.to(replay.logp.device)
        if advantages.dim() == 1:
            advantages = advantages[:, None]
        return -advantages * replay.logp, {{"own/advantage": advantages.expand_as(replay.logp)}}
'''

TERM = '''"""{title}: a loss term of our own."""

from mmrl.controls import Control, number
from mmrl.needs import Needs
from mmrl.terms.base import Term


class {name}(Term):
    """A penalty on decisions that are nearly certain."""

    coefficient: Control = number(0.01, "weight of the term", ge=0)

    @property
    def needs(self):
        return Needs()  # for example Needs(reference=True), or views of the prompt; see mmrl.needs

    def values(self, micro, replay):
        """Values to minimise, coefficient included, and statistics to average; [rollout, decision]."""
        certainty = replay.logp.exp()
        return self.coefficient.value * certainty, {{"certainty": certainty.detach()}}
'''

SHAPER = '''"""{title}: a change of the advantages, of our own."""

from mmrl.settings import option
from mmrl.terms.base import Shaper


class {name}(Shaper):
    """Advantages fade towards the end of a response."""

    gamma: float = option(0.99, "what is left of an advantage after one decision", gt=0, le=1)

    def shape(self, advantages, batch):
        """advantages: [rollout, decision], of this rank's rollouts; returns the like."""
        place = batch.rollouts.mask.cumsum(1) - 1
        return advantages * self.gamma ** place.clamp(min=0)
'''

MASK = '''"""{title}: a choice of what is learned from, of our own."""

from mmrl.settings import option
from mmrl.terms.base import Mask


class {name}(Mask):
    """Only the first decisions of a rollout are learned from."""

    first: int = option(32, "decisions that are learned from", ge=1)

    def keep(self, batch):
        """[rollout, decision] bool, of this rank's rollouts: True where something is learned."""
        return batch.rollouts.mask.cumsum(1) <= self.first
'''

SAMPLER = '''"""{title}: a sampler of prompts of our own."""

import random

from mmrl.prompt_samplers import PromptSampler
from mmrl.settings import option


class {name}(PromptSampler):
    """Prompts that are sometimes answered right come more often than those that always or never are."""

    floor: float = option(0.1, "weight of a prompt that taught nothing the last time", gt=0, le=1)
    _weights: list = []
    _draws: int = 0
    _seed: int = 0

    def start(self, size, seed):
        self._weights, self._draws, self._seed = [1.0] * size, 0, seed

    def draw(self, count):
        """The same on every rank: it depends on the state alone."""
        self._draws += 1
        chance = random.Random(f"{{self._seed}}-{{self._draws}}")
        return chance.choices(range(len(self._weights)), self._weights, k=count)

    def observe(self, outcomes):
        for outcome in outcomes:
            teaches = len(set(outcome.rewards)) > 1
            self._weights[outcome.prompt] = 1.0 if teaches else self.floor

    def state(self):
        return {{"weights": list(self._weights), "draws": self._draws}}

    def load(self, state):
        self._weights, self._draws = list(state["weights"]), state["draws"]
'''

RECIPE = """# {title} on handwritten digits, on the CPU, from a tiny model that has learned nothing:
#   mmrl train {module}.yaml
# With model.path=FOLDER it goes on from a model of yours.
run_dir: runs/{module}
steps: 20
threads: 1
model:
  build: mmrl.tasks.visual_qa.tiny_model:build
task:
  data: {{type: digits, cells: 2, train_size: 10000}}
rollout:
  prompts: 16
  group_size: 8
  max_response_length: 4{rollout}{algorithm}
optim:
  lr: 3e-4
engine:
  micro_batch: 128
evaluation: {{every: 10, prompts: 100}}
"""

TEST = '''"""{title} trains for two steps, and its options are what the configuration says."""

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_it_trains(tmp_path):
    command = [sys.executable, "-m", "mmrl", "train", "{module}.yaml", "steps=2", f"run_dir={{tmp_path / 'run'}}"]
    command += ["rollout.prompts=4", "evaluation.before=false", "evaluation.every=0", "evaluation.prompts=4"]
    subprocess.run(command, cwd=HERE, check=True, env=dict(os.environ, OMP_NUM_THREADS="1"))
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]
'''

# The text of each kind, and how a recipe names it: a line of `rollout`, or of `algorithm`.
KINDS = {
    "algorithm": (ALGORITHM, "algorithm", "type: {module}:{name}\n  scale_by: 1.0"),
    "term": (TERM, "algorithm", "terms:\n    - {{type: '{module}:{name}', coefficient: 0.01}}"),
    "shaper": (SHAPER, "algorithm", "shaping:\n    - {{type: '{module}:{name}', gamma: 0.99}}"),
    "mask": (MASK, "algorithm", "masks:\n    - {{type: '{module}:{name}', first: 32}}"),
    "sampler": (SAMPLER, "rollout", "sampler: {{type: '{module}:{name}', floor: 0.1}}"),
}


def write(kind: str, name: str, folder: Path) -> list[Path]:
    """Write a module, a recipe and a test into `folder`; returns the files.

    Raises UserError for a name that is no name of a class, and where one of the files exists.
    """
    if not re.fullmatch(r"[A-Z][A-Za-z0-9]*", name):
        raise UserError(f"{name!r} is no name of a class; write it like MyAlgorithm")
    module = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    code, section, line = KINDS[kind]
    words = {"name": name, "module": module, "title": name, "rollout": "", "algorithm": ""}
    line = line.format(**words)
    words[section] = f"\n  {line}" if section == "rollout" else f"\nalgorithm:\n  {line}"
    files = {f"{module}.py": code, f"{module}.yaml": RECIPE, f"test_{module}.py": TEST}
    for file in files:
        if (folder / file).exists():
            raise UserError(f"{folder / file} exists; choose another name or remove it")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--folder={folder}: {error}") from None
    for file, text in files.items():
        (folder / file).write_text(text.format(**words))
    return [folder / file for file in files]
