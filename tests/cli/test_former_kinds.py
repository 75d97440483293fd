"""Kinds and keys that are gone: each is told with what it is now; a text is rewritten with all around it as it was."""

import json
from pathlib import Path

import pytest
import yaml

from mmrl import moved
from mmrl.algorithms.algorithm import Algorithm
from mmrl.algorithms.reward_transforms.transform import Transform
from mmrl.algorithms.surrogates.surrogate import Surrogate
from mmrl.cli.former_kinds import with_current_names
from mmrl.cli.main import main
from mmrl.config import configure
from mmrl.errors import UserError
from mmrl.policies.settings import ModelSettings
from mmrl.settings import SettingsError, choose, plain
from mmrl.tasks.visual_qa.settings import Questions
from mmrl.terms.term import Shaper, Term

# As it was, and what it is now: with its own defaults where those of the present kind are others.
TERMS = [
    ("{type: kl, reset_every: 5}", "{type: kl, against: {type: reference, reset_every: 5}}"),
    ("old_kl", "{type: kl, against: {type: old}}"),
    ("{type: old_kl, direction: reverse, normalised: false}", "{type: kl, against: {type: old, direction: reverse}}"),
    ("{type: old_kl, normalised: true}", "{type: kl, against: {type: old}, estimator: k1}"),
    ("ema_kl", "{type: kl, coefficient: 0.1, against: {type: ema}}"),
    ("{type: ema_kl, coefficient: 0}", "{type: kl, coefficient: 0, against: {type: ema}}"),
    (
        "{type: ema_kl, decay: 0.5, coefficient: 0.3, estimator: exact}",
        "{type: kl, coefficient: 0.3, estimator: exact, against: {type: ema, decay: 0.5}}",
    ),
    ("difficulty_kl", "{type: kl, coefficient: 0.001, weighting: difficulty}"),
    ("{type: difficulty_kl, coefficient: 0.4}", "{type: kl, coefficient: 0.4, weighting: difficulty}"),
    (
        "covariance_kl",
        "{type: kl, coefficient: 1.0, estimator: absolute, against: {type: old, direction: unweighted}, "
        "weighting: {type: covariance}}",
    ),
    (
        "{type: covariance_kl, share: 0.3, estimator: k3, coefficient: 0.5}",
        "{type: kl, estimator: k3, coefficient: 0.5, against: {type: old, direction: unweighted}, "
        "weighting: {type: covariance, share: 0.3}}",
    ),
    ("view_kl", "{type: kl, against: {type: view}}"),
    ("{type: view_kl, bound: 1, view: blank}", "{type: kl, against: {type: view, bound: 1, view: blank}}"),
    (
        "{type: of_part, part: text, term: {type: ema_kl, coefficient: 0.2}}",
        "{type: of_part, part: text, term: {type: kl, coefficient: 0.2, against: {type: ema}}}",
    ),
]
SHAPERS = [
    ("entropy_bonus", "{type: entropy, bonus: {type: doubt}}"),
    ("{type: entropy_bonus, alpha: 0.1, kappa: 4}", "{type: entropy, bonus: {type: doubt, alpha: 0.1, kappa: 4}}"),
    ("entropy_modulation", "{type: entropy, sure: {}, bonus: {type: clarity}, centred: true}"),
    (
        "{type: entropy_modulation, k: 2, k_future: 3, zeta: 0.1}",
        "{type: entropy, sure: {k: 2}, bonus: {type: clarity, zeta: 0.1, k: 3}, centred: true}",
    ),
]
ALGORITHMS = [
    ("{type: decoupled_ppo}", "{type: ppo, gamma: 1.0, value_lam: 1.0, lam: {type: by_length, scale: 0.05}}"),
    (
        "{type: decoupled_ppo, gamma: 0.9, length_scale: 2, lam: 0.5, value_lam: 0.7, epochs: 2}",
        "{type: ppo, gamma: 0.9, lam: {type: by_length, scale: 2}, value_lam: 0.7, epochs: 2}",
    ),
    (
        "{type: decoupled_ppo, value_lam: 0}",
        "{type: ppo, gamma: 1.0, value_lam: 0, lam: {type: by_length, scale: 0.05}}",
    ),
    ("{type: decoupled_ppo, length_scale: null, lam: 0.5}", "{type: ppo, gamma: 1, value_lam: 1, lam: 0.5}"),
    ("{type: decoupled_ppo, length_scale: null}", "{type: ppo, gamma: 1.0, value_lam: 1.0}"),
]
TRANSFORMS = [
    ("pairwise", "{type: rank, score: {type: pairwise}}"),
    ("{type: pairwise, temperature: 2}", "{type: rank, score: {type: pairwise, temperature: 2}}"),
    ("inverse_normal", "{type: rank, score: inverse_normal}"),
    ("{type: inverse_normal, by: kind}", "{type: rank, score: inverse_normal, by: kind}"),
]
PLACES = {"terms": (Term, TERMS), "shaping": (Shaper, SHAPERS), "transforms": (Transform, TRANSFORMS)}
LISTED = [(key, *case) for key, (_, cases) in PLACES.items() for case in cases]


@pytest.mark.parametrize(("key", "former", "now"), LISTED)
def test_each_is_rewritten(key, former, now):
    base = PLACES[key][0]
    for text in (f"algorithm: {{{key}: [{former}]}}\n", f"algorithm:\n  {key}:\n    - {former}\n"):
        (item,) = yaml.safe_load(with_current_names(text))["algorithm"][key]
        assert item == yaml.safe_load(now)
        assert plain(choose(base, item)) == plain(choose(base, yaml.safe_load(now)))
        assert with_current_names(with_current_names(text)) == with_current_names(text)


@pytest.mark.parametrize("former", ["{type: sqrt_clip, delta: 0.3}", "{type: sqrt_clip, delta: 0.3, cap: null}"])
def test_an_option_without_an_equal_is_dropped(former):
    """RIPO's bounds are not a function of the former distance: the present ones are those of its released code."""
    found = yaml.safe_load(with_current_names(f"algorithm: {{surrogate: {former}}}\n"))["algorithm"]["surrogate"]
    assert found == {key: value for key, value in yaml.safe_load(former).items() if key != "delta"}
    with pytest.raises(SettingsError, match="sqrt_clip"):
        choose(Surrogate, yaml.safe_load(former))


@pytest.mark.parametrize(("former", "now"), ALGORITHMS)
def test_an_algorithm_is_rewritten(former, now):
    found = yaml.safe_load(with_current_names(f"algorithm: {former}\n"))["algorithm"]
    assert found == yaml.safe_load(now)
    assert plain(choose(Algorithm, found)) == plain(choose(Algorithm, yaml.safe_load(now)))


TWO = [
    (
        "{type: double_entropy, view_coefficient: 0.6, view: blank}",
        "[{type: likelihood, of: all, coefficient: 0.03}, {type: likelihood, of: all, coefficient: 0.6, under: blank}]",
    ),
    (
        "{type: double_entropy, coefficient: 0.3}",
        "[{type: likelihood, of: all, coefficient: 0.3}, "
        "{type: likelihood, of: all, coefficient: 0.03, under: masked_patches}]",
    ),
    (
        "entropy_likelihood",
        "[{type: likelihood, of: demonstrations, coefficient: 0.5, doubt: -1}, "
        "{type: likelihood, of: own_positive, coefficient: 0.1, doubt: 1}]",
    ),
    (
        "{type: entropy_likelihood, demonstrations: 0.2, positive: 0.3}",
        "[{type: likelihood, of: demonstrations, coefficient: 0.2, doubt: -1}, "
        "{type: likelihood, of: own_positive, coefficient: 0.3, doubt: 1}]",
    ),
]


@pytest.mark.parametrize(("former", "now"), TWO)
def test_one_becomes_two_where_it_stood(former, now):
    expected = [{"type": "entropy"}, *yaml.safe_load(now), {"type": "kl"}]
    for text in (
        f"algorithm: {{terms: [{{type: entropy}}, {former}, {{type: kl}}]}}\n",
        f"algorithm:\n  terms:\n  - type: entropy\n  - {former}  # mine\n  - {{type: kl}}\n",
    ):
        assert yaml.safe_load(with_current_names(text))["algorithm"]["terms"] == expected


@pytest.mark.parametrize("terms", ["[{type: of_part, term: double_entropy}]", "{0: double_entropy}"])
def test_two_do_not_fit_where_there_is_room_for_one(terms):
    with pytest.raises(
        UserError,
        match="^terms?: double_entropy was replaced by {type: likelihood, .* and .* only one; write one of them$",
    ):
        with_current_names(f"algorithm: {{terms: {terms}}}")


FORMER = """\
# mine
extends: near.yaml
algorithm:
  # far-sighted
  length_scale: 0.1  # of long answers
  type: decoupled_ppo  # as in the paper
  terms:
    - type: ema_kl
      # slowly
      estimator: k1
      decay: 0.5
    - {type: entropy, coefficient: {type: additive, start: 1.0e-3, rate: 1e-4, metric: old_kl, target: 0.3}}
    - type: double_entropy  # both
      view_coefficient: ${seed}

  lam: 0.9
guards: [{metric: old_kl, high: 1}]  # a metric keeps its name
"""
NOW = """\
# mine
extends: near.yaml
algorithm:
  # far-sighted
  type: ppo  # as in the paper
  gamma: 1.0
  value_lam: 1.0
  terms:
    - type: kl
      coefficient: 0.1
      against: {type: ema, decay: 0.5}
      # slowly
      estimator: k1
    - {type: entropy, coefficient: {type: additive, start: 1.0e-3, rate: 1e-4, metric: old_kl, target: 0.3}}
    - type: likelihood  # both
      of: all
      coefficient: 0.03
    - {type: likelihood, of: all, coefficient: '${seed}', under: masked_patches}

  lam: {type: by_length, scale: 0.1}
guards: [{metric: old_kl, high: 1}]  # a metric keeps its name
"""


def test_what_stands_around_it_stays(tmp_path, capsys):
    (tmp_path / "former.yaml").write_text(FORMER)
    (tmp_path / "near.yaml").write_text("steps: 1\n")
    with pytest.raises(SystemExit) as ended:
        main(["convert", str(tmp_path / "former.yaml")])
    assert ended.value.code == 0
    assert capsys.readouterr().out == NOW


def test_lists_by_number_and_shared_nodes_are_rewritten_too():
    text = "one: &same {type: view_kl}\nalgorithm: {terms: {0: {type: view_kl, bound: 2}, 1: *same}}\n"
    terms = yaml.safe_load(with_current_names(text + "again: {terms: [*same]}\n"))["algorithm"]["terms"]
    assert terms[0] == {"type": "kl", "against": {"type": "view", "bound": 2}}
    assert terms[1] == {"type": "kl", "against": {"type": "view"}}
    assert with_current_names("steps: 3  # only\n") == "steps: 3  # only\n" and with_current_names("") == ""


def test_what_a_mapping_takes_over_from_another_stays():
    text = "near: &near {coefficient: 0.3}\nalgorithm:\n  terms:\n"
    found = with_current_names(text + "  - type: old_kl\n    <<: *near\n    normalised: true\n")
    assert "    <<: *near" in found
    expected = {"type": "kl", "coefficient": 0.3, "against": {"type": "old"}, "estimator": "k1"}
    assert yaml.safe_load(found)["algorithm"]["terms"] == [expected]


TOLD = [
    (
        "algorithm.terms=[kl, {type: ema_kl, decay: 0.5}]",
        "algorithm.terms.1.type=ema_kl with decay is "
        "{type: kl, coefficient: 0.1, against: {type: ema, decay: 0.5}} now",
    ),
    (
        "algorithm.terms=[{type: kl, coefficient: 0.1, reset_every: 5}]",
        "algorithm.terms.0.type=kl with reset_every is {type: kl, against: {type: reference, reset_every: 5}} now",
    ),
    (
        "algorithm.terms=[{type: double_entropy, coefficient: 0.1}]",
        "algorithm.terms.0.type=double_entropy is {type: likelihood, of: all} and {type: likelihood, of: all, "
        "coefficient: 0.03, under: masked_patches} now",
    ),
    (
        "algorithm.shaping=[entropy_bonus]",
        "algorithm.shaping.0.type=entropy_bonus is {type: entropy, bonus: {type: doubt}} now",
    ),
    (
        "algorithm.transforms=[smoothing, {type: pairwise, temperature: 2}]",
        "algorithm.transforms.1.type=pairwise with temperature is "
        "{type: rank, score: {type: pairwise, temperature: 2}} now",
    ),
    (
        "algorithm={type: decoupled_ppo, epochs: 3}",
        "algorithm.type=decoupled_ppo is "
        "{type: ppo, gamma: 1.0, value_lam: 1.0, lam: {type: by_length, scale: 0.05}} now",
    ),
]


@pytest.mark.parametrize(("override", "said"), TOLD)
def test_each_is_told_in_one_line(override, said):
    with pytest.raises(UserError) as error:
        configure({"run_dir": "unset"}, [override])
    assert str(error.value) == f"configuration: {said}; mmrl convert writes it"


def test_every_former_kind_is_gone_or_has_other_keys():
    tables = json.loads(Path(moved.__file__).with_suffix(".json").read_text())["kinds"]
    bases = {b.title: b for b in (Term, Shaper, Transform, Algorithm, Surrogate, ModelSettings, Questions)}
    assert tables.keys() == bases.keys()
    gone = [
        (bases[title], name) for title, kinds in tables.items() for name in kinds.keys() - bases[title].kinds.keys()
    ]
    assert len(gone) == sum(map(len, tables.values())) - 2  # all but kl and sqrt_clip
    for base, name in gone:
        with pytest.raises(SettingsError, match="mmrl convert writes it"):
            choose(base, name)
