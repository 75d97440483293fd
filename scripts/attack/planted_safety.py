"""Faults of children, time limits, ports and readers of responses. Each entry has a name, a file, a string that occurs
once in the file, its replacement, and the tests that should then fail."""

from __future__ import annotations

P, L, H, W = (
    "mmrl/children/processes.py",
    "mmrl/children/listener.py",
    "mmrl/rewards/services/http.py",
    "mmrl/engine/launcher.py",
)
T, Z, G, N = "sims/turns/tools.py", "sims/turns/images.py", "mmrl/runtime/timed_calls.py", "mmrl/engine/interruption.py"
R, E, D, Q = (
    "mmrl/report/run.py",
    "sims/turns/processes.py",
    "sims/turns/timed.py",
    "mmrl/rewards/parsing/quantities.py",
)
J, X, Y = "mmrl/job.py", "mmrl/runtime/user_code.py", "mmrl/runtime/watchdog.py"
TR = "mmrl/trainer.py"
COUNT, STATE = ("checkpoints/test_counters.py",), ("runtime/test_settings_restored.py",)
HEART = ("engine/test_heartbeat.py::test_a_rank_that_does_not_come_up_is_named",)
IDLE = ("checkpoints/test_counters.py::test_steps_without_a_signal_in_a_row_are_counted_on",)
TOLD = ("runtime/test_watchdog.py::test_an_end_that_python_does_not_notice_is_told",)
SILENT = ("runtime/test_watchdog.py::test_a_run_that_a_c_library_ends_with_0_is_not_silent",)
HANGS = ("runtime/test_watchdog.py::test_a_run_that_hangs_ends_in_one_line_that_names_the_key",)
MADE = ("sims/test_environments.py::test_a_first_environment_that_cannot_be_constructed_ends_the_run",)
MADE += ("sims/test_environments.py::test_a_later_one_loses_its_rollout",)
EXITS, WATCH = ("runtime/test_exits.py",), ("runtime/test_watchdog.py",)
STARTED, DOOR, SERVER = ("children/test_processes.py",), ("children/test_listener.py",), ("rewards/test_http.py",)
TOOLS, GROWTH, OWN = ("sims/test_tools.py",), ("faults/test_growth.py",), ("rewards/test_guarded.py",)
APART, SIGNALS, PORTS = ("sims/test_environments.py",), ("engine/test_interruption.py",), ("engine/test_ports.py",)
RUNS, LINES = ("report/test_run.py",), ("test_errors.py",)
WARM = ("whole_runs/test_run_dir.py::test_a_signal_that_stops_a_warm_start_stops_its_job",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("safety: a command outlives who runs it", P, "    if parent is not None:\n        end_with_forker()", "    if parent is not None:\n        pass", STARTED),
    ("safety: a command that was left behind goes on", P, "if os.getppid() != int(parent):", "if False:", STARTED),
    ("safety: SIGUSR1 is not handed on", P, "HANDED_ON = (signal.SIGTERM, signal.SIGUSR1)", "HANDED_ON = (signal.SIGTERM,)", STARTED),
    ("safety: kill -9 counts as a stop in order", P, "if signum in (*HANDED_ON, signal.SIGINT) else 0", "if signum in (*HANDED_ON, signal.SIGINT, 9) else 0", STARTED),
    ("safety: a stopped warm start is a failed one", J, "if signum := stopped_by(", "if signum := 0 * stopped_by(", WARM),
    ("safety: a signal that comes again ends at once", N, "if number == signal.SIGINT or self.signum not in SCHEDULER:", "if True:", SIGNALS),
    ("safety: os._exit ends the training", N, "self._exits.__enter__()", "pass", APART),
    ("safety: a copy can not exit", X, "if os.getpid() == _refusing[0]:", "if _refusing[0]:", APART),
    ("safety: posix._exit ends the training", X, "os._exit = posix._exit = _exit", "os._exit = _exit", EXITS),
    ("safety: an exit while a job is built is success", J, "parts.enter_context(exits_refused())", "pass", EXITS),
    ("safety: sys.exit(0) of user code is success", "mmrl/cli/main.py", "% 256 or 1)", "% 256)", EXITS),
    ("safety: a reward that holds the interpreter hangs the run", G, "ends_process(deadline_s + GRACE_S, message), ", "", WATCH),
    ("safety: a simulator hangs the run", "sims/vector/watch.py", "with ends_process(limit, message):", "if True:", WATCH),
    ("safety: a run that was stopped is ended", Y, "0.0 if is_stopped(process) else elapsed", "elapsed", WATCH),
    ("safety: a call that has ended counts on", Y, "_NUMBER.pack_into(self._table, offset, 0)", "pass", WATCH),
    ("safety: the watchdog outlives its process", Y, " and os.getppid() == process:", ":", WATCH),
    ("safety: a fork has the watchdog of its parent", Y, "if not _WATCHDOGS or _WATCHDOGS[0].owner != os.getpid():", "if not _WATCHDOGS:", WATCH),
    ("safety: times of other calls count", Y, "waited.get(number, -elapsed)", "waited.get(number, max(waited.values(), default=-elapsed))", WATCH),
    ("silence: an end that Python does not notice is not told", Y, "        for text in sudden_ends(table):", "        for text in ():", TOLD),
    ("silence: an end on purpose is told", Y, "os.read(0, 1) == RELEASED):", "False):", TOLD),
    ("silence: forks keep the end from being told", Y, "if not (select.select([0], [], [], 0)[0] and os.read(0, 1) == RELEASED):", "if os.read(0, 1) != RELEASED:", TOLD),
    ("silence: calls with a limit are told too", Y, " if limit == math.inf]", "]", TOLD),
    ("silence: a training is not watched", J, "parts.enter_context(reports_sudden_end(sudden_end_text(self.config.run_dir)))", "pass", SILENT),
    ("silence: an end by a rank's own heartbeat is told twice", "mmrl/engine/heartbeat.py", '            say(f"mmrl: {problem}; the run ends")\n            release()', '            say(f"mmrl: {problem}; the run ends")', HEART),
    ("silence: a simulator's constructor hangs the run", "sims/registry.py", 'with construction_watched(f"simulator {name!r} (task.simulator)", deadline_s, "task.deadline_s", remedy):', "if True:", HANGS),
    ("silence: a reward's constructor hangs the run", "mmrl/rewards/registry.py", "        if not is_custom(name):\n            return factory()\n        limit_name", "        if True:\n            return factory()\n        limit_name", HANGS),
    ("silence: constructors have ten times less time", X, "with ends_process(END_AFTER * limit_s, message):", "with ends_process(limit_s, message):", WATCH),
    ("silence: an environment that is not made is a traceback", D, "            if not self._any_made:", "            if False:", MADE),
    ("silence: a later environment ends the run", D, "        self._any_made = True\n", "", MADE),
    ("counters: steps without a signal begin anew", TR, "        self.zero_gradient_monitor.load(idle)\n", "", IDLE),
    ("counters: unscored steps begin anew", TR, "        self.unscored_monitor.load(unscored)\n", "", IDLE),
    ("counters: equal rewards are counted for idle steps", "mmrl/training/metrics.py", "return [self.steps, self.flat_steps]", "return [self.flat_steps, self.steps]", IDLE),
    ("counters: skipped updates in a row begin anew", TR, 'self.bad_steps, self.accuracies = state["bad_steps"], state["accuracies"]', 'self.accuracies = state["accuracies"]', COUNT),
    ("counters: accuracies so far are forgotten", TR, 'self.bad_steps, self.accuracies = state["bad_steps"], state["accuracies"]', 'self.bad_steps = state["bad_steps"]', COUNT),
    ("counters: the best accuracy is forgotten", TR, 'self.step, self.best = state["step"], state["best"]', 'self.step = state["step"]', COUNT),
    ("counters: steps that are repeated stay in the metrics", TR, "        self.run.drop_after(self.step)", "        pass", COUNT),
    ("process: a default dtype stays", "mmrl/runtime/user_code.py", "torch.set_default_dtype(dtype)", "pass", STATE),
    ("process: a recursion limit stays", "mmrl/runtime/user_code.py", "sys.setrecursionlimit(limit)", "pass", STATE),
    ("process: rewards change settings", G, ", settings_restored(self._name):", ":", STATE),
    ("process: simulators change settings", "sims/vector/simulator.py", ', settings_restored(f"simulator {self.name}"):', ":", STATE),
    ("safety: a number of thousands of digits loses a game", "sims/turns/cards.py", "len(word) < 10 and ", "", ("sims/test_games.py",)),
    ("safety: a marker of thousands of digits is a traceback", "tasks/visual_qa/data/columns.py", r"<image (\d{1,9})>", r"<image (\d+)>", ("tasks/test_sources.py",)),
    ("safety: strangers stay", L, "    late.start()\n", "", DOOR),
    ("safety: any number of strangers", L, "if not self._greetings.acquire(blocking=False):", "if False:", DOOR),
    ("safety: places of strangers are not given back", L, "            self._greetings.release()", "            pass", DOOR),
    ("safety: an error of accept closes the door", L, "                if self._closed:\n", "                if True:\n", DOOR),
    ("safety: a request has no end", G, "thread.call(lambda _: function(), None, limit_s)", "thread.call(lambda _: function(), None, 60.0)", SERVER),
    ("safety: a request to vLLM has no end", "mmrl/generation/vllm/client.py", "lambda: self._send(method, path, body), self.timeout)", "lambda: self._send(method, path, body), 60.0)", ("generation/test_folders.py",)),
    ("safety: close is of the next conversation", E, '            if request[0] == "close":\n', '            if request[0] == "cloze":\n', APART),
    ("safety: a close that hangs has the deadline of a step", E, "limit = min(CLOSE_S, self._processes.deadline_s)", "limit = self._processes.deadline_s", APART),
    ("safety: one that hung is asked again", D, "            self._environment = None\n            raise", "            raise", APART),
    ("safety: forks of rewards stay", G, "os.register_at_fork(after_in_child=_watch_parent)", "", OWN),
    ("safety: a string is a score", "mmrl/rewards/types.py", "if isinstance(value, str | bytes | bytearray):", "if False:", OWN),
    ("safety: what can not be hashed loses the rollout", T, "except (SyntaxError, ValueError, TypeError, MemoryError", "except (SyntaxError, ValueError, MemoryError", TOOLS),
    ("safety: not (3) is a call", T, "if not name or iskeyword(name):", "if not name:", TOOLS),
    ("safety: halves of characters reach the policy", T, 'value.encode(errors="replace").decode()', "value", TOOLS),
    ("safety: the first bracket of a call", T, 'opening = text.rfind("(")', 'opening = text.find("(")', TOOLS),
    ("safety: any box of that size", Z, "index += taken <= index", "index += 0", TOOLS),
    ("safety: a box smaller than a pixel is looked for", Z, "part = _part(whole, box)  # first", "part = whole  # first", TOOLS),
    ("safety: groups of digits without a bound", Q, r"(?:,\d{3}){1,134}+(?!\d)", r"(?:,\d{3})++(?!\d)", GROWTH),
    ("safety: pairs of digits without a bound", Q, r"(?:,\d\d(?=,)){1,9}+", r"(?:,\d\d(?=,))++", GROWTH),
    ("safety: escapes reach a terminal", "mmrl/runtime/progress.py", "self.console.print(printable(text), soft_wrap=True)", "self.console.print(text, soft_wrap=True)", LINES),
    ("safety: escapes stay in errors", "mmrl/errors.py", r'return printable(f"{line}{where}"', r'return (f"{line}{where}"', LINES),
    ("safety: a port for one process", W, 'if os.environ["MASTER_PORT"] == ANY_PORT:  # one', 'if False:  # one', PORTS),
    ("safety: a store at all addresses", W, "socket.create_server((host, 0), family=family)", 'socket.create_server(("0.0.0.0", 0), family=family)', PORTS),
    ("safety: a full disk is a traceback", R, "            with writing(self.folder):\n                os.fsync", "            with suppress():\n                os.fsync", RUNS),
    ("safety: samples that can not be written are a traceback", R, "        with writing(self.folder):\n            write_samples", "        with suppress():\n            write_samples", RUNS),
    ("safety: an ending that can not be recorded is an error", R, '                self.line(f"how the run ended is not recorded: {error}")', "                raise", RUNS),
]
# fmt: on
