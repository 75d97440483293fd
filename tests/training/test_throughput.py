"""Rates of a step, by hand, and as a run logs them."""

import json

import pytest

from mmrl.training.throughput import Workload, rates
from tests.whole_runs.parts import make, release

pytestmark = pytest.mark.usefixtures("alone")
SECONDS = {"rollout": 4.0, "update": 2.0, "step": 8.0}


def test_rates_are_of_one_rank_in_the_seconds_of_each_phase():
    work = {"tokens": 1600.0, "rollout_flops": 8e12, "update_flops": 24e12}
    assert rates(work, SECONDS, ranks=2, epochs=3, peak=10e12) == pytest.approx(
        {
            "throughput/tokens_per_second": 100,
            "throughput/rollout_tokens_per_second": 200,
            "throughput/update_tokens_per_second": 1200,  # three epochs
            "throughput/rollout_tflops_per_second": 1,
            "throughput/update_tflops_per_second": 6,
            "throughput/tflops_per_second": 2,
            "throughput/rollout_mfu": 0.1,
            "throughput/update_mfu": 0.6,
            "throughput/mfu": 0.2,
        }
    )


def test_what_others_generate_has_no_operations_and_an_unknown_peak_no_mfu():
    found = rates({"rollout_flops": 0.0, "update_flops": 24e12}, SECONDS, ranks=1, epochs=1, peak=None)
    assert found == {"throughput/update_tflops_per_second": 12, "throughput/tflops_per_second": 3}


def test_idle_is_what_no_rank_works():
    times = {f"time/{phase}": seconds for phase, seconds in SECONDS.items()}
    busy = [{"rollout": 4.0, "update": 2.0}, {"rollout": 1.0, "update": 1.0}]
    assert Workload(None, 1, None).rates([{}, {}], busy, times) == {"throughput/idle_share": 0.5}


def test_a_run_logs_the_tokens_and_operations_of_its_rollouts(tmp_path):
    trainer = make(tmp_path, "steps=1", "evaluation.before=false", "evaluation.every=0", "algorithm.epochs=2")
    seen, collect = [], trainer.collector.next
    trainer.collector.next = lambda *given: seen.append(collect(*given)) or seen[-1]
    trainer.loop()
    (line,) = [row for row in map(json.loads, (tmp_path / "metrics.jsonl").open()) if "time/step" in row]
    rows = seen[0].inputs
    tokens = sum(len(row.prompt) + len(row.response) for row in rows)
    assert line["throughput/tokens_per_second"] * line["time/step"] == pytest.approx(tokens)
    drawn = sum(len(row.response) for row in rows)
    assert line["throughput/rollout_response_tokens_per_second"] * line["time/rollout"] == pytest.approx(drawn)
    assert line["throughput/update_tokens_per_second"] * line["time/update"] == pytest.approx(2 * tokens)
    assert 0 <= line["throughput/idle_share"] < 1 and "throughput/mfu" not in line
    known = trainer.policy.runner.flops.meter
    config = trainer.policy.runner.core.config.get_text_config()
    pair = 4 * config.num_hidden_layers * config.num_attention_heads * config.hidden_size // config.num_attention_heads
    assert known.known.pair.forward == pair
    weights = sum(p.numel() for n, p in trainer.policy.runner.flops.decoder.layers.named_parameters() if p.dim() == 2)
    assert known.known.token.forward == 2 * weights and known.known.token.backward == 4 * weights
    assert line["throughput/update_tflops_per_second"] * line["time/update"] > 6e-12 * weights * drawn * 2
    release(trainer)
