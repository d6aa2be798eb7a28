"""MkDocs hook: each class of docs/reference gets a page of its own, which the page that names it lists.

The pages exist on the site only: docs/reference/callbacks.md names the class X as ``::: runnerkit.dl.X``, and the site
has reference/callbacks/X.html.
"""

from __future__ import annotations

import builtins
import inspect
import re
from importlib import import_module
from pathlib import Path

from mkdocs.structure.files import File

SECTION = "Reference"
CLASS = re.compile(r"^::: ([\w.]+)\.([A-Z]\w*)\n((?: +.*\n)*)\n*", flags=re.MULTILINE)
CLASSES = re.compile(rf"(?:{CLASS.pattern})+", flags=re.MULTILINE)
ROLE = re.compile(r":\w+:`([^`]+)`")
DEFAULT_END = re.compile(r"</code>\s+\)")
HEADING = re.compile(r'(doc-class-name">runnerkit\.\w+)\.')
OPTIONS = "    options:\n      heading_level: 1\n      show_root_full_path: true\n"
TORCH, PYTHON = "https://docs.pytorch.org/docs/stable", "https://docs.python.org/3/library"
EXCEPTIONS = [name for name in dir(builtins) if re.search(r"(Error|Exception)$", name)]
TYPES = {  # without the inventories of these sites, which a build would have to download
    "torch.Tensor": f"{TORCH}/tensors.html#torch.Tensor",
    "torch.device": f"{TORCH}/tensor_attributes.html#torch.device",
    "torch.dtype": f"{TORCH}/tensor_attributes.html#torch.dtype",
    "torch.nn.Module": f"{TORCH}/generated/torch.nn.Module.html",
    "torch.nn.Parameter": f"{TORCH}/generated/torch.nn.parameter.Parameter.html",
    "torch.optim.Optimizer": f"{TORCH}/optim.html#torch.optim.Optimizer",
    "torch.optim.lr_scheduler.LRScheduler": f"{TORCH}/generated/torch.optim.lr_scheduler.LRScheduler.html",
    "torch.utils.data.BatchSampler": f"{TORCH}/data.html#torch.utils.data.BatchSampler",
    "torch.utils.data.DistributedSampler": f"{TORCH}/data.html#torch.utils.data.distributed.DistributedSampler",
    "torch.utils.data.DataLoader": f"{TORCH}/data.html#torch.utils.data.DataLoader",
    "torch.utils.data.Dataset": f"{TORCH}/data.html#torch.utils.data.Dataset",
    "torch.utils.data.IterableDataset": f"{TORCH}/data.html#torch.utils.data.IterableDataset",
    "torch.utils.data.Sampler": f"{TORCH}/data.html#torch.utils.data.Sampler",
    **{name: f"{PYTHON}/functions.html#{name}" for name in ("bool", "float", "int", "object", "type")},
    **{name: f"{PYTHON}/stdtypes.html#{name}" for name in ("bytes", "dict", "frozenset", "list", "str", "tuple")},
    "None": f"{PYTHON}/constants.html#None",
    **{name: f"{PYTHON}/exceptions.html#{name}" for name in EXCEPTIONS},
    **{
        f"collections.abc.{name}": f"{PYTHON}/collections.abc.html#collections.abc.{name}"
        for name in ("Callable", "Generator", "Iterable", "Iterator", "Mapping", "Sequence")
    },
    **{
        f"typing.{name}": f"{PYTHON}/typing.html#typing.{name}"
        for name in ("Any", "Literal", "Self", "TextIO", "Unpack")
    },
    "abc.ABC": f"{PYTHON}/abc.html#abc.ABC",
    "contextlib.AbstractContextManager": f"{PYTHON}/contextlib.html#contextlib.AbstractContextManager",
    "enum.IntEnum": f"{PYTHON}/enum.html#enum.IntEnum",
    "os.PathLike": f"{PYTHON}/os.html#os.PathLike",
    "pathlib.Path": f"{PYTHON}/pathlib.html#pathlib.Path",
    "matplotlib.figure.Figure": "https://matplotlib.org/stable/api/figure_api.html#matplotlib.figure.Figure",
    "numpy.ndarray": "https://numpy.org/doc/stable/reference/generated/numpy.ndarray.html",
    "pandas.DataFrame": "https://pandas.pydata.org/docs/reference/api/pandas.DataFrame.html",
}


def on_config(config):
    """Put the pages of classes below the page that names them."""
    [reference] = [each[SECTION] for each in config.nav if SECTION in each]
    for item in reference:
        [(title, page)] = item.items()
        below = [{name: path} for name, path, _ in classes_of(Path(config.docs_dir), page)]
        item[title] = [{"Overview": page}, *below] if below else page
    return config


def on_files(files, *, config):
    """Add the pages, and the addresses of types of other libraries."""
    for page in [file.src_uri for file in files.documentation_pages()]:
        for _, path, text in classes_of(Path(config.docs_dir), page):
            files.append(File.generated(config, path, content=text))
    for name, address in TYPES.items():
        config.plugins["autorefs"].register_url(name, address)
    return files


def on_page_markdown(markdown, *, page, **_):
    """List the classes that a page names."""
    folder = Path(page.file.src_uri)
    if folder.parent.name != "reference":
        return markdown

    def listed(run):
        rows = (
            f"- [`{name}`]({folder.stem}/{name}.md): {summary(module, name)}\n"
            for module, name, _ in CLASS.findall(run[0])
        )
        return "".join(rows) + "\n"

    return CLASSES.sub(listed, f"{markdown}\n")


def on_page_content(html, *, page, **_):
    """Let names of classes break after their module on a phone, and leave out the space behind defaults."""
    if not page.file.src_uri.startswith("reference/"):
        return html
    html = DEFAULT_END.sub("</code>)", html)
    return HEADING.sub(lambda heading: f"{heading[1]}.<wbr>", html)


def classes_of(docs: Path, page: str) -> list[tuple[str, str, str]]:
    """Return the classes that a page of the reference names, as (name, path of its page, text of its page)."""
    path = docs / page
    if path.parent != docs / "reference":
        return []
    return [
        (name, f"reference/{path.stem}/{name}.md", f"::: {module}.{name}\n{OPTIONS}{more.removeprefix(OPTIONS[:13])}")
        for module, name, more in CLASS.findall(f"{path.read_text(encoding='utf-8')}\n")
    ]


def summary(module: str, name: str) -> str:
    """Return the first line of a class's docstring."""
    first = (inspect.getdoc(getattr(import_module(module), name)) or "").partition("\n")[0]
    return ROLE.sub(r"`\1`", first)
