"""Robots and simulators: what users of Gymnasium environments, LeRobot data sets and action statistics bring."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.checks.misconfigurations.parts import Case, Written, square, write_config, write_lines, write_module

GITHUB = "https://github.com"
SIDE, FRAMES, EPISODES = 64, 5, 3  # pixels; frames of an episode
INSTRUCTION = "reach for the red cube"
Tree = dict[str, Any]

ENVIRONMENT = '''"""An environment of the user's own: a dot that has to come to the middle."""

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict


class Base(gymnasium.Env):
    metadata = {{"render_modes": ["rgb_array"], "render_fps": 10}}
    observation_space = Box(-9, 9, (2,), np.float32)
    action_space = Box(-1, 1, (2,), np.float32)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.steps = self.np_random.uniform(-1, 1, 2), 0
        return self.seen(), {{}}

    def step(self, action):
        self.place, self.steps = self.place + 0.3 * np.clip(action, -1, 1), self.steps + 1
        solved = self.solved()
        return self.seen(), float(solved), solved, self.steps >= 8, {{"{told}": solved}}

    def solved(self):
        return bool(np.abs(self.place).max() < 0.3)

    def seen(self):
        return self.place.astype(np.float32)

    def render(self):
        image = np.zeros((64, 64, 3), np.uint8)
        x, y = (int(n) for n in np.clip(32 + 12 * self.place, 3, 60))
        image[y - 3 : y + 4, x - 3 : x + 4, 0] = 255
        return image

{changed}

gymnasium.register("{env}", entry_point=Own)
'''
AS_IT_IS = "\nclass Own(Base):\n    pass\n"


def base(folder: Path, case: str, changed: str = AS_IT_IS, told: str = "solved") -> Tree:
    """A configuration that trains: a small policy, an environment of the user's own, success told in info."""
    env = f"{''.join(word.title() for word in case.split('_'))}-v0"
    module = write_module(folder, case, ENVIRONMENT.format(changed=changed, env=env, told=told))
    options = {"env": f"{module}:{env}", "instruction": INSTRUCTION, "success": "solved", "max_steps": 8}
    return {
        "model": {"type": "vision_language_action", "build": "mmrl.tasks.manipulation.tiny_model:build_small"},
        "task": {
            "type": "manipulation",
            "simulator": "gymnasium",
            "options": options,
            "tasks": ["default"],
            "rows": 4,
        },
        "action": {"head": {"type": "token", "bins": 32}, "chunk": 2, "horizon": 8},
    }


def environment(case: str, changed: str = AS_IT_IS, *trees: Tree, told: str = "solved") -> Callable[[Path], Written]:
    return lambda folder: write_config(folder, base(folder, case, changed, told), *trees)


def without_success(folder: Path) -> Written:
    """Episodes end when the dot leaves the field, and nothing says what success is."""
    changed = """
class Own(Base):
    def step(self, action):
        seen, _, _, truncated, _ = super().step(action)
        return seen, 1.0, bool(np.abs(self.place).max() > 1.3), truncated, {}
"""
    made = base(folder, "success_by_falling", changed)
    return write_config(folder, made, without=("task.options.success",))


FOUR_VALUES = """
class Own(Base):
    def step(self, action):
        seen, reward, terminated, truncated, info = super().step(action)
        return seen, reward, terminated or truncated, info
"""
NO_IMAGE = """
class Own(Base):
    def render(self):
        return None
"""
SOLVED_AT_RESET = """
class Own(Base):
    def solved(self):
        return True
"""
RADIANS = """
class Own(Base):
    action_space = Box(-1.57, 1.57, (2,), np.float32)
"""
NOT_FINITE = """
class Own(Base):
    observation_space = Dict(pixels=Box(0, 255, (64, 64, 3), np.uint8), agent_pos=Box(-9, 9, (2,), np.float32))

    def seen(self):
        return {"pixels": self.render(), "agent_pos": np.array([self.place[0], np.nan], np.float32)}
"""
NESTED = """
class Own(Base):
    observation_space = Dict(
        pixels=Dict(front=Box(0, 255, (64, 64, 3), np.uint8)), agent_pos=Box(-9, 9, (2,), np.float32)
    )

    def seen(self):
        return {"pixels": {"front": self.render()}, "agent_pos": self.place.astype(np.float32)}
"""
OTHER_STARTS = """
class Own(Base):
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = np.random.default_rng().uniform(-1, 1, 2)
        return self.seen(), {}
"""


# --- statistics of actions ---


def statistics(
    case: str, held: Mapping[str, Any], changed: str = AS_IT_IS, key: str | None = None
) -> Callable[[Path], Written]:
    """Writes the base with a file of statistics beside it."""

    def write(folder: Path) -> Written:
        path = folder / "dataset_statistics.json"
        path.write_text(json.dumps(held))
        chosen = {} if key is None else {"statistics_key": key}
        return write_config(folder, base(folder, case, changed), {"action": {"statistics": str(path), **chosen}})

    return write


def quantiles(low: float, high: float, size: int = 2) -> Tree:
    return {"action": {"q01": [low] * size, "q99": [high] * size}}


# --- demonstrations ---


def png(number: int) -> Tree:
    content = io.BytesIO()
    square(number, side=SIDE)[0].save(content, "png")
    return {"bytes": content.getvalue(), "path": None}


def write_demonstrations(
    root: Path, *, cameras: tuple[str, ...] = ("front",), scale: float = 0.5, instructions: tuple[str, ...] = ()
) -> Path:
    """A data set in LeRobot's format 2.1 with images in Parquet; actions lie within `scale`."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    images = [f"observation.images.{camera}" for camera in cameras]
    texts = instructions or (INSTRUCTION,) * EPISODES
    two = {"dtype": "float32", "shape": [2], "names": None}
    shown = {"dtype": "image", "shape": [SIDE, SIDE, 3], "names": ["height", "width", "channels"]}
    info = {
        "codebase_version": "v2.1",
        "fps": 10,
        "chunks_size": 1000,
        "total_episodes": EPISODES,
        "total_frames": EPISODES * FRAMES,
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": None,
        "features": {"observation.state": two, "action": two, **dict.fromkeys(images, shown)},
    }
    (root / "meta").mkdir(parents=True)
    (root / "data" / "chunk-000").mkdir(parents=True)
    (root / "meta" / "info.json").write_text(json.dumps(info))
    names = list(dict.fromkeys(texts))
    write_lines(root / "meta" / "tasks.jsonl", [{"task_index": i, "task": name} for i, name in enumerate(names)])
    listed = [{"episode_index": e, "tasks": [texts[e]], "length": FRAMES} for e in range(EPISODES)]
    write_lines(root / "meta" / "episodes.jsonl", listed)
    for e in range(EPISODES):
        t = np.arange(FRAMES)
        columns: Tree = {
            "observation.state": [[0.1 * n, 0.2 * e] for n in range(FRAMES)],
            "action": [[scale * (-1) ** n, scale * (n / FRAMES - 0.5)] for n in range(FRAMES)],
            "timestamp": (t / 10).astype(np.float32),
            "frame_index": t,
            "episode_index": [e] * FRAMES,
            "index": t + e * FRAMES,
            "task_index": [names.index(texts[e])] * FRAMES,
        }
        columns |= {name: [png(e * FRAMES + n) for n in range(FRAMES)] for name in images}
        parquet.write_table(pa.table(columns), root / "data" / "chunk-000" / f"episode_{e:06d}.parquet")
    return root


def supervised(folder: Path, case: str, root: Path, *trees: Tree) -> Written:
    rest = {"algorithm": {"type": "supervised"}, "task": {"demonstrations": {"type": "lerobot", "path": str(root)}}}
    return write_config(folder, base(folder, case), rest, *trees, without=("rollout.group_size",))


def demonstrations(case: str, damage: Callable[[Path], Any] | None = None, **made: Any) -> Callable[[Path], Written]:
    """Writes demonstrations, damages them, and the configuration that learns from them."""

    def write(folder: Path) -> Written:
        root = write_demonstrations(folder / "demonstrations", **made)
        if damage is not None:
            damage(root)
        return supervised(folder, case, root)

    return write


def over_several_lines(root: Path) -> None:
    path = root / "meta" / "episodes.jsonl"
    path.write_text("".join(json.dumps(json.loads(line), indent=2) + "\n" for line in path.read_text().splitlines()))


CASES = (
    Case(
        "step_of_four_values",
        "robots",
        environment("step_of_four_values", FOUR_VALUES),
        (("step", "steps"), ("4", "four"), ("5", "five", "terminated", "truncated")),
        source=f"{GITHUB}/openai/gym/issues/3092",
    ),
    Case(
        "render_gives_nothing",
        "robots",
        environment("render_gives_nothing", NO_IMAGE),
        ("render",),
        source=f"{GITHUB}/Farama-Foundation/Metaworld/issues/487",
    ),
    Case(
        "success_under_another_key",
        "robots",
        environment("success_under_another_key", told="is_success"),
        ("solved", "is_success"),
        source=f"{GITHUB}/rlworkgroup/garage/issues/1717",
    ),
    Case(
        "success_by_falling",
        "robots",
        without_success,
        ("success", ("terminate", "terminates", "terminated", "termination")),
        "warned",
        f"{GITHUB}/strands-labs/robots/pull/968",
    ),
    Case(
        "success_from_the_first_step",
        "robots",
        environment("success_from_the_first_step", SOLVED_AT_RESET),
        ("success", ("first step", "random", "any policy", "whatever", "every episode", "always", "at reset")),
        "warned",
        f"{GITHUB}/strands-labs/robots/pull/3639",
    ),
    Case(
        "statistics_beyond_the_box",
        "robots",
        statistics("statistics_beyond_the_box", {"own": quantiles(-90.0, 90.0)}, RADIANS),
        ("action.statistics", "1.57"),
        "warned",
        f"{GITHUB}/ray-project/ray/issues/1862",
    ),
    Case(
        "statistics_without_a_range",
        "robots",
        statistics("statistics_without_a_range", {"own": quantiles(0.0, 0.0)}),
        ("action.statistics", "q01"),
        "warned",
        f"{GITHUB}/huggingface/lerobot/issues/211",
    ),
    Case(
        "statistics_key_that_is_not_there",
        "robots",
        statistics("statistics_key_that_is_not_there", {"bridge_orig": quantiles(-1.0, 1.0)}, key="libero_spatial"),
        ("action.statistics_key", "libero_spatial", "bridge_orig"),
        source=f"{GITHUB}/openvla/openvla/issues/118",
    ),
    Case(
        "instruction_missing_in_an_episode",
        "robots",
        demonstrations("instruction_missing_in_an_episode", instructions=(INSTRUCTION, "", INSTRUCTION)),
        (("episode 1", "episode_index 1", "demonstrations-1", "line 2"), ("instruction", "task", "tasks")),
        "warned",
        f"{GITHUB}/droid-dataset/droid/issues/3",
    ),
    Case(
        "index_over_several_lines",
        "robots",
        demonstrations("index_over_several_lines", over_several_lines),
        ("episodes.jsonl",),
        source=f"{GITHUB}/NVIDIA/Isaac-GR00T/issues/288",
    ),
    Case(
        "episode_whose_file_is_missing",
        "robots",
        demonstrations(
            "episode_whose_file_is_missing",
            lambda root: (root / "data" / "chunk-000" / "episode_000001.parquet").unlink(),
        ),
        (("episode_000001.parquet", "episode 1"),),
        source=f"{GITHUB}/huggingface/lerobot/issues/2328",
    ),
    Case(
        "cameras_to_choose_from",
        "robots",
        demonstrations("cameras_to_choose_from", cameras=("top", "wrist")),
        ("camera", "observation.images.top"),
        source=f"{GITHUB}/huggingface/lerobot/issues/1620",
    ),
    Case(
        "actions_in_degrees",
        "robots",
        demonstrations("actions_in_degrees", scale=90.0),
        ("action.statistics", "90"),
    ),
    Case(
        "camera_of_another_name",
        "robots",
        environment(
            "camera_of_another_name", NESTED, {"task": {"options": {"image": "pixels.top", "state": "agent_pos"}}}
        ),
        ("pixels.top", "front"),
    ),
    Case(
        "state_that_is_not_finite",
        "robots",
        environment(
            "state_that_is_not_finite", NOT_FINITE, {"task": {"options": {"image": "pixels", "state": "agent_pos"}}}
        ),
        (("agent_pos", "state"), ("nan", "finite")),
    ),
    Case(
        "chunk_longer_than_an_episode",
        "robots",
        environment(
            "chunk_longer_than_an_episode",
            AS_IT_IS,
            {"action": {"chunk": 6, "horizon": 6}, "task": {"options": {"max_steps": 2}}},
        ),
        ("action.chunk", "max_steps"),
        "warned",
    ),
    Case(
        "seed_that_decides_nothing",
        "robots",
        environment("seed_that_decides_nothing", OTHER_STARTS),
        ("seed", ("reset", "start", "starts", "observation")),
        "warned",
    ),
    Case(
        "no_instruction",
        "robots",
        environment("no_instruction", AS_IT_IS, {"task": {"options": {"instruction": ""}}}),
        ("task.options.instruction",),
        "warned",
    ),
)
