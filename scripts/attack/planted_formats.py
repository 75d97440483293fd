"""Faults of rows that do not fit, of data that changed, and of configurations of other systems. Each entry has a name,
a file, a string that occurs once in the file, its replacement, and the tests that should then fail."""

from __future__ import annotations

F, ENCODER, ROWS = "mmrl/preflight/fitting.py", "mmrl/policies/vlm/responses/fitting.py", "tasks/visual_qa/data/rows.py"
FITTING, DATA, RECORDED = ("checks/test_fitting.py",), "mmrl/checkpoints/data.py", ("checkpoints/test_data.py",)
FILES, RULES, PARTS = "mmrl/cli/external/files.py", "mmrl/cli/external/rules.py", "mmrl/cli/external/part_rules.py"
RECIPES, THEIRS = "mmrl/cli/external/recipes.py", ("cli/test_external_recipes.py",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("fitting: the first rows alone are tried", F, "source.fits(position * num_rows // num_tried)", "source.fits(num_checked - 1)", FITTING),
    ("fitting: bad rows are not counted", F, "bad += not source.fits", "bad *= not source.fits", FITTING),
    ("fitting: the share of the sample is enough", F, "wilson(num_bad, num_checked, STANDARD_ERRORS)[0]", "num_bad / num_checked", FITTING),
    ("fitting: a job tries none", "mmrl/job.py", "                try_sources(self.task, config.evaluation.prompts)\n",
     "                pass\n", FITTING),
    ("fitting: sources get no check", "mmrl/build.py", "source.fit(policy.prompt_problem)", "pass", FITTING),
    ("fitting: placeholders are tokens", ENCODER, "if token in text:", "if False:", FITTING),
    ("fitting: a checked prompt is encoded again", ENCODER, "None if cached is None or cached[0]() is not prompt else cached[1]",
     "None", FITTING),
    ("fitting: it is handed out for ever", ENCODER, "self._cached.pop(id(prompt), None)\n", "self._cached.get(id(prompt))\n", FITTING),
    ("fitting: without the instruction", ROWS, "            prompt = self.change(prompt)\n", "            pass\n", FITTING),
    ("fitting: a row is tried every time", ROWS, "            self._fitting.add(row)\n", "            pass\n", FITTING),
    ("data: a changed file goes on", "mmrl/checkpoints/starting.py", "        check_data(folder, config)\n", "        pass\n", FITTING),
    ("data: nothing is recorded", "mmrl/job.py", "                record(folder, plain(self.config))\n", "                pass\n", FITTING),
    ("data: a copy is another file", DATA, '(now := fingerprint(path))["sha256"] == old["sha256"]', '(now := fingerprint(path)) == old', RECORDED),
    ("data: the size alone counts", DATA, "digest.update(file.read(BLOCK))", "file.read(BLOCK)", RECORDED),
    ("data: the end of a large file is not read", DATA, "i * (size - BLOCK) // (BLOCKS - 1)", "i * size // (2 * BLOCKS)", RECORDED),
    ("data: a folder is known by its time", DATA, "return not path.is_dir() and ", "return path.is_dir() or ", RECORDED),
    ("data: accepting is refusing", DATA, '["changed_data"] == "accept"', '["changed_data"] == "never"', RECORDED),
    ("convert: a variable stays", FILES, "_arguments(_fill_variables(_fill_variables(line, variables), variables))", "_arguments(line)", THEIRS),
    ("convert: the second value of a flag is lost", FILES, "[*(previous if isinstance(previous, list) else [previous]), value]", "previous", THEIRS),
    ("convert: a script is a value of the flag before", FILES, 'word.startswith("-") or (word.endswith(".py")',
     'word.startswith("-") or (word.endswith(".pyx")', THEIRS),
    ("convert: references stay", FILES, "return _resolved(settings[match[1]], settings, depth - 1)", "return value", THEIRS),
    ("convert: the file under a script is not read", FILES, "({} if base is None else read_settings(base)) | settings", "settings", THEIRS),
    ("convert: minibatches are prompts", RULES, "max(1, int(prompts) // int(value))", "max(1, int(value))", THEIRS),
    ("convert: processes do not count", RULES, "int(value) * num_processes * batches_per_generation", "int(value) * batches_per_generation", THEIRS),
    ("convert: GPUs do not count", RULES, "int(value) * num_batches * int(num_gpus or 1)", "int(value) * num_batches", THEIRS),
    ("convert: both bounds are the lower", RULES, '"algorithm.surrogate.high": float(high or value)', '"algorithm.surrogate.high": float(low)', THEIRS),
    ("convert: a divergence that is off is added", RULES, 'if get_setting(source, "disable_kl", default=False) or not value:',
     "if not value:", THEIRS),
    ("convert: rewards of robots are not scaled back", RULES, '"low": float(low) / scale', '"low": float(low)', THEIRS),
    ("convert: accuracy is the format", PARTS, 'spec["name"] != "think_answer"', "True", THEIRS),
    ("convert: weights of rewards are lost", PARTS, '({} if float(weight) == 1.0 else {"weight": float(weight)})', "{}", THEIRS),
    ("convert: full sharding is stage 2", PARTS, '3 if value else 2', "2", THEIRS),
    ("convert: the window has no end", PARTS, '"last": int(bounds[1])', '"last": None', THEIRS),
    ("convert: rounds of a robot are one", PARTS, 'groups_at_once * int(get_setting(source, "rollout_epoch", default=1))', "groups_at_once", THEIRS),
    ("convert: their defaults are ours", RECIPES, "complete = settings | defaults", "complete = settings", THEIRS),
    ("convert: parts that do not exist are read", RECIPES, "if key.startswith(prefix)), None)", "if False), None)", THEIRS),
    ("convert: the shortest ending counts", RECIPES, "for start in range(len(parts))]", "for start in reversed(range(len(parts)))]", THEIRS),
]
