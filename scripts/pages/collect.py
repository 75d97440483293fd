"""Collect the pages that lie beside the code, and pages of every key and method, as the sources of the site.

    python scripts/pages/collect.py                                # into build/site
    mkdocs build --strict --config-file mkdocs.yml                # build/html

Pages keep their paths, so that links between them hold. GitHub's Markdown lets a list follow a line of text at once and
indents nested items by two blanks; Python-Markdown, which mkdocs uses, wants a blank line and four. Both are added.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmrl.cli.keys import Meaning

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "build/site"
FOLDERS = ("mmrl", "tasks", "sims", "configs", "scripts")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
ITEM = re.compile(r"^( *)([-*]|\d+\.) ")
WIDE = "---\nhide: [toc]\n---\n"  # tables of keys take the room of the table of contents
ALONE = "---\nhide: [navigation]\n---\n"  # the start page is alone in its sidebar: commands take the room
FENCE = re.compile(r"^ *```")


def pages() -> list[Path]:
    """Returns the Markdown pages of the checkout, tests' own left out."""
    below = [page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md") if not _is_linked(page)]
    return sorted([*ROOT.glob("*.md"), *below])


def _is_linked(page: Path) -> bool:
    """Returns True for a file under a link, such as mmrl/tasks of a checkout that maps packages by links."""
    return any(parent.is_symlink() for parent in page.parents)


def images(page: Path, text: str) -> list[Path]:
    """Returns the image files that a page shows."""
    names = [target for mark, _, target in LINK.findall(text) if mark and "://" not in target]
    return [(page.parent / name).resolve() for name in names]


def without_source_links(text: str) -> str:
    """Returns text in which a link to a file that the site does not have is its name alone: a module, or a page of the
    tests."""

    def replaced(link: re.Match[str]) -> str:
        image, label, target = link.groups()
        path = target.partition("#")[0]
        if path.endswith(".md") and "tests" in Path(path).parts:
            return label
        on_site = image or "://" in target or path == "" or path.endswith(".md")
        return link.group() if on_site else f"`{label}`"

    return LINK.sub(replaced, text)


def python_markdown(text: str) -> str:
    """Returns text with a blank line before each list that follows a line of text, and nested items indented by four.

    Fenced and indented blocks stay as they are.
    """
    lines: list[str] = []
    fenced = False
    for line in text.splitlines():
        fenced ^= bool(FENCE.match(line))
        item = None if fenced else ITEM.match(line)
        if item and len(item.group(1)) < 4:
            if lines and lines[-1].strip() and not _goes_on(lines):
                lines.append("")
            line = " " * (4 * (len(item.group(1)) // 2)) + line.lstrip()
        lines.append(line)
    return "\n".join(lines) + "\n"


def _goes_on(lines: list[str]) -> bool:
    """Returns True where the last paragraph is an item of a list."""
    for line in reversed(lines):
        if not line.strip():
            return False
        if ITEM.match(line):
            return True
    return False


def key_pages() -> dict[str, str]:
    """Returns a page of keys for each section of a configuration, by file name."""
    from mmrl.cli.keys import all_keys

    rows: dict[str, list[str]] = {}
    for path, meanings in all_keys().items():
        rows.setdefault(path.partition(".")[0], []).extend(_key_row(path, meaning) for meaning in meanings)
    head = "| key | default | meaning |\n| --- | --- | --- |\n"
    return {
        f"{name}.md": f'{WIDE}# {name}\n\n<div class="keys" markdown>\n\n{head}' + "\n".join(lines) + "\n\n</div>\n"
        for name, lines in rows.items()
    }


def _key_row(path: str, meaning: Meaning) -> str:
    """Returns the row of a key: a default of more than a line is that of a section, whose keys have rows."""
    from mmrl.cli.keys import type_name, yaml_default

    field = meaning.field
    default = "must be given" if field.is_required() else f"`{yaml_default(field.default)}`"
    conditions = [condition for condition in meaning.conditions if condition]
    where = f" With {' or '.join(f'`{condition}`' for condition in conditions[:4])}." if conditions else ""
    cells = ("" if len(default) > 50 else default, f"{field.description} ({type_name(field.annotation)}).{where}")
    return f"| `{path}` | {' | '.join(map(_cell, cells))} |"


def method_pages() -> dict[str, str]:
    """Returns a page for each kind of choice, and one of rewards, by file name."""
    from mmrl.cli.methods import describe_method, describe_reward, methods, rewards

    by_title: dict[str, list[str]] = {}
    for base, name, kind in methods():
        by_title.setdefault(base.title, []).append(_described(name, describe_method(base, name, kind)))
    by_title["reward"] = [_described(name, describe_reward(name)) for name in rewards()]
    return {
        f"{title.replace(' ', '_')}.md": f"# {title[0].upper()}{title[1:]}\n\n" + "\n".join(entries)
        for title, entries in by_title.items()
    }


def _described(name: str, lines: list[str]) -> str:
    """Returns the Markdown of one method: its docstring as text, what follows as a list."""
    body = [line.strip() for line in lines[1:]]
    return f"## {name}\n\n{_text(body[0])}\n\n" + "".join(f"- {_text(line)}\n" for line in body[1:] if line)


def _text(line: str) -> str:
    return line.replace("*", r"\*").replace("<", "&lt;").replace("_", r"\_").replace("[", r"\[")


def _cell(text: str) -> str:
    return text.replace("|", r"\|").replace("<", "&lt;").replace("\n", " ")


def collect(out: Path = OUT) -> None:
    """Writes the sources of the site into `out`, which is made anew."""
    shutil.rmtree(out, ignore_errors=True)
    for page in pages():
        text = page.read_text()
        target = out / page.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        start = ALONE if page == ROOT / "README.md" else ""
        target.write_text(start + python_markdown(without_source_links(text)))
        for image in images(page, text):
            copy = out / image.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(image, copy)
    for folder, made in (("keys", key_pages()), ("methods", method_pages())):
        (out / "reference" / folder).mkdir(parents=True)
        for name, text in {**made, "README.md": index(folder, made)}.items():
            (out / "reference" / folder / name).write_text(text)
    shutil.copyfile(ROOT / "scripts/pages/theme.css", out / "theme.css")
    (out / "llms.txt").write_text(llms((ROOT / "mkdocs.yml").read_text(), (ROOT / "AGENTS.md").read_text()))


def llms(config: str, agents: str) -> str:
    """Returns llms.txt (llmstxt.org): the commands to begin with, then the pages of the navigation for language models,
    each with its first sentence.

    config: the text of mkdocs.yml; agents: that of AGENTS.md, whose block of commands is copied.
    """
    name, about = (re.search(rf"^{key}: (.+)$", config, flags=re.M) for key in ("site_name", "site_description"))
    assert name is not None and about is not None
    commands = [line for line in agents.splitlines() if line.startswith("    ")]
    lines = [f"# {name[1]}", "", f"> {about[1]}", "", "Commands to start with:", "", *commands, ""]
    for entry in config.partition("\nnav:\n")[2].splitlines():
        group, page = re.fullmatch(r"  - (.+):", entry), re.fullmatch(r" +- (.+): (\S+\.md)", entry)
        if group is not None:
            lines += ["", f"## {group[1]}", ""]
        elif page is not None:
            title, path = page[1].strip('"'), page[2]
            about_page = "" if path.startswith("reference/") else f": {first_sentence((ROOT / path).read_text())}"
            lines.append(f"- [{title}]({address(path)}){about_page}")
    return "\n".join(lines) + "\n"


def address(page: str) -> str:
    """Returns the file that mkdocs makes of a page: a README.md is the index of its folder."""
    return re.sub(r"(^|/)README\.md$", r"\1index.md", page).removesuffix(".md") + ".html"


def first_sentence(text: str) -> str:
    """Returns the first sentence of a page's first paragraph."""
    paragraphs = re.split(r"\n\s*\n", text)
    prose = next(p for p in paragraphs if re.match(r"[A-Za-z*`\[]", p) and not p.startswith("[!["))
    return re.split(r"(?<=[.:])\s", LINK.sub(r"\2", " ".join(prose.split())))[0].rstrip(":")


def index(folder: str, made: dict[str, str]) -> str:
    """Returns the page that lists the pages of a folder, each with the names on it."""
    what = {"keys": "Keys of a configuration, by section", "methods": "Methods, by what they are"}[folder]
    rows = [f"| [{name[:-3].replace('_', ' ')}]({name}) | {_names(text)} |" for name, text in sorted(made.items())]
    return (
        f"# {what}\n\nMade from `mmrl {folder.replace('keys', 'config')}`.\n\n| page | holds |\n| --- | --- |\n"
        + "\n".join(rows)
        + "\n"
    )


def _names(text: str) -> str:
    """Returns the headings of a page of methods, or the number of keys of a page of keys."""
    headings = re.findall(r"^## (.+)$", text, flags=re.M)
    return ", ".join(headings).replace("_", r"\_") or f"{len(re.findall(r'^[|] `', text, flags=re.M))} keys"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    collect()
