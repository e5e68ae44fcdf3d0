"""Every private name of torch that Meshwright touches, and nothing else. :func:`check` looks all of them up at start-up."""

from meshwright.errors import UnsupportedError

try:
    from meshwright.distributed._torch_compat.names import *  # noqa: F403
    from meshwright.distributed._torch_compat.pipelines import *  # noqa: F403
    from meshwright.distributed._torch_compat.process_groups import *  # noqa: F403
    from meshwright.distributed._torch_compat.runs import *  # noqa: F403
    from meshwright.distributed._torch_compat.tensors import *  # noqa: F403
    from meshwright.distributed._torch_compat.units import *  # noqa: F403
except ImportError as error:
    raise UnsupportedError(f"this torch lacks a name that Meshwright needs: {error}") from error
