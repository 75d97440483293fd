"""Faults of what a package ships: simulators, and words that a language half knows."""

from __future__ import annotations

WORDS, WORDY = "tasks/visual_qa/data/words.py", ("tasks/test_words.py",)
SCENE, OGBENCH = "sims/ogbench.py", ("sims/test_ogbench.py",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("rows: what failed plays on", "sims/vector/rows.py", "self._environments[row], out.errors[i] = None, error",
     "out.errors[i] = error", ("sims/test_rows.py",)),
    ("rows: errors by row, not by place", "sims/vector/rows.py", "out.errors[i] = None, error",
     "out.errors[row - 1] = None, error", ("sims/test_rows.py",)),
    ("ogbench: left and right are exchanged", SCENE, "('left', 'right')", "('right', 'left')", OGBENCH),
    ("ogbench: open and close are exchanged", SCENE, "[0] != 0\n", "[0] == 0\n", OGBENCH),
    ("ogbench: locked drawers are played", SCENE, '{"drawer": 0, "window": 1}', '{"window": 1}', OGBENCH),
    ("ogbench: locks are exchanged", SCENE, '{"drawer": 0, "window": 1}', '{"drawer": 1, "window": 0}', OGBENCH),
    ("ogbench: any world will do", SCENE, 'self.info["privileged/target_task"] == task and not', "not", OGBENCH),
    ("ogbench: the mark is where the cube is", SCENE, "privileged/target_block_pos", "privileged/block_0_pos", OGBENCH),
    ("ogbench: the mark is shown in every task", SCENE, 'if self.info["privileged/target_task"] == "cube":\n',
     'if self.info["privileged/target_task"]:\n', OGBENCH),
    ("ogbench: experts move the caller's random numbers", SCENE, "np.random.set_state(before)", "pass", OGBENCH),
    ("ogbench: an expert serves two episodes", SCENE, "self.steps, self._expert = 0, None", "self.steps = 0", OGBENCH),
    ("ogbench: steps go on over episodes", SCENE, "self.steps, self._expert = 0, None", "self._expert = None", OGBENCH),
    ("ogbench: success does not end an episode", SCENE, "if success or out.truncated[i, c]:", "if out.truncated[i, c]:",
     OGBENCH),
    ("ogbench: images are not drawn again", SCENE, "if self._shows_images:\n            model",
     "if self._shows_images and not playing.steps:\n            model", OGBENCH),
    ("ogbench: a shaped reward is for going away", SCENE, "(before - after), after",
     "(after - before), after", OGBENCH),
    ("ogbench: a shaped reward counts from the start", SCENE, "(before - after), after",
     "(before - after), before", OGBENCH),
    ("ogbench: where a thing belongs counts for nothing", SCENE, "distance(hand, position) + distance(position, goal)",
     "distance(hand, position)", OGBENCH),
    ("ogbench: sides are named where they shall not", SCENE, "if not sides:", "if sides is None:", OGBENCH),
    ("ogbench: sides are never named", SCENE, "if not sides:", "if sides or not sides:", OGBENCH),
    ("ogbench: sides of a button are not named", SCENE, 'if task == "button":\n            return f"press',
     'if task == "button" and sides:\n            return f"press', OGBENCH),
    ("ogbench: sides are not an option", SCENE, 'reward == "shaped", sides', 'reward == "shaped", True', OGBENCH),
    ("words: yes and no are exchanged", WORDS, '("yes", "no")', '("no", "yes")', WORDY),
    ("words: what is trained on has one answer", WORDS, "i // 2 % 2 == SPLITS", "i % 2 == SPLITS", WORDY),
    ("words: splits are exchanged for one another", WORDS, "== SPLITS.index(split)", "!= SPLITS.index(split)", WORDY),
    ("words: both splits are the same", WORDS, "SPLITS.index(split)]", "0]", WORDY),
    ("words: teapots are eaten", WORDS, '("teapot",)', '("pot",)', WORDY),
    ("words: mushrooms are animals", WORDS, '"mushroom", ', "", WORDY),
    ("words: an becomes a", WORDS, "name[0] in 'aeiou'", "name[0] in 'eiou'", WORDY),
    ("words: a thing is asked about twice", WORDS, "things[1::2][:size]", "things[::2][:size]", WORDY),
    ("words: kinds are exchanged", WORDS, '("animal", animals[:size]', '("food", animals[:size]', WORDY),
]
# fmt: on
