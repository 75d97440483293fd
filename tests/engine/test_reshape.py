"""A run goes on with another number of ranks, and under another ZeRO stage."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mmrl.checkpoints.store import dealt, redealt
from mmrl.engine import Engine, reshape
from mmrl.engine.settings import AdamW, EngineSettings, ParameterGroup
from mmrl.errors import UserError
from tests.whole_runs.parts import TINY, call, command, distance, final, metrics, start, wait

OPTIONS = ["checkpoint.every=2", "optim.weight_decay=0.5", "optim.lr=1e-2", "optim.ema=0.9"]


def go(folder, ranks, *settings):
    log = folder.with_suffix(".log")
    processes = start(command, "train", str(TINY), f"run_dir={folder}", *OPTIONS, *settings, log=log, ranks=ranks)
    assert wait(processes, log) == [0] * ranks, log.read_text()[-3000:]
    return log.read_text()


SGD = [("optim={type: sgd, lr: 1, momentum: 0.5}",), ("optim={type: sgd, lr: 1}",)]


@pytest.mark.parametrize("optimizer", [(), *(pytest.param(sgd, marks=pytest.mark.slow) for sgd in SGD)])
@pytest.mark.slow
def test_two_ranks_then_one_then_two_and_all_zero_stages(tmp_path, optimizer):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    go(whole, 1, "steps=8", *optimizer)
    go(parts, 2, "steps=2", "engine.zero_stage=2", *optimizer)
    said = go(parts, 1, "steps=4", "engine.zero_stage=3", *optimizer)
    assert "engine.zero_stage changes from 2 to 3" in said
    said = go(parts, 2, "steps=6", "engine.zero_stage=0", *optimizer)
    assert len(re.findall("resumed from", said)) == 2
    go(parts, 1, "steps=8", "engine.zero_stage=1", *optimizer)
    assert distance(final(whole), final(parts)) < 1e-5  # averages of weights, after eight steps that each moved them
    norms = [[(r["step"], r["grad_norm"]) for r in metrics(run) if "loss" in r] for run in (whole, parts)]
    assert [step for step, _ in norms[1]] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [norm for _, norm in norms[0]] == pytest.approx([norm for _, norm in norms[1]], rel=1e-3)


# --- parameter groups, and weights in bfloat16: two layers without a run around them ---

# Moments that count, a group with a rate of its own, and decay of matrices only: all that can be mixed up is unlike.
OPTIM = AdamW(lr=0.02, weight_decay=0.3, betas=(0.5, 0.9), groups={"critic": ParameterGroup(lr=0.05, weight_decay=0.1)})


class Net(nn.Module):
    """Its group stands before what belongs to no group. Two matrices of one size; nothing can be shared evenly."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.critic, self.norm, self.body = nn.Linear(5, 3), nn.LayerNorm(5), nn.Linear(3, 5)
        self.register_buffer("passes", torch.zeros(1))

    def forward(self, x):
        self.passes += 1
        return self.critic(self.norm(self.body(x)).tanh())


def trained(folder, stage, first, last, before=None, dtype=torch.float32):
    """An engine under a stage whose steps are `first` to `last`, from the checkpoint that another one left there.
    before: its ZeRO stage, and its ranks."""
    settings, kind = EngineSettings(zero_stage=stage), str(dtype).removeprefix("torch.")
    net = Net().to(dtype)
    engine = Engine(net, OPTIM, settings, total_steps=8, dtype=kind)
    if before is not None:
        engine.load(folder / str(first), *before)
    assert engine.updates == first
    for step in range(first, last):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step))
        share = x[engine.rank :: engine.world].to(dtype)
        engine.backward((engine(share) - share.sin()).float().square().sum() / 8)
        engine.step()
    assert net.passes == last  # buffers go on too
    engine.save(folder / str(last), torch.save)
    return engine


def weights(engine):
    """After the last step, of an engine that is not needed any more."""
    found = {name: value.float() for name, value in engine.state().items() if name != "passes"}
    engine.release()
    return found


def unlike(one, other):
    return max(float((one[name] - other[name]).abs().max()) for name in one)


CHANGES = [(before, now) for before in range(4) for now in range(4) if before != now]


@pytest.mark.parametrize(("before", "now"), CHANGES)
@pytest.mark.quick("0-3", "3-2", "2-0")
def test_parameter_groups_go_on_under_another_stage(alone, tmp_path, before, now):
    whole, begun = weights(trained(tmp_path / "whole", 0, 0, 4)), Net().state_dict()
    half = weights(trained(tmp_path, before, 0, 2))
    parts = weights(trained(tmp_path, now, 2, 4, (before, 1)))
    assert unlike(whole, begun) > 0.05 and unlike(whole, half) > 0.02
    assert unlike(whole, parts) < 1e-6


@pytest.mark.parametrize(("before", "now"), [(2, 0), (3, 0), (0, 1), (0, 3)])
@pytest.mark.quick("0-1", "3-0")
def test_weights_in_bfloat16_go_on_under_stage_0_and_from_it(alone, tmp_path, before, now):
    """DeepSpeed keeps fp32 weights beside them there too, and would step from those of the start."""
    whole = weights(trained(tmp_path / "whole", before, 0, 5, dtype=torch.bfloat16))
    half = weights(trained(tmp_path, before, 0, 4, dtype=torch.bfloat16))
    parts = weights(trained(tmp_path, now, 4, 5, (before, 1), dtype=torch.bfloat16))
    begun = Net().bfloat16().float().state_dict()
    assert unlike(whole, begun) > 0.1 and unlike(half, whole) > 0.01
    assert unlike(whole, parts) < 0.005  # the last place of a number in bfloat16


def on_a_rank(folder, *section):
    engine = trained(folder, *section)
    state = engine.state()
    if engine.rank == 0:
        torch.save(state, folder / "weights.pt")
    engine.close()


@pytest.mark.slow
def test_other_ranks_get_their_slices_of_parameters_that_can_not_be_shared_evenly(alone, tmp_path):
    whole = weights(trained(tmp_path / "whole", 0, 0, 6))
    sections = [(2, 3), (1, 0), (2, 2), (1, 3), (2, 1), (2, 3)]  # ranks and stages of a step each
    before = None
    for step, (ranks, stage) in enumerate(sections):
        call(on_a_rank, tmp_path, stage, step, step + 1, before, log=tmp_path / f"{step}.log", ranks=ranks)
        before = (stage, ranks)
    assert unlike(whole, torch.load(tmp_path / "weights.pt")) < 1e-6


def test_slices_that_are_padded_are_read_without_their_padding():
    """Parameters of 3 and 5 numbers on two ranks: slices of 2 and 3, of which the second rank's end in padding."""
    first, second = [10, 11, 20, 21, 22], [12, -1, 23, 24, -1]

    def state(numbers):
        flat = torch.tensor(numbers, dtype=torch.float32)
        moments = {"state": {0: {"exp_avg": flat / 10, "step": torch.tensor(4.0)}}}
        return {"fp32_flat_groups": [flat], "optimizer_state_dict": moments}

    shapes = [{"a": torch.Size([3]), "b": torch.Size([5, 1])}]
    pieces, states = reshape.sharded_weights([state(first), state(second)], shapes, ("exp_avg",))
    whole = {
        name: [torch.cat([piece[key] for piece in listed]) for key in ("fp32", "exp_avg")]
        for name, listed in pieces.items()
    }
    assert [values.tolist() for values in whole["a"]] == [[10, 11, 12], pytest.approx([1.0, 1.1, 1.2])]
    assert [values.tolist() for values in whole["b"]] == [
        [20, 21, 22, 23, 24],
        pytest.approx([2.0, 2.1, 2.2, 2.3, 2.4]),
    ]
    assert float(states[0]["step"]) == 4


def test_files_are_those_of_the_ranks_in_their_names():
    names = [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(12)]
    assert sorted(map(Path, sorted(names)), key=reshape.rank_of) == list(map(Path, names))  # 10 comes after 9
    assert reshape.rank_of(Path("mp_rank_00_model_states.pt")) == 0


def test_bfloat16_weights_under_stage_0_go_on_from_their_fp32_copies():
    """1 + 2^-12 is 1 in bfloat16."""
    fine, moment = torch.tensor([[1 + 2**-12, 3.0]]), torch.tensor([[0.5, 0.25]])
    optimizer = {"fp32_groups": [[fine]], "optimizer_state_dict": {"state": {0: {"exp_avg": moment}}}}
    model = {"module": {"a": fine.bfloat16()}, "optimizer": optimizer}
    pieces, _ = reshape.unsharded(model, ["a"], ("exp_avg",))
    assert {key: values.tolist() for key, values in pieces["a"][0].items()} == {
        "fp32": [1 + 2**-12, 3.0],
        "exp_avg": [0.5, 0.25],
    }


# --- rollouts in the making ---


def pool(*positions):
    """Groups of two drafts, as `Pool.state` has them; a draft says where it belongs."""
    drafts = [{"response": f"{position}{which}"} for position in positions for which in "ab"]
    numbers = {"prompts": [p + 1 for p in positions], "versions": [p * 10 for p in positions]}
    return {"positions": list(positions), **numbers, "drafts": drafts}


def test_rollouts_in_the_making_are_dealt_out_by_hand():
    pools = [pool(4, 0), pool(1), pool()]
    assert dealt(pools, 0, 1) == pool(0, 1, 4)
    assert dealt(pools, 0, 2) == pool(0, 4) and dealt(pools, 1, 2) == pool(1)
    assert dealt([pool(7), pool(3)], 2, 4) == pool()
    assert dealt([{}, {}], 0, 1) == {}


def test_what_a_source_keeps_of_its_rank_does_not_go_on_with_other_ranks(tmp_path):
    pending = [{"rounds": {}, "extras": [{}, {"kept": rank}]} for rank in (0, 1)]
    here = SimpleNamespace(rank=1, world=2)
    assert redealt(pending, here, tmp_path) == pending[1]
    says = r"^rollout.extras.1 has a state for each rank, and .* was written by 2 ranks, not 1; resume with 2 ranks$"
    with pytest.raises(UserError, match=says):
        redealt(pending, SimpleNamespace(rank=0, world=1), tmp_path)
    empty = [{"rounds": pool(rank), "extras": [{}]} for rank in (4, 1)]
    found = redealt(empty, SimpleNamespace(rank=0, world=1), tmp_path)
    assert found == {"rounds": pool(1, 4), "extras": [{}]}
