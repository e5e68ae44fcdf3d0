"""A façade: the names that NeMo AutoModel has here (docs/from-automodel.md). Nothing else in Meshwright imports it."""

from meshwright.distributed.conductor import parallelize
from meshwright.models.families.nemotron_h import NemotronHParallelizationStrategy
from meshwright.models.families.wan import WanParallelizationStrategy
from meshwright.models.specs.derived import DefaultParallelizationStrategy
from meshwright.models.specs.registry import (
    PARALLELIZATION_STRATEGIES,
    get_parallelization_strategy,
    register_parallel_strategy,
)
from meshwright.models.specs.strategy import ParallelizationStrategy
from meshwright.nemo.functions import (
    apply_fsdp2_sharding_recursively,
    fsdp2_strategy_parallelize,
    get_lm_ac_layers,
    unshard_fsdp2_model,
)
from meshwright.nemo.megatron_fsdp import (
    HAVE_MEGATRON_FSDP,
    HAVE_NVFSDP,
    megatron_fsdp_strategy_parallelize,
    nvfsdp_strategy_parallelize,
)
from meshwright.nemo.tp_plans import (
    _get_parallel_plan,
    get_hf_tp_shard_plan,
    import_class_from_path,
    import_classes_from_paths,
    translate_to_torch_parallel_style,
    validate_tp_mesh,
)

__all__ = [
    "HAVE_MEGATRON_FSDP",
    "HAVE_NVFSDP",
    "PARALLELIZATION_STRATEGIES",
    "DefaultParallelizationStrategy",
    "NemotronHParallelizationStrategy",
    "ParallelizationStrategy",
    "WanParallelizationStrategy",
    "_get_parallel_plan",
    "apply_fsdp2_sharding_recursively",
    "fsdp2_strategy_parallelize",
    "get_hf_tp_shard_plan",
    "get_lm_ac_layers",
    "get_parallelization_strategy",
    "import_class_from_path",
    "import_classes_from_paths",
    "megatron_fsdp_strategy_parallelize",
    "nvfsdp_strategy_parallelize",
    "parallelize",
    "register_parallel_strategy",
    "translate_to_torch_parallel_style",
    "unshard_fsdp2_model",
    "validate_tp_mesh",
]
