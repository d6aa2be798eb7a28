"""Patterns of prose that native readers stumble over, and the places of the checkout that match them.

``python scripts/prose.py [FILE ...]`` lists the matches as ``file:line: pattern: text``.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("runnerkit", "engines", "callbacks", "loggers", "examples", "benchmarks", "scripts", "tests", "docs")
# Names what is wrong -> the pattern. Case matters only in the first, which looks at the first word of a docstring.
OPENING = re.compile(r"(What|Which|Whether|Who|Whose|Whom|Where|How|That)\b")
PATTERNS = {
    "negate the verb (is not a ...)": r"(?<!there )\b(is|are|was|were|be|has|have) no (?!(longer|more|one|other)\b)",
    "write 'required'": r"\b(is|are) a must\b",
    "write 'for example'": r", say[,.;:)]|, say$",
    "write 'custom' or 'your own'": r"\bof (one|the user|a user)'s own\b",
    "write 'is ignored' or 'is left unchanged'": r"\b(let be|is let|are let|lets? \w+ be\b)",
    "name who reports what": r"\b(is|are|was|were|be) told of\b|\btold of\b",
    "write 'hand-written' or 'manually'": r"\bby hand\b",
    "write 'about'": r"\bsome \d",
    "write 'which part of'": r"\bwhat of (the|a|it)\b",
    "write 'continues' or 'resumes'": r"\b(goes|go|went|gone) on\b(?! (strike|the|a|to the))",
    "write 'released'": r"\blet go\b",
    "write 'synchronizes' or 'waits for'": r"\b(is|are) waited\b(?! for)",
    "write 'again' or a verb with re-": r"\banew\b",
    "write 'silently'": r"\bwithout a word\b",
    "write 'describes' or 'explains'": r"\b(says?|said|told|put) in words\b|\bin words what\b",
    "write 'compared with'": r"\bheld against\b",
    "write 'anyone who' or name them": r"\bwhoever\b",
    "write 'is not' or 'does not have'": r"\bthat (is|are) none\b|\bis none of\b",
}
COMPILED = {advice: re.compile(pattern, re.IGNORECASE) for advice, pattern in PATTERNS.items()}


def files() -> list[Path]:
    """List the files whose prose is checked, this one left out."""
    found = [path for name in FOLDERS for path in (ROOT / name).rglob("*") if path.suffix in {".py", ".md"}]
    return sorted({*found, *ROOT.glob("*.md")} - {Path(__file__).resolve()})


def matches(path: Path) -> Iterator[str]:
    """Yield "line: advice: text" for each match in a Python or Markdown file."""
    text = path.read_text(encoding="utf-8")
    for line, words in _prose_of_code(text) if path.suffix == ".py" else _prose_of_page(text):
        for advice, pattern in COMPILED.items():
            if found := pattern.search(words):
                yield f"{line}: {advice}: {words[max(found.start() - 30, 0) : found.end() + 30].strip()}"
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            docstring = ast.get_docstring(node) or ""
            if OPENING.match(docstring):
                yield f"{getattr(node, 'lineno', 1)}: start with a verb or a noun: {docstring[:60]}"


def _prose_of_code(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of comments and strings; consecutive comment lines are one text."""
    comment: list[str] = []
    start = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            start = start if comment else token.start[0]
            comment.append(token.string.lstrip("# "))
        elif token.type not in {tokenize.NL, tokenize.NEWLINE}:
            if comment:
                yield start, " ".join(comment)
                comment = []
            if token.type in {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}:
                yield token.start[0], " ".join(token.string.split())
    if comment:
        yield start, " ".join(comment)


def _prose_of_page(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, paragraph) outside fenced code."""
    paragraph: list[str] = []
    start, is_code = 1, False
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif line.strip() and not is_code:
            start = start if paragraph else number
            paragraph.append(line.strip())
            continue
        if paragraph:
            yield start, " ".join(paragraph)
            paragraph = []


def main(paths: list[str]) -> int:
    """Print the matches in the files, or in all; return 1 if there are any."""
    found = [f"{path}:{each}" for path in (map(Path, paths) if paths else files()) for each in matches(path)]
    print(*found, f"{len(found)} matches", sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
