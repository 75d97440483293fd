"""Games over turns by value: what is dealt, what earns, what an expert does, and worlds of Gymnasium and BabyAI."""

import gymnasium
import numpy as np
import pytest

from mmrl.errors import UserError
from mmrl.settings import SettingsError
from mmrl.sims.turns.cards import COLORS, SIDE, CardGame, deal
from mmrl.sims.turns.games import BabyAIGame, Cards, Gymnasium


def spots(image):
    """Count and colour of every card, from its pixels alone."""
    pixels, found = np.asarray(image).astype(int), []
    for left in range(0, pixels.shape[1], SIDE):
        card = pixels[:, left : left + SIDE].reshape(-1, 3)
        bright = card[card.max(1) > 60]
        colour = next(name for name, value in COLORS.items() if tuple(bright[0]) == value)
        found.append((len(bright) // 4, colour))
    return found


@pytest.mark.parametrize("rule", ["count", "colour"])
def test_exactly_one_card_matches_and_the_image_shows_it(rule):
    key = ["count", "colour"].index(rule)
    places = set()
    for seed in range(60):
        dealt = deal(seed, 0, rule, 3)
        wanted, *choices = spots(dealt.image())
        assert wanted == dealt.wanted and tuple(choices) == dealt.choices
        assert [n for n, one in enumerate(choices) if one[key] == wanted[key]] == [dealt.right]
        places.add(dealt.right)
    assert places == {0, 1, 2}


def play(game, prompt, said):
    """Rewards, errors and the last reply."""
    world = game.make()
    first = world.start(prompt)
    assert len(first[0].images) == 1
    replies = [world.step(one) for one in said]
    return [r.reward for r in replies], [r.error for r in replies], replies[-1]


def test_the_expert_wins_and_each_round_earns_its_share():
    game = Cards(rounds=4)
    for seed in range(6):
        prompt = game.prompt(seed)
        rewards, errors, last = play(game, prompt, game.demonstration(prompt))
        assert rewards == [0.25] * 4 and errors == [None] * 4
        assert last.end and last.facts["success"] == 1.0


def test_a_round_is_lost_by_a_wrong_card_and_by_words():
    game = Cards(rounds=3)
    prompt = game.prompt(5)
    first, second, third = game.demonstration(prompt)
    assert second == f"{deal(5, 1, 'colour', 3).wanted[1]} {deal(5, 1, 'colour', 3).right + 1}"
    wrong = str(int(second.split()[-1]) % 3 + 1)  # the number alone counts
    rewards, errors, last = play(game, prompt, [first, wrong, third])
    assert rewards == [pytest.approx(1 / 3), 0, pytest.approx(1 / 3)] and errors == [None] * 3
    assert last.end and last.facts["success"] == 0.0
    rewards, errors, _ = play(game, prompt, ["the left one", "red 0", "\u0661"])
    assert rewards == [0, 0, 0] and all("1 to 3" in error for error in errors)
    rewards, errors, _ = play(game, prompt, ["9" * 5000, first, first])  # more digits than int() takes
    assert rewards[0] == 0 and "1 to 3" in errors[0]


def test_kinds_alternate_and_are_told():
    game = Cards()
    assert [game.prompt(seed).text for seed in (0, 1)] == ["Match the count.", "Match the colour."]
    assert CardGame(3, 3).start(game.prompt(1))[0].text == "Match the colour."


class Corridor(gymnasium.Env):
    """Walk right three times. Its image is as wide as the place is far."""

    observation_space = gymnasium.spaces.Discrete(4)
    action_space = gymnasium.spaces.Discrete(2)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 1}

    def __init__(self, render_mode=None):
        self.place, self.render_mode = 0, render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place = seed % 2
        return self.place, {}

    def step(self, action):
        self.place += 1 if action == 1 else -1
        return self.place, float(self.place == 3), self.place == 3, self.place < 0, {}

    def render(self):
        return np.zeros((4, self.place + 1, 3), np.uint8)


@pytest.fixture
def corridor():
    gymnasium.register("Corridor-v0", entry_point=Corridor)
    yield Gymnasium(env="Corridor-v0", actions={"back": 0, "on": 1}, instruction="Walk.")
    del gymnasium.registry["Corridor-v0"]


def test_a_gymnasium_environment_is_played_by_words(corridor):
    world = corridor.make()
    (first,) = world.start(corridor.prompt(1))
    assert first.text == "Walk." and first.images[0].size == (2, 4)
    reply = world.step("I go ON.")
    assert reply.messages[0].images[0].size == (3, 4) and reply.reward == 0 and not reply.end
    assert "say one of back, on" in world.step("jump").error
    reply = world.step("on")
    assert (reply.end, reply.reward, reply.facts) == (True, 1.0, {"success": 1.0})


def test_an_environment_that_gives_up_is_no_success(corridor):
    world = corridor.make()
    world.start(corridor.prompt(0))
    reply = world.step("back")
    assert (reply.end, reply.reward, reply.facts) == (True, 0.0, {"success": 0.0})


def test_environments_that_can_not_be_played_are_named():
    with pytest.raises(UserError, match="task.game.env=Nowhere-v0"):
        Gymnasium(env="Nowhere-v0").make()
    with pytest.raises(UserError, match="actions must be discrete"):
        Gymnasium(env="Pendulum-v1").make()


class Seen(gymnasium.Env):
    """Its observation is its image, and it can not be rendered: a grey that is the place."""

    observation_space = gymnasium.spaces.Box(0, 255, (4, 5, 3), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, broken=False):
        self.place, self.broken = 0, broken

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if self.broken:
            raise RuntimeError("out of order")
        self.place = seed % 3
        return self._image(), {}

    def step(self, action):
        self.place += 1 if action == 1 else -1
        return self._image(), float(self.place == 3), self.place in (0, 3), False, {}

    def _image(self):
        return np.full((4, 5, 3), 10 * self.place, np.uint8)


def go_on(world, observation):
    """The number of the right action, from the place and from what is seen of it, which say the same."""
    assert observation[0, 0, 0] == 10 * world.place
    return 1


def fly(world, observation):
    return "fly"


@pytest.fixture
def seen():
    gymnasium.register("Seen-v0", entry_point=Seen)
    yield lambda **options: Gymnasium(env="Seen-v0", actions={"back": 0, "on": 1}, **options)
    del gymnasium.registry["Seen-v0"]


def test_an_observation_that_is_an_image_is_shown(seen):
    world = seen().make()
    (first,) = world.start(seen().prompt(2))
    assert first.images[0].size == (5, 4) and first.images[0].getpixel((0, 0)) == (20, 20, 20)
    (after,) = world.step("back").messages
    assert after.images[0].getpixel((4, 3)) == (10, 10, 10)


def test_an_image_that_there_is_not_is_refused_before_a_model_is_loaded(seen, corridor):
    with pytest.raises(
        UserError, match="task.game.image=view: the observation of Seen-v0 has no such key; it has none"
    ):
        seen(image="view").check()
    with pytest.raises(UserError, match="task.game.env=Seen-v0 cannot be made: TypeError: .*render_mode"):
        seen(image="render").check()
    with pytest.raises(UserError, match="task.game.env=Seen-v0 cannot begin a game: RuntimeError: out of order"):
        seen(kwargs={"broken": True}).check()
    with pytest.raises(SettingsError, match="task.game.expert=nowhere:f"):
        seen(expert="nowhere:f").check()
    seen(kwargs={"broken": True}, isolated={}).check()  # it is not tried in this process
    seen(expert=f"{__name__}:go_on").check()
    corridor.check()


def test_an_expert_of_one_s_own_demonstrates(seen):
    game = seen(expert=f"{__name__}:go_on")
    assert [game.demonstration(game.prompt(seed)) for seed in (1, 2)] == [["on", "on"], ["on"]]
    short = seen(expert=f"{__name__}:go_on", limits={"max_turns": 1})
    assert short.demonstration(short.prompt(1)) == ["on"]
    rewards, errors, last = play(game, game.prompt(1), game.demonstration(game.prompt(1)))
    assert rewards == [0.0, 1.0] and errors == [None, None] and last.facts["success"] == 1.0
    with pytest.raises(UserError, match="returned fly, which is not one of back, on"):
        seen(expert=f"{__name__}:fly").demonstration(game.prompt(1))
    with pytest.raises(ValueError, match="task.game.expert is not set"):
        seen().demonstration(game.prompt(1))


@pytest.mark.parametrize("level", ["BabyAI-GoToRedBallGrey-v0", "BabyAI-PickupLoc-v0"])
def test_babyai_s_expert_solves_its_levels_in_words(level):
    pytest.importorskip("minigrid")
    game = BabyAIGame(env=level)
    for seed in (3, 4):
        prompt = game.prompt(seed)
        world = game.make()
        (first,) = world.start(prompt)
        assert first.text and first.images[0].size == (56, 56)
        replies = [world.step(word) for word in game.demonstration(prompt)]
        assert replies[-1].end and replies[-1].facts["success"] == 1.0 and replies[-1].reward > 0
        again = game.make()
        assert again.start(prompt)[0].images[0].tobytes() == first.images[0].tobytes()
