"""Terms and shapers by names and keys of before November 2026, written as they are now; see `Choice.former`.

Every function takes the former mapping, with `type`, and returns the present ones: defaults that were others are
written out. An empty list stands for a mapping that is in its present form.
"""

from __future__ import annotations

from typing import Any

from mmrl.settings import rewritten
from mmrl.terms.term import Term

Tree = dict[str, Any]


def kl(tree: Tree) -> list[Tree]:
    reset = taken(tree, "reset_every")
    return [{**tree, "against": {"type": "reference", **reset}}] if reset else []


def old_kl(tree: Tree) -> list[Tree]:
    against = {"type": "old", **taken(tree, "direction")}
    estimator = {"estimator": "k1"} if taken(tree, "normalised").get("normalised") else {}
    return [{**tree, "type": "kl", "against": against, **estimator}]


def ema_kl(tree: Tree) -> list[Tree]:
    against = {"type": "ema", **taken(tree, "decay")}
    return [{**tree, "type": "kl", "coefficient": given(tree, "coefficient", 0.1), "against": against}]


def difficulty_kl(tree: Tree) -> list[Tree]:
    return [{**tree, "type": "kl", "coefficient": given(tree, "coefficient", 0.001), "weighting": "difficulty"}]


def covariance_kl(tree: Tree) -> list[Tree]:
    weighting = {"type": "covariance", **taken(tree, "share")}
    numbers = {"coefficient": given(tree, "coefficient", 1.0), "estimator": given(tree, "estimator", "absolute")}
    against = {"type": "old", "direction": "unweighted"}
    return [{**tree, "type": "kl", **numbers, "against": against, "weighting": weighting}]


def view_kl(tree: Tree) -> list[Tree]:
    against = {"type": "view", **taken(tree, "bound", "view")}
    return [{**tree, "type": "kl", "against": against}]


def double_entropy(tree: Tree) -> list[Tree]:
    """Minus a log-likelihood is the entropy as single samples estimate it."""
    under = given(tree, "view", "masked_patches")
    return [
        {"type": "likelihood", "of": "all", "coefficient": given(tree, "coefficient", 0.03)},
        {"type": "likelihood", "of": "all", "coefficient": given(tree, "view_coefficient", 0.03), "under": under},
    ]


def entropy_likelihood(tree: Tree) -> list[Tree]:
    shown, good = given(tree, "demonstrations", 0.5), given(tree, "positive", 0.1)
    return [
        {"type": "likelihood", "of": "demonstrations", "coefficient": shown, "doubt": -1.0},
        {"type": "likelihood", "of": "own_positive", "coefficient": good, "doubt": 1.0},
    ]


def of_part(tree: Tree) -> list[Tree]:
    """One for each of what its term is now."""
    return [{**tree, "term": term} for term in rewritten(Term, tree.get("term"))]


def entropy_bonus(tree: Tree) -> list[Tree]:
    bonus = {"type": "doubt", **taken(tree, "alpha", "kappa")}
    return [{**tree, "type": "entropy", "bonus": bonus}]


def entropy_modulation(tree: Tree) -> list[Tree]:
    sure, bonus = taken(tree, "k"), {"type": "clarity", **taken(tree, "zeta")}
    if "k_future" in tree:
        bonus["k"] = tree.pop("k_future")
    return [{**tree, "type": "entropy", "sure": sure, "bonus": bonus, "centred": True}]


def taken(tree: Tree, *names: str) -> Tree:
    """Takes these keys out of the tree, where it has them."""
    return {name: tree.pop(name) for name in names if name in tree}


def given(tree: Tree, name: str, default: Any) -> Any:
    return default if tree.get(name) is None else tree[name]
