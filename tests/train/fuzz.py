"""Configurations that nobody would write: those of some tiny runs, with values of every kind in places of every kind.

``python -m tests.train.fuzz 3000`` tries so many and counts how they ended; the test tries fewer. A configuration is a
function of its number alone.
"""

import datetime
import random
import re
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import yaml
from rich.console import Console

from maintain.tiny import TINY_MODELS
from meshwright.errors import MeshwrightError
from meshwright.plan.result.sharding_plan import ShardingPlan
from meshwright.plan.show.explain import explain
from meshwright.train.config import RunConfig, load_config
from meshwright.train.start.processes import planned_processes
from meshwright.train.start.setup import make_setup
from tests.train.runs import LLAMA

SECONDS = 60
"""After which a plan of a tiny model counts as hanging."""

MODELS = [LLAMA, *({"model_type": name, **tiny.config} for name, tiny in TINY_MODELS.items() if name != "gemma4_moe")]
NUMBERS = (0, 1, 2, 3, 4, 8, 64, -1, -2, 1000, 10**6, 10**9, 2**31, 2**63, 10**18, 10**30)
FLOATS = (0.0, -0.0, 0.5, 1.0, 1.5, -0.5, 1e-30, 1e30, 1e308, float("nan"), float("inf"), float("-inf"))
TEXTS = (
    "", " ", "a", "5", "null", "true", "auto", "none", "full", "defer", "float16", "model.layers.*", "**", "*", "[", "(",
    "%s", "{}", "a" * 10_000, "a b " * 3000, "a/" * 3000, "\0", "~nobody-there/x", "~", "/", ".", "..", "../x", "path/to/model",
    "a/b", "a//b", "/dev/null", "\ud800", "é", "\n", "t5", "bert", "llava", "gpt2", "os.path", "os.path.join", "math:pi",
    "aten.mm.default",
)  # fmt: skip
LISTS = ([], [1], ["a"], [[]], [None], [{}], [0.9, 0.9], [0, 1, 2], ["**"] * 1000, ["full_attention"], ["moe", "mlp"])
DICTS = (
    {}, {"a": 1}, {"*": "defer"}, {"**": "full"}, {1: 2}, {None: None}, {"a": {"b": []}}, {"model.layers.*": "reduce_each"},
    {"model.layers.*": "colwise"}, {"model.layers.*.mlp.up_proj": "rowwise"}, {"model_type": "llama"}, {"rope_type": "yarn"},
)  # fmt: skip
OTHERS = (None, None, None, datetime.date(2020, 1, 1), datetime.datetime(2020, 1, 1), b"\x00\xff", {"set"})


def value(draw: random.Random, kinds: str) -> Any:
    """Something: of a kind that is named, twice in three times, so that the checks behind that of the kind are met too."""
    fitting = [pool for name, pool in POOLS.items() if name in kinds]
    return draw.choice(draw.choice(fitting if fitting and draw.random() < 0.66 else list(POOLS.values())))


POOLS: dict[str, tuple[Any, ...]] = {
    "int": NUMBERS,
    "float": FLOATS,
    "str": TEXTS,
    "bool": (True, False),
    "list": LISTS,
    "dict": DICTS,
    "other": OTHERS,
}


def places() -> dict[tuple[str, ...], str]:
    """Every key of the schema, and the sections themselves, with the words of their types."""
    found: dict[tuple[str, ...], str] = {}
    for name, field in RunConfig.model_fields.items():
        found[(name,)] = str(field.annotation)
        kind = next((item for item in (field.annotation, *get_args(field.annotation)) if hasattr(item, "model_fields")), None)
        found |= {(name, key): str(item.annotation) for key, item in getattr(kind, "model_fields", {}).items()}
    return found


PLACES = places()


def content(number: int) -> tuple[dict[str, Any], int | None]:
    """A configuration, and the number of ranks to plan it for."""
    draw = random.Random(number)
    model = dict(draw.choice(MODELS))
    axis = draw.choice(("tp", "ep", "dp_replicate", "dp_shard", "pp", "cp"))
    made: dict[str, Any] = {
        "output": "runs/fuzz",
        "model": {"config": model},
        "layout": {axis: draw.choice((1, 2))},
        "parallel": {"param_dtype": "float32"},
        "data": {"corpus": "python-stdlib", "sequence_length": 32, "packing": "pad"},
        "tokenizer": {"vocab_size": 300},
        "training": {"steps": 6, "global_batch_size": 16, "microbatch_size": draw.choice((1, 2))},
    }
    for _ in range(draw.choice((0, 1, 1, 1, 2, 2, 3))):
        if draw.random() < 0.4:
            keys: tuple[str, ...] = ("model", "config", draw.choice([*model, "text_config", "vision_config", "layer_types"]))
            inner = model.get(keys[-1])
            if isinstance(inner, dict) and draw.random() < 0.7:
                keys = (*keys, draw.choice([*inner, "rope_parameters"]))
                inner = inner.get(keys[-1])
            kinds = type(inner).__name__
        else:
            keys = draw.choice(list(PLACES))
            kinds = PLACES[keys]
        if draw.random() < 0.03:
            keys = (*keys[:-1], draw.choice(("unknown", keys[-1] + "s", "")))
        at: Any = made
        for key in keys[:-1]:
            inner = at.get(key)
            at[key] = dict(inner) if isinstance(inner, dict) else {}
            at = at[key]
        legal = re.findall(r"'(\w+)'", kinds) if "Literal" in kinds else []
        at[keys[-1]] = draw.choice(legal) if legal and draw.random() < 0.5 else value(draw, kinds)
    return made, draw.choice((None, 2, 2, 2, 4, 4, 8, 6, 1, 1000))


class Hang(BaseException):
    """No Exception: what turns those of others into typed errors must not take it for one."""


@contextmanager
def alarm(seconds: int) -> Iterator[None]:
    """Inside, what takes longer fails with a Hang."""

    def ring(*_: object) -> None:
        raise Hang(f"no end after {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def attempt(number: int, folder: Path) -> str:
    """Load and plan a configuration; how that ended: ``planned``, or the type of the error.

    Raises:
        Exception: what no configuration may raise.
    """
    made, ranks = content(number)
    file = folder / "run.yaml"
    text = yaml.dump(made, allow_unicode=False)
    file.write_text(text)
    try:
        with alarm(SECONDS):
            config = load_config(file)
            config.data.problems()
            plan = make_setup(config, ranks or planned_processes(config)).plan
            again = ShardingPlan.from_json(plan.to_json())
            with open("/dev/null", "w") as nowhere:
                Console(file=nowhere, width=160).print(explain(again))
    except MeshwrightError as error:
        for problem in error.problems:
            assert problem.strip(), "an error that says nothing"
            assert len(problem) < 20_000, f"a message of {len(problem)} characters: {problem[:200]}"
            assert "a" * 1000 not in problem
        return type(error).__name__
    return "planned"


def run(numbers: range) -> tuple[Counter[str], dict[int, str]]:
    """Try configurations; how many ended how, and the tracebacks of those that ended as none may."""
    ends: Counter[str] = Counter()
    failures: dict[int, str] = {}
    with TemporaryDirectory() as folder:
        for number in numbers:
            try:
                ends[attempt(number, Path(folder))] += 1
            except (Exception, Hang):
                failures[number] = traceback.format_exc()
                print(f"{number}: {failures[number].splitlines()[-1]}", flush=True)
    return ends, failures


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 3000
    first = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    ended, failed = run(range(first, first + count))
    print("\n".join(f"{number:6}  {kind}" for kind, number in ended.most_common()))
    print(f"{len(failed):6}  that no configuration may raise", *([f"\n{next(iter(failed.values()))}"] if failed else []))
    sys.exit(1 if failed else 0)
