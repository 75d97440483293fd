"""Statistics in the files of LeRobot's processors, written here in its format, without LeRobot."""

import json

import pytest
import torch
from safetensors.torch import load, save_file

from mmrl.errors import UserError
from mmrl.policies.vla.backbones.processor_files import load_processor_files
from mmrl.policies.vla.settings import Actions

FEATURES = {"observation.state": {"type": "STATE", "shape": [2]}, "action": {"type": "ACTION", "shape": [2]}}
MEAN_STD = {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
STATISTICS = {
    "observation.state.mean": [0.5, 1.0],
    "observation.state.std": [2.0, 3.0],
    "action.mean": [0.25, -1.0],
    "action.std": [4.0, 5.0],
}
PREPROCESSOR = "policy_preprocessor_step_1_normalizer_processor.safetensors"
POSTPROCESSOR = "policy_postprocessor_step_0_unnormalizer_processor.safetensors"
OWN_DATA = {
    "action": {"mean": [7.0, 8.0], "std": [9.0, 10.0], "min": [-1.0, -2.0], "max": [3.0, 4.0]},
    "observation.state": {"mean": [11.0, 12.0], "std": [13.0, 14.0], "min": [-5.0, -6.0], "max": [5.0, 6.0]},
}


def write(folder, statistics=None, *, modes=MEAN_STD, features=FEATURES, state_files=True):
    statistics = STATISTICS if statistics is None else statistics
    tensors = {name: torch.tensor(values) for name, values in statistics.items()}
    for processor, file, name in (
        ("policy_preprocessor", PREPROCESSOR, "normalizer_processor"),
        ("policy_postprocessor", POSTPROCESSOR, "unnormalizer_processor"),
    ):
        step = {"registry_name": name, "config": {"eps": 1e-8, "features": features, "norm_map": modes}}
        if state_files:
            step["state_file"] = file
            held = (
                tensors if processor == "policy_preprocessor" else {n: t for n, t in tensors.items() if "action" in n}
            )
            save_file(held, folder / file)
        steps = [{"registry_name": "to_batch_processor", "config": {}}, step]
        (folder / f"{processor}.json").write_text(json.dumps({"name": processor, "steps": steps}))
    (folder / "config.json").write_text("{}")
    return folder


def statistics(files, file=PREPROCESSOR):
    return {name: tensor.tolist() for name, tensor in load(files.contents[file]).items()}


def grouped(group, tree=None):
    return {f"{group}.{name}": values for name, values in (STATISTICS if tree is None else tree).items()}


def actions(**options):
    return Actions(**options)


def test_files_with_lerobots_names_stay_as_they_are(tmp_path):
    files = load_processor_files("P", write(tmp_path), actions())
    assert files.contents == {file.name: file.read_bytes() for file in tmp_path.iterdir()} and len(files.contents) == 5
    assert not files.constants["state"].mask.any() and not files.constants["action"].mask.any()


def test_the_only_group_is_read_under_lerobots_names(tmp_path, caplog):
    caplog.set_level("INFO")
    files = load_processor_files("P", write(tmp_path, grouped("so100.buffer")), actions())
    assert statistics(files) == STATISTICS
    assert statistics(files, POSTPROCESSOR) == {n: v for n, v in STATISTICS.items() if n.startswith("action")}
    assert "the statistics of observation.state are those of so100.buffer.observation.state" in caplog.text
    (tmp_path / "again").mkdir()
    files.write(tmp_path / "again")
    assert load_processor_files("P", tmp_path / "again", actions()).contents == files.contents


@pytest.mark.parametrize("key", ["so100", "so100.buffer"])
def test_one_of_several_groups_is_chosen(tmp_path, key):
    others = grouped("so100-red.buffer", {name: [100.0, 100.0] for name in STATISTICS})
    write(tmp_path, others | grouped("so100.buffer") | {"observation.images.top.mean": [3.0]})
    assert statistics(load_processor_files("P", tmp_path, actions(statistics_key=key))) == STATISTICS | {
        "observation.images.top.mean": [3.0]
    }
    with pytest.raises(
        UserError,
        match=r"model.path=P: policy_preprocessor.json has statistics of several data sets: so100\S*, so100\S*; "
        "choose with action.statistics_key",
    ):
        load_processor_files("P", tmp_path, actions())
    with pytest.raises(
        UserError, match="action.statistics_key=so does not select one entry of observation.state; it has so100"
    ):
        load_processor_files("P", tmp_path, actions(statistics_key="so"))


@pytest.mark.parametrize(
    ("left", "message"),
    [
        (
            "action",
            "has no mean and std of observation.state; .*it holds action.mean, action.std",
        ),
        ("observation.state", "has no mean and std of action; LeRobot needs them to normalise"),
        ("action.mean", "has no mean and std of observation.state.*it holds action.mean. Set action.statistics"),
        ("nothing", "it holds nothing"),
    ],
)
def test_statistics_that_are_absent_are_refused(tmp_path, left, message):
    write(tmp_path, {name: values for name, values in STATISTICS.items() if name.startswith(left)})
    with pytest.raises(UserError, match=message):
        load_processor_files("P", tmp_path, actions())


def test_a_postprocessor_alone_without_statistics_is_refused(tmp_path):
    save_file({"action.mean": torch.zeros(2)}, write(tmp_path) / POSTPROCESSOR)
    with pytest.raises(UserError, match="policy_postprocessor.json has no mean and std of action"):
        load_processor_files("P", tmp_path, actions())


def test_what_is_not_normalised_needs_no_statistics(tmp_path):
    write(tmp_path, {n: v for n, v in STATISTICS.items() if "state" in n}, modes={**MEAN_STD, "ACTION": "IDENTITY"})
    files = load_processor_files("P", tmp_path, actions())
    assert files.constants["action"] is None and files.constants["state"] is not None


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"features": {"action": FEATURES["action"]}}, "names a mode for observation.state but lists only action"),
        (
            {"modes": {**MEAN_STD, "ACTION": "SINE"}},
            "normalises actions by SINE, which is not supported; use a policy with one of MEAN_STD",
        ),
        ({"state_files": False}, "has no mean and std of observation.state.*it holds nothing"),
        ({"statistics": STATISTICS | {"action.std": [float("inf"), 1.0]}}, "statistics of action are not finite"),
        ({"statistics": STATISTICS | {"action.std": [1.0, -1.0]}}, r"number 1 of action has a negative std \(-1\)"),
    ],
)
def test_processors_that_do_not_fit_are_named(tmp_path, made, message):
    with pytest.raises(UserError, match=message):
        load_processor_files("P", write(tmp_path, **made), actions())


def test_a_processor_without_its_step_or_file_is_named(tmp_path):
    (write(tmp_path) / PREPROCESSOR).unlink()
    with pytest.raises(UserError, match=f"policy_preprocessor.json names {PREPROCESSOR}, which is missing"):
        load_processor_files("P", tmp_path, actions())
    (tmp_path / "policy_preprocessor.json").write_text('{"steps": []}')
    with pytest.raises(UserError, match="policy_preprocessor.json has no step normalizer_processor"):
        load_processor_files("P", tmp_path, actions())


@pytest.mark.parametrize("held", [STATISTICS, grouped("so100"), {}])
def test_statistics_of_a_data_set_replace_those_of_the_checkpoint(tmp_path, held):
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta/stats.json").write_text(json.dumps(OWN_DATA))
    write(tmp_path, held, state_files=bool(held))
    files = load_processor_files("P", tmp_path, actions(statistics=str(tmp_path), replace_statistics=True))
    file = PREPROCESSOR if held else "policy_preprocessor_normalizer_processor.safetensors"
    assert statistics(files, file) == {f"{n}.{s}": values for n, one in OWN_DATA.items() for s, values in one.items()}
    file = POSTPROCESSOR if held else "policy_postprocessor_unnormalizer_processor.safetensors"
    assert statistics(files, file) == {f"action.{s}": values for s, values in OWN_DATA["action"].items()}
    (tmp_path / "again").mkdir()
    files.write(tmp_path / "again")  # what a run saves needs no more options
    assert load_processor_files("P", tmp_path / "again", actions()).contents == files.contents


def test_statistics_that_cannot_replace_are_named(tmp_path):
    write(tmp_path, modes={**MEAN_STD, "ACTION": "QUANTILES"})
    path = tmp_path / "own.json"
    for tree, options, message in [
        (OWN_DATA, {}, "has statistics of its own; remove that key, or set action.replace_statistics=true"),
        (OWN_DATA, {"replace_statistics": True}, "action.q01 is missing; it holds mean, std, min, max"),
        (
            {"action": OWN_DATA["action"]},
            {"replace_statistics": True},
            r"no statistics of states \(proprio or .*\); it holds action",
        ),
        (
            {"a": {"proprio": OWN_DATA["observation.state"], "action": {"mask": [True, False], "q01": [0, 0]}}},
            {"replace_statistics": True},
            "the mask of a.action excludes numbers",
        ),
        (OWN_DATA, {"replace_statistics": True, "normalisation": "min_max"}, "action.normalisation=min_max, but the"),
    ]:
        path.write_text(json.dumps(tree))
        with pytest.raises(UserError, match=message):
            load_processor_files("P", tmp_path, actions(statistics=str(path), **options))
    with pytest.raises(UserError, match="replace_statistics=true needs action.statistics"):
        load_processor_files("P", tmp_path, actions(replace_statistics=True))


@pytest.mark.parametrize(
    ("mode", "names", "second"),
    [("MEAN_STD", ("mean", "std"), 0.0), ("QUANTILES", ("q01", "q99"), 0.5), ("MIN_MAX", ("min", "max"), 0.5)],
)
def test_numbers_that_never_moved_are_held(tmp_path, caplog, mode, names, second):
    """LeRobot divides by 1e-8 where they move: 0.9 would be 4e7."""
    tree = {f"{f}.{names[0]}": [0.25, 0.5] for f in FEATURES} | {f"{f}.{names[1]}": [1.25, second] for f in FEATURES}
    files = load_processor_files("P", write(tmp_path, tree, modes={"STATE": mode, "ACTION": mode}), actions())
    for kind in ("state", "action"):
        numbers = torch.tensor([[0.9, 0.9], [0.1, -3.0]])
        torch.testing.assert_close(files.constants[kind].fill(numbers), torch.tensor([[0.9, 0.5], [0.1, 0.5]]))
    assert "model.path=P: numbers [1] of action are constant in the policy's statistics" in caplog.text
