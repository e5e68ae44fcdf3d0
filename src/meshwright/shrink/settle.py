"""Gives an audit the sync policies and twin units that the run's plan chose by the size of the run's own model.

Without an explicit setting, a run keeps unsharded through a step what fits `parallel.sync_budget_gib`. Of a small model,
everything fits. So the policies that the plan chooses for the run's own model are written into the configuration of the small
one.
"""

from math import prod
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.layout import AXES
from meshwright.plan.given.inspection import model_sizes
from meshwright.plan.resolver import resolve
from meshwright.plan.result.sharding_plan import ShardingPlan
from meshwright.shrink.small_config import Change
from meshwright.train.config import RunConfig
from meshwright.train.proofs.claim import axes_above_1
from meshwright.train.start.setup import RunSetup, describe_run

__all__ = ["copy_policies"]


def copy_policies(config: RunConfig, small: RunConfig, setup: RunSetup) -> tuple[RunConfig, tuple[Change, ...]]:
    """Return the small configuration with the policies of the large run, and what this changed.

    Args:
        config: configuration of the run.
        small: configuration of its audit.
        setup: the resolved audit.
    """
    parallel = small.parallel
    if parallel.sync is not None and parallel.twin_units is not None:
        return small, ()
    large = _large_plan(config, setup)
    if large is None:
        return small, ()
    changed: dict[str, Any] = {}
    if parallel.sync is None and _policies(large) != _policies(setup.plan):
        policies = _policies(large)
        changed["sync"] = policies["root"]
        if (experts := policies.get("experts", policies["root"])) != policies["root"]:
            changed["sync_units"] = {**{rule.pattern: experts for rule in setup.spec.experts}, **parallel.sync_units}
    twins = any(unit.twin_of for unit in large.units)
    if parallel.twin_units is None and twins != any(unit.twin_of for unit in setup.plan.units):
        changed["twin_units"] = twins
    changes = [
        Change(f"parallel.{key}", getattr(parallel, key), value, "as the run's model, of its size, has it")
        for key, value in changed.items()
    ]
    return small.model_copy(update={"parallel": parallel.model_copy(update=changed)}), tuple(changes)


def _policies(plan: ShardingPlan) -> dict[str, Any]:
    return {unit.kind: unit.sync for unit in reversed(plan.units)}


def _large_plan(config: RunConfig, setup: RunSetup) -> ShardingPlan | None:
    """Return the plan of the run's own model, with the axes above 1 that the audit has; ``None``: no world size gives them.

    The world size is ``launch.nproc`` if it is set and gives these axes; otherwise the smallest multiple, of the product of the
    configured sizes, that gives them.
    """
    spec, model = describe_run(config)
    layout, sizes = config.layout.layout(), model_sizes(spec, model)
    least = prod(size for axis in AXES if (size := getattr(layout, axis)) not in (None, -1))
    options = config.parallel.options(setup.plan.options.microbatches)
    for world_size in (config.launch.nproc or least, *(count * least for count in range(1, 2 * layout.ep + 1))):
        try:
            resolved = layout.resolve(world_size, sizes)
            if axes_above_1(resolved) == axes_above_1(setup.layout):
                return resolve(spec, model, resolved, options)
        except MeshwrightError:
            continue
    return None
