"""MkDocs hook: a page for each program of examples/, with its code and figure, and a gallery of them."""

from __future__ import annotations

import ast
import json
import re
from dataclasses import dataclass
from pathlib import Path

from mkdocs.structure.files import File

GALLERY = "examples/index.md"
FIGURES = "images/examples"
HEADINGS = {
    "first_hour": "The first hour",
    "minimal": "Ten to forty lines",
    "": "Programs",
    "notebooks": "Notebooks",
    "resnet9_cifar10": "Three ways to write one training",
    "cifar10": "CIFAR-10",
    "imagenet": "ImageNet",
    "language_model": "A language model",
    "streams": "Data in archives",
}
NAMES = {"ddp": "DDP", "ema": "EMA", "fsdp": "FSDP", "gan": "GAN", "gpt": "GPT", "hf": "Hugging Face", "lr": "LR"}
NAMES |= {"kfold": "k-fold", "swa": "SWA", "vae": "VAE"}
INTRODUCTION = """\
---
hide: [navigation, toc]
---

# Examples

Each program runs unchanged, also on a CPU, and a test checks what it learned. The figures are written by
`python scripts/example_figures.py`; [Recipes](../recipes.md#complete-programs) says what each program shows.
"""


@dataclass(frozen=True)
class Example:
    """One program.

    Attributes:
        path: in examples/, such as "minimal/gan.py".
        text: its docstring, or the first cell of a notebook.
        code: Markdown of what follows.
    """

    path: Path
    text: str
    code: str

    @property
    def title(self) -> str:
        """The name of the file in words."""
        title = " ".join(NAMES.get(word, word) for word in self.path.stem.split("_"))
        return title[0].upper() + title[1:]

    @property
    def page(self) -> str:
        """The path of its page on the site."""
        return f"examples/{self.path.with_suffix('.md').as_posix()}"

    @property
    def summary(self) -> str:
        """The first sentence or line of its text."""
        return self.text.partition("\n")[0]


def on_config(config):
    """Add the section before the reference."""
    groups = grouped(Path(config.config_file_path).parent / "examples")
    items = [{HEADINGS[name]: [{each.title: each.page} for each in group]} for name, group in groups.items()]
    places = [number for number, item in enumerate(config.nav) if "Reference" in item]
    config.nav.insert(places[0], {"Examples": [{"Gallery": GALLERY}, *items]})
    return config


def on_files(files, *, config):
    """Add the pages."""
    root = Path(config.config_file_path).parent
    groups = grouped(root / "examples")
    results = results_of(root / "examples" / "minimal" / "README.md")
    for each in (each for group in groups.values() for each in group):
        text = page_text(each, files, result=results.get(each.path.name), repository=config.repo_url)
        files.append(File.generated(config, each.page, content=text))
    files.append(File.generated(config, GALLERY, content=gallery(groups, files)))
    return files


def grouped(folder: Path) -> dict[str, list[Example]]:
    """Return the programs and notebooks by their folder, in the order of the headings."""
    found = [each for path in sorted(folder.rglob("*")) if (each := read(path, folder))]
    return {name: [each for each in found if folder_of(each) == name] for name in HEADINGS}


def folder_of(example: Example) -> str:
    """Return the name of the folder in examples/; "" is examples/ itself."""
    return example.path.parent.as_posix().removeprefix(".")


def read(path: Path, folder: Path) -> Example | None:
    """Read a program or notebook; None for other files, such as modules that programs import."""
    if path.suffix == ".ipynb":
        cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(path.read_text("utf-8"))["cells"]]
        parts = [text if kind == "markdown" else f"```python\n{text}\n```" for kind, text in cells]
        text = re.sub(r"\A# .*\n+", "", parts[0])
        return Example(path.relative_to(folder), text, "\n\n".join(parts[1:]))
    source = path.read_text("utf-8") if path.suffix == ".py" else ""
    is_program = '\nif __name__ == "__main__":\n' in source or (source and path.parent.name == "first_hour")
    if not is_program:
        return None
    tree = ast.parse(source)
    code = "".join(source.splitlines(keepends=True)[tree.body[0].end_lineno :])
    return Example(path.relative_to(folder), ast.get_docstring(tree) or "", f"```python\n{code.strip()}\n```")


def figure_of(example: Example, files) -> str | None:
    """Return the path of the figure, if there is one."""
    path = f"{FIGURES}/{example.path.stem}.png"
    return path if files.get_file_from_path(path) else None


def page_text(example: Example, files, *, result: str | None, repository: str | None) -> str:
    """Return the page of an example; its docstring may hold indented commands, which are Markdown too."""
    path = f"examples/{example.path.as_posix()}"
    name = f"[`{path}`]({repository}/blob/HEAD/{path})" if repository else f"`{path}`"
    parts = [f"# {example.title}", example.text, f"The program is {name}."]
    if result:
        parts[-1] += f" It prints:\n\n```text\n{result}\n```"
    if figure := figure_of(example, files):
        parts.append(f"![Figure of {path}]({'../' * (example.path.as_posix().count('/') + 1)}{figure})")
    return "\n\n".join([*parts, example.code, ""])


def gallery(groups: dict[str, list[Example]], files) -> str:
    """Return the page that shows all figures, and lists the programs without one."""
    parts = [INTRODUCTION]
    for name, group in groups.items():
        parts.append(f"## {HEADINGS[name]}\n")
        cards = []
        for each in group:
            link = each.page.removeprefix("examples/")
            figure = figure_of(each, files)
            picture = f"[![{each.title}](../{figure})]({link})\n\n    " if figure else ""
            cards.append(f"- {picture}[**{each.title}**]({link})\n\n    {each.summary}\n")
        parts.append('<div class="grid cards" markdown>\n\n' + "\n".join(cards) + "\n</div>\n")
    return "\n".join(parts)


def results_of(readme: Path) -> dict[str, str]:
    """Return what each minimal example prints, by the name of its file, from the table."""
    rows = re.findall(r"^\| \[\w+\]\((\w+\.py)\) \| .*? \| (.*) \|$", readme.read_text("utf-8"), flags=re.MULTILINE)
    return {name: printed.replace(r"\|", "|") for name, printed in rows}
