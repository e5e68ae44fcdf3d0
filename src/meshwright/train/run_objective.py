"""The objective of a run: that of its model's family with the options from the configuration, or one of the user's."""

import copy
import inspect
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from meshwright.data.rows.columns import MEMBER
from meshwright.distributed.class_names import class_name
from meshwright.errors import ConfigError, Problems, Refusal
from meshwright.models.added_modules import ADDED, module_problems, without_added
from meshwright.models.families.listed import FAMILIES, family_of
from meshwright.models.objective import PRECOMPUTED, Column, NextToken, Objective, RunFacts
from meshwright.objectives.distillation import IDS, LOG_PROBS
from meshwright.objectives.trying.invented import REFERENCE
from meshwright.train.config import RunConfig
from meshwright.train.schema.our_objectives import OURS
from meshwright.user_code import check_arguments, find_part, make_part

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["columns_of", "make_objective"]

WHERE = "training.objective"


def columns_of(config: RunConfig, objective: Objective | None = None) -> dict[str, Column]:
    """Return the columns of the data that batches have, with those that are computed once for an objective, or by a teacher."""
    columns = {name: Column(one.per, one.width, one.dtype) for name, one in config.data.values.items()}
    pairs = {MEMBER: Column("document", dtype="int64")} if config.data.pairs else {}
    once = {REFERENCE: Column("token")} if objective is not None and objective.reference == PRECOMPUTED else {}
    width = None if config.teacher is None else config.teacher.top_k
    said = {} if width is None else {IDS: Column("token", width, "int64"), LOG_PROBS: Column("token", width)}
    return columns | pairs | once | said


def make_objective(
    config: RunConfig, model: "PreTrainedModel", given: Any = None, more: Mapping[str, Column] = MappingProxyType({})
) -> Objective:
    """Return the objective of a run.

    Args:
        config: configuration of the run.
        model: the model, on any device.
        given: an objective, a class or a function in place of what the configuration names; ``None``: that.
        more: columns that batches have, beside those of the configuration.

    Raises:
        ConfigError: the configuration names an objective that the model is not made for, sets options of another objective, or
            has settings that this objective refuses.
        PartError: an objective of the user raises something when it is tried, or is none.
    """
    objective = _objective(config, model, given, more)
    if problems := _teacher_problems(config, objective):
        raise ConfigError(problems)
    return objective


def _teacher_problems(config: RunConfig, objective: Objective) -> Problems:
    """Return why a teacher is of no use to an objective."""
    problems = Problems()
    if config.teacher is None:
        return problems
    if doubled := [name for name in (IDS, LOG_PROBS) if name in config.data.tensors]:
        words = f"rows have a column {doubled[0]} (data.tensors), and a teacher says it anew; leave one of them out"
        problems.add("objective.teacher", f"teacher.path={config.teacher.path}: {words}")
    if not {IDS, LOG_PROBS} <= objective.reads:
        words = f"objective {objective.name} does not read {IDS} and {LOG_PROBS}, as distillation does; set teacher to null"
        problems.add("objective.teacher", f"teacher.path={config.teacher.path}: {words}")
    return problems


def _objective(config: RunConfig, model: "PreTrainedModel", given: Any, more: Mapping[str, Column]) -> Objective:
    kind, name, wanted = family_of(model).objective(), class_name(model), config.training.objective
    parallel = config.parallel
    run = RunFacts(
        seed=config.training.seed,
        sequence_length=config.data.sequence_length,
        packing=config.data.packing,
        output_dtype=parallel.output_dtype,
        compiled=parallel.compile,
        recomputed={parallel.activation_checkpointing, *parallel.activation_checkpointing_layers.values()},
        columns={**columns_of(config), **more},
        adapter=config.adapter is not None,
        begins_without=config.adapter is not None and config.adapter.path is None and not config.adapter.save_modules,
    )
    problems = Problems()
    if config.model.head is not None and given is None and (wanted is None or wanted.use == kind.name):
        problems.add(
            "config.objective",
            f"{WHERE}: {name} says labels (model.head), not the next token; set it to classification or reward, or to one of "
            "your own that calls given.logits",
        )
    own = {family.objective().name: family.objective() for family in FAMILIES}
    if given is not None:
        return _users(given, getattr(given, "__qualname__", type(given).__name__), {}, model, run, kind)
    if wanted is not None and wanted.use not in own:
        names, ours = sorted({kind.name, *own, *OURS}), OURS.get(wanted.use)
        path = ours.part(wanted.arguments) if ours else wanted.use
        return _users(find_part(WHERE, path, "objectives", names), wanted.use, wanted.arguments, model, run, kind)
    if wanted is not None and wanted.use != kind.name:
        problems.add(
            "config.objective", f"{WHERE}={wanted.use}: {name} is made for {kind.name}; legal are {kind.name} and null"
        )
    section = type(getattr(config, kind.section)) if kind.section else None
    options = getattr(config, kind.section) if kind.section else None
    if wanted is not None and wanted.arguments and not problems:
        if section is None:
            keys = ", ".join(wanted.arguments)
            problems.add("config.part.arguments", f"{WHERE}.with: {wanted.use} has no arguments; leave {keys} out")
        else:
            checked = check_arguments(WHERE, section, wanted.arguments)
            options = options.model_copy(update=checked)  # type: ignore[union-attr]
    for other in own.values():
        if other.section not in ("", kind.section):
            unused = getattr(config, other.section)
            problems += [
                Refusal(
                    "config.objective",
                    f"{other.section}.{key}={value!r}: applies only to {other.name.replace('_', ' ')}, but {name} is trained "
                    f"to {kind.purpose}; leave it out",
                )
                for key, value in unused
                if value != getattr(type(unused)(), key)
            ]
    problems += kind.problems(model, options, run)
    if problems:
        raise ConfigError(problems)
    return kind.of(model, options, run)


def _users(
    found: Any, name: str, arguments: Mapping[str, Any], model: "PreTrainedModel", run: RunFacts, kind: type[Objective]
) -> Objective:
    """Return an objective of the user's, which was tried."""
    from meshwright.objectives.call import calling
    from meshwright.objectives.function import FunctionObjective
    from meshwright.objectives.trying.trial import try_objective

    if kind is not NextToken:
        raise ConfigError(
            "config.objective",
            f"{WHERE}={name}: {class_name(model)} is made for {kind.name}, and is not called as a causal language model; "
            f"legal are {kind.name} and null",
        )
    if isinstance(found, Objective):
        objective: Objective = copy.copy(found)
    elif isinstance(found, type) and issubclass(found, Objective):
        if missing := sorted(getattr(found, "__abstractmethods__", ())):
            raise ConfigError("part.signature", f"{WHERE}={name}: lacks {_lines(missing)}")
        objective = make_part(WHERE, name, found, arguments)
    elif inspect.isfunction(found) or inspect.ismethod(found) or isinstance(found, partial):
        objective = FunctionObjective(found, check_arguments(WHERE, found, arguments, given=2))
    else:
        raise ConfigError(
            "part.signature",
            f"{WHERE}={name}: is {type(found).__name__ if not isinstance(found, type) else f'the class {found.__name__}'}; "
            "legal are a subclass of meshwright.Objective, and a function f(log_probs, batch) or f(logits, labels)",
        )
    if len(objective.weights) != len(objective.terms):
        many = f"{len(objective.terms)} terms and {len(objective.weights)} weights"
        raise ConfigError("part.signature", f"{WHERE}={name}: has {many}; each term has one")
    with calling(objective, "begin"):
        objective.begin(model, run)
    if objective.reference == PRECOMPUTED and REFERENCE in run.columns:
        words = f"rows have a column {REFERENCE}, and reference=precomputed computes it; leave one of them out"
        raise ConfigError("objective.reference", f"{WHERE}={name}: {words}")
    with calling(objective, "modules"), torch.device("meta"):
        added = objective.modules(model)
    if problems := module_problems(added):
        raise ConfigError([line.within(f"{WHERE}={name}: ") for line in problems])
    objective.added = dict(added)
    if objective.added:
        with without_added(model):
            if hasattr(model, ADDED):
                raise ConfigError("objective.modules", f"{WHERE}={name}: {class_name(model)} has a part {ADDED!r} of its own")
    try_objective(objective, model, run)
    return objective


def _lines(missing: list[str]) -> str:
    """Return the lines that a class lacks."""
    return ", ".join(f"`def {name}{inspect.signature(getattr(Objective, name))}`" for name in missing)
