"""Programs of responses by value, from the reward's name to its number."""

import io
import itertools

import numpy as np
import pytest
from PIL import Image

from mmrl.children.confinement import confinable
from mmrl.errors import UserError
from mmrl.rewards import RewardSet, RewardSpec, build
from mmrl.rewards.programs.charts import elements_f1, normalize_weights, to_image
from mmrl.rewards.programs.responses import extract_program, extract_svg
from mmrl.rewards.programs.runner import ProgramRunner
from mmrl.rewards.programs.solids import surface_f1, to_mesh
from mmrl.rewards.programs.unit_tests import read_tests
from mmrl.rollouts import Prompt, Sample

pytestmark = pytest.mark.skipif(not confinable(), reason="needs Landlock")
CHART = "import matplotlib.pyplot as plt\nplt.bar(['a', 'b'], [1, 2], color='red')\nplt.title('Sales')\n"
SUM = "import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))"
BOX = "import trimesh\nresult = trimesh.creation.box(extents=(1, 2, 3))"


def of(response, answer=None, images=()):
    return Sample(Prompt("row", "q", answer=answer, images=images), response, 5, False, 100)


def fenced(source):
    return f"Here it is:\n```python\n{source}\n```\nThat is all."


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("```python\na = 1\n```", "a = 1"),
        ("```\na = 1\n```", "a = 1"),
        ("first ```py\na = 1\n``` then ```py\nb = 2\n```", "b = 2"),
        ("<think>```py\nno\n```</think>a = 1", "a = 1"),
        ("<think>```py\nno\n```", ""),
        ("<answer>```python\na = 1\n```</answer> or ```\nb\n```", "a = 1"),
        ("```python\na = 1", "a = 1"),
        ("a = '''x'''", "a = '''x'''"),
        ("```c++\nint a;\n```", "int a;"),
        ("", ""),
    ],
)
def test_the_program_of_a_response(response, expected):
    assert extract_program(of(response)) == expected


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("<svg><svg/></svg>", "<svg><svg/></svg>"),
        ("<svg a><svg b></svg></svg>", "<svg a><svg b></svg></svg>"),
        ("<svg 1></svg> better: <svg 2></svg>", "<svg 2></svg>"),
        ("<think><svg></svg></think>none", ""),
        ("<svg>", ""),
        ("</svg><svg 1></svg>", "<svg 1></svg>"),
        ("<svg 1></svg> <svg 2>", "<svg 1></svg>"),
    ],
)
def test_the_drawing_of_a_response(response, expected):
    assert extract_svg(of(response)) == expected


@pytest.fixture(scope="module")
def tested():
    return build("unit_tests", {"deadline_s": 5, "partial": True})


ADD = {"inputs": [[1, 2], [3, 4], [0, 0], [-1, 1]], "outputs": [3, 7, 0, 0], "fn_name": "add"}


@pytest.mark.parametrize(
    ("source", "tests", "score"),
    [
        ("def add(a, b): return a + b", ADD, 1.0),
        ("def add(a, b): return max(a + b, 4 * (a == 3))", ADD, 1.0),
        ("def add(a, b): return abs(a) + abs(b)", ADD, 0.75),
        ("def add(a, b): return a + b if a < 3 else 1 / 0", ADD, 0.75),
        ("def plus(a, b): return a + b", ADD, 0.0),
        ("class Solution:\n    def add(self, a, b): return a + b", ADD, 1.0),
        ("def add(a, b): return True", {"inputs": [[0, 1]], "outputs": [1], "fn_name": "add"}, 0.0),
        ("def f(s): return (s, 2.0000000001)", {"inputs": ['"x"'], "outputs": ['["x", 2]'], "fn_name": "f"}, 1.0),
        ("def f(s): return 2", {"inputs": [[1]], "outputs": [[2]], "fn_name": "f"}, 1.0),
        ("def f(s): return 3", {"inputs": [[1]], "outputs": [[2]], "fn_name": "f"}, 0.0),
        ("print(int(input()) * 2)", {"inputs": ["3\n", "4"], "outputs": ["6\n", "8"]}, 1.0),
        (
            SUM,
            '{"inputs": ["1 2"], "outputs": ["3"]}',
            1.0,
        ),
        ("print(input()); raise SystemExit", {"inputs": ["a b"], "outputs": ["a  b "]}, 1.0),
        ("print(1 / 3)", {"inputs": [""], "outputs": ["0.3333333"]}, 1.0),
        ("print(10 ** 9 + 1)", {"inputs": [""], "outputs": ["1000000000"]}, 0.0),
        ("print(1)\nprint(2)", {"inputs": [""], "outputs": ["1 2"]}, 0.0),
        ("print('x' if __name__ == '__main__' else 'y')", {"inputs": [""], "outputs": ["x"]}, 1.0),
        ("n = 0\nn += 1\nprint(n)", {"inputs": ["", ""], "outputs": ["1", "1"]}, 1.0),
        ("def f(x): return {1, x}, 'é'", ["assert f(2) == ({2, 1}, 'é')", "assert f(2) == 3"], 0.5),
        ("def f(x): return x", "assert f(1)\nassert not f(0)\nassert not f(2)", 2 / 3),
        ("def f(:", {"inputs": [[1]], "outputs": [1], "fn_name": "f"}, 0.0),
    ],
)
def test_unit_tests_by_hand(tested, source, tests, score):
    assert tested.score([of(fenced(source), tests)]) == [pytest.approx(score)]


def test_all_or_nothing_by_default_and_in_the_order_of_the_samples():
    rewards = RewardSet([RewardSpec(name="unit_tests", options={"deadline_s": 5})])
    script = {"inputs": ["2"], "outputs": ["4"]}
    samples = [
        of("def add(a, b): return abs(a) + abs(b)", ADD),
        of("print(4)", script),
        of("", script),
        of("def add(a, b): return a + b", ADD),
    ]
    assert rewards.score(samples).tolist() == [[0.0], [1.0], [0.0], [1.0]]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "inputs and outputs"),
        ({"inputs": [], "outputs": []}, "inputs and outputs"),
        ({"inputs": ["1"], "outputs": []}, "must have as many outputs as inputs"),
        ("{broken", "not JSON"),
        (["assert math.isclose(f(1), 2)"], "literal"),
        (["assert f(1) == g(2)"], "literal"),
        (["f(1) == 2"], "literal"),
    ],
)
def test_rows_without_tests_are_named(answer, message):
    with pytest.raises(UserError, match=f"'row'.*{message}"):
        read_tests(Prompt("row", "q", answer=answer))


def test_settings_that_cannot_be_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="deadline_s, workers and memory_gib"):
        build("unit_tests", {"workers": 0})
    with pytest.raises(ValueError, match="unknown name .*; the names are runs, image, elements"):
        build("chart_code", {"weights": {"images": 1}})
    with pytest.raises(ValueError, match="measure must be"):
        build("svg_code", {"measure": "clip"})
    monkeypatch.setattr("mmrl.rewards.programs.runner.confinable", lambda: False)
    with pytest.raises(ValueError, match="confined: false"):
        build("unit_tests")


def test_weights_are_shares():
    assert normalize_weights({"image": 1, "elements": 3}, ("runs", "image", "elements")) == {
        "image": 0.25,
        "elements": 0.75,
    }


def test_a_surface_is_covered_and_covers():
    """Half of the gold lies on a box, all of the box on the gold: precision 1, recall a half."""
    trimesh = pytest.importorskip("trimesh")
    one = trimesh.creation.box()
    two = trimesh.util.concatenate([one, trimesh.creation.box(transform=[[1, 0, 0, 9], *np.eye(4)[1:].tolist()])])
    assert surface_f1(one, two, 2000, 0.01) == pytest.approx(2 * 0.5 / 1.5, abs=0.03)
    assert surface_f1(two, one, 2000, 0.06) == pytest.approx(2 * 0.5 / 1.5, abs=0.03)


def test_what_no_program_of_ours_answers_is_no_image_and_no_solid():
    good = np.zeros((2, 2, 3), np.uint8)
    assert to_image(good).size == (2, 2)
    assert [to_image(bad) for bad in (None, "x", good[0], good.astype(float), good[:0])] == [None] * 5
    vertices, triangle = np.eye(3), np.array([[0, 1, 2]])
    assert to_mesh({"vertices": vertices, "triangles": triangle}).area == pytest.approx(3**0.5 / 2)
    for bad in (triangle + 1, triangle - 1, triangle.astype(float), triangle[:, :2], triangle[:0]):
        assert to_mesh({"vertices": vertices, "triangles": bad}) is None
    assert to_mesh({"vertices": vertices + np.inf, "triangles": triangle}) is None
    assert elements_f1("x", {"texts": ["a"]}) == 0.0


def test_elements_in_common_by_hand():
    gold = {"texts": ["a", "b", "b"], "marks": ["bar"], "values": []}
    # texts: 2 of ours 2 and theirs 3 -> 4/5; marks: 1 of 2 and 1 -> 2/3; values: the gold has none
    ours = {"texts": ["b", "b"], "marks": ["bar", "line"], "values": ["1"]}
    assert elements_f1(ours, gold) == pytest.approx((0.8 + 2 / 3) / 2)


def test_svg_by_hand():
    pytest.importorskip("resvg_py")
    target = Image.new("RGB", (40, 30), "white")
    target.paste((255, 0, 0), (0, 0, 20, 30))
    half = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 40 30"><rect width="20" height="30" fill="red"/></svg>'
    reward = build("svg_code", {"measure": "l1"})
    samples = [
        of(f"So: {half}", images=(target,)),
        of(half.replace('width="20"', 'width="30"'), images=(target,)),  # a quarter differs in two of three channels
        of('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 40 30"></svg>', images=(target,)),
        of("<svg>broken</svg>", images=(target,)),
        of("none", images=(target,)),
    ]
    assert reward.score(samples) == pytest.approx([1.0, 1 - 1 / 6, 0.0, 0.0, 0.0], abs=2e-3)
    with pytest.raises(UserError, match="'row' has no image"):
        reward.score([of(half)])


@pytest.mark.slow
def test_an_svg_shows_no_file(tmp_path):
    pytest.importorskip("resvg_py")
    secret = io.BytesIO()
    Image.new("RGB", (8, 8), "black").save(secret, "PNG")
    (tmp_path / "secret.png").write_bytes(secret.getvalue())
    linked = f'<image href="{tmp_path}/secret.png" width="8" height="8"/>'
    source = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 8 8">{linked}</svg>'
    (answer,) = ProgramRunner("vectors").run([{"source": source, "size": (8, 8)}])
    assert (answer["image"] == 255).all()


@pytest.mark.slow
def test_charts_by_hand():
    (drawn,) = ProgramRunner("charts").run([{"source": CHART}])
    assert drawn["elements"]["marks"] == ["bar", "bar"] and drawn["elements"]["colours"] == ["#ff0000"] * 2
    assert {"Sales", "a", "b"} <= set(drawn["elements"]["texts"])
    assert drawn["elements"]["values"] == ["-0.4 0 0.8 1", "0.6 0 0.8 2"]
    target = Image.fromarray(drawn["image"])
    saving = CHART + "plt.savefig('/nowhere/a.png'); plt.show(); plt.close('all')"
    nothing = ["raise 1", "import matplotlib.pyplot", "import matplotlib.pyplot as p\np.figure()"]
    sources = [CHART, saving, CHART.replace("red", "blue"), *nothing]
    samples = [of(fenced(source), CHART, (target,)) for source in sources]
    by_elements = build("chart_code", {"weights": {"elements": 2.0}}).score(samples)
    # another colour: one of four kinds has nothing in common; an empty figure has none
    assert by_elements == pytest.approx([1.0, 1.0, 0.75, 0.0, 0.0, 0.0])
    by_image = build("chart_code", {"measure": "l1"}).score(samples)
    blue = np.asarray(target) != np.asarray(target)[..., ::-1]
    assert by_image[:2] == [1.0, 1.0] and by_image[3:] == [0.0] * 3
    red = ((np.asarray(target)[..., 0] > 200) & (np.asarray(target)[..., 1] < 50)).mean()
    assert by_image[2] == pytest.approx(1 - 2 / 3 * red, abs=0.01) and blue.any()
    both = build("chart_code", {"weights": {"runs": 1, "elements": 1}}).score(samples)
    assert both == pytest.approx([1.0, 1.0, 0.875, 0.0, 0.0, 0.5])
    with pytest.raises(UserError, match="'row': the program in its answer draws no chart"):
        build("chart_code", {"weights": {"elements": 1}}).score([of(CHART, "x = 1", (target,))])


@pytest.mark.slow
def test_solids_by_hand(tmp_path):
    trimesh = pytest.importorskip("trimesh")
    trimesh.creation.box(extents=(1, 2, 3)).export(tmp_path / "box.stl")
    ring = "import trimesh\nresult = trimesh.creation.annulus(r_min=0.5, r_max=1, height=3)"
    opened = BOX + "\nresult.update_faces([True] * 11 + [False])"
    far = BOX + "\nresult.apply_translation((9, 0, 0))"
    sources = [BOX, ring, opened, far, "result = 3", "x = 1", ""]
    samples = [of(source, BOX) for source in sources]
    topology = build("solid_code", {"weights": {"topology": 1}}).score(samples)
    # a ring is closed and one body, with the Euler number 0; an open box is one body, with 1 in place of 2
    assert topology == pytest.approx([1.0, 2 / 3, 1 / 3, 1.0, 0.0, 0.0, 0.0])
    geometry = build("solid_code", {"weights": {"geometry": 1}})
    scores = geometry.score(samples)
    assert scores[0] == 1.0 and scores[3:] == [0.0] * 4 and 0.2 < scores[1] < 0.7 and 0.9 < scores[2] < 1
    assert geometry.score([of(BOX, str(tmp_path / "box.stl"))]) == [1.0]
    with pytest.raises(UserError, match="'row'.*builds no solid"):
        geometry.score([of(BOX, "x = 1\n")])


def test_runs_are_confined_one_by_one():
    """What a program changes does not meet the next one, and each has a folder of its own."""
    runner = ProgramRunner("tested", workers=1, deadline_s=5)
    look = "import os\nprint(os.listdir('.'))\nprint(hex(0))"
    write = f"import builtins\nbuiltins.hex = lambda x: 7\n{look}\nopen('a', 'w').write('1')"
    outputs = [answer["outputs"] for answer in runner.run([{"source": s, "inputs": [""]} for s in (write, look)])]
    assert list(itertools.chain(*outputs)) == ["[]\n7\n", "[]\n0x0\n"]
    runner.close()
