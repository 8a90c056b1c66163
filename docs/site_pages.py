"""What the site has beside the pages of this folder: the README as its front page, and a reference
of the public names from their docstrings. A hook of mkdocs; see mkdocs.yml.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "depthroute"
COPIED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
}
"""Files of the repository that are pages too."""
LINK = re.compile(r"(?P<text>!?\[[^\]]*\])\((?P<target>[^)\s]+)\)")
ROLE = re.compile(r":(?:func|class|meth|mod|attr):(<code>)~?(?:depthroute\.)?")


def on_files(files: Files, config: Any) -> Files:
    copies = {page: (ROOT / file).read_text() for file, page in COPIED.items()}
    for name, text in (copies | reference()).items():
        files.append(File.generated(config, name, content=text))
    return files


def on_nav(nav: Any, **_: Any) -> Any:
    """The front page, then what a reader begins with; the others in the order of their names."""
    nav.items.sort(key=lambda item: _place(getattr(item, "file", None)))
    return nav


def _place(file: Any) -> int:
    name = "" if file is None else file.name
    return 0 if name == "index" else 1 if name.startswith("tutorial-") else 2


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as they are in the repository lead to pages; files that are no pages are named."""
    folder = "" if page.file.generated_by else "docs/"
    return LINK.sub(lambda link: linked(link, folder), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings name what they speak of by role, which is for those who read the source."""
    return ROLE.sub(r"\1", html)


def linked(link: re.Match[str], folder: str) -> str:
    text, target = link["text"], link["target"]
    if re.match(r"[a-z]+:|#", target):
        return link[0]
    path, hash_, anchor = target.partition("#")
    inside = (ROOT / folder / path).resolve().relative_to(ROOT).as_posix()
    inside = COPIED.get(inside, inside)
    if inside.startswith("docs/") or inside in COPIED.values():
        return f"{text}({inside.removeprefix('docs/')}{hash_}{anchor})"
    return f"{text.strip('[]')} (`{inside}`)"


def reference() -> dict[str, str]:
    """A page a namespace: its public names, each where it is defined."""
    names = listed(PACKAGE / "__init__.py", "_LAZY")
    pages = {"depthroute": sorted(f"{module}.{name}" for name, module in names.items())}
    for space in ("nn", "ops"):
        public = listed(PACKAGE / space / "__init__.py", "__all__")
        pages[f"depthroute.{space}"] = [f"depthroute.{space}.{name}" for name in public]
    return {f"reference/{name}.md": page(name, members) for name, members in pages.items()}


def page(name: str, members: list[str]) -> str:
    return f"# {name}\n\n" + "".join(f"::: {member}\n\n" for member in members)


def listed(file: Path, variable: str) -> Any:
    """The value of a literal in a module, which is not imported: the site needs no torch."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == variable:
            return ast.literal_eval(node.value)
    raise ValueError(f"{file} has no {variable}")
