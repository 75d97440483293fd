"""Attacks data files: images that a file may not open, files that unpack to gigabytes, bad rows, damaged files.

    python scripts/attack/data.py [--part]

It takes two minutes on two cores, with --part half a minute. Files are written into a temporary folder and removed.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import random
import resource
import socket
import struct
import subprocess
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from table import Table

from mmrl.errors import UserError
from mmrl.tasks.image_generation.data import prompts
from mmrl.tasks.visual_qa.data.files import FileSource

READ = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
OTHERS = ("EPS", "PDF", "PPM", "ICO", "TGA", "PCX", "SGI", "IM", "DDS", "ICNS", "JPEG2000", "SPIDER", "MSP", "XBM")
MEBIBYTES = 400  # of memory that no bomb may take
SECONDS = 10.0
ROWS = {
    "half a surrogate pair": '{"problem": "a \\ud83d", "answer": "1"}',
    "in metadata": '{"problem": "?", "answer": "1", "x": {"y": ["\\udc00"]}}',
    "in a name": '{"problem": "?", "answer": "1", "\\udc00": 1}',
    "in a path": '{"problem": "?", "answer": "1", "images": ["\\udc00.png"]}',
    "65 levels": '{"problem": "?", "answer": "1", "x": ' + "[" * 70 + "]" * 70 + "}",
    "900 levels": '{"problem": "?", "answer": "1", "x": ' + "[" * 900 + "]" * 900 + "}",
    "100 000 levels": "[" * 100_000,
    "100 000 objects": '{"a":' * 100_000,
    "integer of 400 digits": '{"problem": "?", "answer": ' + "9" * 400 + "}",
    "integer of 5000 digits": '{"problem": "?", "answer": ' + "9" * 5000 + "}",
    "infinite": '{"problem": "?", "answer": 1e999}',
    "NaN": '{"problem": "?", "answer": NaN}',
    "no object": "[1, 2]",
    "text": '"row"',
    "null": "null",
    "no JSON": "{",
    "two in a line": '{"problem": "?", "answer": "1"} {"problem": "?", "answer": "1"}',
    "zero bytes": "\x00" * 100,
    "no problem": '{"answer": "1"}',
    "empty problem": '{"problem": " ", "answer": "1"}',
    "problem of a number": '{"problem": 3, "answer": "1"}',
    "no answer": '{"problem": "?"}',
    "empty answer": '{"problem": "?", "answer": ""}',
    "image for images": '{"problem": "?", "answer": "1", "image": "good.png"}',
    "Images for images": '{"problem": "?", "answer": "1", "Images": ["good.png"]}',
    "image_s": '{"problem": "?", "answer": "1", "images": null, "image": ["good.png"]}',
    "markers without images": '{"problem": "<image>?", "answer": "1"}',
    "too many markers": '{"problem": "<image><image>?", "answer": "1", "images": ["good.png"]}',
    "bytes as text": '{"problem": "?", "answer": "1", "images": [{"bytes": "abc"}]}',
    "image in lists": '{"problem": "?", "answer": "1", "images": [["good.png"]]}',
    "image of a number": '{"problem": "?", "answer": "1", "images": 7}',
}

HARMLESS_PROMPTS = {  # what is a question's fault and no prompt's
    *("infinite", "NaN", "no answer", "empty answer", "markers without images", "too many markers"),
    *("image for images", "Images for images", "image_s", "bytes as text", "image in lists", "image of a number"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", action="store_true", help="try fewer cases of each kind")
    part = parser.parse_args().part
    warnings.simplefilter("ignore")  # Pillow's, of large images
    logging.getLogger("mmrl").addHandler(logging.NullHandler())
    logging.getLogger("mmrl").propagate = False
    table = Table("data files")
    with tempfile.TemporaryDirectory(prefix="mmrl-attack-") as folder:
        os.environ["MMRL_ROW_CACHE"] = f"{folder}/verdicts"
        root = Path(folder) / "root"
        root.mkdir()
        image().save(root / "good.png")
        paths(table, root)
        formats(table, root)
        bombs(table, root)
        rows(table, root)
        damaged_images(table, root, 60 if part else 600)
        damaged_lines(table, root, 100 if part else 1000)
        damaged_parquet(table, root, 20 if part else 200)
    return table.finish()


def image(side: int = 24) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8))


def row(**changed: object) -> dict:
    return {"problem": "?", "answer": "1", "images": ["good.png"]} | changed


def outcome(path: Path) -> str:
    """Of a file whose first row is good: what becomes of the others when they are checked and used."""
    start = time.monotonic()
    try:
        source = FileSource(path, max_bad_share=1.0)
        for index in range(len(source)):
            source[index]
    except (ValueError, UserError) as error:
        named = str(error).startswith(str(path))
        return "the file is named" if named and "\n" not in str(error) else f"{type(error).__name__}: {error}"
    if time.monotonic() - start > SECONDS:
        return f"{time.monotonic() - start:.0f} s"
    reasons = [bad.reason for bad in source.bad]
    if any("\n" in reason or not reason.startswith(f"{path}, ") for reason in reasons):
        return f"named badly: {reasons[0]!r}"
    return "the row is named" if reasons else "used"


def lines(root: Path, *texts: str | bytes | dict) -> Path:
    """Writes questions.jsonl: a good row, then these lines. Returns its path."""
    path = root / "questions.jsonl"
    written = [
        text if isinstance(text, bytes) else (text if isinstance(text, str) else json.dumps(text)).encode()
        for text in texts
    ]
    path.write_bytes(b"\n".join([json.dumps(row()).encode(), *written]) + b"\n")
    return path


def paths(table: Table, root: Path) -> None:
    (root.parent / "secret.png").write_bytes((root / "good.png").read_bytes())
    (root / "way").symlink_to(root.parent)
    (root / "link.png").symlink_to(root.parent / "secret.png")
    (root / "zero.png").symlink_to("/dev/zero")
    (root / "loop.png").symlink_to("loop.png")
    (root / "deep").mkdir()
    os.mkfifo(root / "pipe.png")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(root / "socket.png"))
    tried = {
        "absolute": str(root.parent / "secret.png"),
        "/etc/passwd": "/etc/passwd",
        "/dev/zero": "/dev/zero",
        "/dev/stdin": "/dev/stdin",
        "/proc": "/proc/self/environ",
        "..": "../secret.png",
        "down and up": "deep/../../secret.png",
        "many ..": "../" * 50 + "etc/passwd",
        "link": "link.png",
        "link of a folder": "way/secret.png",
        "link to a device": "zero.png",
        "link to itself": "loop.png",
        "pipe": "pipe.png",
        "socket": "socket.png",
        "folder": "deep",
        "the root": ".",
        "nothing there": "gone.png",
        "empty": "",
        "long": "x" * 10_000,
        "many folders": "/".join(["x"] * 3000),
        "zero byte": "good.png\0",
        "two lines": "a\nb.png",
        "address": "http://127.0.0.1:9/x.png",
        "file address": "file:///etc/passwd",
        "home": "~/x.png",
    }
    for name, path in tried.items():
        for held in (path, {"path": path, "bytes": None}):
            file = lines(root, row(images=[held]))
            table.case("images that a row may not open", name, lambda file=file: outcome(file), "the row is named")
    (root / "inner.png").symlink_to("good.png")
    for name in ("inner.png", "./good.png", "././good.png", str(root / "good.png")):
        file = lines(root, row(images=[name]))
        table.case("images that it may", name, lambda file=file: outcome(file), "used")
    listening.close()


def formats(table: Table, root: Path) -> None:
    for kind in (*READ, *OTHERS):
        file = io.BytesIO()
        try:
            (image().convert("1") if kind in ("MSP", "XBM") else image()).save(file, kind)
        except (OSError, KeyError, ValueError):
            continue  # this Pillow cannot write it
        (root / "image.png").write_bytes(file.getvalue())
        wanted = "used" if kind in READ else "the row is named"
        path = lines(root, row(images=["image.png"]))
        table.case(
            f"formats that are {'read' if kind in READ else 'not'}", kind, lambda path=path: outcome(path), wanted
        )
    (root / "image.png").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    path = lines(root, row(images=["image.png"]))
    table.case("formats that are not", "SVG", lambda: outcome(path), "the row is named")


def png(width: int, height: int, *chunks: tuple[bytes, bytes]) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    every = [
        (b"IHDR", header),
        *chunks,
        (b"IDAT", zlib.compress(bytes(3 * width + 1) * min(height, 10))),
        (b"IEND", b""),
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in every
    )


def bombs(table: Table, root: Path) -> None:
    text = b"k\0\0" + zlib.compress(bytes(300 << 20), 9)
    made = {
        "PNG of 13 000 x 13 000": png(13_000, 13_000),
        "PNG of 60 000 x 60 000": png(60_000, 60_000),
        "PNG of one row": png(50_000_000, 1),
        "PNG whose text unpacks to 300 MiB": png(4, 4, (b"zTXt", text)),
        "PNG whose profile unpacks to 300 MiB": png(4, 4, (b"iCCP", text)),
        "GIF of 65 535 x 65 535": b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b";",
        "BMP of 30 000 x 30 000": b"BM"
        + struct.pack("<IHHIIiiHHIIiiII", 0, 0, 0, 54, 40, 30_000, 30_000, 1, 24, 0, 0, 0, 0, 0, 0),
    }
    for name, data in made.items():
        (root / "bomb.png").write_bytes(data)
        path = lines(root, row(images=["bomb.png"]))
        table.case("bombs", name, lambda path=path: bounded(lambda: outcome(path)), "the row is named", "used")
    long = lines(root, '{"problem": "' + "x" * (70 << 20) + '", "answer": "1"}')
    table.case("bombs", "a line of 70 MB", lambda: bounded(lambda: outcome(long)), "the row is named")
    path = root / "bomb.parquet"
    many = pa.DictionaryArray.from_arrays(pa.array(np.zeros(1_000_000, np.int8)), pa.array(["x" * 10_000]))
    good = pa.DictionaryArray.from_arrays(pa.array(np.zeros(1, np.int8)), pa.array(["?"]))
    with pq.ParquetWriter(path, pa.schema({"problem": many.type, "answer": many.type}), store_schema=False) as writer:
        for column in (good, many):
            writer.write_table(pa.table({"problem": column, "answer": column}), row_group_size=1_000_000)
    script = (
        "import resource, sys; from mmrl.tasks.visual_qa.data.files import FileSource; s = FileSource(sys.argv[1], "
        "validate=False); s._rows[0]; s._rows._table(1)"
    )

    def parquet() -> str:
        done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=100)
        said = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else ""
        return "the row is named" if "RowError: row group 1: it decompresses to more than" in said else said or "read"

    table.case("bombs", f"Parquet of {path.stat().st_size >> 10} kB that unpacks to 20 GB", parquet, "the row is named")


def bounded(attempt: Callable[[], str]) -> str:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = attempt()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    return found if grown < MEBIBYTES else f"{grown} MiB"


def rows(table: Table, root: Path) -> None:
    for name, text in ROWS.items():
        path = lines(root, text)
        table.case("rows that cannot be used", name, lambda path=path: outcome(path), "the row is named")
    path = lines(root, b'{"problem": "caf\xe9", "answer": "1"}')
    table.case("rows that cannot be used", "not UTF-8", lambda: outcome(path), "the row is named")
    for name, text in ROWS.items():
        asked = root / "prompts.jsonl"
        asked.write_text('{"prompt": "good"}\n' + text.replace('"problem"', '"prompt"') + "\n")
        harmless = name in HARMLESS_PROMPTS

        def attempt(asked=asked) -> str:
            try:
                return "used" if len(prompts.load(asked)) == 2 else "lost"
            except ValueError as error:
                return (
                    "the row is named" if f"{asked}, line 2: " in str(error) and "\n" not in str(error) else str(error)
                )

        table.case("the same as prompts for images", name, attempt, "used" if harmless else "the row is named")


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Cut, with bytes changed, or with bytes left out."""
    kind, place = rng.randrange(3), rng.randrange(len(data))
    if kind == 0:
        return data[:place]
    if kind == 1:
        changed = bytearray(data)
        for _ in range(rng.randint(1, 8)):
            changed[rng.randrange(len(data))] = rng.randrange(256)
        return bytes(changed)
    return data[:place] + data[place + rng.randint(1, 20) :]


def damaged_images(table: Table, root: Path, times: int) -> None:
    rng = random.Random(0)
    for number in range(times):
        kind, file = READ[number % len(READ)], io.BytesIO()
        image().save(file, kind)
        (root / "torn.png").write_bytes(damaged(file.getvalue(), rng))
        path = lines(root, row(images=["torn.png"]))
        table.case("damaged images", f"{kind} {number}", lambda path=path: outcome(path), "used", "the row is named")


def damaged_lines(table: Table, root: Path, times: int) -> None:
    rng = random.Random(1)
    for number in range(times):
        path = lines(root, damaged(json.dumps(row(more={"a": [1, 2.5, None, "é"]})).encode(), rng))
        wanted = ("used", "the row is named", "the file is named")
        table.case("damaged JSONL", str(number), lambda path=path: outcome(path), *wanted)


def damaged_parquet(table: Table, root: Path, times: int) -> None:
    """In processes of their own, since Arrow may end one."""
    rng, file = random.Random(2), io.BytesIO()
    held = [{"images": [{"bytes": (root / "good.png").read_bytes(), "path": None}], "problem": "?", "answer": "1"}] * 8
    pq.write_table(pa.Table.from_pylist(held), file, row_group_size=4)
    for number in range(times):
        (root / f"damaged-{number}.parquet").write_bytes(damaged(file.getvalue(), rng))
    waiting = list(range(times))
    while waiting:
        names = [str(root / f"damaged-{number}.parquet") for number in waiting]
        done = subprocess.run([sys.executable, __file__, "--look", *names], capture_output=True, text=True, timeout=300)
        told = done.stdout.splitlines()
        if len(told) < len(waiting):
            told.append(f"ended the process with {done.returncode}")
        for number, outcome_of_one in zip(waiting, told, strict=False):
            wanted = ("used", "the row is named", "the file is named")
            table.case("damaged Parquet", str(number), lambda said=outcome_of_one: said, *wanted)
        waiting = waiting[len(told) :]


def look(names: list[str]) -> int:
    logging.getLogger("mmrl").addHandler(logging.NullHandler())
    for name in names:
        try:
            print(outcome(Path(name)), flush=True)
        except Exception as error:
            print(f"{type(error).__name__}: {error}".replace("\n", " "), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(look(sys.argv[2:]) if sys.argv[1:2] == ["--look"] else main())
