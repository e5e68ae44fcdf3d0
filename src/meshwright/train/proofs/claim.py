"""The claim of a run, which is what an audit proves: family x axes x choices x versions x code.

A family declares how it is parallelized; that is a claim. An audit proves it for one model, set of axes and set of options, and
for no others. A :class:`Claim` holds what decides whether a proof applies to a run, and leaves out the rest:

- **The model**: its class, the strategy that parallelizes it, its config and its parameters. Of the config, these count: flags,
  words (activation, kinds of layers, type of rotary embedding), and of each number whether it is there and whether it is 0.
  Sizes, names, token ids, dtypes and dropout do not count. Of the parameters, these count: names without the numbers of layers,
  numbers of dimensions, the classes that hold them, ties, and whether there are as many key/value heads as heads, fewer, or
  one. Code outside of torch, transformers and Meshwright counts by its text: the files of the model's classes, of the
  strategy, and of the modules that `imports` names.
- **The axes** that are above 1. Their sizes do not count.
- **The choices** that change what is computed, sent or kept, as the plan has resolved them: `sync: null` counts as the policies
  that the plan chose for it. Dtypes do not count: a record says which arithmetic was audited.
- **The versions** of torch and transformers.
- **The code** of Meshwright that carries the plan out, see :mod:`~meshwright.train.proofs.own_code`. A record of an
  earlier version is found, and proves nothing.
"""

import hashlib
import inspect
import json
import re
import sys
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from meshwright.data.rows.columns import ROUTED_EXPERTS
from meshwright.layout import AXES, Layout
from meshwright.models.specs.registry import get_parallelization_strategy
from meshwright.plan.given.inspection import model_sizes
from meshwright.plan.given.names import generalize, holder_of
from meshwright.plan.given.spec import ParallelSpec
from meshwright.plan.result.sharding_plan import ParameterRow, ShardingPlan
from meshwright.train.callbacks.make_callbacks import OWN
from meshwright.train.proofs.own_code import code_digest
from meshwright.train.start.setup import RunSetup

__all__ = ["Claim", "axes_above_1", "claim_of", "model_digest", "versions"]

_NOT_STRUCTURAL = (
    r"^_|token_(id|ids|index)$|vocab|dtype|version|^architectures$|label|dropout|pdrop|drop_path|layerdrop|jitter|initializer|"
    r"^use_cache$|^return_dict|^output_|^problem_type$|^head_dim$|position_embeddings$|_implementation$|^auto_map$|^keys_to_ignore"
)
"""Pattern of config keys that say nothing about how a model computes, or only how large it is."""

_KNOWN_CODE = ("torch.", "transformers.", "meshwright.")


@dataclass(frozen=True)
class Claim:
    """What an audit has to prove, or has proven.

    Attributes:
        family: name of the model's class, for display.
        model: digest of the model's structure.
        axes: names of the mesh axes whose size is above 1.
        choices: name to value; each value is a word or a digest.
        accumulates: whether an optimizer step has several microbatches.
        versions: library to version.
        code: digest of the files of Meshwright that carry the plan out.
        concerns, strategy: what these files are (:func:`~meshwright.train.proofs.own_code.files_that_count`).
    """

    family: str
    model: str
    axes: tuple[str, ...]
    choices: Mapping[str, str]
    accumulates: bool
    versions: Mapping[str, str]
    code: str
    concerns: tuple[str, ...] = ()
    strategy: str = ""

    @property
    def key(self) -> str:
        """The digest by which records of this claim are found, also those of other code."""
        return _digest({**asdict(replace(self, concerns=(), strategy="")), "code": ""})

    @property
    def with_several_microbatches(self) -> "Claim":
        """The same claim with gradient accumulation. Its proof covers a single microbatch too: that is the last of several."""
        return replace(self, accumulates=True)


def claim_of(setup: RunSetup) -> Claim:
    """Return the claim that a run relies on."""
    plan, moe = setup.plan, setup.config.moe
    balance = [name for name, value in (("loss", moe.aux_loss), ("bias", moe.bias_update_rate)) if value]
    choices = {**_choices(plan), "balance": "+".join(balance) or "none", "objective": objective_digest(setup)}
    if theirs := [part for part in setup.config.callbacks if part.use not in OWN]:
        code = _foreign_code(sorted({part.use.partition(":")[0] for part in theirs if ":" in part.use}))
        choices["callbacks"] = _digest([[[part.use, part.arguments] for part in theirs], code])
    if ROUTED_EXPERTS in setup.config.data.values:
        choices["routing"] = "given"
    axes, strategy = axes_above_1(plan.layout), type(get_parallelization_strategy(setup.model)).__module__
    has = {"experts": bool(setup.spec.experts), "adapter": setup.config.adapter is not None}
    concerns = (*axes, *(name for name, there in has.items() if there))
    return Claim(
        family=plan.family,
        model=model_digest(setup.spec, setup.model, setup.config.imports),
        axes=axes,
        choices=choices,
        accumulates=plan.options.microbatches > 1,
        versions=versions(),
        code=code_digest(concerns, strategy),
        concerns=concerns,
        strategy=strategy,
    )


def objective_digest(setup: RunSetup) -> str:
    """Return what an objective is: its class; of one of the user's its name, its arguments and a digest of its code."""
    kind, part = getattr(setup.objective, "kind", type(setup.objective)), setup.config.training.objective
    if f"{kind.__module__}.".startswith("meshwright."):
        return kind.__name__
    arguments = {} if part is None else part.arguments
    return f"{kind.__module__}:{kind.__qualname__} {_digest([arguments, _foreign_code([kind.__module__])])}"


def axes_above_1(layout: Layout) -> tuple[str, ...]:
    """The names of the mesh axes above 1, and with expert parallelism also those of the experts' axes."""
    experts = {"ep_shard": layout.ep_shard, "ep": layout.ep} if layout.ep > 1 else {}
    sizes = {**{axis: layout.size(axis) for axis in AXES}, **experts}
    return tuple(axis for axis, size in sizes.items() if size > 1)


def versions() -> dict[str, str]:
    """The versions of torch and transformers, without the build (``+cpu``)."""
    import torch
    import transformers

    installed = {"torch": torch.__version__, "transformers": transformers.__version__}
    return {name: str(version).partition("+")[0] for name, version in installed.items()}


def _choices(plan: ShardingPlan) -> dict[str, str]:
    options = plan.options
    # Units of kind fp32 are left out: they exist only if the rest computes in 16 bits, and an audit may use another dtype.
    units = [unit for unit in plan.units if unit.kind != "fp32"]
    policies: dict[str, set[str]] = {}
    for unit in units:
        policies.setdefault(unit.kind, set()).add(str(unit.sync))
    every = set().union(*policies.values())
    by_kind = ", ".join(f"{kind}: {'+'.join(sorted(chosen))}" for kind, chosen in sorted(policies.items()))
    modes = {str(unit.activation_checkpointing) for unit in units if unit.kind == "layer"}
    ahead = (options.prefetch_forward, options.prefetch_backward)
    frozen = {(generalize(row.name), row.trainable) for row in plan.parameters}
    decayed = {(generalize(row.name), row.decayed) for row in plan.parameters}
    moved = {
        (generalize(row.module), row.style, str(row.entry), str(row.exit), *map(generalize, row.sums))
        for row in plan.tensor_parallel
    }
    shapes = {(generalize(u.name), u.kind, u.forwards, generalize(u.twin_of), generalize(u.part_of)) for u in units}
    return {
        "sync": every.pop() if len(every) == 1 else by_kind,
        "all_reduce_once": str(options.all_reduce_once),
        "reshard_after_forward": str(options.reshard_after_forward),
        "prefetch": ", ".join("own" if number is None else "n" if number else "0" for number in ahead),
        "cpu_offload": str(options.cpu_offload),
        "recomputed": "+".join(sorted(modes)) or "none",
        "kept": ", ".join(sorted(options.activation_checkpointing_save)),
        "compile": options.compile_backend if options.compile else "no",
        "gradient_reduction": str(options.gradient_reduction),
        "sequence_parallel": str(options.sequence_parallel),
        "decayed": "matrices" if not options.decay and not options.no_decay else _digest(sorted(decayed)),
        **(
            {"groups": _digest(sorted({(generalize(row.name), *_updated(row)) for row in plan.parameters}))}
            if options.groups
            else {}
        ),
        "frozen": "none" if all(trainable for _, trainable in frozen) else _digest(sorted(frozen)),
        "tensor_parallel": _digest(sorted(moved)) if moved else "none",
        "units": _digest(sorted(shapes)),
        "loss": "whole" if plan.loss is None else "in chunks",
        **({"context_parallel": _attention(plan)} if plan.attentions else {}),
        **({"mixers": _mixers(plan)} if plan.mixers else {}),
        **({"pipeline": _pipeline(plan)} if plan.stages else {}),
    }


def _updated(row: ParameterRow) -> tuple[float | str, ...]:
    """Return what a group changes of the update. An audit may raise eps, so that its value counts as little as others do."""
    return (row.rate, *(name for name in ("betas", "eps") if getattr(row, name) is not None))


def _pipeline(plan: ShardingPlan) -> str:
    several = len(plan.stages) > plan.layout.size("pp")
    runs = ", several runs" if plan.options.runs_per_step > 1 else ""
    return f"{plan.options.pipeline_schedule}{', several stages a rank' if several else ''}{runs}"


def _attention(plan: ShardingPlan) -> str:
    rows = {
        (row.method, row.kernel, row.causal, row.window is None, row.sinks, row.recompute)
        + ((row.carried, row.calls) if row.carried or row.calls > 1 else ())  # of all others it is as it was
        for row in plan.attentions
    }
    balance = f"{plan.options.context_balance}, " if plan.layout.size("cp") > 1 else ""
    return balance + _digest(sorted(map(str, rows)))


def _mixers(plan: ShardingPlan) -> str:
    """Return how ranks share mixers: what opens and closes them, where several ranks need the same, and the tokens before."""
    cp = plan.layout.size("cp")
    rows = set()
    for row in plan.mixers:
        openings = [(name, [copies == cp for _, copies in pieces]) for name, pieces in row.openings]
        parts = [(name, dim) for name, dim, _ in row.slices]
        more = [(row.before, [(name, tokens) for name, tokens, *_ in row.shifts], row.positions)]
        more = more if row.gathered_before or row.positions else []  # of all others it is as it was
        rows.add(str((openings, row.after, row.paths, row.closing, parts, [name for name, _ in row.values], *more)))
    return f"{plan.options.context_balance}, {_digest(sorted(rows))}"


# -- the model ----------------------------------------------------------------------------------------------------------------


def model_digest(spec: ParallelSpec, model: nn.Module, imports: Iterable[str] = (), *, with_heads: bool = True) -> str:
    """Digest of the structure of a model, which does not depend on its sizes, and of the strategy that parallelizes it.

    Args:
        spec: the spec of the model.
        model: on any device.
        imports: names of further modules that the run imports, which may change what is computed.
        with_heads: whether the digest depends on whether there are as many key/value heads as heads, fewer, or one.
    """
    strategy = type(get_parallelization_strategy(model))
    code = {kind.__module__ for kind in (*map(type, model.modules()), *strategy.__mro__)}
    sizes = model_sizes(spec, model)
    heads = "unknown"
    if with_heads and sizes.heads and sizes.kv_heads:
        heads = "all" if sizes.heads == sizes.kv_heads else "one" if sizes.kv_heads == 1 else "some"
    config = getattr(model, "config", None)
    holders = {name: type(module).__name__ for name, module in model.named_modules()}
    parameters = {
        (generalize(name), parameter.ndim, holders[holder_of(name)])
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    return _digest(
        {
            "class": type(model).__name__,
            "config": _structure(config.to_dict()) if config is not None else None,
            "parameters": sorted(parameters),
            "tied": sorted({tuple(map(generalize, group)) for group in spec.tied}),
            "key_value_heads": heads,
            "strategy": _name_of(strategy),
            "code": _foreign_code({*code, *imports}),
        }
    )


def _name_of(strategy: type) -> str:
    """Return the name of a strategy. Where a strategy of Meshwright stands in the package does not count."""
    own = f"{strategy.__module__}.".startswith("meshwright.")
    return strategy.__qualname__ if own else f"{strategy.__module__}.{strategy.__qualname__}"


def _structure(value: Any) -> Any:
    """Return a value of a config without what is only a size."""
    if isinstance(value, Mapping):
        structure: dict[str, Any] = {}
        for key, item in value.items():
            if not re.search(_NOT_STRUCTURAL, str(key)):
                structure.setdefault(re.sub(r"\d+", "*", str(key)), _structure(item))
        return structure
    if isinstance(value, (list, tuple, set)):  # which kinds of items it has; integers in it are sizes, 0 too
        value = [1 if type(item) is int else item for item in value]
        return sorted({json.dumps(_structure(item), sort_keys=True) for item in value})
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return "a number" if value else 0
    return value if isinstance(value, (str, bool, type(None))) else str(type(value))


def _foreign_code(modules: Iterable[str]) -> list[str]:
    """Digests of the files of modules that belong to no library whose version counts."""
    code = []
    for name in sorted(modules):
        module = sys.modules.get(name)
        standard = name.partition(".")[0] in sys.stdlib_module_names
        if module is None or standard or f"{name}.".startswith(_KNOWN_CODE):
            continue
        try:
            code.append(hashlib.sha256(Path(inspect.getfile(module)).read_bytes()).hexdigest()[:16])
        except (OSError, TypeError):  # the module has no file, as that of a notebook
            code.append(f"{_PROCESS} {_digest(_sources(module))}")
    return code


_PROCESS = uuid.uuid4().hex
"""What has no file may be anything in another process."""


def _sources(module: ModuleType) -> list[str]:
    """Return the source of what a module defines, as far as it is known."""
    own = [one for one in vars(module).values() if inspect.isclass(one) or inspect.isfunction(one)]
    found = []
    for one in own:
        if one.__module__ == module.__name__:
            with suppress(OSError, TypeError):
                found.append(inspect.getsource(one))
    return found


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:20]
