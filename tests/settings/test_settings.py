"""Sections, choices and trees by value: what becomes of a mapping, and the one line with which it is refused."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import pytest

from mmrl.settings import Choice, Section, SettingsError, choose, kind_of, locate, make, option, plain, sections_in
from mmrl.settings.tree import TreeError, Whole, merged, read_override, read_overrides, read_yaml

HERE = "tests.settings.test_settings"


class Shape(Choice):
    title: ClassVar[str] = "shape"
    kinds: ClassVar[dict[str, str]] = {
        "circle": f"{HERE}:Circle",
        "square": f"{HERE}:Square",
        "nothing": f"{HERE}:Nothing",
        "gone": f"{HERE}:Gone",
    }

    @abstractmethod
    def area(self) -> float: ...


class Circle(Shape):
    type: str = "circle"
    radius: float = option(1.0, "of the circle", gt=0)

    def area(self) -> float:
        return 3 * self.radius**2


class Square(Shape):
    type: str = "square"
    side: float = option(description="of the square")
    within: Shape | None = option(None, "another shape")

    def area(self) -> float:
        return self.side**2


class Nothing(Shape):
    type: str = "nothing"

    def area(self) -> float:
        return 0


class Triangle(Shape):
    """One that is not among the shipped kinds."""

    type: str = f"{HERE}:Triangle"
    height: float = 2.0

    def area(self) -> float:
        return self.height


class Untyped(Choice):
    kinds: ClassVar = {"plain": f"{HERE}:Plain"}
    width: float = 1.0


class Plain(Untyped):
    pass


class Lacking(Shape):
    """It does not say its area."""

    type: str = f"{HERE}:Lacking"


class Stranger(Choice):
    type: str = "stranger"


class Frame(Section):
    width: float = option(1.0, "of the line", unit="pixels", ge=0)
    colour: str | None = option(None, "of the line")


class Image(Section):
    title: str = option(description="of the image")
    shape: Shape = option(Circle(), "in the middle")
    corner: Shape = option(Square(side=2.0), "only some", kinds={"square": f"{HERE}:Square"})
    shapes: list[Shape] = option([], "others")
    named: dict[str, Shape] = option({}, "by name")
    frame: Frame = option(Frame(), "around it")
    second: Frame | None = option(None, "around that")
    folder: Path = option(Path("."), "where it lies")
    numbers: tuple[int, ...] = option((), "any")
    free: dict[str, Any] = option({}, "anything")


def image(**tree: Any) -> Image:
    return make(Image, {"title": "t", **tree})


def refusal(model: type[Section] = Image, **tree: Any) -> str:
    with pytest.raises(SettingsError) as error:
        make(model, {"title": "t", **tree} if model is Image else tree)
    assert "\n" not in str(error.value)
    return str(error.value)


# --- what a mapping becomes ---


def test_a_kind_is_chosen_by_its_type_and_has_only_its_own_options():
    made = image(shape={"type": "square", "side": 3, "within": {"type": "circle", "radius": 2}})
    assert made.shape == Square(side=3, within=Circle(radius=2))
    assert made.shape.area() == 9 and made.shape.within.area() == 12
    assert "radius" not in type(made.shape).model_fields


def test_a_name_alone_is_a_kind_with_its_defaults():
    assert image(shape="nothing").shape == Nothing()
    assert image(shapes=["circle", {"type": "square", "side": 1}]).shapes == [Circle(), Square(side=1)]
    assert refusal(shape="square") == "shape.side: Field required"


def test_options_without_a_type_are_those_of_the_default_kind():
    assert image(shape={"radius": 2}).shape == Circle(radius=2)
    assert image(corner={"side": 4}).corner == Square(side=4)
    assert refusal(shapes=[{"radius": 2}]).startswith("shapes.0.type is missing; set it to one of circle, square")


def test_lists_and_mappings_of_choices():
    made = image(named={"a": "circle", "b": {"type": "square", "side": 1, "within": "nothing"}})
    assert made.named == {"a": Circle(), "b": Square(side=1, within=Nothing())}
    assert refusal(shapes=["circle", {"type": "circle", "radus": 1}]) == (
        "unknown key shapes.1.radus; did you mean shapes.1.radius?"
    )
    assert refusal(named={"a": {"type": "circle", "radius": 0}}).startswith("named.a.radius: ")
    assert refusal(shapes="circle") == "shapes: expected a list (got 'circle')"
    assert refusal(named=["circle"]) == "named: expected a mapping (got ['circle'])"


def test_ones_own_kind_is_named_by_where_it_is():
    made = image(shape={"type": f"{HERE}:Triangle", "height": 5})
    assert made.shape == Triangle(height=5) and made.shape.area() == 5
    assert refusal(shape={"type": f"{HERE}:Triangle", "hight": 5}) == (
        "unknown key shape.hight; did you mean shape.height?"
    )


def test_an_object_that_is_made_in_python_knows_its_type():
    assert Untyped(width=2.0).type == f"{HERE}:Untyped"
    assert Plain(width=2.0) == Plain(type="plain", width=2.0)
    assert Stranger().type == "stranger"


def test_null_is_the_default_unless_null_means_something():
    made = make(Image, {"title": "t", "frame": None, "shape": None, "numbers": None, "second": None})
    assert made.frame == Frame() and made.shape == Circle() and made.numbers == () and made.second is None
    assert image(second={"width": 2}).second == Frame(width=2)
    assert refusal(title=None) == "title: Field required"


def test_a_section_is_taken_as_it_is():
    frame, circle = Frame(width=3), Circle(radius=3)
    made = image(frame=frame, shape=circle, shapes=[circle])
    assert made.frame is frame and made.shape is circle and made.shapes[0] is circle


def test_a_section_can_not_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        image().frame.width = 3


# --- how it is refused ---


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"framme": {}}, "unknown key framme; did you mean frame?"),
        ({"frame": {"wdth": 2}}, "unknown key frame.wdth; did you mean frame.width?"),
        ({"second": {"wdth": 2}}, "unknown key second.wdth; did you mean second.width?"),
        ({"frame": {"zzzz": 2}}, "unknown key frame.zzzz; valid keys: width, colour"),
        ({"frame": {3: 2}}, "unknown key frame.3; valid keys: width, colour"),
        ({"shape": {"type": "circle", "side": 2}}, "unknown key shape.side; valid keys: type, radius"),
        ({"frame": 3}, "frame: expected a mapping of width, colour (got 3)"),
        ({"frame": "thick"}, "frame: expected a mapping of width, colour (got 'thick')"),
        ({"shape": 3}, "shape: expected one of circle, square, nothing, gone, or package.module:Class (got 3)"),
        ({"frame": {"width": -1}}, "frame.width: Input should be greater than or equal to 0 (got -1)"),
        ({"numbers": [1, "x"]}, "numbers.1: "),
    ],
)
def test_the_key_at_fault_is_named_with_the_nearest_one(tree, message):
    assert refusal(**tree).startswith(message)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("circl", "shape.type=circl is unknown (did you mean circle?); use one of circle, square, nothing, gone, or "),
        ("zzzz", "shape.type=zzzz is unknown; use one of circle, square, nothing, gone, or package.module:Class"),
        (3, "shape.type=3 is unknown"),
        ("CIRCLE", "shape.type=CIRCLE is unknown (did you mean circle?); use one of"),
        (f"{HERE}:Trapeze", f"shape.type={HERE}:Trapeze: no such object ({HERE} has no Trapeze); expected package."),
        (
            "no.such:Thing",
            "shape.type=no.such:Thing: no such object (No module named 'no'); expected package.module:name, with its "
            "folder on PYTHONPATH",
        ),
        (":Thing", "shape.type=:Thing: no such object (Empty module name); expected package.module:name"),
        (f"{HERE}:Stranger", f"shape.type={HERE}:Stranger does not inherit from {HERE}:Shape"),
        (f"{HERE}:HERE", f"shape.type={HERE}:HERE does not inherit from {HERE}:Shape"),
        (f"{HERE}:Lacking", f"shape.type={HERE}:Lacking does not define area, which {HERE}:Shape requires"),
        ("gone", f"shape.type={HERE}:Gone: no such object"),
    ],
)
def test_a_kind_that_can_not_be_is_refused(name, message):
    assert refusal(shape={"type": name}).startswith(message)


def test_a_key_may_allow_other_kinds_than_its_class():
    assert refusal(corner={"type": "circle"}).startswith("corner.type=circle is unknown; use one of square, or package")
    assert image(corner={"type": f"{HERE}:Triangle"}).corner == Triangle()


def test_kinds_without_a_default_have_to_be_named():
    assert kind_of(Shape, "circle") is Circle and kind_of(Shape, {"type": "square"}) is Square
    with pytest.raises(SettingsError, match=r"^a\.type is missing; set it to one of circle, square, nothing, gone"):
        choose(Shape, {}, ("a",))
    with pytest.raises(SettingsError, match="^k=os.path:nowhere: no such object"):
        locate("os.path:nowhere", "k")


# --- back to a mapping ---


def test_what_is_plain_makes_the_same_again():
    made = image(
        shape="nothing",
        shapes=[{"type": "square", "side": 1, "within": "nothing"}, f"{HERE}:Triangle"],
        named={"a": "circle"},
        folder="x/y",
        numbers=[1, 2],
        free={"deep": {"er": None}},
    )
    tree = plain(made)
    assert tree["shape"] == "nothing" and tree["folder"] == "x/y" and tree["numbers"] == [1, 2]
    assert tree["shapes"][0] == {"type": "square", "side": 1.0, "within": "nothing"}
    assert tree["second"] is None and tree["free"] == {"deep": {"er": None}}
    assert make(Image, tree) == made


def test_brief_leaves_out_what_holds_nothing():
    tree = plain(image(), brief=True)
    assert tree == {
        "title": "t",
        "shape": {"type": "circle", "radius": 1.0},
        "corner": {"type": "square", "side": 2.0},
        "frame": {"width": 1.0},
        "folder": ".",
    }
    assert make(Image, tree) == image()


def test_choices_are_found_wherever_they_are():
    inner = {"type": "square", "side": 1, "within": "nothing"}
    made = image(shapes=["circle", inner], named={"a": "nothing"})
    assert dict(sections_in(made, Circle)) == {"shape": Circle(), "shapes.0": Circle()}
    assert dict(sections_in(made, Nothing)) == {"shapes.1.within": Nothing(), "named.a": Nothing()}
    assert [key for key, _ in sections_in(made, Shape)] == ["shape", "corner", "shapes.0", "shapes.1", "named.a"]


# --- trees ---


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("a=1", {"a": 1}),
        ("a.b.c=1e-5", {"a": {"b": {"c": 1e-5}}}),
        ("a=b=c", {"a": "b=c"}),
        ("a=null", {"a": None}),
        ("a=[1,x]", {"a": [1, "x"]}),
        ("a.0.b=true", {"a": {"0": {"b": True}}}),
        ("a.b={c: {d: 1}}", {"a": {"b": Whole({"c": {"d": 1}})}}),
        ("a={}", {"a": Whole({})}),
    ],
)
def test_an_override_is_a_tree(text, tree):
    assert read_override(text) == tree


@pytest.mark.parametrize("text", ["a", "=1", "a..b=1", ".a=1", "a.=1", "a=[1,", "a={", "a=", "a= "])
def test_an_override_that_is_none_is_quoted(text):
    with pytest.raises(TreeError, match="^override ") as error:
        read_override(text)
    assert repr(text) in str(error.value) and "\n" not in str(error.value)


BASE = {
    "shape": {"type": "square", "side": 3, "within": {"type": "circle", "radius": 2}},
    "frame": {"width": 2, "colour": "red"},
    "shapes": [{"type": "circle", "radius": 1}, "nothing"],
    "kind": "circle",
    "title": "t",
}


def over(*overrides):
    tree = BASE
    for override in read_overrides(overrides):
        tree = merged(tree, override)
    return tree


def test_laying_over_leaves_the_base_as_it_was():
    before = plain(BASE)
    assert over("frame.width=3", "shapes.0.radius=9", "shape={type: nothing}") != BASE
    assert before == BASE


@pytest.mark.parametrize(
    ("override", "key", "found"),
    [
        ("frame.width=3", "frame", {"width": 3, "colour": "red"}),
        ("frame={width: 3}", "frame", {"width": 3}),  # braces replace the whole section
        ("frame={}", "frame", {}),
        ("frame=null", "frame", None),
        ("frame.colour=null", "frame", {"width": 2, "colour": None}),
        ("shape.side=5", "shape", {"type": "square", "side": 5, "within": {"type": "circle", "radius": 2}}),
        ("shape.type=circle", "shape", {"type": "circle"}),  # the options of another kind are others
        ("shape.type=square", "shape", BASE["shape"]),
        ("shape=circle", "shape", "circle"),
        ("shape.within.type=nothing", "shape", {"type": "square", "side": 3, "within": {"type": "nothing"}}),
        ("kind.radius=2", "kind", {"type": "circle", "radius": 2}),  # below a choice that was written short
        ("kind.type=square", "kind", {"type": "square"}),
        ("shapes.0.radius=4", "shapes", [{"type": "circle", "radius": 4}, "nothing"]),
        ("shapes.1=circle", "shapes", [{"type": "circle", "radius": 1}, "circle"]),
        ("shapes.1.x=4", "shapes", [{"type": "circle", "radius": 1}, {"type": "nothing", "x": 4}]),
        ("shapes=[circle]", "shapes", ["circle"]),
        ("new.deep=1", "new", {"deep": 1}),
    ],
)
def test_how_an_override_is_laid_over(override, key, found):
    tree = over(override)
    assert tree[key] == found
    assert {k: v for k, v in tree.items() if k != key} == {k: v for k, v in BASE.items() if k != key}


@pytest.mark.parametrize("place", ["2", "-1", "first"])
def test_an_item_that_a_list_does_not_have(place):
    with pytest.raises(TreeError, match=rf"^shapes\.{place}: shapes is a list of 2; its items are 0 to 1$"):
        over(f"shapes.{place}.radius=1")


def test_overrides_apply_in_order():
    assert over("frame={width: 3}", "frame.colour=blue")["frame"] == {"width": 3, "colour": "blue"}
    assert over("shape.type=circle", "shape.radius=7")["shape"] == {"type": "circle", "radius": 7}
    assert over("frame=null", "frame.width=7")["frame"] == {"width": 7}
    assert over("frame.width=7", "frame=null")["frame"] is None


@pytest.mark.parametrize(
    ("overrides", "shape"),
    [
        (("shape.radius=7", "shape.type=circle"), {"type": "circle", "radius": 7}),
        (("shape.radius=7", "frame.width=4", "shape.type=circle", "shape.radius=8"), {"type": "circle", "radius": 8}),
        (("shape={type: square, side: 4}", "shape.type=circle"), {"type": "circle"}),
        (("shape.type=circle", "shape.radius=7", "shape.type=square"), {"type": "square", "radius": 7}),
        (("shape.type=circle", "shape={type: square, side: 4}"), {"type": "square", "side": 4}),
    ],
)
def test_the_type_of_a_section_comes_before_its_other_keys(overrides, shape):
    assert over(*overrides)["shape"] == shape


def test_a_file_replaces_a_section_of_another_type_and_merges_one_of_the_same(tmp_path):
    (tmp_path / "base.yaml").write_text("shape: {type: square, side: 3}\nother: {type: square, side: 3}\nkept: 1\n")
    path = tmp_path / "own.yaml"
    path.write_text("extends: base.yaml\nshape: {type: circle}\nother: {within: nothing}\n")
    (_, base), (_, own) = read_yaml(path)
    assert merged(base, own) == {
        "shape": {"type": "circle"},
        "other": {"type": "square", "side": 3, "within": "nothing"},
        "kept": 1,
    }


def test_a_missing_package_of_an_extra_is_named_with_its_command(monkeypatch):
    """As where diffusers was not installed: the module of a part that comes with mmrl cannot be imported."""

    def missing(module):
        raise ModuleNotFoundError("No module named 'diffusers'", name="diffusers.models")

    monkeypatch.setattr("mmrl.settings.section.importlib.import_module", missing)
    expected = r"^model.type=mmrl.x:Y needs diffusers.models; install it with: pip install -e '.\[diffusion\]'$"
    with pytest.raises(SettingsError, match=expected):
        locate("mmrl.x:Y", "model.type")
