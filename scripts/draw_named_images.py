"""Draw tasks/data/named_images/*.png anew: each name once in each shipped style, from icon packages of the npm
registry.

The icons are SVG; `rsvg-convert` (Debian: librsvg2-bin) draws them. PACKAGES is a folder with the unpacked packages
`@iconify-json/noto` 1.2.9 (Apache-2.0) and `@iconify-json/fluent-emoji` 1.2.7 (MIT), each in a folder of its last name:

    npm pack @iconify-json/noto@1.2.9 && mkdir noto && tar xzf iconify-json-noto-1.2.9.tgz -C noto
    python scripts/draw_named_images.py PACKAGES
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
from pathlib import Path
from typing import Any

from PIL import Image

from mmrl.tasks.data.named_images.images import COLUMNS, FOLDER, SIDE, names

PACKAGES = {"noto": "noto", "fluent": "fluent-emoji"}  # the package of each style


def drawn(icons: dict[str, Any], name: str) -> Image.Image:
    """The icon as SIDE x SIDE RGBA. Raises KeyError for an unknown name, CalledProcessError for bad SVG."""
    icon = icons["icons"][name]
    box = [icon.get(key, icons.get(key, default)) for key, default in (("left", 0), ("top", 0))]
    box += [icon.get(key, icons.get(key, 16)) for key in ("width", "height")]
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="{" ".join(map(str, box))}">{icon["body"]}</svg>'
    )
    command = ["rsvg-convert", "--width", str(SIDE), "--height", str(SIDE)]
    made = subprocess.run(command, input=svg.encode(), stdout=subprocess.PIPE, check=True).stdout
    return Image.open(io.BytesIO(made)).convert("RGBA")


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the named images from their icon packages.")
    parser.add_argument("packages", type=Path)
    folder = parser.parse_args().packages
    rows = -(-len(names()) // COLUMNS)
    for style, package in PACKAGES.items():
        icons = json.loads((folder / package / "package" / "icons.json").read_text())
        sheet = Image.new("RGBA", (COLUMNS * SIDE, rows * SIDE))
        for number, name in enumerate(names()):
            sheet.paste(drawn(icons, name), (number % COLUMNS * SIDE, number // COLUMNS * SIDE))
        path = FOLDER / f"{style}.png"
        sheet.save(path, optimize=True)
        print(f"{path.name}: {len(names())} images, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
