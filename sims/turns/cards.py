"""A card game of counting and matching colors, with images of a few pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from PIL import Image

from mmrl.rollouts import Message, Prompt
from mmrl.sims.turns.environment import Environment, Reply

SIDE = 8  # of a card, in pixels
COLORS = {"red": (230, 30, 30), "green": (30, 200, 30), "blue": (60, 60, 255), "yellow": (220, 200, 0)}
COUNTS = ("one", "two", "three", "four")
SPOTS = ((1, 1), (1, 5), (5, 1), (5, 5))  # top left corners (row, column) of the spots on a card


@dataclass(frozen=True)
class Deal:
    """A round: the card to match, the cards to choose from, and the index of the right one. Cards are (count,
    color)."""

    wanted: tuple[int, str]
    choices: tuple[tuple[int, str], ...]
    right: int

    def expert(self, rule: Literal["count", "colour"]) -> str:
        """Returns the right response: the property to match and the number of the card, from 1, such as `blue 3`."""
        count, colour = self.wanted
        return f"{COUNTS[count - 1] if rule == 'count' else colour} {self.right + 1}"

    def image(self) -> Image.Image:
        """Draws the card to match and, to its right, the cards to choose from."""
        return Image.fromarray(np.concatenate([card(*one) for one in (self.wanted, *self.choices)], axis=1))


def deal(seed: int, number: int, rule: Literal["count", "colour"], choices: int) -> Deal:
    """Samples round `number` of the game with this seed. Exactly one choice matches by `rule`; any may match by the
    other rule."""
    rng = np.random.default_rng([seed, number])
    counts, colours = rng.permutation(len(SPOTS)) + 1, rng.permutation(list(COLORS))
    wanted, right = (int(counts[0]), str(colours[0])), int(rng.integers(choices))
    cards = []
    for index in range(choices):
        # index of the property in `counts` or `colours`: 0 for the right card, another one for each wrong card
        property_index = index + 1 - (index > right) if index != right else 0
        if rule == "count":
            cards.append((int(counts[property_index]), str(rng.choice(list(COLORS)))))
        else:
            cards.append((int(rng.integers(len(SPOTS))) + 1, str(colours[property_index])))
    return Deal(wanted, tuple(cards), right)


def card(count: int, colour: str) -> np.ndarray:
    """Draws a card, [SIDE, SIDE, 3] uint8: `count` spots of 2 x 2 pixels on dark gray."""
    drawn = np.full((SIDE, SIDE, 3), 30, np.uint8)
    for top, left in SPOTS[:count]:
        drawn[top : top + 2, left : left + 2] = COLORS[colour]
    return drawn


class CardGame(Environment):
    """A game of several rounds: the policy says which of `choices` cards matches the first one by the prompt's rule
    (count or color). Each right round has the reward 1 / rounds; success is that all rounds were right."""

    def __init__(self, rounds: int, choices: int) -> None:
        self.rounds, self.choices = rounds, choices
        self.number = self.won = 0

    def start(self, prompt: Prompt) -> list[Message]:
        self.seed, self.rule, self.text = prompt.metadata["seed"], prompt.metadata["kind"], prompt.text
        return [self._shown(self.text)]

    def step(self, response: str) -> Reply:
        """Plays a round. The last word of the response must be the number of a card, from 1; otherwise the round is
        wrong, and the reply has an error."""
        right = deal(self.seed, self.number, self.rule, self.choices).right
        word = (response.split() or [""])[-1]
        # int() refuses thousands of digits
        valid = word.isascii() and word.isdigit() and len(word) < 10 and 1 <= int(word) <= self.choices
        won = valid and int(word) == right + 1
        self.won, self.number = self.won + won, self.number + 1
        error = None if valid else f"say the number of a card, 1 to {self.choices}"
        facts = {"success": float(self.won == self.rounds)}
        if self.number == self.rounds:
            return Reply(end=True, reward=won / self.rounds, error=error, facts=facts)
        return Reply([self._shown("")], reward=won / self.rounds, error=error, facts=facts)

    def _shown(self, text: str) -> Message:
        """Returns a message with the image of the current round and `text`, if any."""
        image = deal(self.seed, self.number, self.rule, self.choices).image()
        return Message("user", (image, text) if text else (image,))
