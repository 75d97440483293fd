"""When engines are said to compute with other weights: by what they have, and by how far their answers are."""

import math

import pytest
import torch

from mmrl.generation.weight_sync.checksums import PACKED, Checksum, Report, checksum
from mmrl.policies.vlm.proof import ChecksumComparison, Gap, GapLimit

SENT = {name: checksum(torch.full((3,), float(i))) for i, name in enumerate(("a", "b", "c", "d", "e"))}
LORA = {"x.lora_A.weight": Checksum(5, 2), "x.lora_B.weight": Checksum(6, 2)}
OTHER = Checksum(1, 3)


def said(report, sent=SENT, adapter=None, comparison=None):
    return (comparison or ChecksumComparison()).compare(sent, adapter or {}, [report])[0]


def test_tensors_that_are_right_are_counted():
    packed = SENT | {"b": Checksum(SENT["b"].value, 3, PACKED)}
    problem, counts = ChecksumComparison().compare(SENT, LORA, [Report(packed | LORA)])
    assert problem is None
    assert counts == {f"generation/tensors_{name}": n for name, n in (("held", 6), ("packed", 1), ("unused", 0))}


def test_every_engine_is_looked_at():
    assert "1 of the 5 tensors in it are not as they were sent: c;" in (
        ChecksumComparison().compare(SENT, {}, [Report(SENT), Report(SENT | {"c": OTHER})])[0] or ""
    )


def test_the_first_few_are_named():
    assert "4 of the 5 tensors in it are not as they were sent: a, b, c and 1 more;" in said(
        Report(SENT | dict.fromkeys("abcd", OTHER))
    )


def test_a_lora_that_is_not_there():
    assert "its LoRA lacks x.lora_B.weight;" in said(
        Report(SENT | {"x.lora_A.weight": LORA["x.lora_A.weight"]}), adapter=LORA
    )


def test_parameters_that_got_nothing_are_named_with_what_was_not_taken():
    taken = {name: SENT[name] for name in "abcd"}
    assert "its parameters E got no weights, and it did not load e: the names do not match;" in said(
        Report(taken, ["E"])
    )


def test_what_an_engine_has_no_use_for_must_not_be_trained():
    taken, comparison = {name: SENT[name] for name in "abcd"}, ChecksumComparison()
    assert said(Report(taken), comparison=comparison) is None  # a layer that it leaves out, say
    assert said(Report(taken), comparison=comparison) is None
    assert "vLLM, e are trained, but it does not load them;" in said(
        Report(taken), SENT | {"e": OTHER}, comparison=comparison
    )


def test_a_layout_that_changed():
    assert "d have the values that were sent, but another memory layout" in said(Report(SENT, [], ["d"]))


@pytest.mark.parametrize(("dtype", "floor"), [(torch.float32, 1e-3), (torch.bfloat16, 4e-2)])
def test_the_limit_comes_from_the_noise_at_the_start(dtype, floor):
    quiet, noisy = GapLimit(None, dtype), GapLimit(None, dtype)
    assert quiet.problem(Gap(floor / 100), compared=True) is None and quiet.value == floor
    assert noisy.problem(Gap(floor), compared=True) is None and noisy.value == 4 * floor
    assert noisy.problem(Gap(3 * floor), compared=True) is None and noisy.value == 4 * floor  # of the first one alone
    assert quiet.problem(Gap(3 * floor), compared=True) is not None
    assert noisy.problem(Gap(5 * floor), compared=True) is not None


@pytest.mark.parametrize("gap", [0.3, math.nan, math.inf])
def test_an_engine_that_computes_otherwise_from_the_start(gap):
    for dtype in (torch.float32, torch.bfloat16):
        assert "computes something else with them" in GapLimit(None, dtype).problem(Gap(gap), compared=True)


def test_a_limit_that_is_given_is_kept():
    limit = GapLimit(0.5, torch.float32)
    assert limit.problem(Gap(0.4), compared=True) is None and limit.value == 0.5
    assert "0.6 on average, more than rollout.generator.probe_limit=0.5: " in limit.problem(Gap(0.6), compared=True)


@pytest.mark.parametrize(
    ("gap", "compared", "words"),
    [
        (Gap(0.6, images=0.9, text=0.1), True, "so its cache of encoded images is stale"),
        (Gap(0.6, images=0.9, text=0.7), True, "so its key-value cache is stale"),
        (Gap(0.6, images=None, text=0.6), True, "so its key-value cache is stale"),
        (Gap(0.6, images=0.9, text=0.1), False, "weights or caches are stale"),
    ],
)
def test_what_is_stale_is_named(gap, compared, words):
    assert words in GapLimit(0.5, torch.float32).problem(gap, compared=compared)
