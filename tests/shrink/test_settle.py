"""A small audit is of what the large run relies on: the same policies, the same claim."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from meshwright.audit.ready import make_ready
from meshwright.shrink.run import shrink
from meshwright.shrink.settle import copy_policies
from meshwright.train.proofs.claim import claim_of, model_digest
from meshwright.train.start.setup import make_setup
from tests.shrink.test_run import FAMILIES, LLAMA, QWEN3_MOE, run_config, with_vocabulary


def settled(model: dict[str, Any], **sections: Any) -> tuple[dict[str, str], dict[str, str], dict[str, Any]]:
    """Policies by kind of unit in the run and in its audit, and what was changed for that."""
    config = run_config(with_vocabulary(model), **sections)
    small, world, _ = shrink(config)
    settled, changes = copy_policies(config, small, make_setup(small, world))
    plans = make_setup(config, 64).plan, make_setup(settled, world).plan
    large, audited = ({unit.kind: str(unit.sync) for unit in plan.units} for plan in plans)
    return large, audited, {change.key: change.after for change in changes}


@pytest.mark.thorough
def test_an_audit_has_the_policies_that_the_size_of_the_run_decides() -> None:
    batch = {"training": {"global_batch_size": 128}}
    large, audited, changes = settled(LLAMA, parallel={"sync_budget_gib": 1.0}, **batch)
    assert large == audited == {"root": "reduce_each", "layer": "reduce_each"}
    assert changes == {"parallel.sync": "reduce_each"}
    large, audited, changes = settled(QWEN3_MOE, layout={"ep": 4}, **batch)
    assert large == audited == {"root": "defer", "layer": "defer", "experts": "reduce_each"}
    assert changes["parallel.sync_units"] == {"model.layers.*.mlp.experts": "reduce_each"}
    assert settled(LLAMA, parallel={"sync": "defer"}, **batch)[2] == {}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("llama-3.1-8b", {}),
        ("llama-3.1-8b", {"tp": 2, "dp_replicate": 2}),
        ("llama-3.1-8b", {"tp": 16}),  # two ranks share a head
        ("qwen3-30b", {"tp": 2, "ep": 4}),
        ("qwen3-moe-some-dense", {"ep": 4}),
        ("qwen3-30b", {"dp_replicate": 4, "ep": 16, "dp_shard": 16}),
        ("gemma3-1b", {}),
        ("gpt-oss-20b", {"tp": 4}),
        ("mamba2", {"dp_replicate": 2}),
    ],
    ids=str,
)
def test_what_is_audited_is_what_the_run_relies_on(name: str, layout: dict[str, int], tmp_path: Path) -> None:
    """Though sizes, axes, dtypes and layers are fewer or others."""
    parallel = {"activation_checkpointing": "full"}
    batch = {"global_batch_size": 128}
    config = run_config(with_vocabulary(FAMILIES[name]), layout=layout, parallel=parallel, training=batch)
    small, world, _ = shrink(config)
    ready, _ = make_ready(small, "float64", 1, tmp_path)
    ready, _ = copy_policies(config, ready, make_setup(ready, world))
    audited, run = (claim_of(make_setup(*of)) for of in ((ready, world), (config, 64)))
    # Of shared heads the small model may have one, not some; so the record has the digest of the run's.
    assert replace(audited, model=run.model) == run
    digests = {
        model_digest(setup.spec, setup.model, with_heads=False) for setup in (make_setup(ready, world), make_setup(config, 64))
    }
    assert len(digests) == 1
