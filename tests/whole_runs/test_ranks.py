"""One batch gives one gradient and one trained model, however it is divided over ranks and micro-batches."""

import json

import pytest
import torch
from safetensors.torch import load_file

from mmrl.core.reduce import MODES
from tests.whole_runs import workers
from tests.whole_runs.parts import call, distance, final, metrics, model_folder, timeless


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks")
    call(workers.one_rank, path, log=path / "one.log")
    call(workers.two_ranks, path, log=path / "two.log", ranks=2, timeout=300)
    return path


@pytest.fixture(scope="module")
def further(folder):
    call(workers.further_stages, folder, log=folder / "further.log", ranks=2, timeout=300)
    call(workers.splits, folder, log=folder / "four.log", ranks=4)
    return folder


def split_makes_no_difference(folder, ranks, mode):
    differences = json.loads((folder / f"splits-{ranks}.json").read_text())
    for size in workers.MICRO:
        difference = differences[f"{mode}/{size}"]
        assert difference["norm"] > 1e-2
        assert difference["loss"] < 1e-6
        assert difference["gradient"] < 1e-6 * max(1.0, difference["norm"])  # the largest difference of one element


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_loss_and_gradient_do_not_depend_on_the_split(folder, ranks, mode):
    split_makes_no_difference(folder, ranks, mode)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_loss_and_gradient_do_not_depend_on_the_split_over_four(further, mode):
    split_makes_no_difference(further, 4, mode)


def trains_as_one(folder, stage):
    one, two = folder / "one-0", folder / f"two-{stage}"
    assert distance(final(one), final(two)) < 1e-5
    shown = ("loss", "grad_norm", "entropy", "accuracy", "advantages/reward_mean")
    steps = [[r for r in timeless(metrics(path)) if "loss" in r] for path in (one, two)]
    for a, b in zip(*steps, strict=True):
        assert {k: a[k] for k in shown} == pytest.approx({k: b[k] for k in shown}, rel=1e-4, abs=1e-6)


def test_zero_3_on_two_ranks_trains_as_one_process_does(folder):
    trains_as_one(folder, 3)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_other_stages_on_two_ranks_train_as_one_process_does(further, stage):
    trains_as_one(further, stage)


def test_the_runs_compared_did_train(folder):
    before = load_file(f"{model_folder()}/model.safetensors")
    assert distance(before, final(folder / "one-0")) > 1e-3
    assert all(v.dtype == torch.float32 for v in final(folder / "two-3").values())


@pytest.mark.parametrize("rank", [0, 1])
def test_under_zero_3_a_rank_has_all_weights_while_it_generates(folder, rank):
    """Nothing is gathered then, and responses and training are those of ranks that generate in step."""
    told = json.loads((folder / f"generated-{rank}.json").read_text())
    assert told["whole"]["fetched"] == 0 < told["in step"]["fetched"]
    assert told["whole"]["responses"] == told["in step"]["responses"] == told["alone"]["responses"]
    for name in ("in step", "alone"):
        assert distance(final(folder / "generated whole"), final(folder / f"generated {name}")) < 1e-5


def test_a_rank_without_images_does_not_hang_under_zero_3(folder):
    assert [r["step"] for r in metrics(folder / "blind")] == [0, 1, 2, 2]  # the first and the last are evaluations


def skips_the_step(folder, stage, dtype):
    kind = f"{stage}-{dtype}"
    found = json.loads((folder / f"bad-{kind}.json").read_text())
    assert found == {"same": [False, True, False], "updates": 2, "bad_steps": 0}
    skipped = [r["updates_skipped"] for r in metrics(folder / f"bad-{kind}") if "loss" in r]
    assert skipped == [0, 1, 0]
    rows = [json.loads(line) for line in (folder / f"bad-{kind}" / "bad-step-2-rank1.jsonl").read_text().splitlines()]
    assert len(rows) == 8 and all(row.keys() == {"prompt", "response", "rewards"} for row in rows)


@pytest.mark.parametrize(("stage", "dtype"), workers.BAD)
def test_a_loss_that_is_not_finite_on_one_rank_skips_the_step_on_all(folder, stage, dtype):
    skips_the_step(folder, stage, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "dtype"), workers.FURTHER_BAD)
def test_it_does_so_under_further_stages(further, stage, dtype):
    skips_the_step(further, stage, dtype)
