"""Clips of the user's, written by Pillow and ffmpeg, read back frame by frame; and files that are none."""

import json
import struct

import imageio.v3 as iio
import numpy as np
import pytest
from PIL import Image

from mmrl.runtime.jsonl import RowError
from mmrl.tasks.data import video_files
from mmrl.tasks.data.image_files import ImageFiles
from mmrl.tasks.data.video_files import VideoFiles, evenly_spaced
from mmrl.tasks.visual_qa.data.files import FileSource

SHADES = list(range(10, 250, 30))  # of eight frames


def frames():
    return [Image.new("RGB", (32, 16), (shade,) * 3) for shade in SHADES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("clips")
    for name in ("a.gif", "a.webp", "a.png"):
        more = {"lossless": True} if name.endswith("webp") else {}
        frames()[0].save(path / name, save_all=True, append_images=frames()[1:], duration=100, **more)
    for name in ("a.mp4", "a.webm"):
        codec = "libx264" if name.endswith("mp4") else "libvpx-vp9"
        iio.imwrite(path / name, np.stack([np.asarray(f) for f in frames()]), fps=10, plugin="FFMPEG", codec=codec)
    (path / "playlist.m3u8").write_text("#EXTM3U\n#EXTINF:1,\n/etc/passwd\n")
    (path / "cut.mp4").write_bytes((path / "a.mp4").read_bytes()[:60])
    return path


def shades(clip):
    return [float(np.asarray(frame).mean()) for frame in clip.frames]


@pytest.mark.parametrize("name", ["a.gif", "a.webp", "a.png", "a.mp4", "a.webm"])
def test_frames_and_times(folder, name):
    files = VideoFiles(ImageFiles(folder))
    clip = files.decode(name)
    assert clip.shape == (8, 32, 16) and clip.fps == pytest.approx(10)
    assert shades(clip) == pytest.approx(SHADES, abs=4)
    assert shades(files.decode({"bytes": (folder / name).read_bytes()})) == shades(clip)
    few = VideoFiles(ImageFiles(folder), max_frames=3).decode(name)
    assert shades(few) == pytest.approx([SHADES[0], SHADES[2], SHADES[5]], abs=4)
    assert few.fps == pytest.approx(3.75)  # three frames over the 0.8 seconds that the clip takes
    files.check(name)


def test_evenly():
    assert evenly_spaced(8, 3) == [0, 2, 5] and evenly_spaced(3, 8) == [0, 1, 2] and evenly_spaced(1, 1) == [0]


REFUSED = [
    ("playlist.m3u8", 100_000, "not an MP4, MOV, WebM, GIF, WEBP, PNG file"),
    ("cut.mp4", 100_000, "cannot read 'cut.mp4'"),
    ("a.gif", 500, "32 x 16 pixels, more than max_pixels=500"),
    ("a.mp4", 500, "32 x 16 pixels, more than max_pixels=500"),
    ("../a.gif", 100_000, "contains '..'"),
    ("none.mp4", 100_000, "cannot read 'none.mp4'"),
]


@pytest.mark.parametrize(("name", "pixels", "message"), REFUSED)
def test_what_is_no_clip_is_refused_in_one_line(folder, name, pixels, message):
    files = VideoFiles(ImageFiles(folder, pixels))
    for read in (files.check, files.decode):
        with pytest.raises(RowError) as refusal:
            read(name)
        assert message in str(refusal.value) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(("count", "fits"), [(111, True), (112, False)])
def test_few_bytes_that_claim_hours_of_decoding_are_refused(count, fits):
    """A GIF of a few hundred bytes whose frames are a pixel each, on a large canvas: 36 million pixels a frame."""
    head = b"GIF89a" + struct.pack("<HHBBB", 6000, 6000, 0x80, 0, 0) + bytes([0, 0, 0, 255, 255, 255])
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00"
    bomb = {"bytes": head + frame * count + b"\x3b"}
    if fits:
        VideoFiles().check(bomb)
    for read in () if fits else (VideoFiles().check, VideoFiles().decode):
        with pytest.raises(RowError, match="has 112 frames of 6000 x 6000 pixels, more than 4000000000 pixels"):
            read(bomb)


def test_a_film_that_claims_hours_of_decoding_is_refused(folder, monkeypatch):
    monkeypatch.setattr(video_files, "MAX_VIDEO_PIXELS", 8 * 32 * 16 - 1)
    for name in ("a.mp4", "a.webm"):
        with pytest.raises(RowError, match="has 8 frames of 32 x 16 pixels, more than 4095 pixels together"):
            VideoFiles(ImageFiles(folder)).decode(name)


def test_rows_of_a_file(folder):
    rows = [
        {"videos": "a.mp4", "problem": "Which way?", "answer": "up"},
        {"videos": ["a.gif", "a.webm"], "problem": "<video> or <video>?", "answer": "both", "kind": "pair"},
        {"videos": "a.gif", "problem": "<video> and <video>?", "answer": "x"},
        {"video": "a.gif", "problem": "Which way?", "answer": "x"},
        {"videos": "cut.mp4", "problem": "Which way?", "answer": "x"},
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = FileSource(folder / "rows.jsonl", max_frames=4, max_bad_share=0.6)
    assert [len(source[0].videos[0].frames), len(source[1].videos)] == [4, 2] and len(source) == 2
    assert source[1].metadata == {"kind": "pair"}
    told = [row.reason for row in source.bad]
    assert "2 <video> markers, field 'videos' has 1 videos" in told[0]
    assert "set task.data.video_field=video" in told[1]
    assert "field 'videos', video 0: cannot read 'cut.mp4'" in told[2]
