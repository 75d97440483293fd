"""Faults of rewards that run programs. Entries are as in `planted_spans.py`."""

from __future__ import annotations

P = "mmrl/rewards/programs/"
VALUE, HOSTILE = ("rewards/programs/test_programs.py",), ("rewards/programs/test_hostile.py",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("programs: not confined", P + "executors.py", "    if confined:\n", "    if not confined:\n", HOSTILE),
    ("programs: files may be written anywhere", "mmrl/children/confinement.py", "_allow(ruleset, path, _READ & every)", "_allow(ruleset, Path('/'), every)", HOSTILE),
    ("programs: files may be read anywhere", "mmrl/children/confinement.py", "_allow(ruleset, path, _READ & every)", "_allow(ruleset, Path('/'), _READ & every)", HOSTILE),
    ("programs: connections are free", "mmrl/children/confinement.py", "_rights(_CONNECTIONS, version)", "0", HOSTILE),
    ("programs: signals are free", "mmrl/children/confinement.py", "_rights(_SCOPES, version)", "0", HOSTILE),
    ("programs: a worker serves two", P + "runner.py", "worker.fork_server.terminate(worker)", "worker.release()", VALUE),
    ("programs: scratch folders stay", P + "runner.py", "shutil.rmtree(scratch, ignore_errors=True)", "pass", HOSTILE),
    ("programs: a hang is a pass", P + "unit_tests.py", "            return 0.0\n        is_equal", "            return 1.0\n        is_equal", HOSTILE),
    ("programs: the first block counts", P + "responses.py", "parts[-2] if", "parts[1] if", VALUE),
    ("programs: thoughts count", P + "responses.py", "text = without_thoughts(full_response(sample))\n    tagged", "text = full_response(sample)\n    tagged", VALUE),
    ("programs: outputs go along", P + "unit_tests.py", "tests[row][0]: tests[row][1]}", "tests[row][0]: tests[row][1], 'outputs': tests[row][2]}", HOSTILE),
    ("programs: true is one", P + "unit_tests.py", "return value is expected", "return value == expected", VALUE),
    ("programs: whole numbers within a tolerance", P + "unit_tests.py", 'if not {".", "e", "E"} & set(word + expected):', "if False:", VALUE),
    ("programs: lines are words", P + "unit_tests.py", "[line.split() for line in t.strip().splitlines()]", "[t.split()]", VALUE),
    ("programs: one test is enough", P + "unit_tests.py", "float(all(passed))", "float(any(passed))", VALUE),
    ("programs: exit with 0 is a failure", P + "executors.py", "if end.code not in (None, 0):", "if True:", VALUE),
    ("programs: names stay between inputs", P + "executors.py", '{"__name__": name}', "globals()", VALUE),
    ("charts: an empty image is alike", P + "charts.py", "return 0.0\n    scaled", "pass\n    scaled", VALUE),
    ("charts: kinds that the gold lacks count", P + "charts.py", "        if gold_items:\n", "        if True:\n", VALUE),
    ("charts: weights are not shares", P + "charts.py", "weight / sum(weights.values())", "weight", VALUE),
    ("svg: the first element counts", P + "responses.py", "            last = text[start : tag.end()]", "            last = last or text[start : tag.end()]", VALUE),
    ("solids: recall is precision", P + "solids.py", "(cKDTree(dense_mesh).query(gold_points)[0] <= max_distance)", "(cKDTree(dense_gold).query(mesh_points)[0] <= max_distance)", VALUE),
    ("solids: a corner out of range", P + "solids.py", "if triangles.min() < 0 or", "if", VALUE),
]
