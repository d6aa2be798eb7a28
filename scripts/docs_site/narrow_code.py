"""MkDocs hook: Python code fits its column of 80 characters, without a scroll bar; the sources have lines of 120."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import textwrap
import tokenize

WIDTH = 80
BLOCK = re.compile(r"^(```(?:python|py)\b[^\n]*\n)(.*?)(^```)", flags=re.MULTILINE | re.DOTALL)
RUFF = (sys.executable, "-m", "ruff", "format", "--isolated", f"--line-length={WIDTH}", "--stdin-filename=page.py", "-")


def on_page_markdown(markdown, **_):
    """Format the blocks with longer lines."""
    return BLOCK.sub(lambda block: f"{block[1]}{narrow(block[2])}{block[3]}", markdown)


def narrow(code: str) -> str:
    """Break lines of more than 80 characters; code that ruff cannot read stays as it is."""
    if all(len(line) <= WIDTH for line in code.splitlines()):
        return code
    try:
        code = with_comments_above(code)
    except (tokenize.TokenError, SyntaxError):
        return code
    done = subprocess.run(RUFF, input=code, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else code


def with_comments_above(code: str) -> str:
    """Move the comments that end beyond the width above their lines."""
    lines = code.splitlines()
    for token in reversed(list(tokenize.generate_tokens(io.StringIO(code).readline))):
        row, column = token.start
        if token.type != tokenize.COMMENT or token.end[1] <= WIDTH:
            continue
        before = lines[row - 1][:column].rstrip()
        indent = before[: len(before) - len(before.lstrip())] if before else " " * column
        comment = textwrap.wrap(token.string.lstrip("# "), WIDTH - len(indent) - 2)
        lines[row - 1 : row] = [f"{indent}# {each}" for each in comment] + [before] * bool(before)
    return "\n".join(lines) + "\n"
