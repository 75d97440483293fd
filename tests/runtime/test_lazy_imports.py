"""What a job does not import, and that whoever needs it later finds it as it always was."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mmrl.runtime.lazy_imports import Deferred, eager, importing

ROOT = Path(__file__).parents[2]
# Half a second or more: scikit-learn and what it brings.
UNUSED = {"sklearn", "scipy.stats", "scipy.optimize", "pandas"}
PERCEPTRON = UNUSED | {"peft", "diffusers", "transformers.models"}
SMALL = ["rollout.prompts=4", "engine.micro_batch=4"]
LORA = "model.lora={rank: 2, alpha: 4}"
RUN = """if True:
    import json, sys
    from mmrl.cli.main import main
    try:
        main(json.loads(sys.argv[1]))
    except SystemExit as ended:
        assert ended.code == 0, ended.code
    print(json.dumps(sorted(sys.modules)))
"""


def in_process(code, *words, **environment):
    """The last line that the code prints, on a machine whose GPU is hidden."""
    around = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment}
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, env=around)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("recipe", "overrides", "absent"),
    [
        ("image_digits_base", [*SMALL, LORA], {"sklearn"}),
        ("visual_qa_digits_warm_start", SMALL, UNUSED | {"peft", "diffusers"}),
        pytest.param("image_digits_base", SMALL, UNUSED | {"peft"}, marks=pytest.mark.slow),
        pytest.param("image_digits_perceptron_base", SMALL[:1], PERCEPTRON, marks=pytest.mark.slow),
    ],
)
@pytest.mark.quick("image_digits_base-overrides0-absent0")
def test_a_training_step_does_without(recipe, overrides, absent):
    """To the end of a step, its update and an evaluation."""
    words = ["train", recipe, "--dry-run", "threads=1", *overrides]
    found = set(json.loads(in_process(RUN, json.dumps(words))))
    assert absent & found == set()
    assert ("peft" in found) == (LORA in overrides)


@pytest.mark.parametrize(
    ("environment", "gpu", "expected"),
    [
        ({}, False, False),
        ({}, True, True),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, True, True),
        ({"CUDA_VISIBLE_DEVICES": "0"}, False, False),
        ({"CUDA_VISIBLE_DEVICES": ""}, True, False),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, True, False),
        ({"MMRL_EAGER_IMPORTS": "1"}, False, True),
        ({"MMRL_EAGER_IMPORTS": "1", "CUDA_VISIBLE_DEVICES": ""}, True, True),
        ({"MMRL_EAGER_IMPORTS": "0"}, False, False),
    ],
)
def test_where_imports_are_eager(tmp_path, environment, gpu, expected):
    driver = tmp_path / "nvidiactl"
    if gpu:
        driver.touch()
    assert eager(environment, (str(tmp_path / "dxg"), str(driver))) is expected


def test_the_switch_leaves_libraries_to_themselves():
    code = """if True:
        import sys
        from mmrl.runtime.lazy_imports import Finder, defer_imports
        defer_imports()
        assert not any(isinstance(finder, Finder) for finder in sys.meta_path)
        from transformers.generation import candidate_generator
        from sklearn.metrics import roc_curve
        assert candidate_generator.roc_curve is roc_curve
        print("fine")
    """
    assert in_process(code, MMRL_EAGER_IMPORTS="1") == "fine"


def test_libraries_get_their_own_when_they_use_it():
    code = """if True:
        from mmrl.runtime.lazy_imports import Deferred, defer_imports
        defer_imports()
        import sys
        from transformers.generation import candidate_generator

        assert "sklearn" not in sys.modules
        found = [list(part) for part in candidate_generator.roc_curve([0, 1, 1], [0.1, 0.4, 0.3])]
        from sklearn.metrics import roc_curve
        assert not isinstance(roc_curve, Deferred)
        assert found == [list(part) for part in roc_curve([0, 1, 1], [0.1, 0.4, 0.3])]
        print("fine")
    """
    assert in_process(code) == "fine"


def test_a_stand_in_is_called_asked_and_derived_from():
    from collections import OrderedDict

    from mmrl.runtime.lazy_imports import Deferred

    stand_in = Deferred("collections", "OrderedDict")
    assert stand_in(a=1) == OrderedDict(a=1) and stand_in.fromkeys("ab") == OrderedDict.fromkeys("ab")
    assert isinstance(OrderedDict(), stand_in) and not isinstance({}, stand_in)
    assert issubclass(OrderedDict, stand_in) and not issubclass(dict, stand_in)

    class Own(stand_in):
        pass

    assert Own.__mro__[1] is OrderedDict
    never = Deferred("a_package_that_is_not_there", "Name")
    assert not isinstance({}, never) and not issubclass(dict, never)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        never()


def test_names_that_are_asked_for_beside_others_are_the_library_s_own():
    from collections import Counter, OrderedDict

    ask = importing({"collections": ("OrderedDict",)})
    alone, both = (ask("collections", {}, {}, names) for names in (("OrderedDict",), ("OrderedDict", "Counter")))
    assert type(alone.OrderedDict) is Deferred
    assert both.OrderedDict is OrderedDict and both.Counter is Counter


def test_nothing_else_is_deferred():
    """What is imported before, and what users import."""
    code = """if True:
        from transformers.generation import candidate_generator
        kept = candidate_generator.roc_curve
        from mmrl.runtime.lazy_imports import Deferred, Finder, defer_imports
        defer_imports()
        defer_imports()
        import importlib, sys
        assert [type(finder) for finder in sys.meta_path].count(Finder) == 1
        assert importlib.import_module("transformers.generation.candidate_generator").roc_curve is kept
        from peft import PeftModel
        from scipy.optimize import linear_sum_assignment
        assert not isinstance(PeftModel, Deferred) and not isinstance(linear_sum_assignment, Deferred)
        print("fine")
    """
    assert in_process(code) == "fine"
