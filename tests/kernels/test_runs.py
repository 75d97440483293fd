"""The small recipes with the compiled kernels and with the torch reference: the same numbers to rounding."""

import pytest

from tests.whole_runs import workers
from tests.whole_runs.parts import IMAGES, TINY, call, distance, final, metrics, train

# Two minibatches, so that half of the updates are off-policy and the ratios are not all 1.
OPTIONS = ["steps=2", "algorithm.minibatches=2", "optim.lr=1e-2"]
RUNS = {
    "visual_qa": (TINY, "algorithm.terms=[{type: kl, coefficient: 0.1}, {type: entropy, coefficient: 0.1}]"),
    "flow": (IMAGES, "algorithm.terms=[{type: kl, coefficient: 0.1, estimator: exact}]"),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", RUNS)
def test_kernels_and_reference_train_alike(tmp_path, name):
    base, terms = RUNS[name]
    rows = {}
    for backend in ("torch", "cpu"):
        folder = tmp_path / backend
        train(folder, *OPTIONS, terms, f"kernels.backend={backend}", base=base)
        rows[backend] = [r for r in metrics(folder) if "loss" in r]
    for one, other in zip(*rows.values(), strict=True):
        assert one["surrogate/ratio_gap_max"] > 1e-3 and abs(one["loss"]) > 1e-4
        same = {k: v for k, v in one.items() if not k.startswith(("time", "throughput", "memory"))}
        assert same == pytest.approx({k: other[k] for k in same}, rel=2e-5, abs=1e-6)
    assert distance(final(tmp_path / "torch"), final(tmp_path / "cpu")) < 2e-5


@pytest.mark.slow
def test_on_two_ranks_too(tmp_path):
    call(workers.kernels_and_reference, tmp_path, log=tmp_path / "log", ranks=2, timeout=200)
    torch_rows, cpu_rows = ([r for r in metrics(tmp_path / name) if "loss" in r] for name in ("torch", "cpu"))
    assert len(torch_rows) == 2
    for one, other in zip(torch_rows, cpu_rows, strict=True):
        assert one["surrogate/ratio_gap_max"] > 1e-3 and abs(one["loss"]) > 1e-4
        shown = ("loss", "grad_norm", "entropy", "surrogate/ratio_gap_max", "advantages/reward_mean")
        assert {k: one[k] for k in shown} == pytest.approx({k: other[k] for k in shown}, rel=2e-5, abs=1e-6)
    assert distance(final(tmp_path / "torch"), final(tmp_path / "cpu")) < 2e-5
