"""Tests of what publishes the project: the README on PyPI, the lock file, the Dockerfile, the recipe, the workflows."""

import configparser
import fnmatch
import importlib.metadata
import re
import runpy
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import runnerkit
from runnerkit.commands import docs_pages
from runnerkit.version import __version__

ROOT = Path(__file__).parents[1]
URL, TAG = "https://forge.example/owner/name", "v0.1.0"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def setup_cfg(root=ROOT):
    parser = configparser.ConfigParser()
    parser.read(root / "setup.cfg", encoding="utf-8")
    return parser


def requirements(section, key):
    return [Requirement(line) for line in setup_cfg()[section][key].splitlines() if line and line[0] != "#"]


# ------------------------------------------------------------------------------------------------ metadata and README


def test_the_author_and_the_description_are_the_same_everywhere():
    """The README and the first page of the docs end the same sentence in the same words."""
    citation, metadata = yaml.safe_load(read("CITATION.cff")), setup_cfg()["metadata"]
    description = metadata["description"]
    end = ", with" + description.partition(", with")[2]

    assert metadata["author"] == ", ".join(author["name"] for author in citation["authors"])
    assert description == citation["abstract"] == runnerkit.__doc__
    assert f"\nsite_description: {description}\n" in read("mkdocs.yml")
    assert docs_pages.llms_txt().startswith(f"# runnerkit\n\n> {description}\n")
    assert end in read("README.md").replace("\n", " ") and end in read("docs/index.md").replace("\n", " ")


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    """Return a copy of the checkout whose files name the repository, as the release has it."""
    copy = tmp_path_factory.mktemp("named") / "copy"
    copy.mkdir()
    for path in ROOT.iterdir():  # links need files to lead to, not their contents
        if path.name in {"README.md", "setup.cfg", "CITATION.cff"}:
            shutil.copy(path, copy)
        elif not path.name.startswith((".", "build", "dist")):
            (copy / path.name).symlink_to(path)
    name_repository(copy, url=URL, ref=TAG)
    return copy


def name_repository(folder, **where):
    runpy.run_path(str(ROOT / "scripts" / "name_repository.py"))["name_repository"](folder, **where)


class Links(HTMLParser):
    """The addresses of a page's links and pictures."""

    def __init__(self, html):
        super().__init__()
        self.links, self.pictures = [], []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "img":
            self.pictures.append(given["src"])


def test_links_and_pictures_of_the_readme_work_on_pypi(named):
    """Each is absolute, and leads to a file of the tag or to another site; the checkout's README stays relative."""
    import markdown  # another parser than the script's

    page = Links(markdown.markdown((named / "README.md").read_text(encoding="utf-8"), extensions=["tables"]))
    before = Links(markdown.markdown(read("README.md"), extensions=["tables"]))

    of_files = {"blob": page.links, "tree": page.links, "raw": page.pictures}
    paths = {
        address.removeprefix(f"{URL}/{kind}/{TAG}/").partition("#")[0]
        for kind, addresses in of_files.items()
        for address in addresses
        if address.startswith(f"{URL}/{kind}/{TAG}/")
    }
    others = [each for each in page.links + page.pictures if f"/{TAG}/" not in each]
    assert paths and [path for path in paths if not (ROOT / path).exists()] == []
    assert [each for each in others if not re.match(rf"https://|{URL}/actions/", each)] == []
    assert f"{URL}/actions/workflows/ci.yml/badge.svg" in page.pictures
    assert len(page.links) == len(before.links) and len(page.pictures) == len(before.pictures)
    assert "docs/index.md" in before.links and f"{URL}/blob/{TAG}/docs/index.md" in page.links


def test_code_and_sites_in_the_readme_are_left_unchanged(named):
    def blocks(text):
        return re.findall(r"^```.*?^```", text, flags=re.MULTILINE | re.DOTALL)

    text = (named / "README.md").read_text(encoding="utf-8")

    assert blocks(text) == blocks(read("README.md")) != []
    assert "(https://pypi.org/project/runnerkit/)" in text


def test_the_readme_is_rendered_as_pypi_does(named):
    """PyPI's own renderer accepts it, and keeps its pictures, tables and code."""
    markdown = pytest.importorskip("readme_renderer.markdown")

    html = markdown.render((named / "README.md").read_text(encoding="utf-8"))

    assert html is not None
    page = Links(html)
    assert all(each.startswith("https://") for each in page.links + page.pictures if not each.startswith("#"))
    assert len(page.pictures) == 6 and html.count("<table>") == 3 and "<pre" in html


def test_the_metadata_name_the_repository(named):
    metadata = setup_cfg(named)["metadata"]

    urls = dict(line.split(" = ") for line in metadata["project_urls"].strip().splitlines())
    assert set(urls) == {"Homepage", "Documentation", "Changelog", "Issues", "Source"}
    assert urls["Changelog"] == f"{URL}/blob/{TAG}/CHANGELOG.md" and urls["Homepage"] == URL
    assert (metadata["name"], metadata["license"]) == ("runnerkit", "Apache-2.0")
    assert yaml.safe_load((named / "CITATION.cff").read_text())["repository-code"] == URL


@pytest.mark.parametrize(
    ("url", "link", "error"),
    [("forge.example/owner", "LICENSE", ValueError), (URL, "no.md", FileNotFoundError)],
)
def test_a_wrong_address_and_a_broken_link_are_refused(tmp_path, url, link, error):
    for name in ("README.md", "setup.cfg", "CITATION.cff"):
        (tmp_path / name).write_text(f"[x]({link})\n")
    (tmp_path / "LICENSE").touch()

    with pytest.raises(error, match=r"URL of a repository|no\.md, which does not exist"):
        name_repository(tmp_path, url=url, ref=TAG)

    assert (tmp_path / "README.md").read_text() == f"[x]({link})\n"


def test_badges_say_what_the_metadata_say():
    badges = dict(re.findall(r"^\[!\[([^\]]*)\]\((\S+)\)\]", read("README.md"), flags=re.MULTILINE))
    metadata = setup_cfg()["metadata"]
    pythons = re.findall(r"Python :: (3\.\d+)", metadata["classifiers"])

    assert badges[f"Python {pythons[0]} to {pythons[-1]}"].endswith(f"/python-{pythons[0]}_to_{pythons[-1]}-blue")
    assert badges[f"License: {metadata['license']}"].endswith("/license-Apache--2.0-blue")
    assert badges["PyPI"].endswith(f"/pypi/v/{metadata['name']}")
    assert (ROOT / ".github" / badges["CI"].removeprefix("../../actions/").removesuffix("/badge.svg")).exists()


# ------------------------------------------------------------------------------------------------------ the lock file


def pins(name):
    lines = [line for line in read(name).splitlines() if line and line[0] != "#"]
    return dict(line.split("==") for line in lines), lines


def test_the_lock_file_pins_each_requirement_of_development_once():
    """The versions are in the ranges of setup.cfg, and those of constraints.txt where that has one."""
    locked, lines = pins("constraints-dev.txt")
    wanted = [*requirements("options", "install_requires"), *requirements("options.extras_require", "dev")]

    assert list(locked) == sorted(locked) and len(lines) == len(locked)
    assert all(re.fullmatch(r"[a-z0-9-]+==\d[\w.]*", line) for line in lines)
    names = {canonicalize_name(each.name): each.specifier for each in wanted}
    assert len(names) > 40
    assert [name for name, versions in names.items() if not versions.contains(locked.get(name, "0"), True)] == []
    assert pins("constraints.txt")[0].items() <= locked.items()


def test_the_lock_file_pins_what_the_locked_versions_require():
    """As far as this environment has these versions; an unlocked package might be another one in each installation."""
    locked, _ = pins("constraints-dev.txt")
    missing, misfits = set(), []
    for name, version in locked.items():
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if distribution.version.partition("+")[0] != version:
            continue
        for requirement in map(Requirement, distribution.requires or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                needed = canonicalize_name(requirement.name)
                missing |= {needed} - locked.keys()
                if needed in locked and not requirement.specifier.contains(locked[needed], prereleases=True):
                    misfits.append((name, str(requirement)))

    # Their torch is not for CUDA, as this one may be, or this system is not the one that the file was written on.
    assert {name for name in missing if not name.startswith(("nvidia-", "cuda-", "triton"))} == set()
    assert misfits == []


# -------------------------------------------------------------------------------------------------- Docker and conda


def instructions(text):
    """Return (instruction, value) of a Dockerfile, continued lines joined."""
    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return [tuple(line.split(maxsplit=1)) for line in code.replace("\\\n", " ").splitlines() if line.strip()]


def copied(text):
    """Return the sources of the files that a Dockerfile copies from the context."""
    sources = [value.split()[:-1] for name, value in instructions(text) if name == "COPY" and "--from=" not in value]
    return [each for group in sources for each in group]


def is_ignored(path):
    """Apply .dockerignore: the last pattern that matches decides."""
    result = False
    for line in filter(None, (line.strip() for line in read(".dockerignore").splitlines())):
        if not line.startswith("#") and fnmatch.fnmatch(path, line.lstrip("!").removeprefix("**/")):
            result = not line.startswith("!")
    return result


def test_the_dockerfile_copies_what_exists_and_is_sent():
    """Everything else is excluded from the context, so that neither data nor logs are sent."""
    sources = copied(read("Dockerfile"))

    assert {"runnerkit", "engines", "callbacks", "loggers", "setup.cfg", "constraints.txt"} <= set(sources)
    assert [path for path in sources if not (ROOT / path).exists() or is_ignored(path)] == []
    assert {path.name for path in ROOT.iterdir() if not is_ignored(path.name)} == set(sources)
    assert is_ignored("__pycache__")


def test_the_dockerfile_has_a_cpu_and_a_cuda_image():
    """Each installs existing extras as its own user, and the entry point is the command of the package."""
    lines = instructions(read("Dockerfile"))
    stages = {value.rpartition(" AS ")[2]: value for name, value in lines if name == "FROM"}
    extras = [value.removeprefix("EXTRAS=").split(",") for name, value in lines if value.startswith("EXTRAS=")]
    [python] = [value.removeprefix("PYTHON=") for name, value in lines if value.startswith("PYTHON=")]
    names = [name for name, _ in lines]

    assert list(stages) == ["wheel", "base", "cpu", "cuda"] and stages["cuda"].startswith("base ")
    assert set(names) <= {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "ENTRYPOINT", "CMD", "USER"}
    assert len(extras) == 2 and {each for group in extras for each in group} <= {*setup_cfg()["options.extras_require"]}
    assert "gpu" in extras[1] and "gpu" not in extras[0]
    assert f"Python :: {python}" in setup_cfg()["metadata"]["classifiers"]
    assert ("ENTRYPOINT", '["runnerkit"]') in lines
    assert setup_cfg()["options.entry_points"]["console_scripts"].strip().startswith("runnerkit =")
    assert names.count("USER") == 2 and names[-1] == "USER"


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="needs hadolint; .github/workflows/docker.yml has it")
def test_hadolint_finds_nothing_in_the_dockerfile():
    done = subprocess.run(["hadolint", "Dockerfile"], cwd=ROOT, capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.slow
def test_what_the_dockerfile_copies_is_enough_for_the_wheel(tmp_path):
    """The first stage, executed here: the wheel is that of the checkout."""
    for path in copied(read("Dockerfile")):
        (shutil.copytree if (ROOT / path).is_dir() else shutil.copy)(
            ROOT / path, tmp_path / path, **({"symlinks": True} if (ROOT / path).is_dir() else {})
        )
    [build] = [value for name, value in instructions(read("Dockerfile")) if name == "RUN" and " pip wheel " in value]
    assert "--no-deps --wheel-dir /wheels ." in build
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]

    done = subprocess.run([*command, "--wheel-dir", "wheels", "."], cwd=tmp_path, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "wheels").iterdir()] == [f"runnerkit-{__version__}-py3-none-any.whl"]


def test_the_conda_recipe_has_the_version_and_the_requirements_of_the_package():
    """Under the names that conda-forge gives them."""
    recipe, metadata = yaml.safe_load(read("conda/recipe.yaml")), setup_cfg()["metadata"]
    run = {line.split()[0]: line.split(maxsplit=1)[1] for line in recipe["requirements"]["run"]}
    conda = {"torch": "pytorch"}

    assert recipe["context"]["version"] == __version__
    assert f">={recipe['context']['python_min']}" == setup_cfg()["options"]["python_requires"]
    assert run.pop("python") == ">=${{ python_min }}"
    wanted = requirements("options", "install_requires")
    names = {conda.get(each.name, each.name.lower()): each.specifier for each in wanted}
    assert {name: SpecifierSet(versions) for name, versions in run.items()} == names
    [setuptools] = [line for line in recipe["requirements"]["host"] if line.startswith("setuptools")]
    assert setuptools.replace(" ", "") in read("pyproject.toml")
    assert recipe["build"]["python"]["entry_points"] == [setup_cfg()["options.entry_points"]["console_scripts"].strip()]
    assert (ROOT / "conda" / recipe["source"]["path"] / recipe["about"]["license_file"]).is_file()
    assert (recipe["about"]["summary"], recipe["about"]["license"]) == (metadata["description"], metadata["license"])


# ------------------------------------------------------------------------------------------------------ the workflows


def workflow(path):
    loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    loaded["on"] = loaded.pop(True)  # YAML 1.1 reads "on" as a boolean
    return loaded


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_what_exists_with_the_fewest_permissions(path):
    """Scripts, make targets, needed jobs and files exist; a job that may write says so, and ends."""
    loaded = workflow(path)
    jobs = loaded["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    shell = "\n".join(step.get("run", "") for step in steps)

    assert loaded["permissions"] in ({}, {"contents": "read"})
    assert all("timeout-minutes" in job for job in jobs.values())
    assert all({job["needs"]} <= jobs.keys() for job in jobs.values() if "needs" in job)
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@(v[\d.]+|release/v\d+)", step["uses"]) for step in steps if "uses" in step)
    named = re.findall(r"(?<![\w/])((?:scripts|\.ci)/[\w.]+|constraints[\w-]*\.txt|CHANGELOG\.md)", shell)
    assert [name for name in named if not (ROOT / name).exists()] == []
    modules = [name.replace(".", "/") for name in re.findall(r"-m (tests\.\w+)", shell)]
    assert [path for path in modules if not (ROOT / f"{path}.py").exists()] == []
    assert "${{" not in shell  # a branch's name is an argument, not code
    for file in loaded["on"].get("pull_request") or {}:
        assert [each for each in loaded["on"]["pull_request"][file] if not (ROOT / each).exists()] == []


def test_releases_are_published_without_a_secret():
    """PyPI trusts the workflow: only its last jobs have an identity, and only after the wheel was tried."""
    loaded = workflow(ROOT / ".github" / "workflows" / "release.yml")
    jobs = loaded["jobs"]

    assert loaded["on"] == {"push": {"tags": ["v*"]}} and "secrets." not in read(".github/workflows/release.yml")
    signing = [name for name, job in jobs.items() if job.get("permissions", {}).get("id-token") == "write"]
    assert signing == ["publish", "announce"]
    assert (jobs["publish"]["environment"], jobs["publish"]["permissions"]) == ("pypi", {"id-token": "write"})
    assert [(name, job.get("needs")) for name, job in jobs.items()] == [
        ("build", None), ("try", "build"), ("publish", "try"), ("announce", "publish"),
    ]  # fmt: skip
    [step] = [step for step in jobs["publish"]["steps"] if "pypi-publish" in step["uses"]]
    assert step["with"] == {"attestations": True}
    pythons = re.findall(r"Python :: (3\.\d+)", setup_cfg()["metadata"]["classifiers"])
    assert jobs["try"]["strategy"]["matrix"]["python"] == pythons


def test_images_are_built_for_each_target_and_pushed_only_from_tags():
    loaded = workflow(ROOT / ".github" / "workflows" / "docker.yml")
    jobs = loaded["jobs"]
    targets = re.findall(r"^FROM base AS (\w+)$", read("Dockerfile"), flags=re.MULTILINE)

    assert jobs["build"]["strategy"]["matrix"]["target"] == jobs["push"]["strategy"]["matrix"]["target"] == targets
    assert jobs["push"]["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert jobs["build"]["permissions"] == jobs["lint"]["permissions"] == {"contents": "read"}
    assert {"Dockerfile", ".dockerignore", "setup.cfg", "constraints.txt"} < set(loaded["on"]["pull_request"]["paths"])


@pytest.mark.parametrize("version", ["0.2.0", "0.1.0"])
def test_the_notes_of_a_release_are_its_section_of_the_changelog(tmp_path, version):
    """The command of the workflow, with another changelog."""
    sections = {"Unreleased]": "- new\n", "0.2.0] - 2026-12-31": "\n### Added\n- b\n", "0.1.0] - 2026-01-02": "\n- a\n"}
    text = "# Changelog\n\n" + "".join(f"## [{head}\n{body}" for head, body in sections.items())
    (tmp_path / "CHANGELOG.md").write_text(text)
    steps = workflow(ROOT / ".github" / "workflows" / "release.yml")["jobs"]["announce"]["steps"]
    [line] = [line for step in steps for line in step.get("run", "").splitlines() if line.startswith("awk")]

    subprocess.run(["bash", "-ec", f"version={version}\n{line}"], cwd=tmp_path, check=True)

    [body] = [body for head, body in sections.items() if head.startswith(version)]
    assert (tmp_path / "notes.md").read_text() == body


# ------------------------------------------------------------------------------------------------------- the checkout


def test_links_in_the_checkout_lead_to_what_is_in_it():
    """A link out of the checkout dangles in a clone, where .ci/run then cannot make its environment."""
    listed = subprocess.run(["git", "ls-files", "--stage"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is not a repository")

    links = [ROOT / line.split("\t")[1] for line in listed.stdout.splitlines() if line.startswith("120000")]

    assert ROOT / "runnerkit" / "docs" in links
    assert [link for link in links if not link.exists() or not link.resolve().is_relative_to(ROOT)] == []
