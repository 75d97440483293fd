"""The tasks of the tabletop: random scenes, instructions, success, progress for the shaped reward, scripted experts.

Every instruction names a colour and a position, and every scene holds objects that other instructions would mean, so
that a policy that does not read the instruction cannot know what to do. Success, progress and experts depend on the
current `TableView` alone: an expert can act in any state, its own or a policy's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from mmrl.sims.mujoco.arm import HIGH, LOW
from mmrl.sims.mujoco.control import STEP
from mmrl.sims.mujoco.scene import CUBE, PAD, PADS

COLOURS = {
    "red": (0.85, 0.10, 0.10),
    "green": (0.10, 0.65, 0.15),
    "blue": (0.10, 0.20, 0.85),
    "yellow": (0.90, 0.80, 0.10),
}
HOVER, CARRY = 0.10, 0.13  # heights of the fingertips, in metres, on the way to a cube and while carrying it
LIFTED = 0.10  # height of the cube's centre, in metres, above which it counts as lifted
MARGIN = 0.03  # cubes start this far inside the box of the fingertips
APART = 0.105  # minimum distance between centres, in metres, so that the open gripper fits in between
TRIES = 200  # random positions that are tried at most
SURE = 0.016  # horizontal distance to the cube, in metres, at which the open gripper may come down around it, and close
BEHIND = 2 * CUBE + 0.006  # from the centre of a cube to where closed fingers come down beside it
LONGEST_PUSH = 0.22  # metres
SLANT = 0.03  # metres by which a straight push may miss the middle of the pad
PUSH_STEP = 0.016  # metres in one control step; faster, the cube tumbles
PUSH_SHORT = 0.022  # metres before the middle of the pad at which closed fingers stop; the cube goes a little past it
PUSH_DEPTH = 0.02  # height of the fingertips that push
PUSH_HOVER = 0.07  # height of closed fingertips on their way over cubes
PUSH_LOW, PUSH_ASIDE = 0.04, 0.02  # metres: fingertips below this height, and this near to the line of the push, push
AREA_LOW, AREA_HIGH = LOW[:2] + MARGIN, HIGH[:2] - MARGIN


@dataclass(frozen=True)
class TabletopScene:
    """The start of an episode. Cube 0 is the one of the instruction."""

    cubes: NDArray  # [cubes, 2]
    cube_colours: list[str]
    pads: NDArray  # [shown pads, 2]; pad 0 is the goal
    pad_colours: list[str]
    instruction: str


@dataclass(frozen=True)
class TableView:
    """The state that success, progress and experts read, in metres, seconds, and the axes of the table."""

    tip: NDArray  # [3] between the fingertips
    opening: float  # of the gripper, 0 closed to 1 open
    closing: bool  # the command of the gripper
    cubes: NDArray  # [cubes, 3] centres
    speed: float  # of cube 0
    goal: NDArray  # [3] goal of cube 0, if it has one


@dataclass(frozen=True)
class TabletopTask:
    max_steps: int
    draw: Callable[[Generator, int, list[str]], TabletopScene | None]  # None: this draw is rejected, draw again
    success: Callable[[TableView], bool]
    progress: Callable[[TableView], float]  # 0 to 1, for the shaped reward
    expert: Callable[[TableView], NDArray]  # an aim [4], see `mmrl.sims.mujoco.control`
    step: float = STEP  # metres that the setpoint moves at most in one control step


def scatter(
    rng: Generator, count: int, start: Sequence[NDArray] = (), free: Callable[[NDArray], bool] = lambda point: True
) -> NDArray | None:
    """Samples positions at least APART from one another, for which `free` is true. Returns [count, 2], beginning with
    the positions `start`; None if TRIES samples do not give `count` of them."""
    positions = list(start)
    for _ in range(TRIES):
        if len(positions) == count:
            return np.array(positions)
        point = rng.uniform(AREA_LOW, AREA_HIGH)
        if free(point) and all(np.linalg.norm(point - position) >= APART for position in positions):
            positions.append(point)
    return None


def pick_colours(rng: Generator, colours: list[str], count: int) -> list[str]:
    """Returns `count` random colors; they are all different if there are enough."""
    order = [str(colour) for colour in rng.permutation(colours)]
    return [order[i % len(order)] for i in range(count)]


def twins(verb: str) -> Callable[[Generator, int, list[str]], TabletopScene | None]:
    """Returns a function that samples scenes in which cubes 0 and 1 have the same color, one on the left and one on the
    right of the image, and other cubes have other colors. verb: the beginning of the instruction."""

    def draw(rng: Generator, cubes: int, colours: list[str]) -> TabletopScene | None:
        """Samples a scene; None if positions are too close from left to right, or TRIES positions were not enough."""
        positions = scatter(rng, cubes)
        if positions is None or abs(positions[0, 1] - positions[1, 1]) < 0.08:
            return None
        colour, *others = pick_colours(rng, colours, len(colours))
        rest = pick_colours(rng, others, cubes - 2)
        side = "left" if positions[0, 1] < positions[1, 1] else "right"
        return TabletopScene(
            positions, [colour, colour, *rest], np.empty((0, 2)), [], f"{verb} the {colour} cube on the {side}"
        )

    return draw


def onto_pad(
    verb: str, preposition: str, straight: bool = False
) -> Callable[[Generator, int, list[str]], TabletopScene | None]:
    """Returns a function that samples scenes of cubes and pads, of different colors if there are enough. The
    instruction is built from `verb` and `preposition`. straight: one push along an axis of the table moves cube 0 to
    pad 0, and no other cube is in between."""

    def draw(rng: Generator, cubes: int, colours: list[str]) -> TabletopScene | None:
        """Samples a scene; None if the positions of cubes and pads were rejected."""
        positions = push_line(rng, cubes + PADS) if straight else scatter(rng, cubes + PADS)
        if positions is None:
            return None
        # position 0 is cube 0's, the next PADS positions are the pads', the others are the other cubes'
        cube_positions, pads = np.delete(positions, slice(1, 1 + PADS), axis=0), positions[1 : 1 + PADS]
        names = pick_colours(rng, colours, cubes + PADS)
        cube_colours, pad_colours = names[:cubes], names[cubes:]
        instruction = f"{verb} the {cube_colours[0]} cube {preposition} the {pad_colours[0]} pad"
        return TabletopScene(cube_positions, cube_colours, pads, pad_colours, instruction)

    return draw


def push_line(rng: Generator, count: int) -> NDArray | None:
    """Samples positions [count, 2] such that one straight push moves a cube from the first to the second, and
    the rest are not in its way. Returns None if the sample is rejected."""
    # the push goes along one axis of the table (main, 0 or 1), forwards or backwards, with a small slant
    way = rng.choice([-1.0, 1.0]) * np.array([rng.uniform(APART, LONGEST_PUSH), 0.0])
    way[1] = rng.uniform(-SLANT, SLANT)
    main = int(rng.integers(2))
    cube, way = rng.uniform(AREA_LOW, AREA_HIGH), way[[main, 1 - main]]
    behind, pad = cube.copy(), cube + way
    behind[main] -= np.sign(way[main]) * (BEHIND + 0.01)
    if not LOW[main] < behind[main] < HIGH[main] or (pad < AREA_LOW).any() or (pad > AREA_HIGH).any():
        return None
    # all other objects stay 7.5 cm away from the line that the fingers take
    return scatter(rng, count, [cube, pad], lambda point: distance_to_segment(point, behind, pad) > 0.075)


def onto_cube(rng: Generator, cubes: int, colours: list[str]) -> TabletopScene | None:
    """Samples a scene in which cube 0 has to be placed on cube 1."""
    positions = scatter(rng, cubes)
    if positions is None:
        return None
    names = pick_colours(rng, colours, cubes)
    return TabletopScene(positions, names, np.empty((0, 2)), [], f"stack the {names[0]} cube on the {names[1]} cube")


def distance_to_segment(point: NDArray, a: NDArray, b: NDArray) -> float:
    """Returns the distance of a point [2] from the segment between a and b [2]."""
    along = np.clip((point - a) @ (b - a) / ((b - a) @ (b - a)), 0, 1)
    return float(np.linalg.norm(point - a - along * (b - a)))


# Success


def reached(view: TableView) -> bool:
    """Returns whether the fingertips are over the cube, no more than 3 cm above its top."""
    return horizontal_distance(view.tip, view.cubes[0]) < 0.02 and view.tip[2] < 2 * CUBE + 0.03


def pushed(view: TableView) -> bool:
    """Returns whether the centre of the cube is over the pad and the cube stands on the table."""
    return bool((np.abs(view.cubes[0] - view.goal)[:2] < PAD - 0.008).all()) and view.cubes[0][2] < CUBE + 0.005


def lifted(view: TableView) -> bool:
    return bool(view.cubes[0][2] > LIFTED)


def placed(view: TableView) -> bool:
    """Returns whether the cube is on the pad, at rest and released."""
    return pushed(view) and let_go(view)


def stacked(view: TableView) -> bool:
    """Returns whether the cube is on top of the other cube, at rest and released."""
    error = view.cubes[0] - view.goal
    return bool(np.linalg.norm(error[:2]) < 0.9 * CUBE and abs(error[2]) < 0.006) and let_go(view)


def let_go(view: TableView) -> bool:
    """Returns whether the gripper is open and cube 0 at rest."""
    return not view.closing and view.opening > 0.75 and view.speed < 0.05


# Progress


def near(distance: float) -> float:
    """Returns 1 at distance 0, and less at a larger distance in metres: 0.62 at 5 cm, 0.34 at 10 cm."""
    return float(1 - np.tanh(8 * distance))


def reach_progress(view: TableView) -> float:
    return near(float(np.linalg.norm(view.tip - view.cubes[0] - [0, 0, CUBE + 0.02])))


def push_progress(view: TableView) -> float:
    """Returns the progress of a push, 0 to 1. The fingertips have to be behind cube 0: in front of it they are as near,
    but can not push."""
    behind = over(view.cubes[0][:2] - push_axis(view) * BEHIND, PUSH_DEPTH)
    return 0.3 * near(float(np.linalg.norm(view.tip - behind))) + 0.7 * near(
        horizontal_distance(view.cubes[0], view.goal)
    )


def lift_progress(view: TableView) -> float:
    """Returns the progress of a lift, 0 to 1: fingertips near cube 0, cube 0 held, and its height."""
    reach = near(float(np.linalg.norm(view.tip - view.cubes[0])))
    height = float(np.clip((view.cubes[0][2] - CUBE) / (LIFTED - CUBE), 0, 1))
    return 0.3 * reach + 0.2 * held(view) + 0.5 * height


def place_progress(view: TableView) -> float:
    """Returns the progress of placing, 0 to 1: fingertips near cube 0, cube 0 held, and cube 0 near its goal."""
    reach = near(float(np.linalg.norm(view.tip - view.cubes[0])))
    near_goal = near(float(np.linalg.norm(view.cubes[0] - view.goal)))
    return 0.3 * reach + 0.2 * held(view) + 0.5 * near_goal


# Experts


def horizontal_distance(a: NDArray, b: NDArray) -> float:
    """Returns the horizontal distance of two points."""
    return float(np.hypot(a[0] - b[0], a[1] - b[1]))


def held(view: TableView) -> bool:
    """Returns whether the gripper holds cube 0: it is commanded to close and blocked, with the cube between its
    fingers."""
    # A cube blocks the gripper at an opening of CUBE / FINGER_TRAVEL = 0.55.
    return view.closing and 0.45 < view.opening < 0.65 and float(np.linalg.norm(view.tip - view.cubes[0])) < 0.025


def aim(goal: NDArray, gripper: float) -> NDArray:
    """Returns the action target [4] (position of the fingertips x, y, z, and gripper) at `goal`, clipped to the box
    that the fingertips may move in."""
    return np.append(np.clip(goal, LOW, HIGH), gripper)


def over(point: NDArray, height: float) -> NDArray:
    """Returns the position [3] above or below a point [2 or 3], at `height`."""
    return np.array([point[0], point[1], height])


def descend(view: TableView, goal: NDArray, hover: float, gripper: float) -> NDArray:
    """Returns the action target [4] of an approach to `goal` from above: first up if the fingertips are low and
    aside, then over the goal, then down."""
    aside = horizontal_distance(view.tip, goal)
    if aside < 0.008:
        return aim(goal, gripper)
    if aside > 0.03 and view.tip[2] < hover - 0.02:
        return aim(over(view.tip, hover), gripper)
    return aim(over(goal, hover), gripper)


def funnel(view: TableView, goal: NDArray, hover: float, gripper: float) -> NDArray:
    """Returns the action target [4] of an approach to `goal` from above: its height falls continuously from `hover` to
    the height of `goal` as the horizontal distance shrinks. A policy that estimates this distance only to within a
    centimetre could not imitate a height that jumps."""
    share = np.clip((horizontal_distance(view.tip, goal) - SURE) / 0.02, 0, 1)
    return aim(over(goal, goal[2] + share * (hover - goal[2])), gripper)


def grasp(view: TableView) -> NDArray:
    """Returns the action target [4] that grasps cube 0."""
    cube = view.cubes[0]
    around = horizontal_distance(view.tip, cube) < SURE and view.tip[2] < cube[2] + 0.02
    if around and (not view.closing or view.opening > 0.65):
        return aim(cube, 1.0)
    return funnel(view, cube, max(HOVER, cube[2] + 0.05), -1.0)


def reach_expert(view: TableView) -> NDArray:
    """Returns the action target [4] that moves the open gripper to just above cube 0."""
    return descend(view, over(view.cubes[0], 2 * CUBE + 0.015), HOVER, -1.0)


def lift_expert(view: TableView) -> NDArray:
    """Returns the action target [4] that grasps cube 0 and lifts it."""
    if held(view):
        return aim(over(view.tip, LIFTED + 0.04), 1.0)
    return grasp(view)


def place_expert(view: TableView) -> NDArray:
    """Returns the action target [4] that picks cube 0 up, carries it over its goal, sets it down, opens and
    withdraws."""
    error = view.cubes[0] - view.goal
    at_goal = bool(np.linalg.norm(error[:2]) < 0.01 and abs(error[2]) < 0.006)
    if at_goal:  # opens the gripper here, and rises once it is open
        return aim(over(view.tip, view.goal[2] if view.opening < 0.9 else CARRY), -1.0)
    if held(view):
        return funnel(view, view.goal + view.tip - view.cubes[0], CARRY, 1.0)
    return grasp(view)


def push_expert(view: TableView) -> NDArray:
    """Returns the action target [4] (position of the fingertips x, y, z, and gripper) that goes behind cube 0 with
    closed fingers and pushes against the middle of a face, along the axis of the table on which the cube is further
    from its goal. During the push the target is one fixed position before the pad: a target only one step ahead of the
    fingers would be nearer than a policy's error."""
    cube, ahead = view.cubes[0][:2], push_axis(view)
    from_cube = view.tip[:2] - cube
    along = float(from_cube @ ahead)
    aside = from_cube - along * ahead
    if view.tip[2] < PUSH_LOW and along < 0 and float(np.linalg.norm(aside)) < PUSH_ASIDE:
        return aim(over(view.goal[:2] - ahead * PUSH_SHORT, PUSH_DEPTH), 1.0)
    return funnel(view, over(cube - ahead * BEHIND, PUSH_DEPTH), PUSH_HOVER, 1.0)


def push_axis(view: TableView) -> NDArray:
    """Returns the unit vector [2] towards the goal, along the axis of the table on which cube 0 is further from it."""
    way = (view.goal - view.cubes[0])[:2]
    return np.where(np.abs(way) == np.abs(way).max(), np.sign(way), 0.0)


TASKS = {
    "reach": TabletopTask(20, twins("reach for"), reached, reach_progress, reach_expert),
    "push": TabletopTask(60, onto_pad("push", "to", straight=True), pushed, push_progress, push_expert, PUSH_STEP),
    "lift": TabletopTask(35, twins("lift"), lifted, lift_progress, lift_expert),
    "pick_and_place": TabletopTask(50, onto_pad("put", "on"), placed, place_progress, place_expert),
    "stack": TabletopTask(50, onto_cube, stacked, place_progress, place_expert),
}
