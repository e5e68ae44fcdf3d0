"""Names of torch that are no part of its documentation: all that are used are looked up as a process starts."""

import ast
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from meshwright.distributed import _torch_compat
from meshwright.distributed._torch_compat import private_names as tables
from meshwright.distributed._torch_compat import process_groups
from meshwright.errors import UnsupportedError
from meshwright.models import _transformers_compat

ROOM = Path(_torch_compat.__file__).parent
FILES = sorted(file for file in ROOM.glob("*.py") if file.stem not in ("__init__", "private_names"))

OURS = {
    "_meshwright", "_meshwright_course", "at_end", "data_group", "fresh", "ran", "runs", "say", "single", "splits", "stays",
    "tell", "used", "BACKWARD", "FORWARD", "REDUCTION",
    "_operators", "_results", "run",
    "_frozen", "_kinds", "_made", "_without_values", "_wrap", "again", "base", "of", "offset", "size",
}  # fmt: skip
"""Attributes of Meshwright's own classes, or put on those of torch."""

DOCUMENTED = {
    "Module", "OpOverload", "Parameter", "PrefixStore", "ProcessGroup", "ProcessGroupGloo", "ScriptObject", "Store", "Tensor",
    "Variable", "__init__", "__version__", "_C", "_ops", "all_gather_into_tensor", "autograd", "data", "detach",
    "device", "dim", "get_group", "get_process_group_ranks", "get_world_size", "grad",
    "is_gloo_available", "is_grad_enabled",
    "is_initialized", "mesh", "ndim", "placements", "queue_callback", "reduce_scatter_tensor", "register_forward_hook",
    "register_forward_pre_hook", "remove", "requires_grad", "get_rank", "group_name",
    "get_device_module", "memory",
    "flatten", "get_coordinate",
    "empty_like", "from_local", "step", "new_group", "numel", "to_local", "untyped_storage", "zeros_like", "tags",
    "Size", "Tag", "data_dependent_output", "dynamic_output_shape", "empty", "empty_strided", "is_complex", "is_meta", "layout",
    "namespace", "nbytes", "set_", "shape", "storage_offset", "stride", "strided",
    "GraphModule", "args", "fx", "graph", "meta", "nodes", "op",
}  # fmt: skip
"""Public names of torch, and the ways to modules that hold private ones."""

PYTHON = {
    "append",
    "signature",
    "setdefault",
    "tolist",
    "clear",
    "environ",
    "get",
    "items",
    "loads",
    "partition",
    "split",
    "values",
    "any",
    "get_native_id",
    "glob",
    "monotonic",
    "name",
    "read_text",
    "register",
    "rpartition",
    "sleep",
}

OPTIONAL = {
    "paused": "of modes of our own",
    "propagate_op_sharding_non_cached": "a method of DTensor that has no underscore, which a trace alone needs",
    "patch": "of torch._functorch.config, which torchao's compiled steps need",
    "set_timeout": "torch 2.14 and later; before it there is a private one",
    "_fsdp_param_groups": "torch 2.13 and later; before it there is one group",
    "options": "of a backend: read where the backend is one of gloo or NCCL",
    "parameters": "of a stage's module",
    "modules": "of a stage's module",
    "_is_view": "a method of every tensor",
    "contiguous": "a method of every tensor",
    "_autograd_grad_for_inputs": "of pipelining; a torch without it is refused where backward is split",
    "stage_backward": "of pipelining, which is looked up as it is used",
    "stage_backward_input": "of pipelining, which is looked up as it is used",
    "stage_backward_weight": "of pipelining, which is looked up as it is used",
    "backward_maybe_with_nosync": "of pipelining, which is looked up as it is used",
    "submod": "of pipelining, which is looked up as it is used",
    "schedules": "of pipelining, which is looked up as it is used",
    "_initialize_stage": "of pipelining, which is looked up as it is used",
    "_initialize_stages": "of pipelining, which is looked up as it is used",
    "_step_microbatches": "of pipelining, which is looked up as it is used",
    "_schema": "a higher-order operator has none",
    **dict.fromkeys(("arguments", "returns", "type", "alias_info", "is_write"), "of an operator's schema"),
    "_world": "of the flight recorder's report, which does without",
    "pg_names": "of the flight recorder's report, which does without",
    "pg_group_ranks": "of the flight recorder's report, which does without",
    "_distributed_c10d": "of the flight recorder's report, which does without",
    "reset_iter_state": "torch 2.13; before it the fields are cleared one by one",
    "synchronize": "of an event",
    "event": "of a collective under way",
    "all_gather_single": "torch 2.13; before it the name is another",
    "reduce_scatter_single": "torch 2.13; before it the name is another",
    **dict.fromkeys(
        (
            "aten",
            "ops",
            "_grouped_mm",
            "_local_scalar_dense",
            "default",
            "dispatch",
            "to",
            "dtype",
            "bool",
            "bfloat16",
            "_clear_sharding_prop_cache",
        ),
        "of traces, which nothing else needs",
    ),
    "_meshwright": "ours",
    "_meshwright_course": "ours",
}
"""Names that may be missing, and why."""


def used(file: Path) -> set[str]:
    """Every attribute that a file reads or sets, by a dot or by its name in a string."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        asks = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr")
        if asks and isinstance(node.args[1], ast.Constant):
            found.add(node.args[1].value)
    return found


def looked_up() -> set[str]:
    named = [
        *tables.NAMES.values(),
        *tables.INSTANCE_ATTRIBUTES.values(),
        [part for path in tables.GLOO for part in path.split(".")],
    ]
    return {name for names in named for name in names}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_name_that_is_used_is_looked_up_at_start_up(file: Path) -> None:
    assert used(file) - OURS - DOCUMENTED - PYTHON - OPTIONAL.keys() - looked_up() == set()


def test_private_modules_are_imported_as_the_package_is() -> None:
    """Within a function they would be missed first in the middle of a run. Pipelines alone look theirs up as they are used."""
    late = [
        (file.stem, node.module)
        for file in FILES
        for function in ast.walk(ast.parse(file.read_text()))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.ImportFrom)
    ]
    assert {stem for stem, _ in late} <= {"pipelines"}


def test_every_name_that_is_looked_up_is_used() -> None:
    everywhere = set().union(*map(used, FILES))
    rest = [file.read_text() for file in ROOM.parent.rglob("*.py")]  # public methods of units, which other files call
    assert {name for name in looked_up() - everywhere if not any(f".{name}" in text for text in rest)} == set()


def test_this_torch_has_them() -> None:
    _torch_compat.check()


@pytest.mark.parametrize(
    ("owner", "name", "table"),
    [(FSDPParamGroup, "post_backward", "NAMES"), (FSDPParam, "_unsharded_param", "INSTANCE_ATTRIBUTES")],
    ids=["a method", "an attribute that a method sets"],
)
def test_a_name_that_moved_is_refused_by_name(owner: type, name: str, table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = getattr(tables, table)
    assert name in known[owner]
    monkeypatch.setitem(known, owner, (*known[owner], f"{name}_as_it_is_called_now"))
    with pytest.raises(UnsupportedError, match=f"{owner.__name__} have? no|{owner.__name__} has no") as error:
        _torch_compat.check()
    assert f"{name}_as_it_is_called_now" in str(error.value)


def test_a_torch_or_transformers_newer_than_the_tested_ones_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (_torch_compat.untested(), _transformers_compat.untested()) == ("", "")
    monkeypatch.setattr(torch, "__version__", "2.99.0+cu130")
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.99.1")
    assert _torch_compat.untested() == "torch 2.99.0+cu130: Meshwright's tests have run with 2.14 at the newest"
    assert _transformers_compat.untested() == "transformers 5.99.1: Meshwright's tests have run with 5.23 at the newest"


def test_a_torch_whose_halves_of_backward_are_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.pipelining import _backward

    from meshwright.distributed._torch_compat.pipelines import make_schedule
    from meshwright.plan.given.closed_choices import PipelineSchedule

    monkeypatch.delattr(_backward, "_autograd_grad_for_inputs", raising=False)
    for schedule in filter(lambda schedule: schedule.splits, PipelineSchedule):
        with pytest.raises(
            UnsupportedError, match=r"legal schedules are gpipe, 1f1b and interleaved_1f1b, or take torch 2\.13"
        ):
            make_schedule(schedule, [], 4)


class _Silent:
    """A group whose backend, not one of torch's, tells no options, as from torch 2.14 on."""

    _device_types = ("somewhere",)

    def _get_backend(self, device: str) -> Any:
        return self

    @property
    def options(self) -> Any:
        raise RuntimeError("Backend other does not implement getBackendOptions.")


def test_a_backend_that_tells_no_options_has_no_timeout() -> None:
    assert process_groups._timeout_of(_Silent()) is None  # type: ignore[arg-type]


def test_modes_look_away_where_shapes_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 makes tensors of the whole shape for it, which are no memory and no work of a step."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    from meshwright.distributed._torch_compat.fake import without_propagation
    from meshwright.trace.live import LiveBytes
    from meshwright.trace.work import WorkCounter

    live, work = LiveBytes(torch.nn.Linear(2, 2)), WorkCounter()
    made: list[torch.Tensor] = []
    looks = "propagate_op_sharding_non_cached"
    monkeypatch.setattr(ShardingPropagator, looks, lambda propagator, schema: made.append(torch.ones(8, 8) + 1))
    work.begin("step")
    before = live.held
    with live, work, without_propagation(live, work):
        ShardingPropagator.propagate_op_sharding_non_cached(None, None)  # type: ignore[arg-type]
        assert (live.held, work.moments["step"].total()) == (before, 0)
        made.append(torch.ones(8, 8) + 1)
    assert live.held > before
    assert work.moments["step"].total() > 0
