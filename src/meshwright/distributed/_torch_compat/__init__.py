"""Every private name of torch's distributed code (FSDP2, meshes, groups) that Meshwright touches, and some others.

:func:`check` looks up those in the tables of ``names.py``. Names that only pipelines or the report of a hang use are optional.
"""

from meshwright.errors import UnsupportedError

try:
    from meshwright.distributed._torch_compat.pipelines import *  # noqa: F403
    from meshwright.distributed._torch_compat.private_names import *  # noqa: F403
    from meshwright.distributed._torch_compat.process_groups import *  # noqa: F403
    from meshwright.distributed._torch_compat.runs import *  # noqa: F403
    from meshwright.distributed._torch_compat.tensors import *  # noqa: F403
    from meshwright.distributed._torch_compat.unit_state import *  # noqa: F403
except ImportError as error:
    raise UnsupportedError("torch.version", f"this torch lacks a name that Meshwright needs: {error}") from error
