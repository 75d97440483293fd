"""Faults of what is not scored or only fills up a batch, and of joints beside. Entries are as in `planted_spans.py`."""

from __future__ import annotations

B, P, C = "mmrl/protocols/batch.py", "mmrl/training/preparation.py", "mmrl/rewards/parsing/choices.py"
BATCH, PARTS = ("protocols/test_batch.py",), ("joints/test_part_checks.py",)
LETTERS, SOURCES = ("rewards/test_answers_by_hand.py",), ("tasks/test_sources.py",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("scored: fillers are", B, "scored & ~self.rollouts.filler", "scored", BATCH),
    ("scored: what is unknown is", B, "self.local(self.combined_rewards()).isfinite()", "self.local(self.combined_rewards()).isfinite() | True", BATCH),
    ("scored: rows of the first rank", B, "scored = self.local(self.combined_rewards()).isfinite()", "scored = self.combined_rewards().isfinite()[: len(self.rollouts)]", BATCH),
    ("scored: shapers change all", P, "advantages = shaped.where(shapeable, advantages)", "advantages = shaped", PARTS),
    ("scored: shapers change the others", P, "advantages = shaped.where(shapeable, advantages)", "advantages = advantages.where(shapeable, shaped)", PARTS),
    ("scored: a token baseline of all", "mmrl/terms/shapers/entropy.py", "used = rollouts.mask & batch.scored()[:, None]", "used = rollouts.mask", ("joints/test_terms.py",)),
    ("scored: a key that a prompt lacks", "mmrl/build.py", "range(0, len(task.train), math.ceil(len(task.train) / CHECKED_PROMPTS))", "range(1)", ("joints/test_columns.py",)),
    ("scored: a gate of turns is closed elsewhere", "mmrl/terms/shapers/turns.py", "gates = frozenset() if self.gate is None else frozenset({self.gate})", "gates = frozenset()", ("joints/test_components.py",)),
    ("scored: one score has no spread", "mmrl/prompts/curriculum.py", "if len(scored) > 1:  # fewer", "if scored:  # fewer", ("prompts/test_curriculum.py",)),
    ("scored: groups without a signal move", "mmrl/algorithms/baselines/quantile.py", "zero_if_equal: ClassVar[bool] = True", "zero_if_equal: ClassVar[bool] = False", ("joints/test_advantages.py",)),
    ("told: a clip of values", "mmrl/algorithms/ppo.py", "if self.value_clip is not None and has_ratios_of_one(self, config):", "if False:", ("joints/test_one_update.py",)),
    ("told: a clip of values that can bind", "mmrl/algorithms/ppo.py", "if self.value_clip is not None and has_ratios_of_one(self, config):", "if self.value_clip is not None:", ("joints/test_one_update.py",)),
    ("letters: reasons name answers", C, "            if position >= end:\n", "            if position > len(text):\n", LETTERS),
    ("letters: a reason before the first letter ends", C, "_REASON.search(text, position)", "_REASON.search(text, begin)", LETTERS),
    ("letters: only because", C, "|rather\\s+than|instead\\s+of|not)", ")", LETTERS),
    ("nesting: a tool call", "mmrl/rewards/credit.py", "except (ValueError, RecursionError):", "except ValueError:", LETTERS),
    ("nesting: boxes", "mmrl/rewards/parsing/boxes.py", "    except (ValueError, RecursionError):\n        try:", "    except ValueError:\n        try:", LETTERS),
    ("nesting: an action of a game", "sims/turns/openenv.py", "except (ValueError, RecursionError) as error:", "except ValueError as error:", ("sims/test_other_environments.py",)),
    ("inversion: splits of a dataset", "tasks/visual_qa/settings.py", "split(self.train_split, False)", "split(self.train_split, True)", SOURCES),
    ("inversion: held-out splits", "tasks/visual_qa/settings.py", "split(self.eval_split, True)", "split(self.eval_split, False)", SOURCES),
    ("extras: the extra of tests", "mmrl/runtime/installation.py", "if extra not in (None, DEVELOPMENT_EXTRA)", "if extra is not None", ("runtime/test_installation.py",)),
    ("extras: no command", "mmrl/settings/section.py", "if isinstance(error, ModuleNotFoundError) and (extra :=", "if False and (extra :=", ("settings/test_settings.py",)),
    ("printed: a worker's last line", "mmrl/workers/pool.py", "print(printable(f\"rollout worker {handle.number}: {last}; restarting it\"), flush=True)", "print(f\"rollout worker {handle.number}: {last}; restarting it\", flush=True)", ("workers/test_pool.py",)),
    ("printed: lines of check", "mmrl/cli/check.py", "printable(f\"{word:<8}  {part:<{width}}  {text}\")", "f\"{word:<8}  {part:<{width}}  {text}\"", ("checks/test_check.py",)),
]
