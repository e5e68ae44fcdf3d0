"""A run with fewer layers and ranks, of which each rank holds the same of each layer's activations as in the whole run.

Layers of one kind hold the same, so a trace of some of them says what all of them hold. Shards of parameters depend on the
number of ranks, and are known in closed form; nothing else of a rank does, as long as tp, cp and ep stay.
"""

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from meshwright.layout import Layout
from meshwright.models.added_modules import add_modules
from meshwright.models.weights.build import build_on_meta
from meshwright.plan.given.closed_choices import PipelineSchedule
from meshwright.plan.given.options import ParallelOptions
from meshwright.plan.resolver import resolve
from meshwright.plan.result.alike_layers import alike_layers, places_in
from meshwright.plan.result.plan_rows import PlanRows
from meshwright.plan.result.sharding_plan import ROOT, ShardingPlan
from meshwright.shrink.kinds import with_layers
from meshwright.train.start.run_plan import with_canvases
from meshwright.train.start.setup import RunSetup, spec_of_run

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["kinds_of_layers", "layers_of_config", "options_of_fewer", "with_fewer", "world_of"]


def kinds_of_layers(plan: ShardingPlan) -> list[int]:
    """Return the kind of each layer, a number: layers of a kind have parameters of the same shapes, and the same units.

    That the last layer stays gathered after forward does not count: it does so in a run with fewer layers too. The kinds of an
    audit (:func:`meshwright.shrink.kinds.kinds_of`) are finer: a window makes another kind there, but holds the same here.
    """
    return plan.shared.once(_kinds_of_layers)


def _kinds_of_layers(rows: PlanRows) -> list[int]:
    alike, kinds = alike_layers(rows), dict[Any, int]()
    numbers = []
    for layer in alike.examples:
        shapes = frozenset((rest, row.shape, row.trainable) for rest, row in layer.parameters)
        units = frozenset((rest, unit.kind, unit.activation_checkpointing, unit.sync) for rest, unit in layer.units)
        numbers.append(kinds.setdefault((shapes, units), len(kinds)))
    return [numbers[kind] for kind in alike.kinds]


def layers_of_config(setup: RunSetup) -> int:
    """Return the number of layers in the config of a run's model; 0: it does not say."""
    section: Any = setup.model.config
    for part in setup.spec.sizes.get("layers", "").split("."):
        section = getattr(section, part, 0)
    return section if isinstance(section, int) else 0


def world_of(layout: Layout) -> Layout:
    """Return the smallest layout in which a rank computes the same: the same tp, cp and ep, and no stages."""
    replicas, inner = min(layout.size("dp_replicate"), 2), layout.size("cp") * layout.size("tp")
    least = 2 if layout.size("dp_shard") > 1 else 1
    sharded = next(
        size for size in range(least, layout.size("dp_shard") + 1)
        if layout.size("dp_shard") % size == 0 and size * inner % layout.ep == 0
        and (layout.ep == 1 or layout.ep_shard == 1 or size * inner > layout.ep)
    )  # fmt: skip
    return Layout(dp_replicate=replicas, dp_shard=sharded, cp=layout.size("cp"), tp=layout.size("tp"), ep=layout.ep).resolve(
        replicas * sharded * inner
    )


def options_of_fewer(setup: RunSetup, layers: int, *, compiled: bool = False) -> ParallelOptions:
    """Return the options of the plan of a run with the first layers of another one: its choices, written out layer by layer."""
    plan = setup.plan
    return replace(
        plan.options,
        **plan.shared.once(_choices_of_layers, layers),
        decay=(),
        no_decay=(),
        groups=(),
        updates=ParallelOptions().updates,
        microbatches=min(2, plan.options.microbatches),
        compile=compiled,
        loss_chunks=0 if plan.loss is None else plan.loss.chunks,
        pipeline_schedule=PipelineSchedule.ONE_F_ONE_B,
        stages_per_rank=None,
        pipeline_cuts=(),
        runs_per_step=1,
    )


def _choices_of_layers(rows: PlanRows, layers: int) -> dict[str, Any]:
    """Return the options that choose what the first layers do, and what is beside all layers."""
    units, left, places = rows.units_by_name, frozenset(rows.layers[layers:]), places_in(rows.layers)

    def stays(name: str) -> bool:
        return places[name][0] not in left

    return {
        "sync": units[ROOT].sync,
        "sync_units": {
            unit.name: unit.sync for unit in rows.units if unit.name != ROOT and not unit.part_of and stays(unit.name)
        },
        "activation_checkpointing_layers": {name: units[name].activation_checkpointing for name in rows.layers[:layers]},
        "freeze": tuple(row.name for row in rows.parameters if not row.trainable and stays(row.name)),
    }


def with_fewer(setup: RunSetup, layers: int, *, compiled: bool = False) -> RunSetup:
    """Return a run with the first layers of another one, in the smallest world. Its choices are those of the whole run.

    Its optimizer is AdamW for all parameters: what others keep is known in closed form, and torchao's cannot be traced.

    Args:
        setup: the run.
        layers: how many layers.
        compiled: whether its plan compiles layers.
    """
    layout, run = world_of(setup.layout), setup.config
    model = build_on_meta(
        run.model, _config(setup, layers), adapter=run.adapter, param_dtype=run.parallel.param_dtype, planning=True
    )
    spec = spec_of_run(run, model)
    spec = with_canvases(add_modules(spec, model, setup.objective.added, setup.objective.module_runs), setup.objective)
    small = resolve(spec, model, layout, options_of_fewer(setup, layers, compiled=compiled))
    config = run.model_copy(update={"optimizer": run.optimizer.as_adamw.model_copy(update={"groups": []})})
    return RunSetup(config, layout, model, spec, small, setup.objective)


def _config(setup: RunSetup, layers: int) -> "PretrainedConfig":
    """Return the config of the model with the first layers."""
    config = section = copy.deepcopy(setup.model.config)
    *path, name = setup.spec.sizes["layers"].split(".")
    for part in path:
        section = getattr(section, part)
    if layers != len(setup.plan.layers):
        values = {name: getattr(section, name), **vars(section)}
        for key, value in with_layers(values, name, range(layers)).items():
            setattr(section, key, value)
    return config
