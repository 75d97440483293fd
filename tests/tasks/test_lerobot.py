"""Demonstrations from data sets in LeRobot's format, written here with pyarrow and ffmpeg alone."""

import io
import json

import imageio.v2 as imageio
import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from PIL import Image

from mmrl.errors import UserError
from mmrl.tasks.manipulation.lerobot import solved_at_end
from tests.tasks.choosing import build

FPS, SIZE, LENGTHS = 10, 32, (5, 3, 4)
TASKS = ["push the cube", "lift the cube"]
SHOWN = [TASKS[0], TASKS[1], TASKS[0]]
FRONT, SIDE = "observation.images.front", "observation.images.side"


def grey(episode, t):
    """Every frame has its own shade, far enough from its neighbours' to survive the video's compression."""
    return 20 + 18 * (sum(LENGTHS[:episode]) + t)


def images(episode, camera=FRONT):
    """Those of another camera are the negatives of the front's."""
    shades = [grey(episode, t) for t in range(LENGTHS[episode])]
    return [np.full((SIZE, SIZE, 3), s if camera == FRONT else 255 - s, np.uint8) for s in shades]


def video(path, frames):
    path.parent.mkdir(parents=True, exist_ok=True)
    with imageio.get_writer(path, fps=FPS, codec="libx264", quality=9, macro_block_size=2) as writer:
        for frame in frames:
            writer.append_data(frame)


def png(frame):
    content = io.BytesIO()
    Image.fromarray(frame).save(content, "png")
    return {"bytes": content.getvalue(), "path": None}


def rows(episode, dtype, cameras, earned=()):
    n, first = LENGTHS[episode], sum(LENGTHS[:episode])
    columns = {
        "observation.state": [[episode + t / 10] for t in range(n)],
        "action": [[(-1) ** t * (episode + 1) / 10] for t in range(n)],
        "timestamp": np.arange(n, dtype=np.float32) / FPS,
        "frame_index": range(n),
        "episode_index": [episode] * n,
        "index": range(first, first + n),
        "task_index": [TASKS.index(SHOWN[episode])] * n,
    }
    paid = {"next.reward": [episode + t for t in range(n)], "next.success": [episode == 1 and t == 2 for t in range(n)]}
    columns |= {name: paid[name] for name in earned}
    shown = {camera: [png(frame) for frame in images(episode, camera)] for camera in cameras}
    return columns | (shown if dtype == "image" else {})


def write(root, version, dtype="video", cameras=(FRONT,), earned=(), **info):
    """earned: features of what an action earned: episode + t, and success in the middle of the second episode."""
    shared = version == "v3.0"
    one = {"dtype": "float32", "shape": [1], "names": None}
    camera = {"dtype": dtype, "shape": [SIZE, SIZE, 3], "names": ["height", "width", "channels"]}
    tail = "chunk-{chunk_index:03d}/file-{file_index:03d}" if shared else "episode_{episode_index:06d}"
    files = {
        "data_path": f"data/{tail}.parquet" if shared else f"data/chunk-{{episode_chunk:03d}}/{tail}.parquet",
        "video_path": f"videos/{{video_key}}/{tail}.mp4"
        if shared
        else f"videos/chunk-{{episode_chunk:03d}}/{{video_key}}/{tail}.mp4",
    }
    told = {"codebase_version": version, "fps": FPS, "chunks_size": 2, "total_episodes": 3, "total_frames": 12, **files}
    told["features"] = {"observation.state": one, "action": one, **dict.fromkeys(cameras, camera)}
    kinds = {"next.reward": "float32", "next.success": "bool"}
    told["features"] |= {name: {"dtype": kinds[name], "shape": [1], "names": None} for name in earned}
    (root / "meta").mkdir(parents=True)
    (root / "meta/info.json").write_text(json.dumps(told | info))
    episodes = [{"episode_index": e, "tasks": [SHOWN[e]], "length": n} for e, n in enumerate(LENGTHS)]
    if not shared:
        (root / "meta/episodes.jsonl").write_text("".join(json.dumps(e) + "\n" for e in episodes))
        (root / "meta/tasks.jsonl").write_text(
            "".join(json.dumps({"task_index": i, "task": t}) + "\n" for i, t in enumerate(TASKS))
        )
        for e in range(3):
            file = root / files["data_path"].format(episode_chunk=e // 2, episode_index=e)
            file.parent.mkdir(parents=True, exist_ok=True)
            parquet.write_table(pa.table(rows(e, dtype, cameras, earned)), file)
            for name in cameras if dtype == "video" else ():
                video(
                    root / files["video_path"].format(episode_chunk=e // 2, episode_index=e, video_key=name),
                    images(e, name),
                )
        return root
    parts = [[0, 1], [2]]  # two episodes share a file
    for f, part in enumerate(parts):
        place = {"chunk_index": 0, "file_index": f}
        file = root / files["data_path"].format(**place)
        file.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.concat_tables(pa.table(rows(e, dtype, cameras, earned)) for e in part), file)
        for number, name in enumerate(
            cameras if dtype == "video" else ()
        ):  # of each camera in a file of another number
            video(
                root / files["video_path"].format(chunk_index=0, file_index=f + number, video_key=name),
                [p for e in part for p in images(e, name)],
            )
        start = 0
        for e in part:
            episodes[e] |= {"data/chunk_index": 0, "data/file_index": f, "dataset_from_index": sum(LENGTHS[:e])}
            if dtype == "video":
                where = {**place, "from_timestamp": start / FPS}
                for number, name in enumerate(cameras):
                    places = {**where, "file_index": f + number}
                    episodes[e] |= {f"videos/{name}/{key}": value for key, value in places.items()}
            start += LENGTHS[e]
    (root / "meta/episodes/chunk-000").mkdir(parents=True)
    parquet.write_table(pa.Table.from_pylist(episodes), root / "meta/episodes/chunk-000/file-000.parquet")
    return root


class Table:
    """A simulator of the data set's dimensions."""

    action_dim, state_dim, tasks = 1, 1, ("go",)

    def __init__(self, count, *, size=(SIZE, SIZE), action_dim=1, cameras=("front",)):
        """size: of one camera's image."""
        self.count, self.cameras, self.action_dim = count, tuple(cameras), action_dim
        self.image_shape = (size[0], size[1] * len(cameras), 3)

    def close(self):
        pass


def source(root, options=None, **demonstrations):
    return build(
        "manipulation",
        {
            "simulator": "tests.tasks.test_lerobot:Table",
            "options": options or {},
            "tasks": ["go"],
            "demonstrations": {"type": "lerobot", "path": str(root), **demonstrations},
        },
        seed=0,
    ).demonstrations


LAYOUTS = [("v2.0", "image"), ("v2.1", "video"), ("v2.1", "image"), ("v3.0", "video"), ("v3.0", "image")]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    made = {}

    def get(version="v2.1", dtype="video"):
        if (version, dtype) not in made:
            made[version, dtype] = write(tmp_path_factory.mktemp("data") / f"{version}-{dtype}", version, dtype)
        return made[version, dtype]

    return get


@pytest.mark.parametrize(("version", "dtype"), LAYOUTS)
@pytest.mark.parametrize("memory", [0, 1])
def test_each_step_is_read_back(dataset, version, dtype, memory):
    found = source(dataset(version, dtype), memory=memory)
    assert len(found) == 12
    places = [(e, t) for e in range(3) for t in range(LENGTHS[e])]
    for index in (11, 0, 7, 4, 5, 8):  # in no order: each is sought in its file
        e, t = places[index]
        prompt = found[index]
        seen, shown = prompt.metadata["observation"], prompt.metadata["actions"]
        assert seen.images.shape == (1, SIZE, SIZE, 3) and seen.images.dtype == np.uint8
        assert np.abs(seen.images.astype(int) - grey(e, t)).max() <= (0 if dtype == "image" else 6)
        assert seen.state == pytest.approx(np.array([[e + t / 10]])) and seen.state.dtype == np.float32
        assert seen.instructions == [SHOWN[e]]
        expected = [[(-1) ** s * (e + 1) / 10] for s in range(t, LENGTHS[e])]
        np.testing.assert_allclose(shown, expected, rtol=1e-6)
    assert all((e.images.cached is None) == (memory == 0) for e in found.episodes)


@pytest.mark.parametrize(
    ("earned", "rewards", "outcome"),
    [
        (("next.reward", "next.success"), [2, 3], 1.0),
        (("next.reward",), [2, 3], 0.0),
        (("next.success",), [0, 0], 1.0),
    ],
)
@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_what_an_episode_earned(tmp_path, version, earned, rewards, outcome):
    """From the second frame of the second episode on it earns 2, 3, ..., and it succeeds in the third."""
    shown = source(write(tmp_path / "data", version, "image", earned=earned))
    to_go = shown[LENGTHS[0] + 1].metadata["tail"].rewards
    assert to_go.rewards.tolist()[:2] == rewards and to_go.elapsed.tolist() == list(range(LENGTHS[1] - 1))
    assert to_go.outcome == outcome
    assert shown[0].metadata["tail"].rewards.outcome == 0.0
    tails = [shown[i].metadata["tail"] for i in (0, LENGTHS[0] + 1)]
    assert [tail.actions for tail in tails] == [LENGTHS[0], LENGTHS[1] - 1]
    assert [tail.terminated for tail in tails] == [False, outcome == 1.0]  # its last frame is a success
    assert tails[1].observation(1).state.tolist() == pytest.approx(np.array([[1.2]]))
    assert tails[1].observation(LENGTHS[1] - 1) is None


def test_an_episode_that_ends_with_its_success_terminated():
    for success, ended in (([False, True], True), ([True, False], False)):
        assert solved_at_end({"next.success": np.array(success)[:, None]}) is ended
    assert not solved_at_end({"next.reward": np.ones((2, 1))})


def test_images_are_resized_to_the_simulators(dataset):
    found = source(dataset("v2.1", "image"), {"size": [16, 16]})
    assert found[0].metadata["observation"].images.shape == (1, 16, 16, 3)
    with pytest.raises(UserError, match="32 x 32, but the simulator's are 16 x 24"):
        source(dataset(), {"size": [16, 24]})


def test_the_first_episodes(dataset):
    assert len(source(dataset("v3.0"), episodes=2)) == 8


@pytest.mark.parametrize(("version", "dtype"), LAYOUTS)
def test_several_cameras_lie_side_by_side_under_the_simulators_names(tmp_path, version, dtype):
    root, off = write(tmp_path / "two", version, dtype, (FRONT, SIDE)), 0 if dtype == "image" else 6
    size = [SIZE // 2, SIZE // 2]
    for order in ((FRONT, SIDE), (SIDE, FRONT)):
        found = source(root, {"cameras": ["wrist", "above"], "size": size}, camera=list(order))
        for index, (e, t) in ((7, (1, 2)), (0, (0, 0)), (11, (2, 3))):
            seen = found[index].metadata["observation"]
            assert seen.images.shape == (1, SIZE // 2, SIZE, 3) and seen.cameras == ("wrist", "above")
            for name, feature in zip(("wrist", "above"), order, strict=True):
                shade = grey(e, t) if feature == FRONT else 255 - grey(e, t)
                image = seen.image(name)
                assert image.shape == (1, *size, 3) and np.abs(image.astype(int) - shade).max() <= off


def test_one_camera_has_the_simulators_name_and_a_whole_image_none(tmp_path, dataset):
    one = source(dataset(), {"cameras": ["above"]})[0].metadata["observation"]
    assert one.cameras == ("above",) and (one.image("above") == one.images).all()
    whole = source(dataset(), {"cameras": ["wrist", "above"], "size": [SIZE, SIZE // 2]}, camera=FRONT)
    seen = whole[0].metadata["observation"]
    assert seen.images.shape == (1, SIZE, SIZE, 3)
    with pytest.raises(UserError, match="no camera 'wrist'"):
        seen.image("wrist")


@pytest.mark.parametrize(
    ("cameras", "chosen", "message"),
    [
        (["a", "b"], None, r"has the cameras .*; select one, or 2, one for each of the simulator's cameras, with "),
        (["a"], None, r"has the cameras .*; select one with task.demonstrations.camera"),
        (["a", "b"], [FRONT], "must be 2 different names, one for each of the simulator's cameras, not "),
        (["a", "b"], [FRONT, FRONT], "must be 2 different names"),
        (["a"], [FRONT, SIDE], "must be 1 different names"),
        (["a", "b"], [FRONT, "top"], "task.demonstrations.camera=top is not in "),
        (["a", "b"], FRONT, "front has images of 32 x 32, but the simulator's are 32 x 64"),
    ],
)
def test_cameras_that_do_not_fit_are_refused(tmp_path, cameras, chosen, message):
    root = write(tmp_path / "two", "v2.1", "image", (FRONT, SIDE))
    with pytest.raises(UserError, match=message):
        source(root, {"cameras": cameras}, camera=chosen)


def test_what_does_not_fit_is_named(dataset, tmp_path):
    with pytest.raises(UserError, match=r"meta/info\.json: action has 1 numbers, but the simulator takes 7"):
        source(dataset(), {"action_dim": 7})
    with pytest.raises(UserError, match=r"no feature 'observation\.joints'"):
        source(dataset(), state="observation.joints")
    with pytest.raises(UserError, match="camera=observation.images.side is not in"):
        source(dataset(), camera=SIDE)
    with pytest.raises(UserError, match="nowhere/meta/info.json is missing"):
        source(tmp_path / "nowhere")
    with pytest.raises(UserError, match="unknown version v1.6"):
        source(write(tmp_path / "old", "v2.1", "image", codebase_version="v1.6"))
    with pytest.raises(UserError, match="timestamps of episode 0 do not fit the dataset.s fps=30"):
        source(write(tmp_path / "fast", "v2.1", "image", fps=30))
    torn = write(tmp_path / "torn", "v2.1")
    video(torn / f"videos/chunk-000/{FRONT}/episode_000001.mp4", images(1)[:2])
    with pytest.raises(UserError, match=r"episode_000001\.mp4 has . frames, but 3 according"):
        source(torn)
    (torn / f"videos/chunk-000/{FRONT}/episode_000001.mp4").write_bytes(b"no video")
    with pytest.raises(UserError, match=r"episode_000001\.mp4 cannot be read"):
        source(torn)
    (torn / "data/chunk-000/episode_000001.parquet").unlink()
    with pytest.raises(UserError, match=r"episode_000001\.parquet is missing"):
        source(torn)
    with pytest.raises(ValueError, match=r"unknown key task\.demonstrations\.noise"):  # of the scripted expert
        source(dataset(), noise=0.1)
    with pytest.raises(ValueError, match=r"unknown key task\.demonstrations\.camera"):  # of the data set
        build("manipulation", {"demonstrations": {"camera": FRONT}}, seed=0)
    with pytest.raises(ValueError, match=r"task\.demonstrations\.type=lerobt is unknown .did you mean lerobot"):
        build("manipulation", {"demonstrations": {"type": "lerobt", "path": "x"}}, seed=0)


def seen(found):
    """The states of all steps, which say their episode and time."""
    return [round(float(found[i].metadata["observation"].state[0, 0]), 1) for i in range(len(found))]


FIRST, SECOND, THIRD = [[e + t / 10 for t in range(n)] for e, n in enumerate(LENGTHS)]


def test_listed_episodes_and_splits(tmp_path, dataset):
    root = write(tmp_path / "split", "v2.1", "image", splits={"train": "0:2", "test": "2:3"})
    assert seen(source(root)) == FIRST + SECOND
    assert seen(source(root, split="test")) == THIRD
    assert seen(source(root, episodes=[2, 0])) == THIRD + FIRST
    assert seen(source(dataset("v3.0"), episodes=[1])) == SECOND
    with pytest.raises(UserError, match="has no episode 3; it has 3 episodes, from 0 to 2"):
        source(dataset("v3.0"), episodes=[1, 3])
    for episodes in (0, [], [1, 1], [-1]):
        with pytest.raises(ValueError, match=r"task\.demonstrations\.episodes"):
            source(root, episodes=episodes)


@pytest.mark.parametrize(("version", "dtype"), LAYOUTS)
def test_a_number_that_is_not_finite_costs_its_episode_alone(tmp_path, caplog, version, dtype):
    root = write(tmp_path / "nan", version, dtype)
    (file,) = [f for f in root.glob("data/**/*.parquet") if 1 in parquet.read_table(f)["episode_index"].to_pylist()]
    table = parquet.read_table(file)
    at = table["episode_index"].to_pylist().index(1) + 1
    actions = table["action"].to_pylist()
    actions[at] = [float("nan")]
    parquet.write_table(table.set_column(table.schema.get_field_index("action"), "action", pa.array(actions)), file)
    assert seen(source(root, max_bad_share=0.34)) == FIRST + THIRD
    assert "left out" in caplog.text and "action of episode 1 must hold finite numbers" in caplog.text
    with pytest.raises(UserError, match="1 of 3 episodes cannot be used, more than task.demonstrations.max_bad"):
        source(root)
    assert seen(source(root, episodes=[0, 2])) == FIRST + THIRD


def test_torn_and_missing_files_cost_their_episodes(tmp_path, caplog):
    root = write(tmp_path / "torn", "v2.1")
    video(root / f"videos/chunk-000/{FRONT}/episode_000000.mp4", images(0)[:3])
    (root / "data/chunk-001/episode_000002.parquet").unlink()
    assert seen(source(root, max_bad_share=0.7)) == SECOND
    assert "frames, but 5 according to the dataset" in caplog.text
    assert "episode_000002.parquet is missing" in caplog.text
    shared = write(tmp_path / "shared", "v3.0")
    video(shared / f"videos/{FRONT}/chunk-000/file-000.mp4", [*images(0), *images(1)][:7])
    assert seen(source(shared, max_bad_share=0.34)) == FIRST + THIRD
    assert "frames, but 8 according to the dataset" in caplog.text
