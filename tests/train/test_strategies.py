"""The trainer takes spec and steps from the strategy of the model, in every process."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.distributed.data.fsdp_units import fsdp_units
from meshwright.errors import ConfigError, UnsupportedError
from meshwright.train.config import RunConfig, load_config
from meshwright.train.start.prepare import prepare_run
from meshwright.train.start.setup import make_setup
from tests.harness import run_ranks
from tests.train.runs import losses, train, trainer_on_rank

Tiny = Callable[..., RunConfig]

FAMILY = """
from dataclasses import replace
import meshwright as mw
from meshwright.models.specs.derived import derived_spec

carried_out = []

@mw.register_parallel_strategy("LlamaForCausalLM")
class Finer(mw.ParallelizationStrategy):
    def spec(self, model, param_dtype="bfloat16"):
        return replace(derived_spec(model, param_dtype), units=(mw.UnitRule("model.embed_tokens"),))

    def carry_out(self, model, plan, mesh):
        carried_out.append(plan.family)
        return super().carry_out(model, plan, mesh)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the working directory that registers a strategy. It is for processes forked from here, not for this one."""
    (tmp_path / "finer_llama.py").write_text(FAMILY)
    monkeypatch.chdir(tmp_path)
    return "finer_llama"


def test_spec_and_steps_are_those_of_the_strategy(tiny: Tiny, module: str) -> None:
    config = tiny()
    _, _, store = prepare_run(config, 2)

    def on_rank(rank: int) -> tuple[list[str], Any]:
        run = config.model_copy(update={"imports": [module]})
        trainer = trainer_on_rank(run, store.directory)
        return list(fsdp_units(trainer.model)), sys.modules[module].carried_out

    for units, carried_out in run_ranks(on_rank, 2):
        assert "model.embed_tokens" in units
        assert carried_out == ["LlamaForCausalLM"]


def test_a_strategy_that_parallelizes_by_itself_is_refused(tiny: Tiny, module: str) -> None:
    """A run would pass it over without a word."""
    own = "\n    def parallelize(self, model, device_mesh, **kwargs):\n        return model\n"
    Path("finer_llama.py").write_text(FAMILY + own)

    def on_rank(rank: int) -> None:
        with pytest.raises(UnsupportedError, match=r"Finer.parallelize: is overridden, but a run does not call it"):
            make_setup(tiny(f"imports=[{module}]"), 1)

    run_ranks(on_rank, 1)


@pytest.mark.thorough
def test_a_hybrid_of_mamba_trains_as_in_one_process(tiny: Tiny) -> None:
    """NemotronH, whose documents must not be packed."""
    model = (
        "model.config={model_type: nemotron_h, hidden_size: 32, intermediate_size: 48, num_attention_heads: 4, head_dim: 8, "
        "num_key_value_heads: 2, layers_block_type: [linear_attention, moe, full_attention, mlp], ssm_state_size: 8, "
        "mamba_num_heads: 4, mamba_head_dim: 8, n_groups: 2, chunk_size: 16, n_routed_experts: 4, moe_intermediate_size: 32, "
        "moe_shared_expert_intermediate_size: 32}"
    )
    found = []
    for name, ranks, layout in (("one", 1, "layout.tp=1"), ("two", 2, "layout.tp=2")):
        config = tiny(model, "data.packing=pad", layout, "training.steps=3", name=name)
        train(config, ranks)
        found.append(losses(config))
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[0][-1] < found[0][0]


def test_imports_are_a_list_of_names(tiny: Tiny, tmp_path: Path) -> None:
    config = tiny("imports=[absent_module]")  # nothing is imported where a configuration is only read
    assert load_config(_written(config, tmp_path)).imports == ["absent_module"]
    with pytest.raises(ConfigError, match=r"imports: 'absent_module' cannot be imported: ModuleNotFoundError"):
        make_setup(config, 1)
    with pytest.raises(ConfigError, match="imports='absent_module': input should be a valid list"):
        tiny("imports=absent_module")


def _written(config: RunConfig, folder: Path) -> Path:
    path = folder / "written.yaml"
    path.write_text(config.to_yaml())
    return path
