"""Meshwright: N-dimensional parallel training from one declarative plan.

Names are imported on first use, so that ``import meshwright`` costs next to nothing.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Callback": "train.callbacks.callback",
    "Engine": "train.engine.own_loop",
    "GradSync": "distributed.data.grad_sync",
    "Layout": "layout",
    "MeshwrightError": "errors",
    "MetricSink": "train.metrics",
    "ModelSizes": "layout",
    "Objective": "models.objective",
    "ParallelMesh": "distributed.mesh",
    "ParallelOptions": "plan.given.options",
    "ParallelSpec": "plan.given.spec",
    "ParallelizationStrategy": "models.specs.strategy",
    "Pipeline": "models.pipeline_by_hand",
    "Run": "from_python",
    "ShardingPlan": "plan.result.sharding_plan",
    "SyncPolicy": "plan.given.options",
    "UnitRule": "plan.given.spec",
    "build_mesh": "distributed.mesh",
    "clip_grad_norm_": "distributed.update.grad_clip",
    "context_parallel": "distributed.context.sequences",
    "get_parallelization_strategy": "models.specs.registry",
    "parallelize": "distributed.conductor",
    "register_parallel_strategy": "models.specs.registry",
    "resolve": "plan.resolver",
    "spec_of": "models.specs.registry",
}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    return getattr(import_module(f"meshwright.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
