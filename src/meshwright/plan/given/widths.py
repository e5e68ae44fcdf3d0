"""How many features the tensors have that enter and leave modules, read from the shapes of parameters."""

from meshwright.plan.draft import Draft

__all__ = ["experts_width", "module_widths", "stream_width"]


def stream_width(draft: Draft) -> int:
    """Return the features of what a layer takes and returns: those of its norms, or else those of the first matrix."""
    modules = draft.model.modules
    for layer in draft.layers:
        for name in draft.model.children(layer):
            shapes = list(modules[name].parameters.values())
            if shapes and not modules[name].children and all(len(shape) == 1 for shape in shapes):
                return shapes[0][0]
    return next((parameter.shape[-1] for parameter in draft.parameters if len(parameter.shape) >= 2), 0)


def experts_width(draft: Draft, name: str) -> int:
    """Return the features of a token as it enters a mixture: less than those of the stream if experts work on a latent."""
    experts = draft.model.modules[name]
    shape = next((shape for shape in experts.parameters.values() if len(shape) == 3), None)
    return stream_width(draft) if shape is None else shape[1 if experts.transposed else 2]


def module_widths(draft: Draft, name: str, stream: int) -> tuple[int, int]:
    """Return the features that enter a module, and those that leave it, over all ranks; those of the stream if unknown.

    Token ids enter an embedding, which are one feature.
    """
    modules = draft.model.modules
    module = modules.get(f"{name}.base_layer", modules[name])  # peft puts a module around a matrix and its adapter
    shape = module.parameters.get("weight", ())
    if len(shape) < 2:
        experts = any(len(own) == 3 for own in module.parameters.values())
        width = experts_width(draft, name) if experts else stream
        return width, width
    if module.embedding:
        return 1, shape[-1]
    return (shape[0], shape[1]) if module.transposed else (shape[1], shape[0])
