"""Rows of words with a label each, such as names in a text. The first token of each word has its label."""

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from meshwright.data.rows.document import Tokens, Words
from meshwright.data.rows.labels import label_of
from meshwright.data.rows.row_files import Row
from meshwright.data.rows.turns import field_of, kind_of
from meshwright.data.rows.wanted import Labels
from meshwright.errors import ConfigError, DataError, number_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["WORD_LABELS", "tokens_of_words", "words_of"]

WORD_LABELS = "word_labels"
"""Column of the label of each token, int64: 1 more than the class, so that 0 is none."""


def words_of(row: Row, words: str, labels: str, legal: Labels) -> Words:
    """Return the words of a row and their classes.

    Args:
        row: the row.
        words: the field with a list of words.
        labels: the field with a list of as many labels: numbers, or names of labels.
        legal: what labels are.

    Raises:
        DataError: they are others; names file, line and field.
    """
    said, given = field_of(row, words, "columns"), field_of(row, labels, "columns")
    if not isinstance(said, list) or not said or not all(isinstance(word, str) and word for word in said):
        has = "a list of something else" if isinstance(said, list) else kind_of(said)
        raise DataError("data.words", f"{row.source}: field {words!a} is {has}; legal is a list of words, none of them empty")
    if not isinstance(given, list) or len(given) != len(said):
        has = number_of(len(given), "label") if isinstance(given, list) else kind_of(given)
        raise DataError(
            "data.words", f"{row.source}: field {labels!a} has {has} for {number_of(len(said), 'word')}; each has one"
        )
    each = [Row({labels: one}, f"{row.source}: word {number}") for number, one in enumerate(given, start=1)]
    return Words(said, [int(label_of(one, labels, legal)) for one in each])


def tokens_of_words(
    tokenizer: "PreTrainedTokenizerBase", words: Words, source: str
) -> tuple[Tokens, dict[str, npt.NDArray[Any]]]:
    """Return the tokens of words, and their labels as a column of the store.

    In a batch the column of a token is beside the token before it, where the token is the label. So the label of a token stands
    at the next one, and a last token without a label is added.

    Args:
        tokenizer: a fast tokenizer.
        words: the words.
        source: origin of the row, for messages.

    Raises:
        ConfigError: the tokenizer does not take words.
        DataError: no word gives a token.
    """
    try:
        encoded = tokenizer(words.words, is_split_into_words=True, add_special_tokens=True, truncation=False, verbose=False)
        places = encoded.word_ids()
    except Exception as error:  # some want add_prefix_space=True, others are not fast: there is no common class
        raise ConfigError("data.words", f"tokenizer: does not take texts word by word ({error}); use another one") from error
    ids: list[int] = list(encoded["input_ids"])
    end = next(one for one in (tokenizer.eos_token_id, tokenizer.pad_token_id, 0) if one is not None)
    labels, before = np.zeros(len(ids) + 1, np.int64), None
    for place, word in enumerate(places):
        if word is not None and word != before:
            labels[place + 1] = 1 + words.labels[word]
        before = word
    if not labels.any():
        raise DataError("data.words", f"{source}: the tokenizer gives no token for its words")
    return Tokens([*ids, int(end)], None, None), {WORD_LABELS: labels}
