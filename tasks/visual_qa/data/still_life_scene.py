"""The images of `StillLifesSource`: a table with objects, rendered by MuJoCo with textures, light and shadow, and
developed like a photograph: exposure, white balance, vignetting, blur and noise.

Importing it needs the package mujoco (the extra of the same name).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from io import BytesIO

import mujoco
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from mmrl.sims.mujoco.gl import Renderer, choose_backend
from mmrl.tasks.visual_qa.data.kinds import STILL_LIFE_GRID as GRID

SIZE = 256  # side of an image in pixels
COLOURS: dict[str, tuple[float, float, float]] = {  # RGB in 0 .. 1, before the light
    "red": (0.75, 0.08, 0.07),
    "green": (0.10, 0.50, 0.14),
    "blue": (0.08, 0.18, 0.70),
    "yellow": (0.85, 0.68, 0.05),
    "purple": (0.42, 0.10, 0.55),
}
DIGITS = tuple("0123456789")
TABLES = ("oak", "walnut", "cloth", "marble")
WALLS = ("plaster", "brick")
SHAPES = (mujoco.mjtGeom.mjGEOM_BOX, mujoco.mjtGeom.mjGEOM_CYLINDER, mujoco.mjtGeom.mjGEOM_ELLIPSOID)
CARD = (0.055, 0.06)  # half width and half height of a card, in metres
LEAN = 0.6  # how far cards lean back, in radians
CARD_MIDDLE = CARD[1] * np.cos(LEAN) + 0.002  # height of a card's middle above the table, in metres
CAMERA, TARGET = np.array([0.0, -0.95, 0.95]), np.array([0.0, 0.02, 0.03])  # metres
FIELD_OF_VIEW = 42.0  # degrees
HIGHEST = 1  # highest row of cells with a card; above it is the wall
# Cells that a card's middle is from that of its cell at most, along each side. Tiny models, which have no convolutions,
# hardly learn to read cards that stray by 0.1.
STRAY = 0.03
CLUTTER = 0.13  # metres of clutter from objects and from cards at least
IN_FRONT = 0.12  # metres of a card's middle in front of its object's


@dataclass(frozen=True)
class StillLife:
    """An image and where the middle of each object's card is: x from the left and y from the top, [object, 2] as
    fractions of the image's side."""

    image: Image.Image
    cards: NDArray[np.float64]


def _waves(rng: np.random.Generator, side: int, scale: float) -> NDArray[np.float64]:
    """Returns a smooth random field [side, side] in about -1 .. 1: noise of three scales, the coarsest of `scale`
    pixels."""
    field = np.zeros((side, side))
    for octave in range(3):
        cells = max(2, round(side / scale * 2**octave))
        noise = Image.fromarray(rng.uniform(-1, 1, (cells, cells)).astype(np.float32))
        field += np.asarray(noise.resize((side, side), Image.Resampling.BICUBIC)) / 2**octave
    return field / 1.75


def _texture(name: str, side: int = 512) -> NDArray[np.uint8]:
    """Draws the texture of a table or wall, [side, side, 3]."""
    rng = np.random.default_rng((*TABLES, *WALLS).index(name))
    y, x = np.mgrid[:side, :side] / side
    rough = rng.normal(0, 1, (side, side))
    if name in ("oak", "walnut"):
        light, dark = ((196, 150, 98), (150, 102, 58)) if name == "oak" else ((112, 72, 46), (66, 40, 26))
        rings = np.sin(60 * (x + 0.05 * _waves(rng, side, 200)) + 6 * _waves(rng, side, 160)) * 0.5 + 0.5
        streaks = rng.normal(0, 1, side)[None, :] * 0.12
        gap = np.where((x * 5) % 1 < 0.012, 0.9, 0.0)  # between boards
        share = np.clip(0.6 * rings + streaks + 0.04 * rough + gap, 0, 1.3)
    elif name == "cloth":
        light, dark = (226, 220, 206), (150, 158, 170)
        weave = 0.25 * (np.sin(x * side * 0.9) * np.sin(y * side * 0.9))
        stripes = np.where((x * 6) % 1 < 0.3, 0.35, 0) + np.where((y * 6) % 1 < 0.3, 0.35, 0)
        share = stripes + weave + 0.05 * rough
    elif name == "marble":
        light, dark = (224, 224, 222), (128, 130, 134)
        share = np.abs(np.sin(9 * (x + y) + 5 * _waves(rng, side, 180))) ** 0.25
        share = 1 - share + 0.02 * rough
    elif name == "plaster":
        light, dark = (206, 202, 190), (160, 158, 150)
        share = 0.4 * _waves(rng, side, 120) + 0.3 + 0.05 * rough
    else:
        light, dark = (158, 84, 64), (190, 182, 170)
        row = np.floor(y * 12)
        mortar = ((y * 12) % 1 < 0.12) | ((x * 6 + 0.5 * (row % 2)) % 1 < 0.06)
        share = np.where(mortar, 0.95, 0.15 + 0.15 * _waves(rng, side, 60)) + 0.05 * rough
    colours = np.array(light) + (np.array(dark, float) - light) * share[:, :, None]
    return np.clip(colours, 0, 255).astype(np.uint8)


def _card(digit: str, side: int = 128) -> NDArray[np.uint8]:
    """Draws a white card with a digit, [side, side, 3]."""
    card = Image.new("RGB", (side, side), (244, 241, 232))
    pen, middle = ImageDraw.Draw(card), side / 2
    pen.rectangle((3, 3, side - 4, side - 4), outline=(120, 116, 108), width=2)
    pen.text((middle, middle), digit, (22, 22, 26), ImageFont.load_default(round(side * 0.92)), anchor="mm")
    return np.asarray(card)


def _png(pixels: NDArray[np.uint8]) -> bytes:
    """Encodes an image [height, width, 3]."""
    buffer = BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


@cache
def _model(objects: int) -> mujoco.MjModel:
    """Compiles a table, a wall, a lamp, a pencil and a ball, and `objects` objects with a card each. Positions, sizes,
    materials, light and camera are set for each image."""
    surfaces = {name: _png(_texture(name)) for name in (*TABLES, *WALLS)}
    cards = {f"card{digit}": _png(_card(digit)) for digit in DIGITS}
    textures = "".join(f'<texture name="{n}" type="2d" file="{n}.png"/>' for n in (*surfaces, *cards))
    repeats = {"cloth": 3, "brick": 2}
    materials = "".join(
        f'<material name="{n}" texture="{n}" texrepeat="{repeats.get(n, 1)} {repeats.get(n, 1)}" specular=".2" '
        f'shininess=".3" reflectance="{0.12 if n == "marble" else 0}"/>'
        for n in surfaces
    )
    materials += "".join(f'<material name="{n}" texture="{n}" specular=".05"/>' for n in cards)
    things = "".join(
        f'<geom name="object{i}" type="box" pos="1 1 1" euler="9 9 9" size=".1 .1 .1" material="glazed"/>'
        f'<geom name="card{i}" type="box" pos="1 1 1" euler="9 9 9" size="{CARD[0]} {CARD[1]} .002" material="card0"/>'
        for i in range(objects)
    )
    xml = f"""
<mujoco model="still life">
  <visual>
    <quality shadowsize="1024" offsamples="4" numslices="32" numstacks="24"/>
    <global offwidth="{SIZE}" offheight="{SIZE}"/>
    <headlight ambient=".25 .25 .26" diffuse=".12 .12 .12" specular="0 0 0"/>
    <map znear="0.05" zfar="10" shadowclip="1.2"/>
  </visual>
  <asset>{textures}{materials}<material name="glazed" specular=".7" shininess=".6"/></asset>
  <worldbody>
    <light name="lamp" pos="0 0 1.6" dir="0 0 -1" diffuse=".8 .8 .75" specular=".4 .4 .4" cutoff="80" exponent="1"/>
    <camera name="photographer" fovy="{FIELD_OF_VIEW}"/>
    <geom name="table" type="box" pos="0 .1 -.03" size=".8 .72 .03" material="oak"/>
    <geom name="wall" type="box" pos="0 1.25 0" euler="90 0 0" size="2 2 .02" material="plaster"/>
    <geom name="pencil" type="capsule" pos="1 1 1" size=".008 .09" rgba=".9 .6 .1 1" euler="90 0 0"/>
    <geom name="ball" type="sphere" pos="1 1 1" size=".03" material="glazed"/>
    {things}
  </worldbody>
</mujoco>"""
    return mujoco.MjModel.from_xml_string(xml, {f"{n}.png": data for n, data in (surfaces | cards).items()})


class Photographer:
    """Takes images of still lifes of `objects` objects. Only the thread that made it may use it."""

    def __init__(self, objects: int):
        """Raises UserError if MuJoCo cannot render on this machine."""
        self.model, self.objects = _model(objects), objects
        self.data = mujoco.MjData(self.model)
        self._renderer = Renderer(self.model, choose_backend(), SIZE)

    def render(self, colours: Sequence[str], digits: Sequence[int], rng: np.random.Generator) -> StillLife:
        """Renders a random still life. colours: the color of each object; digits: the digit on each object's card."""
        model = self.model
        camera, rotation = self._place_camera(rng)
        self._light(rng)
        surfaces = {"table": TABLES, "wall": WALLS}
        for name, choices in surfaces.items():
            model.geom(name).matid = model.material(choices[rng.integers(len(choices))]).id
        positions, cards = self._layout(rng, camera, rotation)
        for i, (x, y) in enumerate(positions[: self.objects]):
            self._put(i, x, y, colours[i], digits[i], rng)
        self._put_clutter(positions[self.objects :], rng)
        mujoco.mj_forward(model, self.data)
        pixels = np.empty((SIZE, SIZE, 3), np.uint8)
        self._renderer.render(model, self.data, pixels)
        return StillLife(develop(pixels, rng), cards)

    def _place_camera(self, rng: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Moves the camera a little at random. Returns its position [3], and its rotation [3, 3], whose columns are its
        right, up and backward directions."""
        position, target = CAMERA + rng.uniform(-0.06, 0.06, 3), TARGET + rng.uniform(-0.03, 0.03, 3)
        back = (position - target) / np.linalg.norm(position - target)
        roll = rng.uniform(-0.04, 0.04)
        right = np.cross([np.sin(roll), 0, np.cos(roll)], back)
        right /= np.linalg.norm(right)
        rotation = np.stack([right, np.cross(back, right), back], axis=1)
        self.model.cam_pos[0] = position
        mujoco.mju_mat2Quat(self.model.cam_quat[0], rotation.ravel())
        return position, rotation

    def _light(self, rng: np.random.Generator) -> None:
        """Moves the lamp, and changes how bright and how warm it is."""
        lamp = self.model.light("lamp")
        lamp.pos = [rng.uniform(-0.9, 0.9), rng.uniform(-0.9, 0.3), rng.uniform(1.1, 1.7)]
        lamp.dir = np.array([0.0, 0.05, 0.0]) - lamp.pos
        lamp.diffuse = rng.uniform(0.6, 0.95) * np.array([1.0, rng.uniform(0.88, 1.0), rng.uniform(0.72, 1.0)])
        self.model.vis.headlight.ambient[:] = rng.uniform(0.18, 0.34)

    def _layout(
        self, rng: np.random.Generator, camera: NDArray[np.float64], rotation: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Samples positions on the table for all objects and two pieces of clutter. Each object's card is near the
        middle of a cell of the grid, so far from the others that no object hides another's card.

        Returns the positions [thing, 2] in metres and the middles of the objects' cards in the image [object, 2].
        """
        cells = np.empty((0, 2), int)
        while len(cells) < self.objects:
            cell = rng.integers((0, HIGHEST), GRID)
            across, down = np.abs(cells - cell).T
            if ((across >= 1) | (down >= 2)).all():
                cells = np.append(cells, cell[None], axis=0)
            elif rng.random() < 0.02:  # no cell may be left
                cells = cells[:0]
        cards = (cells + 0.5 + rng.uniform(-STRAY, STRAY, cells.shape)) / GRID
        positions = _placed(cards, camera, rotation)
        while len(positions) < self.objects + 2:
            position = rng.uniform(-0.4, 0.4, 2)
            if (np.linalg.norm(positions - position, axis=1) > CLUTTER).all() and (
                np.linalg.norm(positions - (0, IN_FRONT) - position, axis=1) > CLUTTER
            ).all():
                positions = np.append(positions, position[None], axis=0)
        return positions, cards

    def _put(self, i: int, x: float, y: float, colour: str, digit: int, rng: np.random.Generator) -> None:
        """Puts object i at (x, y) in metres, of a random shape and shade, with its card leaning against its front."""
        model = self.model
        thing, card = model.geom(f"object{i}"), model.geom(f"card{i}")
        width, height = rng.uniform(0.055, 0.075), rng.uniform(0.05, 0.085)
        shape = SHAPES[rng.integers(len(SHAPES))]
        thing.type = shape
        thing.size = [width, height, 0] if shape == mujoco.mjtGeom.mjGEOM_CYLINDER else [width, width, height]
        thing.pos, yaw = [x, y, height], rng.uniform(-0.3, 0.3)
        thing.quat = [np.cos(yaw / 2), 0, 0, np.sin(yaw / 2)]
        thing.rgba = [
            *np.clip(np.array(COLOURS[colour]) * rng.uniform(0.8, 1.2) + rng.uniform(-0.03, 0.03, 3), 0, 1),
            1,
        ]
        model.geom_rbound[thing.id] = 0.2
        # The card's z axis, its face, points to the front and, as it leans back, up; its y axis is the digit's.
        lean, turn = np.pi / 2 - LEAN, rng.uniform(-0.25, 0.25)
        tilt = np.array([np.cos(lean / 2), np.sin(lean / 2), 0, 0])
        quat = np.zeros(4)
        mujoco.mju_mulQuat(quat, np.array([np.cos(turn / 2), 0, 0, np.sin(turn / 2)]), tilt)
        card.quat, card.pos = quat, [x, y - IN_FRONT, CARD_MIDDLE]
        card.matid = model.material(f"card{digit}").id

    def _put_clutter(self, positions: NDArray[np.float64], rng: np.random.Generator) -> None:
        """Puts a pencil and a ball on the table, which no question is about."""
        pencil, ball = self.model.geom("pencil"), self.model.geom("ball")
        turn = rng.uniform(0, np.pi)
        flat = np.array([np.cos(np.pi / 4), np.sin(np.pi / 4), 0, 0])
        quat = np.zeros(4)
        mujoco.mju_mulQuat(quat, np.array([np.cos(turn / 2), 0, 0, np.sin(turn / 2)]), flat)
        pencil.quat, pencil.pos = quat, [*positions[0], 0.008]
        ball.pos, ball.rgba = [*positions[1], 0.03], [*rng.uniform(0.3, 0.8) * np.ones(3), 1]


def _placed(
    cards: NDArray[np.float64], camera: NDArray[np.float64], rotation: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Returns where objects stand [..., 2], in metres on the table, for the middles of their cards in the image
    [..., 2], x from the left and y from the top as fractions of its side: the ray through a middle meets the plane at
    the height of the middles."""
    reach = 2 * np.tan(np.radians(FIELD_OF_VIEW) / 2)
    rays = np.stack([(cards[..., 0] - 0.5) * reach, (0.5 - cards[..., 1]) * reach, -np.ones(cards.shape[:-1])], -1)
    rays = rays @ rotation.T
    meeting = camera + rays * ((CARD_MIDDLE - camera[2]) / rays[..., 2])[..., None]
    return meeting[..., :2] + (0, IN_FRONT)


def develop(pixels: NDArray[np.uint8], rng: np.random.Generator) -> Image.Image:
    """Makes a photograph of a rendered image [side, side, 3]: random exposure, white balance, vignetting and blur, and
    noise that is stronger where it is dark."""
    side = len(pixels)
    light = (pixels / 255.0) ** 2.2  # display values to linear light
    light *= rng.uniform(0.8, 1.3) * np.array([rng.uniform(0.94, 1.06), 1.0, rng.uniform(0.92, 1.08)])
    y, x = np.mgrid[:side, :side] / (side - 1) - 0.5
    light *= (1 - rng.uniform(0.3, 0.8) * (x**2 + y**2))[:, :, None]
    shown = np.clip(light, 0, 1) ** (1 / 2.2)
    blurred = Image.fromarray(np.rint(shown * 255).astype(np.uint8)).filter(
        ImageFilter.GaussianBlur(rng.uniform(0.0, 0.7))
    )
    grain = rng.normal(0, 1, (side, side, 1)) * 3 + rng.normal(0, 1, (side, side, 3)) * 2
    noisy = np.asarray(blurred) + grain * (1.3 - shown)
    return Image.fromarray(np.clip(np.rint(noisy), 0, 255).astype(np.uint8))
