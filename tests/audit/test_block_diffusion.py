"""Block diffusion on two ranks against one process: both losses, every gradient, and the noise of every sequence."""

from pathlib import Path

import pytest

from meshwright.audit.conduct import audit
from tests.diffusion_gemma import RUN
from tests.train.conftest import corpus
from tests.train.runs import tiny_run

__all__ = ["corpus"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["dp_shard=2", "dp_replicate=2 dp_shard=1"], ids=["shard 2", "replicate 2"])
@pytest.mark.parametrize(
    "options",
    [
        ("float64", "diffusion.encoder_loss_weight=0.5"),
        ("float64", "diffusion.encoder_loss_weight=0", "diffusion.mode=one_block"),
        ("float32", "diffusion.freeze_router=true", "model.attn_implementation=eager"),
        ("bfloat16", "parallel.output_dtype=float32"),
    ],
    ids=["all blocks", "one block, no encoder loss", "routers frozen", "outputs in fp32"],
)
def test_two_ranks_compute_what_one_process_does(tmp_path: Path, corpus: Path, layout: str, options: tuple[str, ...]) -> None:
    dtype, *overrides = options
    config = tiny_run(tmp_path, corpus, *RUN, *(f"layout.{size}" for size in layout.split()), *overrides)
    report = audit(config, nproc=2, dtype=dtype, full=True)
    assert report.passed, report.verdict
