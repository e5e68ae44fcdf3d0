"""From documents to microbatches: corpora, tokenizers, packing, resumable loaders.

Importing this package is light. Public names are loaded from their files on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.data.chat import encode_chat
    from meshwright.data.data_config import DataConfig
    from meshwright.data.index import StoreIndex
    from meshwright.data.loader import EvalLoader, TrainLoader, check_batch_sizes
    from meshwright.data.packing import IGNORE, SequenceDataset
    from meshwright.data.preparation import prepare
    from meshwright.data.rows.corpora import documents, eval_documents, training_texts
    from meshwright.data.rows.document import Document
    from meshwright.data.store import TokenStore
    from meshwright.data.tokenizer import build_tokenizer, load_tokenizer, train_tokenizer
    from meshwright.data.tokenizer_config import TokenizerConfig

__all__ = [
    "IGNORE",
    "DataConfig",
    "Document",
    "EvalLoader",
    "SequenceDataset",
    "StoreIndex",
    "TokenStore",
    "TokenizerConfig",
    "TrainLoader",
    "build_tokenizer",
    "check_batch_sizes",
    "documents",
    "encode_chat",
    "eval_documents",
    "load_tokenizer",
    "prepare",
    "train_tokenizer",
    "training_texts",
]

_FILES = {
    "chat": ("encode_chat",),
    "data_config": ("DataConfig",),
    "tokenizer_config": ("TokenizerConfig",),
    "rows.corpora": ("documents", "eval_documents", "training_texts"),
    "rows.document": ("Document",),
    "loader": ("EvalLoader", "TrainLoader", "check_batch_sizes"),
    "packing": ("IGNORE", "SequenceDataset"),
    "index": ("StoreIndex",),
    "preparation": ("prepare",),
    "store": ("TokenStore",),
    "tokenizer": ("build_tokenizer", "load_tokenizer", "train_tokenizer"),
}
_HOME = {name: file for file, names in _FILES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Load a public name from its file (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
