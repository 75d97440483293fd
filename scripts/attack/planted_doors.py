"""Faults of what comes from outside: images as viewers show them, the golds that are tried, spaces of Gymnasium. Each
entry has a name, a file, a string that occurs once in the file, its replacement, and the tests that should then
fail."""

from __future__ import annotations

SHOWN, FILES, GOLDS = "mmrl/runtime/images.py", "tasks/data/image_files.py", "mmrl/preflight/golds.py"
ROWS, BOXES, READERS = "mmrl/preflight/prompts.py", "mmrl/preflight/boxes.py", "mmrl/preflight/readers.py"
SPACES, WORLD, CODEC = "sims/spaces.py", "sims/gymnasium.py", "mmrl/policies/vla/heads/codec.py"
SEEN, CHECKED, MOVED = ("runtime/test_images.py",), ("checks/test_check.py",), ("sims/test_spaces.py",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("doors: images are turned the other way", SHOWN, "6: Image.Transpose.ROTATE_270", "6: Image.Transpose.ROTATE_90", SEEN),
    ("doors: transposed images are turned", SHOWN, "5: Image.Transpose.TRANSPOSE", "5: Image.Transpose.TRANSVERSE", SEEN),
    ("doors: images stay as the sensor saw them", SHOWN, "return shown if turn is None else shown.transpose(turn)",
     "return shown", SEEN),
    ("doors: black stands behind", SHOWN, 'Image.new("RGB", drawn.size, "white")', 'Image.new("RGB", drawn.size)', SEEN),
    ("doors: 16 bits are cut off", SHOWN, "((values + 128) // 257)", "(values.clip(max=255))", SEEN),
    ("doors: 16 bits are rounded down", SHOWN, "(values + 128) // 257", "values // 257", SEEN),
    ("doors: 32 bits are guessed", SHOWN, 'SIXTEEN_BIT = ("I;16",', 'SIXTEEN_BIT = ("I", "I;16",', SEEN),
    ("doors: damaged EXIF ends the row", SHOWN, "except Exception:  # damaged EXIF",
     "except KeyError:  # damaged EXIF", SEEN),
    ("doors: names in file URLs stay quoted", SHOWN, "return unquote(parts.path)", "return parts.path", SEEN),
    ("doors: files of other hosts are opened here", SHOWN, 'if parts.netloc not in ("", "localhost"):',
     "if False:", ("tasks/test_sources.py",)),
    ("doors: base64 in a URL is not unquoted", SHOWN, "text = unquote(data)", "text = data", SEEN),
    ("check: the first form of a gold counts alone", GOLDS, "return max(scored, default=math.nan)",
     "return scored[0] if scored else math.nan", CHECKED),
    ("check: golds of other rows are this row's", GOLDS, "(*golds[row + 1 :], *golds[:row])", "(golds[row],)", CHECKED),
    ("check: silence is another gold", GOLDS, 'responses = ["", *', 'responses = [texts[0][1], *', CHECKED),
    ("check: a form alone is a fault", GOLDS, "if all(len(row.confused_with) == len(row.other_golds) for row in rows):",
     "if False:", CHECKED),
    ("check: rows without a score are passed over", GOLDS,
     "unscored = [row for row in rows if math.isnan(row.gold)]", "unscored = [row for row in rows if row.gold < 0]", CHECKED),
    ("check: components are tried on all rows", GOLDS, "            if not applies(spec, prompt):\n", "            if False:\n", CHECKED),
    ("check: rewards of groups are tried", GOLDS, 'is_custom(spec.name) and scope == "sample"', "is_custom(spec.name)", CHECKED),
    ("check: judges are asked", GOLDS, "if spec.name in GOLD_VERIFIERS or", "if not is_custom(spec.name) or", CHECKED),
    ("check: one's own form is a fault", GOLDS, "if is_custom(spec.name) and values == {0.0}:", "if False:", CHECKED),
    ("check: reasons are those of another reward", GOLDS, 'if text.startswith(f"reward {name} ")', "if name in text", CHECKED),
    ("check: large images are all held", ROWS, "min(num_selected, IMAGE_BYTES // max(1, bytes_per_prompt))", "num_selected", CHECKED),
    ("check: overlap looks at texts alone", ROWS, "digest.update(repr(image.size).encode() + image.tobytes())",
     "digest.update(repr(image.size).encode())", CHECKED),
    ("check: overlap does not look at answers", ROWS, "repr((prompt.text, str(prompt.answer), prompt.system,",
     "repr((prompt.text, prompt.system,", CHECKED),
    ("check: the first rows stand for all", ROWS, "source[index * size // num_selected]", "source[index]", CHECKED),
    ("check: height is not looked at", BOXES, "max(coordinates[0::2]) > width or max(coordinates[1::2]) > height",
     "max(coordinates[0::2]) > width", CHECKED),
    ("check: golds of 1 pixel are shares", BOXES, "if max(coordinates) <= 1 and", "if min(coordinates) <= 1 and", CHECKED),
    ("check: a gold as long as a response fits", READERS, "strict=True) if size >= limit]", "strict=True) if size > limit]", CHECKED),
    ("check: the length to raise to is the shortest", READERS, "{max(sizes) + 1}", "{min(sizes) + 1}", CHECKED),
    ("spaces: several choices share their count", SPACES, "parts = _interval(np.asarray(actions), self.counts.ravel())",
     "parts = _interval(np.asarray(actions), self.counts.max())", MOVED),
    ("spaces: the start of choices is left out", SPACES, "+ self.start).astype(self.dtype)", ").astype(self.dtype)", MOVED),
    ("spaces: channels stay first", SPACES, "images = images.transpose(0, 2, 3, 1)", "images = images", MOVED),
    ("spaces: cameras lie one over the other", SPACES, "return np.concatenate(cameras, 2)", "return np.concatenate(cameras, 1)", MOVED),
    ("spaces: training starts are held-out ones", SPACES, "else (1 << 30) + seed % (1 << 30)", "else seed % (1 << 30)", MOVED),
    ("spaces: seeds are not folded", WORLD, "row_seeds[row] = folded(seed) if self._fold and seed is not None else seed",
     "row_seeds[row] = seed", MOVED),
    ("spaces: success has a default", WORLD, "        if success is None:\n", "        if success == 0:\n", MOVED),
    ("spaces: half-open numbers are stretched", CODEC, "finite = np.isfinite(low) & np.isfinite(high) & (high > low)",
     "finite = np.isfinite(low) & (high > low)", MOVED),
]
