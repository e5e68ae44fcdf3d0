"""Rows from the docstrings of Python's own library: texts and words with labels, pairs of answers. Nothing is downloaded."""

import ast
import inspect
import io
import keyword
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("", "asyncio", "collections", "concurrent/futures", "email", "html", "http", "importlib", "json", "logging",
           "multiprocessing", "unittest", "urllib", "xml/dom", "xml/etree", "xml/sax", "xmlrpc")  # fmt: skip
MOST = 400
"""Characters of a text."""


def functions(files: int) -> Iterator[tuple[str, str, str]]:
    """Yield the name, the first sentence of the docstring, and the code of functions, in a fixed order.

    Args:
        files: how many files of each folder are read.
    """
    root = Path(sysconfig.get_path("stdlib"))
    for folder in FOLDERS:
        for path in sorted((root / folder).glob("*.py"))[:files]:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                said = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
                if isinstance(node, ast.FunctionDef) and said:
                    sentence = " ".join(inspect.cleandoc(said).partition("\n\n")[0].split()).partition(". ")[0].rstrip(".")
                    code = "\n".join(ast.unparse(line) for line in node.body[1:])
                    if len(sentence.split()) > 4 and len(code) > 40:
                        yield node.name, f"{sentence}."[:MOST], code[:MOST]


def labeled(files: int = 12) -> Iterator[dict[str, str]]:
    """Yield rows of the format ``labeled``: what is said of a function, or its code.

    Args:
        files: see :func:`functions`.
    """
    for _, sentence, code in functions(files):
        yield {"text": sentence, "label": "words"}
        yield {"text": code, "label": "code"}


def pairs(files: int = 12) -> Iterator[dict[str, str]]:
    """Yield rows of the format ``preference``: what a function does, and the same words backwards.

    Args:
        files: see :func:`functions`.
    """
    for name, sentence, _ in functions(files):
        backwards = " ".join(reversed(sentence.split()))
        yield {"prompt": f"What does {name} do?", "chosen": sentence, "rejected": backwards}


KINDS = {tokenize.OP: "sign", tokenize.NUMBER: "number", tokenize.STRING: "text"}


def labeled_words(files: int = 12) -> Iterator[dict[str, list[str]]]:
    """Yield rows of the format ``labeled_words``: the code of a function, and what each of its words is.

    Args:
        files: see :func:`functions`.
    """
    for _, _, code in functions(files):
        whole = code[: code.rfind("\n")] if len(code) == MOST else code  # not cut within a line
        try:
            found = [one for one in tokenize.generate_tokens(io.StringIO(whole).readline) if one.string.strip()]
        except (tokenize.TokenError, IndentationError):  # cut within a bracket
            continue
        named = [("keyword" if keyword.iskeyword(one.string) else "name") if one.type == tokenize.NAME else KINDS.get(one.type)
                 for one in found]  # fmt: skip
        if all(named):
            yield {"words": [one.string for one in found], "labels": [str(one) for one in named]}
