"""Faults of model cards, sample tables, and commands that install. Each entry has a name, a file, a
string that occurs once in the file, its replacement, and the tests that should then fail."""

from __future__ import annotations

CARD, INTERVALS, RUN = "mmrl/report/model_card.py", "mmrl/report/intervals.py", "mmrl/report/run.py"
HTML, DOCTOR = "mmrl/report/html/", "mmrl/doctor/installed.py"
CARDS, MEANS, TABLES = ("report/test_model_card.py",), ("report/test_intervals.py",), ("report/test_run.py",)
SEEN, DOCTORS = ("report/test_browser.py",), ("doctor/test_doctor.py",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("card: intervals of one standard error", INTERVALS, "half = float(t.ppf(0.975, n - 1))", "half = float(t.ppf(0.95, n - 1))", MEANS),
    ("card: the error of n zeros and ones is the biased one", INTERVALS, "(mean * (1 - mean) / (n - 1))", "(mean * (1 - mean) / n)", MEANS),
    ("card: no accuracy is a share of right answers", INTERVALS, "        return wilson(round(mean * n), n)", "        pass", MEANS),
    ("card: as many degrees of freedom as values", INTERVALS, "t.ppf(0.975, n - 1)", "t.ppf(0.975, n)", MEANS),
    ("card: LoRA of diffusers is not known", CARD, '"pytorch_lora_weights.safetensors"', '"lora_weights.safetensors"', CARDS),
    ("card: the base is the run's own weights", CARD, 'base=str(run.key("model.path"))', "base=name", CARDS),
    ("card: the interval of the last evaluation twice", CARD, "{_value(first, name)} | {_value(last, name)}", "{_value(last, name)} | {_value(last, name)}", CARDS),
    ("card: of the evaluations the last alone", CARD, "        rows += [f\"| `{' '", "        rows = [f\"| `{' '", CARDS),
    ("card: episodes are not listed", CARD, 'for decoding, tasks in measured.get("found", {}).items():', "for decoding, tasks in {}.items():", CARDS),
    ("card: the lower end twice", CARD, "({rates['low']:.3f} .. {rates['high']:.3f})", "({rates['low']:.3f} .. {rates['low']:.3f})", CARDS),
    ("card: lines are counted from 0", CARD, "splitlines(), start=1)", "splitlines())", CARDS),
    ("tables: an episode without a prompt of its own", RUN, "row_spans = [1] * len(prompts) if names else", "row_spans =", TABLES),
    ("tables: success at the end colours the tile", RUN, '"success" if episode.success else "failure"', '"success" if episode.success_at_end else "failure"', TABLES),
    ("tables: every table has tiles", RUN, "'<table class=\"tiles\">' if names else", "'<table class=\"tiles\">' if samples else", TABLES),
    ("report: outcomes of episodes are lost", HTML + "galleries.py", '{"success", "failure", "lost"}', "set[str]()", SEEN),
    ("report: a row of figures has a hole", HTML + "templates/report.css", ":nth-last-child(-n+4)", ":nth-last-child(-n+3)", SEEN),
    ("doctor: a wheel is told of scripts", DOCTOR, 'COMMANDS[extra] if is_checkout() else f"in', 'COMMANDS[extra] if True else f"in', DOCTORS),
    ("doctor: constraints of a wheel", DOCTOR, '"--constraint constraints.txt " if is_checkout() else ""', '"--constraint constraints.txt "', DOCTORS),
    ("doctor: vLLM for GPUs on a CPU", DOCTOR, 'return "vllm" if shutil.which("nvidia-smi") is None', 'return "vllm" if shutil.which("nvidia-smi") is not None', DOCTORS),
    ("methods: the number of environments is an option", "mmrl/cli/methods.py", "parameters.values())[1:]", "parameters.values())[0:]", ("cli/test_reference.py",)),
    ("methods: simulators are not listed", "mmrl/cli/methods.py", 'explains its task.options" for name in SIMULATORS]', 'explains its task.options" for name in ()]', ("cli/test_reference.py",)),
    ("methods: a user's class names a test of mmrl", "mmrl/cli/methods.py", '*(["test"] if is_shipped else [])', '"test"', ("cli/test_reference.py",)),
    ("starting: any run may be overwritten", "mmrl/checkpoints/starting.py", 'row is None or row["step"] > 0 for row', 'row is None or row["step"] > 9 for row', ("whole_runs/test_run_dir.py",)),
    ("starting: damaged lines are no training", "mmrl/checkpoints/starting.py", 'row is None or row["step"] > 0 for row', 'row is not None and row["step"] > 0 for row', ("whole_runs/test_run_dir.py",)),
    ("starting: no mistake can be mended", "mmrl/checkpoints/starting.py", "    if not has_trained(folder):", "    if False:", ("whole_runs/test_run_dir.py",)),
    ("recipe: micro-batches of GPUs hold more than was planned", "configs/vlm/visual_qa_geometry3k.yaml", "micro_tokens: 12288", "micro_tokens: 24576", ("doctor/test_gpu_memory.py",)),
]
