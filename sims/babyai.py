"""BabyAI (arXiv 1810.08272) as a simulator: levels of small grid worlds with instructions from a grammar."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import lru_cache
from io import StringIO
from typing import TYPE_CHECKING, Any

import gymnasium
import minigrid  # noqa: F401  it registers the levels
import numpy as np
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from minigrid.core.constants import COLOR_TO_IDX, OBJECT_TO_IDX, STATE_TO_IDX
from minigrid.core.grid import Grid
from minigrid.core.world_object import WorldObj
from minigrid.utils.baby_ai_bot import BabyAIBot
from numpy.typing import NDArray

from mmrl.errors import UserError
from mmrl.sims.gymnasium import GymnasiumSimulator
from mmrl.sims.vector.simulator import Transition

if TYPE_CHECKING:
    from minigrid.minigrid_env import MiniGridEnv

LEVELS = ("GoToLocalS8N7", "PickupDist", "OpenDoorColor", "PutNextLocalS5N3")
COLORS = ("red", "green", "blue", "purple", "yellow", "grey")
THINGS = ("ball", "box", "key", "door")
UNSEEN = frozenset({("red", "ball"), ("blue", "box"), ("yellow", "key"), ("green", "ball"), ("purple", "door")})
SUFFIX = "/unseen"
MAX_TRIES = 1000  # worlds that are generated at most to find one with an instruction of the task
VIEW = 7  # squares along each side of the agent's view
EMPTY = (OBJECT_TO_IDX["empty"], 0, 0)
WALL = (OBJECT_TO_IDX["wall"], COLOR_TO_IDX["grey"], 0)
STRIDE = 1 << 40  # between the seeds of these worlds: so large that episodes with neighbouring seeds share no world


def is_unseen(instruction: str) -> bool:
    """Returns whether an instruction names an object (color and type) of UNSEEN."""
    pairs = re.findall(rf"({'|'.join(COLORS)}) ({'|'.join(THINGS)})", instruction)
    return any(pair in UNSEEN for pair in pairs)


class Levels(gymnasium.Env):
    """Several BabyAI levels as one environment; a reset with options={"task": name} selects one.

    A level has two tasks: NAME, whose instructions name no object of UNSEEN, and NAME/unseen, whose instructions do.
    Worlds with an instruction of the other task are skipped; the next world has a seed that is larger by STRIDE.
    Observations are the mission (the instruction), and an image: of the 7 x 7 squares in front of the agent, or of
    `around` x `around` squares with the agent in the middle. tile: see `BabyAI`.

    After a reset without a seed the environment is idle: steps change nothing until the next reset with a seed.
    """

    def __init__(self, levels: Sequence[str], tile: int, around: int = 0) -> None:
        self._worlds = {level: _world(level) for level in levels}
        self._world = self._worlds[levels[0]]
        self._idle = True
        self._last: dict[str, Any] = {}  # the last observation
        self._tile, self._around = tile, around
        self._codes = np.zeros((0, 0, 3), np.uint8)  # minigrid's codes of all squares, [x, y, (object, color, state)]
        if around:  # the view of 7 x 7 squares takes half of a step's time and is not used
            for world in self._worlds.values():
                _skip_view(world.unwrapped)
        # with tile=0 the image has minigrid's codes, as one pixel for each square
        side = (around or VIEW) * (tile or 1)
        box = gymnasium.spaces.Box(0, 255, (side, side, 3), np.uint8)
        self.observation_space = gymnasium.spaces.Dict(image=box, mission=gymnasium.spaces.Text(200))
        self.action_space = self._world.action_space

    @property
    def unwrapped(self) -> Any:  # minigrid's, whose attributes gymnasium's type does not know
        return self._world.unwrapped

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Starts the first random world, from `seed` on, whose instruction belongs to options["task"]. Without a seed
        the environment becomes idle: steps change nothing until the next reset with a seed."""
        if seed is None and self._last:
            self._idle = True
            return self._last, {}
        task = (options or {}).get("task", next(iter(self._worlds)))
        level = task.removesuffix(SUFFIX)
        self._world = self._worlds[level]
        for number in range(MAX_TRIES):
            with redirect_stdout(StringIO()):  # the levels print rejected worlds
                observation, info = self._world.reset(seed=(seed or 0) + number * STRIDE)
            # a task that ends in SUFFIX has its level's unseen instructions, the one without it all others
            if is_unseen(observation["mission"]) == task.endswith(SUFFIX):
                self._idle = False
                if self._around:
                    self._codes = self.unwrapped.grid.encode()
                return self._observe(observation), info
        raise UserError(
            f"babyai: no instruction of task {task!r} in {MAX_TRIES} random worlds of {level}; use another level"
        )

    def step(self, action: int | np.integer) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Executes one of minigrid's seven actions. Changes nothing while the environment is idle. info: "solved",
        whether the mission is fulfilled."""
        if self._idle:
            return self._last, 0.0, False, False, {"solved": False}
        world = self.unwrapped
        ahead = tuple(world.front_pos)
        observation, reward, terminated, truncated, info = self._world.step(int(action))
        if self._around:  # an action changes at most the square ahead of the agent
            thing = world.grid.get(*ahead)
            self._codes[ahead] = EMPTY if thing is None else thing.encode()
        solved = bool(terminated and float(reward) > 0)
        return self._observe(observation), float(reward), terminated, truncated, {"solved": solved}

    def close(self) -> None:
        for world in self._worlds.values():
            world.close()

    def _observe(self, observation: dict[str, Any]) -> dict[str, Any]:
        """Returns the observation: the mission, and the image, drawn with `tile` pixels a square or as minigrid's
        codes."""
        squares = view_around(self.unwrapped, self._codes, self._around) if self._around else observation["image"]
        pixels = image(squares, self._tile) if self._tile else np.ascontiguousarray(squares.transpose(1, 0, 2))
        self._last = {"image": pixels, "mission": observation["mission"]}
        return self._last


class BabyAI:
    """The simulator of BabyAI levels, with the levels' scripted expert. An action is one number, the seven actions are
    equal intervals of [-1, 1] (see `mmrl.sims.spaces.Choices`).

    levels: names without "BabyAI-" and "-v0"; each level has the tasks NAME and NAME/unseen, see `Levels`. tile: pixels
    along a side of a square; 0: images have one pixel for each square, with minigrid's codes of object, color and state
    in place of red, green and blue. max_steps: of an episode. around: 0: the image shows the 7 x 7 squares in front of
    the agent, as far as it can see them; an odd number: that many squares along each side, with the agent in the middle
    and nothing hidden.
    """

    def __init__(
        self, count: int, *, levels: Sequence[str] = LEVELS, tile: int = 8, max_steps: int = 32, around: int = 0
    ) -> None:
        if around and (around < 3 or around % 2 == 0):
            raise UserError(
                f"babyai: around must be 0, or odd and at least 3, so that the agent is in the middle; got {around}"
            )
        if not levels:
            raise UserError("babyai: levels is empty; name at least one level")
        if tile < 0:
            raise UserError(f"babyai: tile must not be negative, not {tile}")
        if max_steps < 1:
            raise UserError(f"babyai: max_steps must be at least 1, not {max_steps}")
        tasks = [f"{level}{suffix}" for level in levels for suffix in ("", SUFFIX)]
        self._inner = GymnasiumSimulator(
            count,
            env=lambda n: SyncVectorEnv(
                [lambda: Levels(levels, tile, around)] * n, autoreset_mode=AutoresetMode.DISABLED
            ),
            image="image",
            instruction=dict.fromkeys(tasks, ""),
            mission="mission",
            expert=_bot,
            success="solved",
            max_steps=max_steps,
            fold_seeds=False,  # its levels take seeds of any size
        )
        self.count, self.tasks = count, self._inner.tasks
        self.action_dim, self.state_dim = self._inner.action_dim, self._inner.state_dim
        self.image_shape = self._inner.image_shape

    def reset(self, rows: Sequence[int], seeds: Sequence[int], tasks: Sequence[str]) -> Transition:
        return self._inner.reset(rows, seeds, tasks)

    def step(self, rows: Sequence[int], actions: NDArray[np.float64]) -> Transition:
        return self._inner.step(rows, actions)

    def instruction(self, row: int) -> str:
        return self._inner.instruction(row)

    def expert(self, rows: Sequence[int], length: int) -> NDArray[np.float32]:
        return self._inner.expert(rows, length)

    def close(self) -> None:
        self._inner.close()


def _bot(env: gymnasium.Env) -> Callable[[Any], Any]:
    """Returns BabyAI's scripted expert: a function that takes the last action and returns the next one."""
    return BabyAIBot(env.unwrapped).replan


def view_around(world: MiniGridEnv, codes: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """Returns minigrid's codes of the side x side squares around the agent, [x, y, (object, color, state)], turned so
    that the agent faces up.

    codes: the codes of the whole grid, indexed in the same way. Nothing is hidden; squares outside of the grid are
    walls. The agent's square shows the object that it carries, as in minigrid's own view.
    """
    half = side // 2
    x, y = world.agent_pos
    view = np.full((side, side, 3), WALL, np.uint8)
    left, top = max(0, half - x), max(0, half - y)
    inside = codes[max(0, x - half) : x + half + 1, max(0, y - half) : y + half + 1]
    view[left : left + inside.shape[0], top : top + inside.shape[1]] = inside
    view[half, half] = EMPTY if world.carrying is None else world.carrying.encode()
    turned = np.rot90(view.transpose(1, 0, 2), world.agent_dir + 1)  # [y, x]; direction 0 faces right, 3 up
    return turned.transpose(1, 0, 2)


def image(squares: NDArray[np.uint8], tile: int) -> NDArray[np.uint8]:
    """Draws n x n squares, given as minigrid's codes [x, y, (object, color, state)], as RGB [n tile, n tile, 3]. Unseen
    squares are black.

    It gives the same image as minigrid in a twentieth of the time, since minigrid computes the view again.
    """
    tiles, drawn = _tiles(tile)
    kind, color, state = squares.transpose(2, 1, 0)  # each [y, x]
    # draws the tiles of codes that occur for the first time
    for new_kind, new_color, new_state in {tuple(code) for code in squares[~drawn[kind, color, state].T].tolist()}:
        code = new_kind, new_color, new_state
        tiles[code], drawn[code] = _tile(*code, tile), True
    rows = tiles[kind, color, state].transpose(0, 2, 1, 3, 4)  # [y, pixel row, x, pixel column, channel]
    return rows.reshape(len(squares) * tile, len(squares) * tile, 3)


@lru_cache
def _tiles(side: int) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Returns two arrays that cache tiles: the tile for each object, color and state, and whether it has been drawn."""
    codes = max(OBJECT_TO_IDX.values()) + 1, max(COLOR_TO_IDX.values()) + 1, max(STATE_TO_IDX.values()) + 1
    return np.zeros((*codes, side, side, 3), np.uint8), np.zeros(codes, bool)


def _tile(kind: int, color: int, state: int, side: int) -> NDArray[np.uint8]:
    """Draws the tile of an object, [side, side, 3], from minigrid's codes of its type, color and state."""
    if kind == OBJECT_TO_IDX["unseen"]:
        return np.zeros((side, side, 3), np.uint8)
    return np.asarray(Grid.render_tile(WorldObj.decode(kind, color, state), tile_size=side), np.uint8)


def _skip_view(world: Any) -> None:
    """Reduces the observations of a minigrid world to its mission, which is faster. The expert does not read them."""
    world.gen_obs = lambda: {"mission": world.mission}


def _world(level: str) -> gymnasium.Env:
    """Makes the environment of a level. Raises UserError if there is none of this name."""
    name = f"BabyAI-{level}-v0"
    if name not in gymnasium.registry:
        # names without "BabyAI-" and "-v0"
        levels = ", ".join(sorted(i[7:-3] for i in gymnasium.registry if i.startswith("BabyAI-")))
        raise UserError(f"babyai: unknown level {level!r}; known: {levels}")
    return gymnasium.make(name, disable_env_checker=True)
