"""Why a model type is refused on an axis: the kinds of refusals, with a sentence for each."""

import re

__all__ = ["EXPLAINED", "OTHER", "reason_of"]

OTHER = "other"

_REASONS = (
    ("unbuilt", r"^model: |^model\.config: .* refuses it",
     "transformers cannot build the model from its default config."),
    ("encoder", r"is an encoder",
     "the model predicts no next token: it has no causal attention, or it continues a text that another model has read."),
    ("dense", r"declares no experts", "the model has no experts."),
    ("experts", r"experts? (are divisible|cannot be divided) by|declares experts",
     "the number of experts has no divisor that the axis could be."),
    ("float64", r"without overflow",
     "the model cannot compute in float64, in which an audit computes, or measures the rounding of float32."),
    ("nested", r"unknown key of",
     "the config of its language model is nested in a way that `model.config` cannot name."),
    ("initial", r"leaves without an initial value",
     "transformers gives some parameters no initial value, so a new model cannot be trained; a pretrained one can."),
    ("shrink", r"cannot be shrunk", "no small model of its structure can be made; `--full` audits it as it is."),
    ("empty", r"parameter without entries", "the model has parameters without entries, which FSDP cannot store."),
    ("dtypes", r"mixes stored dtypes",
     "the model stores parameters of one layer in several dtypes, and FSDP gathers them as one buffer."),
    ("random", r"drew random numbers",
     "the model draws random numbers in training whatever its config says, so that no two runs of it agree."),
    ("heads", r"heads are divisible by|heads? .*divide|entries to slice, too few",
     "the number of heads, or of what else is sliced, has no divisor that the axis could be."),
    ("styles", r"there are no styles",
     "the model declares no tensor parallel plan, and its layers have no pair of matrices that can be sliced."),
    ("style", r"the style .* is not supported|has no style|has the style|is sliced \(",
     "the model declares a tensor parallel plan that is incomplete, or has a style that Meshwright lacks."),
    ("structure", r"does not say which modules need the whole sequence",
     "nothing says which modules need the whole sequence."),
    ("sequence", r"sequence_parallel=True:",
     "a module outside of attention and MLP needs the whole sequence: a state that goes from token to token, or an embedding "
     "that each layer adds."),
    ("state", r"mixes tokens outside of an attention \(aten\.(convolution|constant_pad|slice|select|flip|roll|cat|index)",
     "a layer carries a state from token to token (Mamba, linear attention, a convolution), or moves tokens itself."),
    ("own attention",
     r"mixes tokens outside of an attention|has a mask (of its own|under|that)|changes its mask|has no mask that|has a window",
     "the model computes attention or its mask itself, where nothing can be put in its place."),
    ("positions", r"position_ids|positions of its own|largest position",
     "the model counts positions itself, or does not tell its attention the positions of its tokens."),
    ("twice", r"runs twice", "a layer runs twice in one forward."),
    ("values", r"cannot be traced without values",
     "what the forward calls depends on values, so it cannot be read without them."),
    ("parts", r"has parts beside its language model",
     "the model has an image or audio tower, and stages run the layers of the language model alone."),
    ("reads more", r"reads more than its hidden state|is not the output of",
     "a layer reads more than the hidden state of the layer before it, which alone crosses a cut between stages."),
    ("cut", r"do not run; the legal value of pp|used by no stage|runs after the last layer|layers make at most|pp=",
     "the model cannot be cut between its layers for another reason, which the plan names."),
)  # fmt: skip
"""Key, pattern of the message, sentence. The first pattern that is found counts."""

EXPLAINED = {**{key: sentence for key, _, sentence in _REASONS}, OTHER: "none of these; `meshwright plan` says it in full."}


def reason_of(note: str) -> str:
    """Return the key of the reason that a refusal has."""
    return next((key for key, pattern, _ in _REASONS if re.search(pattern, note)), OTHER)
