"""Environments of OpenEnv and of verifiers as environments of turns. Parts that need a package are skipped where it is
not installed; a class of OpenEnv needs none but its own, for which a stand-in with the same methods is played here."""

import base64
import importlib.util
import io
import json
import socket
import threading
import time

import pytest
from PIL import Image
from pydantic import BaseModel

from mmrl.build import build_task
from mmrl.config import load
from mmrl.errors import UserError
from mmrl.settings import make
from mmrl.sims.turns.chat import message, read_image
from mmrl.sims.turns.dialogue import Dialogue
from mmrl.sims.turns.games import OpenEnv, Verifiers
from mmrl.tasks.visual_games.settings import VisualGamesSettings

HERE = "tests.sims.test_other_environments"
needs_openenv = pytest.mark.skipif(importlib.util.find_spec("openenv") is None, reason="openenv-core is not installed")
needs_verifiers = pytest.mark.skipif(importlib.util.find_spec("verifiers") is None, reason="verifiers is not installed")


def png(red):
    buffer = io.BytesIO()
    Image.new("RGB", (4, 2), (red, 0, 0)).save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


class Guess(BaseModel):
    word: str


class Seen(BaseModel):
    done: bool = False
    reward: float | None = None
    metadata: dict = {}
    hint: str = ""
    tries: int = 0
    shown: str = ""


class Guessing:
    """Guess the seed; each wrong guess costs 0.25."""

    def reset(self, seed=None, episode_id=None):
        self.secret, self.tries = seed, 0
        return Seen(hint="guess", shown=png(10))

    def step(self, action):
        self.tries += 1
        if action.word == str(self.secret):
            return Seen(done=True, reward=1.5, tries=self.tries)
        return Seen(hint="no", reward=-0.25, tries=self.tries, shown=png(20))

    def close(self):
        self.secret = None


def openenv(**options):
    given = {"target": f"{HERE}:Guessing", "action": f"{HERE}:Guess", "type": "openenv", **options}
    return make(OpenEnv, {name: value for name, value in given.items() if value is not None})


def talk(game, seed):
    return Dialogue(game.make(), game.prompt(seed), game.limits)


def test_a_game_of_openenv_by_value():
    game = openenv(action_field="word", text=["hint"], image="shown", instruction="Which number?")
    dialogue = talk(game, 7)
    (first,) = dialogue.prompt.messages
    assert first.text == "guess\nWhich number?" and first.images[0].getpixel((0, 0)) == (10, 0, 0)
    (answer,) = dialogue.answer("3")
    assert answer.text == "no" and answer.images[0].getpixel((0, 0)) == (20, 0, 0)
    assert dialogue.answer(" 7\n") == () and dialogue.end == "environment"
    assert [turn.reward for turn in dialogue.turns] == [-0.25, 1.5]
    assert dialogue.turns[-1].facts == {"success": 1.0}  # 1.25 in all


def test_actions_and_observations_as_json():
    game = openenv(won=1.3)
    dialogue = talk(game, 7)
    assert json.loads(dialogue.prompt.messages[0].text) == {"hint": "guess", "tries": 0, "shown": png(10)}
    for wrong in ("7", "{", '{"number": 7}', "[7]", "[" * 3000 + "]" * 3000):
        (said,) = dialogue.answer(wrong)
        assert said.text.startswith("error: no action (") and dialogue.turns[-1].error
    (said,) = dialogue.answer('{"word": "8"}')
    assert json.loads(said.text)["tries"] == 1
    dialogue.answer('{"word": "7"}')
    assert dialogue.end == "environment" and dialogue.turns[-1].facts == {"success": 0.0}  # 1.25 is not 1.3


def test_images_as_others_write_them():
    assert read_image(f"data:image/png;base64,{png(30)}").getpixel((0, 0)) == (30, 0, 0)
    assert read_image([[[1, 2, 3]] * 4] * 2).size == (4, 2)
    for wrong in ("no", 3, [[[300, 0, 0]]], [[[0]]]):
        with pytest.raises(ValueError, match="not an image"):
            read_image(wrong)
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png(30)}"}}
    found = message({"role": "user", "content": [url, {"type": "text", "text": "there"}]})
    assert (found.role, found.text, len(found.images)) == ("user", "there", 1)
    with pytest.raises(ValueError, match="a part of type 'input_audio'"):
        message({"role": "user", "content": [{"type": "input_audio"}]})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"type": "openenv"}, "set either target or address"),
        ({"type": "openenv", "target": "a:b"}, "set action if target is set"),
        ({"type": "openenv", "target": "a:b", "address": "c", "action": "d:e"}, "set either target or address"),
        ({"type": "verifiers"}, "set either env or target"),
    ],
)
def test_where_an_environment_is_must_be_said_once(options, words):
    with pytest.raises(ValueError, match=words):
        make(VisualGamesSettings, {"type": "visual_games", "game": options})


@pytest.mark.parametrize(
    ("game", "words"),
    [
        (
            "{type: openenv, address: 'http://localhost:1'}",
            "^task: task.game.type=openenv needs .*: pip install openenv",
        ),
        (
            "{type: verifiers, env: gsm8k}",
            "^task: task.game.type=verifiers needs .*: pip install 'verifiers<0.2'",
        ),
        ("{type: openenv, target: 'tests.no:No', action: 'tests.no:No'}", "task.game.target"),
    ],
)
def test_what_is_not_installed_is_one_line_before_a_model_is_loaded(monkeypatch, tmp_path, game, words):
    usual = importlib.util.find_spec
    gone = ("openenv", "verifiers")
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name in gone else usual(name, *more))
    config = load("configs/vlm/visual_games.yaml", [f"run_dir={tmp_path}", f"task.game={game}"])
    with pytest.raises(UserError, match=words) as caught:
        build_task(config)
    assert "\n" not in str(caught.value)


# --- with the packages themselves ---


def real_guessing():
    from openenv.core.env_server import Action, Environment, Observation, State

    class RealGuess(Action):
        word: str

    class RealSeen(Observation):
        hint: str = ""

    class RealGuessing(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **_):
            self.secret = seed
            return RealSeen(hint="guess")

        def step(self, action, timeout_s=None, **_):
            right = action.word == str(self.secret)
            return RealSeen(done=right, reward=1.0 if right else -0.25, hint="" if right else "no")

        @property
        def state(self):
            return State()

    return RealGuessing, RealGuess, RealSeen


@needs_openenv
def test_a_class_of_openenv_itself(monkeypatch):
    made, action, _ = real_guessing()
    monkeypatch.setattr(f"{HERE}.Guessing", made)
    monkeypatch.setattr(f"{HERE}.Guess", action)
    dialogue = talk(openenv(action_field="word", text=["hint"]), 7)
    assert dialogue.prompt.messages[0].text == "guess" and dialogue.answer("3")[0].text == "no"
    dialogue.answer("7")
    assert [turn.reward for turn in dialogue.turns] == [-0.25, 1.0] and dialogue.turns[-1].facts["success"] == 0.0


@needs_openenv
def test_a_server_of_openenv():
    import uvicorn
    from openenv.core.env_server import create_app

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    app = create_app(*real_guessing(), max_concurrent_envs=4)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    game = openenv(
        target=None, action=None, address=f"http://127.0.0.1:{port}", action_field="word", text=["hint"], won=0.5
    )
    both = [talk(game, 7), talk(game, 8)]
    assert [one.prompt.messages[0].text for one in both] == ["guess", "guess"]
    assert [one.answer("7") != () for one in both] == [False, True]  # each has its own secret
    assert both[0].turns[0].reward == 1.0 and both[0].turns[0].facts == {"success": 1.0} and both[1].end is None
    both[1].finish("turns")
    server.should_exit = True
    thread.join(10)


def made_of_verifiers(rows=2):
    """Three turns; the last must repeat the answer, and a tool gives it away."""
    import verifiers as vf
    from datasets import Dataset

    class Repeat(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **_):
            url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png(40)}"}}
            return [{"role": "user", "content": [url, {"type": "text", "text": f"turn {len(state['trajectory'])}"}]}]

    def right(completion, answer, **_):
        return float(completion[-1].content == answer)

    def data(first):
        return Dataset.from_list(
            [
                {"prompt": [{"role": "user", "content": f"row {first + n}"}], "answer": str(first + n)}
                for n in range(rows)
            ]
        )

    rubric = vf.Rubric(funcs=[right], weights=[2.0])
    return Repeat(dataset=data(100), eval_dataset=data(0), rubric=rubric, max_turns=3)


def tools_of_verifiers():
    import verifiers as vf
    from datasets import Dataset

    def double(number: int) -> int:
        """Doubles a number."""
        return 2 * number

    def right(completion, answer, **_):
        return float(completion[-1].content == answer)

    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "Twice 21?"}], "answer": "42"}])
    return vf.ToolEnv(tools=[double], dataset=rows, rubric=vf.Rubric(funcs=[right]), max_turns=4)


@needs_verifiers
def test_an_environment_of_verifiers_by_value():
    game = make(Verifiers, {"type": "verifiers", "target": f"{HERE}:made_of_verifiers", "won": 2.0})
    one, other = talk(game, 1), talk(game, 1_000_001)
    assert one.prompt.messages[0].text == "row 1" and other.prompt.messages[0].text == "row 101"  # held out, trained on
    for number in (1, 2):
        (said,) = one.answer("hm")
        assert said.text == f"turn {number}" and said.images[0].getpixel((0, 0)) == (40, 0, 0)
        other.answer("hm")
    assert one.answer("1") == () and other.answer("1") == ()
    assert [turn.reward for turn in one.turns] == [0.0, 0.0, 2.0] and one.turns[-1].facts["success"] == 1.0
    assert one.turns[-1].facts["metric/right"] == 1.0 and other.turns[-1].reward == 0.0
    left = talk(game, 0)
    left.finish("turns")
    assert left.problem == ""


@needs_verifiers
def test_tools_of_verifiers():
    game = make(Verifiers, {"type": "verifiers", "target": f"{HERE}:tools_of_verifiers"})
    dialogue = talk(game, 0)
    assert dialogue.prompt.tools[0]["function"]["name"] == "double"
    (said,) = dialogue.answer('<tool_call>{"name": "double", "arguments": {"number": 21}}</tool_call>')
    assert (said.role, said.text) == ("tool", "42")
    assert dialogue.answer("42") == () and dialogue.turns[-1].reward == 1.0
