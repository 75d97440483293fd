"""Faults of rewards that return spans and of credit by them. Each entry has a name, a file, a string that occurs once
in the file, its replacement, and the tests that should then fail."""

from __future__ import annotations

CREDIT, DOOR = ("joints/test_span_credit.py",), ("rewards/test_spans.py",)
TURNS, SHAPERS = "mmrl/core/turns.py", "mmrl/terms/shapers/spans.py"
MEASURED, SERVICES = "mmrl/measurements/spans.py", "mmrl/rewards/services/"

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("spans: a letter's first tokens are in none", TURNS, "nonempty_end = max(end, begin + 1)", "nonempty_end = end", CREDIT),
    ("spans: a token counts in full in each of its spans", TURNS, "(decision, span, characters / total)",
     "(decision, span, 1.0)", CREDIT),
    ("spans: a token is of the first span alone", TURNS, "range(first, stop)", "range(first, min(stop, first + 1))", CREDIT),
    ("spans: the minimum is a maximum", TURNS, "return (-values / temperature)", "return (values / temperature)", CREDIT),
    ("spans: the strict minimum is everywhere", TURNS, "torch.zeros_like(values).index_copy_",
     "torch.full_like(values, float(values.min())).index_copy_", CREDIT),
    ("spans: what is missing is not shared", TURNS, "/ max(1, len(values))", "/ 1", CREDIT),
    ("spans: the others are all", TURNS, '"leave_one_out" if against == "others"', '"leave_one_out" if against == "other"', CREDIT),
    ("spans: signs follow the advantage", SHAPERS, "(signs * advantages < 0)", "(signs * advantages > 0)", CREDIT),
    ("spans: the outcome is left out", SHAPERS, "self.outcome * advantages + self.weight * credit", "self.weight * credit", CREDIT),
    ("spans: the weight is left out", SHAPERS, "self.weight * credit", "credit", CREDIT),
    ("spans: returns of the minimum without its weights", SHAPERS, "softmin_weighted(values, self.temperature)[None]", "values[None]", CREDIT),
    ("spans: progress forgets the spans' words", SHAPERS, "word_counts(text, PROMPT_WIDTH)", "word_counts('', PROMPT_WIDTH)", CREDIT),
    ("spans: progress learns nothing", SHAPERS, "            network.update(loss)\n", "", CREDIT),
    ("spans: the unscored have credit", SHAPERS, "(batch.rollout_mask & scored)", "batch.rollout_mask", CREDIT),
    ("spans: decisions are counted with the others", MEASURED, "{other_unit}; set of={other_unit}", "something else", CREDIT),
    ("spans: numbers alone pass in silence", MEASURED, "            if scored:\n", "            if not scored:\n", CREDIT),
    ("door: spans may overlap", SERVICES + "spans.py", "if begin < previous_end:", "if begin < 0:", DOOR),
    ("door: spans may end anywhere", SERVICES + "spans.py", "if end > length:", "if False:", DOOR),
    ("door: values may be infinite", SERVICES + "spans.py", "if not math.isfinite(value):", "if False:", DOOR),
    ("door: the sum is the mean", SERVICES + "spans.py", '(len(values) if total == "mean" else 1)', "len(values)", CREDIT),
    ("door: the accuracy's spans take the place of the reward's", SERVICES + "spans.py", "sample.spans.setdefault(name, value)",
     "sample.spans.update({name: value})", DOOR),
    ("door: a server's score is not the total", SERVICES + "http.py", 'Spans(spans["values"], score,', 'Spans(spans["values"], None,', DOOR),
    ("door: a server keeps its spans", SERVICES + "server.py", "if any(value is not None for value in spans):", "if False:", DOOR),
    ("steps: blank ones count", "mmrl/rewards/judges/process.py", " if text[begin:end].strip()]", "]", DOOR),
    ("agreement: wrong ones are dropped in the place of right", "mmrl/terms/masks/rollouts.py", "{\"right\": right_low,", "{\"right\": wrong_high,", CREDIT),
    ("agreement: the unknown are wrong", "mmrl/terms/masks/rollouts.py", "wrong = known & ~right", "wrong = ~right", CREDIT),
    ("sums: one line alone is wrong", "tasks/visual_qa/data/running_sums.py", "(line >= wrong_from)", "(line == wrong_from)", ("tasks/test_running_sums.py",)),
    ("sums: held-out digits are those of training", "tasks/visual_qa/data/running_sums.py", "split_indices(split)", 'split_indices("train")', ("tasks/test_running_sums.py",)),
    ("sums: the first digits of the pool", "tasks/visual_qa/data/running_sums.py", "labels[indices]", "labels[: self.cells]", ("tasks/test_running_sums.py",)),
    ("sums: careless demonstrations are the answer", "tasks/visual_qa/data/running_sums.py", 'answer="\\n".join(map(str, sums))', 'answer="\\n".join(map(str, lines))', ("tasks/test_running_sums.py",)),
    ("sums: lines are checked against the right sum", "tasks/visual_qa/tiny/sums.py", "zip([0, *sums], sums, strict=False)", "zip([0, *(sum(digits[:i]) for i in range(1, 20))], sums, strict=False)", ("tasks/test_running_sums.py",)),
    ("sums: lines beyond the digits are right", "tasks/visual_qa/tiny/sums.py", "if line < len(digits) and before is not None and after == before + digits[line]:", "if line >= len(digits) or before is not None and after == before + digits[line]:", ("tasks/test_running_sums.py",)),
    ("sums: a line that is no number is 0", "tasks/visual_qa/tiny/sums.py", "len(line) <= MOST_DIGITS else None", "len(line) <= MOST_DIGITS else 0", ("tasks/test_running_sums.py",)),
]
