"""Faults of what a run keeps by rank, and of its time limits. Each entry has a name, a file, a string that occurs once
in the file, its replacement, and the tests that should then fail."""

from __future__ import annotations

C, L, R = "mmrl/checkpoints/store.py", "mmrl/runtime/time_limits.py", "mmrl/collection/replay_buffer.py"
PAGE = "checkpoints/test_every_state_by_layout.py::"
SLICES = (f"{PAGE}test_averages_of_slices_are_put_together",)
TWO = (f"{PAGE}test_two_ranks_go_on_to_the_bit",)
BY_RANK = (f"{PAGE}test_what_is_of_each_rank_is_not_divided_anew",)
VIDEOS, BOARD = ("tasks/test_clip_files.py",), ("report/test_trackers.py",)
CONTAINER = ("engine/test_heartbeat.py::test_a_rank_in_a_container_of_the_same_name_is_not_taken_for_one_that_ended",)
SINCE = ("engine/test_heartbeat.py::test_a_rank_that_came_up_since_the_last_look_is_looked_for",)
BEFORE = ("engine/test_heartbeat.py::test_a_rank_that_is_killed_before_ranks_meet_is_named_at_once",)
BEFORE += ("engine/test_heartbeat.py::test_a_rank_that_does_not_come_up_is_named",)
MESSAGES, TEMPLATE = ("engine/test_messages.py",), "mmrl/runtime/template_limits.py"
LIMITS, TEMPLATES = ("runtime/test_time_limits.py",), ("policies/test_templates.py",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("surroundings: every rank has the rewards' state of the first", C, 'return {"rewards": {}} | rank["own"]', 'return rank["own"] | {"rewards": torch.load(path / "rank-0.pt")["own"]["rewards"]}', TWO),
    ("surroundings: rewards' states are divided over fewer ranks", C, "if any(states) and len(states) != engine.world:", "if False:", BY_RANK),
    ("surroundings: averages of another layout stay as they are", C, '"averages": {name: engine.reshard(states, before) for name, states in averages.items()},', '"averages": rank["own"]["averages"],', SLICES),
    ("surroundings: updates are counted by each rank", "mmrl/trainer.py", "torch.tensor([1.0 / self.engine.world])", "torch.ones(1)", TWO),
    ("surroundings: replays are kept in the order of ranks", R, "in sorted(rows, key=itemgetter(0)):", "in rows:", ("joints/test_replays.py",)),
    ("surroundings: no time limit", L, "    timer.start()\n", "", LIMITS),
    ("surroundings: a limit strikes later", L, "                ended.set()\n            timer.cancel()", "                pass", LIMITS),
    ("surroundings: a block may catch its time limit", L, "class OutOfTime(BaseException):", "class OutOfTime(Exception):", LIMITS),
    ("surroundings: a template has no time limit", TEMPLATE, "with limit, limit_memory_growth(", "with limit_memory_growth(", TEMPLATES),
    ("surroundings: a template takes what memory there is", TEMPLATE, "with limit, limit_memory_growth(TEMPLATE_BYTES, too_large):", "with limit:", TEMPLATES),
    ("surroundings: a template's text may be as long as it likes", TEMPLATE, "if len(text) > LONGEST:", "if False:", TEMPLATES),
    ("surroundings: a limit of memory stays", TEMPLATE, "            if not _within:\n                resource.setrlimit(resource.RLIMIT_AS, (before, hard))\n", "", TEMPLATES),
    ("surroundings: a limit of memory ends with the first of two threads", TEMPLATE, "            if not _within:\n                resource", "            if True:\n                resource", TEMPLATES),
    ("surroundings: ranks announce themselves when they have met", "mmrl/job.py", "            self._start_heartbeat(parts)\n        else", "        else", BEFORE),
    ("surroundings: a rank that never comes up is waited for", "mmrl/engine/heartbeat.py", "and waited >= self.start:", "and False:", BEFORE),
    ("surroundings: what an earlier start left is a rank", "mmrl/engine/heartbeat.py", "return state.written < self._began + MIN_START_S", "return False", BEFORE),
    ("surroundings: a rank that ends before the meeting has no name", "mmrl/engine/heartbeat.py", "        ended = self._ended_rank()\n        if ended", "        ended = None\n        if ended", BEFORE),
    ("surroundings: messages repeat what is there twice", "mmrl/engine/packing.py", "message = encode(value, repeats=True)", "message = encode(value)", MESSAGES),
    ("surroundings: a message may have any size", "mmrl/engine/packing.py", "if not 0 <= size <= MAX_MESSAGE:", "if False:", MESSAGES),
    ("surroundings: parts are numbered before what is in them", "mmrl/children/frames.py", "            self.written[id(value)] = len(self.written)", "            self.written[id(value)] = max(0, len(self.written) - 1)", MESSAGES),
    ("surroundings: animations of any length", "tasks/data/video_files.py", "check_length(name, num_frames, *opened.size, max_pixels=MAX_ANIMATION_PIXELS)", "pass", VIDEOS),
    ("surroundings: the frames of a video are not its length", "tasks/data/video_files.py", "if num_frames * width * height > max_pixels:", "if width * height > max_pixels:", VIDEOS),
    ("surroundings: a container of the same name is this host", "mmrl/engine/heartbeat.py",
     "return (state.host, state.namespace) == (self.state.host, self.state.namespace)",
     "return state.host == self.state.host", CONTAINER),
    ("surroundings: a rank that has just begun is not looked for", "mmrl/engine/heartbeat.py", "            self._read()  # at the start", "            pass  # at the start", SINCE),
    ("surroundings: TensorBoard's thread prints its error", "mmrl/report/trackers.py", "        threading.excepthook = self._failed\n", "", BOARD),
    ("surroundings: no thread prints its error", "mmrl/report/trackers.py", "if not (writes and isinstance(failed.exc_value, OSError)):", "if False:", BOARD),
]
# fmt: on
