"""Why a model type is refused on an axis: the kinds of refusals, with the codes that each has and a sentence for it."""

__all__ = ["CODES", "EXPLAINED", "OTHER", "reason_of"]

OTHER = "other"

_REASONS = (
    ("unbuilt", "model.build model.config.refused", "transformers cannot build the model from its default config."),
    ("encoder", "model.encoder",
     "the model predicts no next token: it has no causal attention, or it continues a text that another model has read."),
    ("dense", "ep.dense", "the model has no experts."),
    ("experts", "ep.experts", "the number of experts has no divisor that the axis could be."),
    ("float64", "worker.overflow",
     "the model cannot compute in float64, in which an audit computes, or measures the rounding of float32."),
    ("nested", "model.config.unknown_key",
     "the config of its language model is nested in a way that `model.config` cannot name."),
    ("initial", "model.initial_values",
     "transformers gives some parameters no initial value, so a new model cannot be trained; a pretrained one can."),
    ("shrink", "shrink.model", "no small model of its structure can be made; `--full` audits it as it is."),
    ("empty", "fsdp.empty", "the model has parameters without entries, which FSDP cannot store."),
    ("dtypes", "fsdp.dtypes",
     "the model stores parameters of one layer in several dtypes, and FSDP gathers them as one buffer."),
    ("random", "audit.random",
     "the model draws random numbers in training whatever its config says, so that no two runs of it agree."),
    ("heads", "tp.heads tp.entries tp.packed cp.heads",
     "the number of heads, or of what else is sliced, has no divisor that the axis could be."),
    ("styles", "tp.no_styles",
     "the model declares no tensor parallel plan, and its layers have no pair of matrices that can be sliced."),
    ("style", "tp.style.unknown tp.style.missing tp.style.misfit tp.style.tied",
     "the model declares a tensor parallel plan that is incomplete, or has a style that Meshwright lacks."),
    ("structure", "sp.structure", "nothing says which modules need the whole sequence."),
    ("sequence", "sp.module sp.regions sp.stream sp.stacks",
     "something between attention and MLP needs the whole sequence, such as an embedding that each layer adds, or the stream "
     "is not [rows, positions, ...]."),
    ("state", "cp.state",
     "a layer carries a state from token to token (Mamba, linear attention, a convolution), or moves tokens itself."),
    ("own attention", "cp.mixes_tokens cp.mask",
     "the model computes attention or its mask itself, and has no cache by which it could get the keys of other ranks."),
    ("positions", "cp.positions",
     "the model computes with positions of its own that are not those of its tokens, one after another."),
    ("twice", "cp.twice pp.twice", "a layer runs twice in one forward."),
    ("values", "model.values", "what the forward calls depends on values, so it cannot be read without them."),
    ("reads more", "pp.reads_more",
     "a layer reads more of earlier stages than its hidden state, and what its call gives it for each position."),
    ("cut", "pp.cut pp.ends pp.halves pp.hidden_state pp.layers pp.outside",
     "the model cannot be cut between its layers for another reason, which the plan names."),
)  # fmt: skip
"""Key, the codes of its refusals (of :mod:`meshwright.error_codes`, or ``audit.`` and the kind of a finding), sentence."""

CODES = {code: key for key, codes, _ in _REASONS for code in codes.split()}
"""Code to the key of its reason."""

EXPLAINED = {**{key: sentence for key, _, sentence in _REASONS}, OTHER: "none of these; `meshwright plan` says it in full."}


def reason_of(code: str) -> str:
    """Return the key of the reason that a refusal has."""
    return CODES.get(code, OTHER)
