"""Write the address of the repository into a copy of the checkout that is published.

    python scripts/name_repository.py FOLDER URL REF

PyPI shows the README without the repository around it, so the links and pictures of FOLDER's README.md become absolute:
those of REF, a tag, at URL. setup.cfg gets the project's URLs, and CITATION.cff the repository. The checkout itself
keeps relative links, which also work in branches, forks and offline.
"""

import re
import sys
from pathlib import Path

BLOCK = re.compile(r"(^```.*?^```[^\n]*$)", flags=re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)(\[(?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*\])\((?!https?:|mailto:|#)([^)\s]+)\)")
OF_REPOSITORY = "../../"  # what GitHub shows beside the files, such as ../../actions: two levels above blob/BRANCH


def absolute(text: str, *, root: Path, url: str, ref: str) -> str:
    """Make the relative links and pictures of a page in the folder `root` absolute, except in blocks of code.

    >>> text = "[![a](../../actions/b.svg)](../../actions) ![p](docs/p.png)"
    >>> absolute(text, root=Path(), url="https://host/me/it", ref="v1")
    '[![a](https://host/me/it/actions/b.svg)](https://host/me/it/actions) ![p](https://host/me/it/raw/v1/docs/p.png)'
    """

    def replaced(link: re.Match[str]) -> str:
        mark, label, target = link.groups()
        label = LINK.sub(replaced, label[1:-1])  # a picture that is a link
        return f"{mark}[{label}]({_address(target, root, url, ref, is_picture=bool(mark))})"

    parts = BLOCK.split(text)  # those with an odd index are blocks
    return "".join(part if index % 2 else LINK.sub(replaced, part) for index, part in enumerate(parts))


def _address(target: str, root: Path, url: str, ref: str, *, is_picture: bool) -> str:
    if target.startswith(OF_REPOSITORY):
        return f"{url}/{target.removeprefix(OF_REPOSITORY)}"
    path = root / target.partition("#")[0]
    if not path.exists():
        raise FileNotFoundError(f"README.md links to {target}, which does not exist")
    kind = "raw" if is_picture else "tree" if path.is_dir() else "blob"
    return f"{url}/{kind}/{ref}/{target}"


def name_repository(folder: Path, *, url: str, ref: str) -> None:
    """Rewrite README.md, setup.cfg and CITATION.cff of a copy of the checkout."""
    if not re.fullmatch(r"https://[\w.-]+(/[\w.-]+)+", url):
        raise ValueError(f"expected the URL of a repository, such as https://HOST/OWNER/NAME, got {url!r}")
    pages = {
        "Homepage": url,
        "Documentation": f"{url}/blob/{ref}/docs/index.md",
        "Changelog": f"{url}/blob/{ref}/CHANGELOG.md",
        "Issues": f"{url}/issues",
        "Source": f"{url}/tree/{ref}",
    }
    listed = "".join(f"    {name} = {page}\n" for name, page in pages.items())
    _edit(folder / "README.md", lambda text: absolute(text, root=folder, url=url, ref=ref))
    _edit(folder / "setup.cfg", lambda text: text.replace("[metadata]\n", f"[metadata]\nproject_urls =\n{listed}", 1))
    _edit(folder / "CITATION.cff", lambda text: f"{text.rstrip()}\nrepository-code: {url}\n")


def _edit(path, change):
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    name_repository(Path(sys.argv[1]), url=sys.argv[2], ref=sys.argv[3])
