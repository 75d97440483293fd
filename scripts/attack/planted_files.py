"""Faults of files of prompts, of images to edit, pairs of videos, streams, and rewards of other libraries. Each entry
has a name, a file, a string that occurs once in the file, its replacement, and the tests that should then fail."""

from __future__ import annotations

PROMPTS, PROMPT_TESTS = "tasks/data/prompt_files.py", ("tasks/test_prompt_files.py", "tasks/test_image_prompts.py")
EDITS, EDIT_TESTS = "tasks/image_generation/data/sources_to_edit.py", ("tasks/test_own_images_to_edit.py",)
SIGNATURES, SIGNATURE_TESTS = "mmrl/rewards/adapters/signatures.py", ("rewards/test_signatures.py",)
PAIRS, PAIR_TESTS = "tasks/video_generation/pairs.py", ("tasks/test_video_pairs.py",)
STREAMS = "tasks/visual_qa/data/huggingface.py"
STREAM_TESTS = ("tasks/test_row_shapes.py",)

# fmt: off
FAULTS: list[tuple[str, str, str, str, tuple[str, ...]]] = [
    ("files: a text file's prompts have another column", PROMPTS, "{field: line.strip().decode()}", '{"prompt": line.strip().decode()}', PROMPT_TESTS),
    ("files: the prompt is among the other columns", PROMPTS, "for key, value in row.items() if key != field}", "for key, value in row.items()}", PROMPT_TESTS),
    ("files: rows of a saved data set begin with 0", PROMPTS, "TableEntry(start + offset + 1, row)", "TableEntry(start + offset, row)", PROMPT_TESTS),
    ("files: a bad row is not part of the share", PROMPTS, "num_rows += 1\n", "num_rows += 10\n", PROMPT_TESTS),
    ("edits: each has the first image alone", EDITS, "return list(value) if isinstance", "return [value[0]] if isinstance", EDIT_TESTS),
    ("edits: images lie in the working directory", "tasks/image_generation/settings.py", "ImagesToEdit(path.parent, self.image_field)", "ImagesToEdit(Path(), self.image_field)", EDIT_TESTS),
    ("edits: a mask is not looked at", EDITS, "(*images, *_mask(row))", "images", EDIT_TESTS),
    ("edits: the same words are the same prompt", "tasks/image_generation/data/prompts.py", 'return prompt.text, "" if image_field', 'return prompt.text, "" if True or image_field', EDIT_TESTS),
    ("edits: the mask stays a path", EDITS, "metadata[MASK] = self.files.decode(mask)", "pass", EDIT_TESTS),
    ("pairs: a short video is repeated", PAIRS, "len(video.frames) < self.num_frames", "len(video.frames) < 1", PAIR_TESTS),
    ("pairs: colours are rows", PAIRS, '"f h w c -> f c h w"', '"f h w c -> f c w h"', PAIR_TESTS),
    ("streams: all is read", STREAMS, "islice(dataset.decode(False), num_rows)", "dataset.decode(False)", STREAM_TESTS),
    ("streams: of the dataset's keys without streaming", STREAMS, '| {"streaming": True}', '| {"streaming": False}', STREAM_TESTS),
    ("signatures: messages are texts", SIGNATURES, 'has_kwargs, signature == "trl")', 'has_kwargs, signature != "trl")', SIGNATURE_TESTS),
    ("signatures: the gold has one name", SIGNATURES, "{**dict.fromkeys(GOLDS, prompt.answer), **prompt.metadata}", '{"answer": prompt.answer, **prompt.metadata}', SIGNATURE_TESTS),
    ("signatures: the gold hides a column", SIGNATURES, "{**dict.fromkeys(GOLDS, prompt.answer), **prompt.metadata}", "{**prompt.metadata, **dict.fromkeys(GOLDS, prompt.answer)}", SIGNATURE_TESTS),
    ("signatures: EasyR1's accuracy is its score", SIGNATURES, '_number(value, "overall")', '_number(value, "accuracy")', SIGNATURE_TESTS),
    ("signatures: verl gets the question", SIGNATURES, '"solution_str": sample.response,', '"solution_str": sample.prompt.text,', SIGNATURE_TESTS),
    ("check: every base is told of its overlap", "mmrl/cli/check.py", " and not config.task.shows_held_out", "", ("checks/test_bases.py",)),
    ("check: no overlap is told", "mmrl/cli/check.py", "not config.task.shows_held_out", "config.task.shows_held_out", ("checks/test_bases.py",)),
    ("config: a script is a configuration", "mmrl/settings/tree.py", "len(str(key).split()) > 1", "len(str(key).split()) > 1e9", ("test_config.py",)),
    ("files: a missing file is named by its reader alone", "mmrl/build.py", "        if not path.exists():", "        if False:", ("checks/test_neighbours.py",)),
    ("files: LoRA targets that match nothing are told by peft", "mmrl/policies/vlm/loading.py", "        except ValueError as error:  # cut,", "        except KeyError as error:  # cut,", ("checks/test_neighbours.py",)),
]
