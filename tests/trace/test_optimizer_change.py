"""Where the state of the optimizer is what does not fit, moments of 8 bits are among the changes that help."""

import json
from pathlib import Path

import pytest

from meshwright.plan.cost.hardware import load_hardware
from meshwright.plan.cost.price import totals
from meshwright.trace.verdict import judge
from meshwright.train.config import RunConfig
from meshwright.train.start.setup import RunSetup, make_setup
from tests.harness import run_ranks


def setup_of(kind: str) -> RunSetup:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
    run = {
        "output": "runs/x",
        "model": {"config": {"model_type": "llama", **sizes}},
        "optimizer": {"kind": kind},
        "parallel": {"param_dtype": None, "activation_checkpointing": "full"},
        "data": {"files": ["drawn"], "sequence_length": 16},
        "training": {"steps": 1, "microbatch_size": 1, "global_batch_size": 1},
    }
    return make_setup(RunConfig.model_validate(run), 1)


@pytest.mark.thorough
def test_fewer_bits_are_offered_where_they_help(tmp_path: Path) -> None:
    def verdicts(_: int) -> tuple[int, list[tuple[str, ...]], int]:
        device = {**vars(load_hardware("h100")), "reserved_gib": 0}
        whole = judge(setup_of("adamw"), load_hardware("h100"))
        plain, small = (totals(setup_of(kind).plan).optimizer_bytes for kind in ("adamw", "adamw8bit"))
        peak = whole.peak_bytes - whole.parts["reserved"]
        # What fits with moments of 8 bits, and with nothing that concerns activations.
        limit = peak - (plain - small) // 2
        path = tmp_path / "device.yaml"
        path.write_text(json.dumps({**device, "memory_gib": limit / 2**30}))
        found = judge(setup_of("adamw"), load_hardware(str(path)))
        again = judge(setup_of("adamw8bit"), load_hardware(str(path)))
        return again.peak_bytes, [(*one.overrides, str(one.peak_bytes), str(one.fits)) for one in found.changes], limit

    ((peak, changes, limit),) = run_ranks(verdicts, 1, group=False)
    assert peak <= limit
    assert ("optimizer.kind=adamw8bit", str(peak), "True") in changes
