from tests.train.conftest import corpus, tiny

__all__ = ["corpus", "tiny"]
