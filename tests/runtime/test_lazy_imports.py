"""What a job does not import, and that whoever needs it later finds it as it always was."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# A second or more: scikit-learn and what it brings, and the compiler of torch.
UNUSED = {"sklearn", "scipy.stats", "scipy.optimize", "pandas", "torch._dynamo"}
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


def in_process(code, *words):
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("recipe", "overrides", "absent"),
    [
        ("image_digits_base", [*SMALL, LORA], {"sklearn", "torch._dynamo"}),
        ("visual_qa_digits_warm_start", SMALL, UNUSED | {"peft", "diffusers"}),
        pytest.param("image_digits_base", SMALL, UNUSED | {"peft"}, marks=pytest.mark.slow),
        pytest.param("image_digits_perceptron_base", SMALL[:1], PERCEPTRON, marks=pytest.mark.slow),
    ],
)
def test_a_training_step_does_without(recipe, overrides, absent):
    """To the end of a step, its update and an evaluation."""
    words = ["train", recipe, "--dry-run", "threads=1", *overrides]
    found = set(json.loads(in_process(RUN, json.dumps(words))))
    assert absent & found == set()
    assert ("peft" in found) == (LORA in overrides)


def test_the_compiler_knows_what_it_was_told_before_it_was_imported():
    code = """if True:
        from mmrl.runtime.lazy_imports import defer_imports
        defer_imports()
        import sys, torch

        @torch.compiler.disable
        def apart(x): return x.sin()

        @torch.compiler.disable(recursive=False)
        def also(x): return x.cos()

        @torch.compiler.allow_in_graph
        def whole(x): return x.neg()

        x = torch.ones(3)
        weight = torch.nn.Parameter(x.clone())
        optimizer = torch.optim.SGD([weight], lr=0.5)
        weight.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert weight.tolist() == [0.5] * 3 and weight.grad is None
        assert torch.equal(apart(x), x.sin()) and torch.equal(also(x), x.cos())
        assert "torch._dynamo" not in sys.modules

        seen = []

        def recording(graph, inputs):
            seen.extend(str(node.target) for node in graph.graph.nodes)
            return graph

        compiled = torch.compile(lambda x: apart(x.exp()) + also(x).tan(), backend=recording)
        assert torch.allclose(compiled(x), x.exp().sin() + x.cos().tan())
        assert {"exp", "tan"} <= set(seen) and not {"sin", "cos"} & set(seen), seen
        assert torch._dynamo is sys.modules["torch._dynamo"] and hasattr(torch._dynamo, "explain")
        assert torch.equal(torch.compile(lambda x: whole(x), backend=recording)(x), -x)
        assert "neg" not in seen and any("whole" in target for target in seen), seen
        print("fine")
    """
    assert in_process(code) == "fine"


def test_libraries_get_their_own_when_they_use_it():
    code = """if True:
        from mmrl.runtime.lazy_imports import Deferred, defer_imports
        defer_imports()
        import sys, torch
        from transformers.generation import candidate_generator
        from transformers.distributed.utils import is_dtensor
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        import transformers.masking_utils as masks

        assert not is_dtensor(torch.ones(2))
        for name in ("sklearn", "torch._dynamo", "torch.distributed.tensor"):
            assert name not in sys.modules, name
        found = [list(part) for part in candidate_generator.roc_curve([0, 1, 1], [0.1, 0.4, 0.3])]
        from sklearn.metrics import roc_curve
        assert not isinstance(roc_curve, Deferred)
        assert found == [list(part) for part in roc_curve([0, 1, 1], [0.1, 0.4, 0.3])]
        with masks.TransformGetItemToIndex():  # a mask that is looked up by an index of a batched function
            table = torch.arange(3)
            assert torch.vmap(lambda i: table[i])(torch.tensor([2, 0])).tolist() == [2, 0]
        from torch.distributed.tensor import DTensor
        assert issubclass(DTensor, torch.Tensor) and not is_dtensor(torch.ones(2))
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
