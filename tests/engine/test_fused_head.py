"""Under ZeRO-3 likelihoods are made by the fused head, from an output matrix of which each rank keeps a part."""

import json

import pytest
import torch

from mmrl.policies.vlm.scorer import FusedHead
from tests.whole_runs import workers
from tests.whole_runs.parts import call, distance

MODELS = ("build_model", "build_untied")  # the output matrix is that of the words, and is not


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("fused")
    call(workers.fused_head, path, log=path / "log", ranks=2, timeout=300)
    return path


@pytest.mark.parametrize("other", ["plain", "layer"])
@pytest.mark.parametrize("build", MODELS)
def test_loss_and_gradient_are_those_of_whole_weights_and_of_the_layer_itself(folder, build, other):
    found = torch.load(folder / "fused.pt")
    fused, expected = found[f"{build} fused"], found[f"{build} {other}"]
    matrix = "model.lm_head.weight" if build == "build_untied" else "model.model.language_model.embed_tokens.weight"
    assert ("model.lm_head.weight" in fused) == (build == "build_untied") and fused[matrix].norm() > 1e-2
    assert distance(fused, expected) < 1e-6 * max(1.0, max(float(g.norm()) for g in expected.values()))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("build", MODELS)
def test_logits_are_made_a_chunk_at_a_time_and_the_matrix_is_not_gathered_for_each(folder, build, rank):
    """Two micro-batches of three chunks, of which rank 1 has none in the second. The matrix is asked for in a forward
    pass and by each of two results in a backward pass; through the layer for each chunk, and again to recompute it."""
    seen = json.loads((folder / f"fused-{rank}.json").read_text())
    fused, layer = seen[f"{build} fused"], seen[f"{build} layer"]
    assert fused["through the layer"] == [] and fused["rows"] == [4] * (12 if rank == 0 else 6)
    assert layer["through the layer"] == [4] * 12 if rank == 0 else [4] * 6 + [0] * 6
    assert (len(fused["passes"]), len(layer["passes"])) == (2 * 3, 2 * 9)
    assert fused["whole"][0] == 0  # what ranks have apart between the passes; DeepSpeed may keep what it uses soon


def test_every_decision_has_its_own_temperature_and_gradient():
    torch.manual_seed(0)
    layer, hidden = torch.nn.Linear(6, 9, bias=False), torch.randn(5, 6, requires_grad=True)
    targets, heat = torch.tensor([0, 8, 3, 3, 5]), torch.tensor([0.5, 1.0, 2.0, 0.7, 1.3])
    logp, entropy, square_sum = FusedHead(layer)(hidden, targets, heat, None, 2)
    expected = (layer(hidden).double() / heat[:, None]).log_softmax(-1)
    torch.testing.assert_close(logp.double(), expected.gather(1, targets[:, None])[:, 0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(entropy.double(), -(expected.exp() * expected).sum(1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(square_sum.double(), expected.exp().square().sum(1), rtol=1e-5, atol=1e-6)
    found = torch.autograd.grad(logp.sum(), (hidden, layer.weight))
    wanted = torch.autograd.grad(expected.gather(1, targets[:, None]).sum(), (hidden, layer.weight))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
