"""Faults of what a run keeps by rank, and of its time limits. A name, a file, a string that it holds once, what takes
its place, and the tests that could notice."""

from __future__ import annotations

C, L, R = "mmrl/checkpoints/store.py", "mmrl/runtime/time_limits.py", "mmrl/collection/replay_buffer.py"
PAGE = "checkpoints/test_every_state_by_layout.py::"
TWO = (f"{PAGE}test_two_ranks_go_on_to_the_bit",)
ONE = (f"{PAGE}test_one_rank_goes_on_from_two",)
BY_RANK = (f"{PAGE}test_what_is_of_each_rank_is_not_divided_anew",)
VIDEOS, BOARD = ("tasks/test_clip_files.py",), ("report/test_trackers.py",)
KILLED = ("engine/test_heartbeat.py::test_a_rank_that_is_killed_is_named_at_once",)
LIMITS, TEMPLATES = ("runtime/test_time_limits.py",), ("policies/test_templates.py",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("surroundings: every rank has the rewards' state of the first", C, 'return {"rewards": {}} | rank["own"]', 'return rank["own"] | {"rewards": torch.load(path / "rank-0.pt")["own"]["rewards"]}', TWO),
    ("surroundings: rewards' states are divided over fewer ranks", C, "if any(states) and len(states) != engine.world:", "if False:", BY_RANK),
    ("surroundings: averages of another layout stay as they are", C, '"averages": {name: engine.reshaped(states, before) for name, states in averages.items()},', '"averages": rank["own"]["averages"],', ONE),
    ("surroundings: updates are counted by each rank", "mmrl/trainer.py", "torch.tensor([1.0 / self.engine.world])", "torch.ones(1)", TWO),
    ("surroundings: replays are kept in the order of ranks", R, "in sorted(rows, key=itemgetter(0)):", "in rows:", ("joints/test_replays.py",)),
    ("surroundings: no time limit", L, "    timer.start()\n", "", LIMITS),
    ("surroundings: a limit strikes later", L, "                ended.set()\n            timer.cancel()", "                pass", LIMITS),
    ("surroundings: a block may catch its time limit", L, "class OutOfTime(BaseException):", "class OutOfTime(Exception):", LIMITS),
    ("surroundings: a template has no time limit", "mmrl/policies/vlm/templates.py", "with template_limit(name_of(processor)):", "if True:", TEMPLATES),
    ("surroundings: animations of any length", "tasks/data/video_files.py", "check_length(what, count, *opened.size, most=MAX_ANIMATED)", "pass", VIDEOS),
    ("surroundings: the frames of a video are not its length", "tasks/data/video_files.py", "if count * width * height > most:", "if width * height > most:", VIDEOS),
    ("surroundings: a rank that has just begun is not looked for", "mmrl/engine/heartbeat.py", "            self._read()  # in a run", "            pass  # in a run", KILLED),
    ("surroundings: TensorBoard's thread prints its error", "mmrl/report/trackers.py", "        threading.excepthook = self._failed\n", "", BOARD),
    ("surroundings: no thread prints its error", "mmrl/report/trackers.py", "if not (writes and isinstance(failed.exc_value, OSError)):", "if False:", BOARD),
]
# fmt: on
