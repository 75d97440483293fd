"""An environment that does what the prompt tells it to, good and bad."""

import os
import subprocess
import time

from PIL import Image

from mmrl.rollouts import Message
from mmrl.sims.turns.environment import Environment, Reply
from mmrl.sims.turns.settings import EnvironmentSettings


class Hostile(Environment):
    """Answers twice with a word and then ends with a reward of 1; what a response or the prompt tells it, it does."""

    count, at_close = 0, ""

    def start(self, prompt):
        self.obey(prompt.text)
        return [Message("user", (prompt.text,))]

    def step(self, response):
        self.count += 1
        if found := self.obey(response):
            return found
        if self.count == 3:
            return Reply(end=True, reward=1.0, facts={"pid": os.getpid()})
        return Reply([Message("user", (f"word {self.count}",))], reward=0.5, tool="t", error="e", facts={"n": [1, "a"]})

    def close(self):
        self.obey(self.at_close)

    def obey(self, order):
        if order.startswith("at close: "):
            self.at_close = order.removeprefix("at close: ")
        if order == "raise":
            raise KeyError("no such thing")
        if order == "hang":
            time.sleep(1000)
        if order == "exit":
            os._exit(3)
        if order == "children":
            subprocess.Popen(["sleep", "1000"])
            time.sleep(1000)
        if order == "memory":
            return len(bytearray(64 << 30)) and None
        if order == "nothing":
            return "no reply"
        if order == "silent":
            return Reply([])
        if order == "part":
            return Reply([Message("user", ("see", 7))])
        if order == "empty image":
            return Reply([Message("user", (Image.new("RGB", (0, 5)),))])
        if order == "nan":
            return Reply([Message("user", ("a",))], reward=float("nan"))
        if order == "text":
            return Reply([Message("user", ("a" * 5000,))])
        if order == "flood":
            return Reply([Message("user", ("a" * (1 << 28),))])
        if order == "pixels":
            return Reply([Message("user", (Image.new("RGB", (3000, 3000)),))])
        if order == "images":
            return Reply([Message("user", tuple(Image.new("RGB", (8, 8)) for _ in range(20)))])
        return None


class HostileSettings(EnvironmentSettings):
    type: str = "tests.sims.hostile_turns:HostileSettings"

    def make(self):
        return Hostile()


class Impossible(HostileSettings):
    type: str = "tests.sims.hostile_turns:Impossible"

    def make(self):
        raise ValueError("it needs a licence")
