"""Makes the config of a small model from that of a large one: each number is reduced by what its key means (:data:`RULES`)."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.models.model_config import ModelConfig
from meshwright.models.weights.build import legal_keys
from meshwright.shrink.kinds import lists_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["ALWAYS", "RULES", "Change", "Needs", "small_config"]

HIDDEN, VOCABULARY, POSITIONS = 64, 320, 128
"""Target sizes; a smaller original is kept."""


@dataclass(frozen=True)
class Change:
    """A change of the configuration.

    Args:
        key: the dotted key, such as ``model.config.hidden_size``.
        before: the value in the run.
        after: the value in the audit.
        why: the reason in a few words; may be empty.
    """

    key: str
    before: Any
    after: Any
    why: str = ""


@dataclass(frozen=True)
class Needs:
    """What layout and batch require of the small model: sizes of axes, number of pipeline stages, tokens in a sequence."""

    tp: int
    ep: int
    stages: int
    sequence: int
    shares_heads: bool = False
    """Whether several ranks of `tp` share a key/value head, in the run and therefore in its audit."""
    block: int = 1
    """Each rank has a multiple of so many numbers in the rows of its matrices."""


def small_config(
    source: ModelConfig, large: "PretrainedConfig", defaults: Mapping[str, Any], needs: Needs, kept: Sequence[int],
    count: int, rules: "_Rules",
) -> tuple[dict[str, Any], list[Change]]:  # fmt: skip
    """Return the config of the run's model, or of its pretrained model, with smaller numbers, and the changes.

    It has only keys that the family knows.

    Args:
        source: the ``model`` section of the run's configuration.
        large: the config of the large model.
        defaults: values for keys that the run's configuration leaves out.
        needs: what layout and batch require.
        kept: numbers of the layers that are kept.
        count: number of layers of the large model.
        rules: the rules for numbers.
    """
    config_values = {**defaults, **source.config} if source.config is not None else large.to_diff_dict()
    values = {"model_type": large.model_type, **_legal(type(large), config_values)}
    text = large.get_text_config()
    noted: list[Change] = []
    _rewrite(large, values, _Numbers(text, needs, kept, count), rules, "model.config", noted)
    return values, noted


def _rewrite(
    section: "PretrainedConfig", values: dict[str, Any], text: "_Numbers", rules: "_Rules", where: str, noted: list[Change]
) -> None:
    """Write the new numbers of a section of the config into ``values``, and those of inner sections into their values."""
    from transformers import PretrainedConfig

    complete = section.to_dict()
    sized = any(type(section).attribute_map.get(name, name) in complete for name in ("hidden_size", "embed_dim"))
    numbers = _Numbers(section, text.needs, text=text) if sized and section is not text.section else text
    inside = {key: value for key, value in complete.items() if key in _INSIDE and where != "model.config"}
    for key, before in {**_legal(type(section), complete), **inside}.items():
        if isinstance(inner := vars(section).get(key), PretrainedConfig):
            inner_values: dict[str, Any] = values.get(key) or {}
            kept = {name: value for name, value in inner_values.items() if name in _INSIDE}
            values[key] = {"model_type": inner.model_type, **kept, **_legal(type(inner), inner_values)}
            _rewrite(inner, values[key], text, rules, f"{where}.{key}", noted)
            continue
        after, why = numbers.new(key, before, rules)
        if after != before:
            values[key] = after
            noted.append(Change(f"{where}.{key}", before, after, why))


def _legal(kind: "type[PretrainedConfig]", values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are legal in a config of this class, under the names that it uses."""
    legal, spelled = legal_keys(kind), {}
    for key in sorted(legal):
        attribute = kind.attribute_map.get(key, key)
        spelled[key] = spelled[attribute] = attribute if attribute in legal else key
    return {spelled[key]: value for key, value in values.items() if key in spelled}


_INSIDE = {"model_type", "per_layer_config"}
"""Keys that inner sections may have beyond those of :func:`legal_keys`."""


class _Numbers:
    """The new numbers of one section of a config (text, vision, ...), by what their keys mean.

    Args:
        section: the section of the config.
        needs: what layout and batch require.
        kept: numbers of the layers that are kept; ``None``: the first two.
        count: number of layers of the language model; 0: read it from the section.
        text: the numbers of the language model, if this is another section.
    """

    def __init__(
        self, section: "PretrainedConfig", needs: Needs, kept: Sequence[int] | None = None, count: int = 0,
        text: "_Numbers | None" = None,
    ) -> None:  # fmt: skip
        values, names = section.to_dict(), type(section).attribute_map

        def number(*choices: str) -> int:
            numbers = [values.get(names.get(name, name)) for name in choices]
            return next((value for value in numbers if isinstance(value, int) and value), 0)

        self.section, self.needs, self.text = section, needs, text
        self.layers = count or number("num_hidden_layers", "depth")
        self.kept = range(min(2, self.layers)) if kept is None else kept
        self.rotary = "rope_parameters" in values
        self.ids: dict[int, int] = text.ids if text else {}
        self.heads = number("num_attention_heads", "num_heads") or 1
        self.kv = number("num_key_value_heads", "num_kv_heads") or self.heads
        if self.kv in (1, self.heads):
            self.new_heads = _least(self.heads, 4, needs.tp)
            self.new_kv = 1 if self.kv == 1 else self.new_heads
        elif needs.shares_heads:
            self.new_heads, self.new_kv = _least(self.heads, 4, needs.tp), max(1, needs.tp // 2)
        else:
            self.new_kv = _least(self.kv, 2, needs.tp)
            self.new_heads = min(self.heads, 2 * self.new_kv)
        # If heads x head size equals the hidden size (times Mamba's expansion), it stays so; otherwise the two stay different.
        self.hidden = number("hidden_size", "embed_dim") or HIDDEN
        expand = number("expand") or max(1, number("attention_hidden_size") // self.hidden)
        self.head_dim = number("head_dim") or max(1, self.hidden // self.heads)
        fills = self.hidden * expand == self.heads * self.head_dim
        self.new_head_dim = min(self.head_dim, 16 if (self.new_heads <= 4) == fills else 8)
        while self.new_heads * self.new_head_dim % (needs.tp * needs.block) and self.new_head_dim < self.head_dim:
            self.new_head_dim = min(self.head_dim, 2 * self.new_head_dim)
        hidden = _least(self.hidden, HIDDEN, needs.block)
        self.new_hidden = self.new_heads * self.new_head_dim // expand if fills else hidden
        # A group has at least two experts. If tokens are routed to some groups only, that stays so.
        self.groups, limit = number("n_group", "num_expert_group") or 1, number("topk_group") or 1
        self.new_limit = min(limit, 2)
        self.new_groups = min(self.groups, 2 * self.new_limit) if self.groups > limit else self.new_limit
        self.words, unit = number("vocab_size"), math.lcm(8, needs.tp)
        fewer = math.ceil(VOCABULARY / unit) * unit + self.words % 8
        self.new_words: int = text.new_words if text else fewer if self.words > 2 * VOCABULARY else self.words

    def new(self, key: str, value: Any, rules: "_Rules") -> tuple[Any, str]:
        """Return the new value of a key, and the reason."""
        if isinstance(value, (list, tuple)) and rules is RULES:
            return self.listed(key, list(value))
        if key == "per_layer_config" and rules is RULES:  # number of a layer, with leading zeros, to what differs in it
            entries = {str(self.kept.index(int(old))): entry for old, entry in value.items() if int(old) in self.kept}
            return {
                new: {name: self.new(name, item, rules)[0] for name, item in entry.items()} for new, entry in entries.items()
            }, ""
        if key in ("rope_parameters", "rope_scaling") and rules is RULES:
            return self.rope(key, value), ""
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
            for pattern, rule, why in rules:
                if re.fullmatch(pattern, key) and (isinstance(value, int) or rule is _zero):
                    return rule(self, key, value), why
        return value, ""

    def listed(self, key: str, value: list[Any]) -> tuple[list[Any], str]:
        numbers = all(isinstance(item, int) and not isinstance(item, bool) for item in value)
        if key == "attention_types":  # [[[kinds], repeats], ...]
            kinds = [kind for block, times in value for _ in range(times) for kind in block]
            return [[[kinds[index] for index in self.kept], 1]], ""
        if re.search(r"(layers|layer_ids|idxs|indexes)$", key) and numbers and value == sorted(set(value)):
            return [new for new, index in enumerate(self.kept) if index in value], "numbers of the layers that stay"
        if self.layers and lists_of({key: value}, self.layers):
            value = [value[index] for index in self.kept]
        return [self.new(key, item, RULES)[0] for item in value] if numbers else value, ""

    def rope(self, key: str, value: Any) -> Any:
        """Return the new value of a key of rope_parameters, which may hold one dictionary for each type of layer."""
        if isinstance(value, dict):
            return {name: self.rope(name, item) for name, item in value.items()}
        if isinstance(value, list):  # one factor for each rotary frequency, or counts that add up to their number: now fewer
            if key.endswith("section"):
                total = sum(value) * self.new_head_dim // self.head_dim
                parts = [item * total // sum(value) for item in value]
                return [total - sum(parts[1:]), *parts[1:]]
            length = max(1, len(value) * self.new_head_dim // self.head_dim)
            return [value[index * len(value) // length] for index in range(length)]
        if key == "partial_rotary_factor" and ((rotated := int(self.new_head_dim * value)) % 2 or not rotated):
            return max(2, rotated - 1) / self.new_head_dim
        return value

    # Rules: each returns the new value for a key and its value, which is above 0.

    def window(self, key: str, value: int) -> int:
        return value if self.text else min(value, max(2, self.needs.sequence // 4))

    def vocabulary(self, key: str, value: int) -> int:
        return self.new_words if value == self.words else min(value, self.new_words)

    def token(self, key: str, value: int) -> int:
        """Ids that are too large become the last ids of the small vocabulary: equal ones stay equal, others different."""
        return value if value < self.new_words else self.ids.setdefault(value, self.new_words - 1 - len(self.ids))

    def positions(self, key: str, value: int) -> int:
        """The size of a table of learned positions is reduced. Rotary embeddings depend on the number, so there it is kept."""
        return value if self.rotary else min(value, POSITIONS)

    def all_layers(self, key: str, value: int) -> int:
        return len(self.kept) if value == self.layers else value

    def first_layers(self, key: str, value: int) -> int:
        return sum(index < value for index in self.kept)

    def last_layers(self, key: str, value: int) -> int:
        return sum(index >= self.layers - value for index in self.kept)

    def experts(self, key: str, value: int) -> int:
        return _least(value, max(4, 2 * self.new_groups if self.groups > 1 else 4), math.lcm(self.needs.ep, self.new_groups))

    def expert_groups(self, key: str, value: int) -> int:
        return self.new_limit if key == "topk_group" else self.new_groups

    def head_size(self, key: str, value: int) -> int:
        return _least(value, value * self.new_head_dim // self.head_dim, 8)

    def head_count(self, key: str, value: int) -> int:
        if value in (1, self.heads):
            return 1 if value == 1 else self.new_heads
        if value == self.kv or "kv" in key or "key_value" in key:
            return min(value, self.new_kv)
        return max(2, value * self.new_heads // self.heads)  # several heads stay several

    def size(self, key: str, value: int) -> int:
        """Reduced in proportion to the hidden size, to a multiple of 8 (grouped_mm needs strides of 16 bytes) and of tp."""
        inner = re.search(r"intermediate|ffn|inner|ff", key)
        for numbers in (self, self.text):
            if numbers and value == numbers.hidden and not inner:
                return numbers.new_hidden
        if value == self.heads * self.head_dim and not inner:
            return self.new_heads * self.new_head_dim
        if value <= 16:
            return value
        unit = math.lcm(8, self.needs.tp * self.needs.block)
        new = _least(value, min(2 * HIDDEN, max(16, value * self.new_hidden // self.hidden)), unit)
        return new if new != self.new_hidden else _least(value, new + 1, unit)


def _least(value: int, at_least: int, unit: int) -> int:
    """Return the smallest multiple of ``unit`` that is at least ``at_least``, or ``value`` if that is smaller."""
    return min(value, max(1, math.ceil(at_least / unit)) * unit)


def _zero(numbers: _Numbers, key: str, value: float) -> float:
    return 0.0


def _at_most(most: int) -> Callable[[_Numbers, str, int], int]:
    return lambda numbers, key, value: min(value, most)


_Rules = tuple[tuple[str, Callable[[_Numbers, str, Any], Any], str], ...]
"""Pattern of the key, rule, reason. The first pattern that matches counts."""

ALWAYS: _Rules = (
    (r".*(dropout|pdrop|layerdrop|drop_path|jitter).*", _zero, "masks of one process cannot be those of N"),
    (r".*(sliding_window|window_size|local_attention|attention_chunk_size|index_topk)", _Numbers.window, "below the sequence"),
)
"""Rules for every model."""

RULES: _Rules = (
    *ALWAYS,
    (r".*vocab_size.*", _Numbers.vocabulary, "the same remainder modulo 8"),
    (r".*_token_(id|ids|index)", _Numbers.token, "inside the vocabulary"),
    (r".*position_embeddings|n_positions|n_ctx|max_seq_len", _Numbers.positions, ""),
    (r"first_k_dense_replace|num_dense_layers|max_window_layers|moe_layer_start_index", _Numbers.first_layers, ""),
    (r"num_kv_shared_layers", _Numbers.last_layers, ""),
    (r"(.*_)?layers?(_per_stack)?|num_blocks|depth", _Numbers.all_layers, "every kind of layer"),
    (r"topk_group|n_group|num_expert_group", _Numbers.expert_groups, ""),
    (r".*experts_per_tok(en)?|moe_k|moe_top_?k|top_k_experts|.*shared_experts|.*n_groups", _at_most(2), ""),
    (r".*experts|zero_expert_num", _Numbers.experts, ""),
    (r".*(head_dim|head_size|kv_channels|d_kv|d_head|dim_head|rotary_dim)", _Numbers.head_size, ""),
    (r".*heads(_per_layer)?|n_head", _Numbers.head_count, ""),
    (r".*rank", _at_most(8), ""),
    (r".*(d_state|state_size|chunk_size)|block_size", _at_most(16), ""),
    (r"(hidden|intermediate|ffn|embed|shared_|moe_|expert).*|.*_(intermediate|ffn|hidden)_.*|.*(d_ff|dff|n_inner|d_inner|n_embd"
     r"|d_model|_dim|_width)", _Numbers.size, ""),
)  # fmt: skip
"""Rules for a model that is shrunk."""
