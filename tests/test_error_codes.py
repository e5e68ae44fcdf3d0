"""Every refusal has a code of the catalogue, which stays with it through workers, prefixes and the command line."""

import ast
import copy
import json
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshwright import errors
from meshwright.cli.problems import show_problems
from meshwright.error_areas import AREAS
from meshwright.error_codes import CODES, page
from meshwright.errors import OTHER, ConfigError, LayoutError, MeshwrightError, Refusal, WorkerError, coded
from meshwright.layout import Layout, ModelSizes
from meshwright.plan.given.names import without_repetition
from meshwright.ranks.pool import Pool
from meshwright.train.config import load_config
from tests.train.test_config import file as file  # a fixture

ROOT = Path(__file__).parents[1]
FILES = [*(ROOT / "src" / "meshwright").rglob("*.py"), *(ROOT / "maintain").glob("*.py")]
KINDS = {name: getattr(errors, name) for name in errors.__all__ if isinstance(getattr(errors, name), type)}
ERRORS = {name for name, kind in KINDS.items() if issubclass(kind, MeshwrightError)}
CODE = re.compile(rf"({'|'.join(AREAS)})(\.[a-z_]+)+")
SEVERAL = LayoutError([Refusal("tp.heads", "a"), Refusal("pp.cut", "b")])


def constants(node: ast.AST) -> set[str]:
    return {item.value for item in ast.walk(node) if isinstance(item, ast.Constant) and isinstance(item.value, str)}


def calls(names: set[str]) -> Iterator[tuple[str, ast.Call]]:
    """The calls of these functions or methods in the code, each with its place."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
                if name in names:
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_the_page_is_that_of_the_catalogue() -> None:
    assert (ROOT / "docs" / "errors.md").read_text() == page()
    assert {code.partition(".")[0] for code in CODES} == AREAS.keys()
    assert all(text.endswith(".") and "|" not in text for texts in CODES.values() for text in texts)


def test_each_code_of_the_catalogue_is_used() -> None:
    used = set().union(*(constants(ast.parse(path.read_text())) for path in FILES if path.name != "error_codes.py"))
    assert CODES.keys() - used == set()


def test_each_code_that_is_used_is_in_the_catalogue() -> None:
    found: set[str] = set()
    for _, call in calls({"Refusal", "add", "coded", "_report", *ERRORS}):
        found |= {item.value for item in call.args if isinstance(item, ast.Constant) and CODE.fullmatch(str(item.value))}
    assert len(found) > 200
    assert found - CODES.keys() == set()


def test_each_error_that_is_raised_has_a_code() -> None:
    """Two arguments are a code and a message. One is a refusal or a list of them, which mypy checks, and never a string."""
    strings = (ast.JoinedStr, ast.Constant, ast.BinOp)
    without = [place for place, call in calls(ERRORS) if len(call.args) == 1 and isinstance(call.args[0], strings)]
    assert without == []
    assert len([call for _, call in calls(ERRORS) if len(call.args) == 2]) > 200


@pytest.mark.parametrize("error", [ConfigError("cli.part", "x" * 10_000), SEVERAL])
def test_a_code_stays_in_pickles_copies_and_longer_messages(error: MeshwrightError) -> None:
    for other in (error, pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert (other.problems, other.codes) == (error.problems, error.codes)
    assert error.problems[0].code == error.codes[0] != OTHER
    around = error.problems[-1].within("rank 1: ", "; leave it out")
    assert around == f"rank 1: {error.problems[-1]}; leave it out"
    assert around.code == error.codes[-1]
    assert json.dumps(around) == json.dumps(str(around))


def test_a_message_without_a_code_is_legal_for_code_of_users() -> None:
    error = ConfigError("mine")  # type: ignore[call-overload]
    assert (str(error), error.codes) == ("mine", (OTHER,))
    assert coded("text", "pp.cut").code == "pp.cut"
    assert coded(Refusal("cp.mask", "text"), "pp.cut").code == "cp.mask"


def test_lines_that_are_alike_keep_their_code() -> None:
    (line,) = without_repetition([Refusal("cp.mask", "'layers.0' no"), Refusal("cp.mask", "'layers.1' no")])
    assert (line, line.code) == ("'layers.0' no (and 1 more like it)", "cp.mask")


def test_all_problems_of_a_layout_have_their_own_codes() -> None:
    with pytest.raises(LayoutError) as caught:
        Layout(pp=8, tp=3, ep=2).resolve(48, ModelSizes(layers=4, heads=8, experts=0))
    assert set(caught.value.codes) >= {"tp.heads", "pp.layers", "ep.dense"}


def test_problems_of_a_configuration_have_codes(file: Path) -> None:
    for overrides, codes in (
        (["optimizer.rate=1", "training.steps=x", "nonsense"], {"config.unknown_key", "config.type", "config.override"}),
        (["data.hub_config=x"], {"data.source"}),
        (["schedule.warmup_steps=1000"], {"config.warmup"}),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(file, overrides)
        assert set(caught.value.codes) == codes


def fail(_: object, kind: str) -> None:
    if kind == "refusal":
        raise LayoutError("tp.heads", "tp=3: 8 heads")
    raise RuntimeError({"dtypes": "expected m1 and m2 to have the same dtype, but got: float != double"}.get(kind, kind))


def test_workers_keep_codes_and_give_one_to_what_others_raise() -> None:
    with Pool(1) as pool:
        for kind, error, code in (
            ("refusal", LayoutError, "tp.heads"),
            ("dtypes", WorkerError, "worker.dtypes"),
            ("value cannot be converted to type float without overflow", WorkerError, "worker.overflow"),
            ("anything", WorkerError, "worker.exception"),
        ):
            with pytest.raises(error) as caught:
                pool.run(fail, kind)
            assert caught.value.codes == (code,)


def test_the_command_line_shows_the_code(capsys: pytest.CaptureFixture[str]) -> None:
    show_problems([Refusal("tp.heads", "tp=3: no\n  really"), Refusal(OTHER, "mine")])
    assert capsys.readouterr().err == "error: tp=3: no\n  really [tp.heads]\nerror: mine\n"
    show_problems([Refusal("run.stopped", "ended")], kind="")
    assert capsys.readouterr().err == "ended\n"
