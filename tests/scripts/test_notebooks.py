"""The notebooks of scripts/notebooks run in IPython from the first cell to the last, and what they train improves."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.helpers.command_line import ROOT

FOLDER = ROOT / "scripts" / "notebooks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
RUN = """if True:
    import json, sys
    from IPython.core.interactiveshell import InteractiveShell
    shell = InteractiveShell.instance()
    for cell in json.load(open(sys.argv[1]))["cells"]:
        if cell["cell_type"] == "code":
            shell.run_cell("".join(cell["source"])).raise_error()
"""


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """Returns a function that runs a notebook once, in a folder of its own, and returns the folder."""
    folders = {}

    def execute(name):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            environment = os.environ | {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)}
            command = [sys.executable, "-c", RUN, str(FOLDER / f"{name}.ipynb")]
            done = subprocess.run(command, cwd=folders[name], capture_output=True, text=True, env=environment)
            assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        return folders[name]

    return execute


def rows(folder, run, key):
    lines = (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()
    return [row[key] for row in map(json.loads, lines) if key in row]


def test_there_is_one_for_each_kind_of_policy():
    assert NAMES == ["images", "robots", "visual_questions"]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_in_the_published_format_without_outputs(name):
    tree = json.loads((FOLDER / f"{name}.ipynb").read_text())
    assert (tree["nbformat"], tree["nbformat_minor"]) == (4, 5)
    cells = tree["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells) and cells[0]["source"][0].startswith("# ")
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) >= 3 and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


@pytest.mark.parametrize("name", NAMES)
def test_links_of_a_notebook_lead_to_pages(name):
    links = re.findall(r"\]\(([^)]+)\)", (FOLDER / f"{name}.ipynb").read_text())
    assert links and all((FOLDER / link).is_file() for link in links)


def test_a_model_learns_colours_that_it_was_taught_in_part(executed):
    before, *_, after = rows(executed("visual_questions"), "colours", "evaluation/accuracy")
    assert before < 0.7 and after >= before + 0.2
    assert 0 < max(rows(executed("visual_questions"), "colours", "reward/__main__:one_word")) < 0.1001


@pytest.mark.slow
def test_images_become_brighter(executed):
    brightness = rows(executed("images"), "bright", "reward/brightness")
    assert brightness[0] < 0.6 and brightness[-1] > brightness[0] + 0.2


@pytest.mark.slow
def test_an_environment_of_a_notebook_is_solved_more_often(executed):
    before, *_, after = rows(executed("robots"), "reach", "evaluation/accuracy")
    assert before < 0.4 and after > before + 0.3
