"""Text to tokens to packed batches. Its state is one small value, Position, independent of the layout."""

from meshwright.data.corpus import Corpus, prepare
from meshwright.data.documents import Progress
from meshwright.data.loader import Loader
from meshwright.data.pack import Batch, Packed, Position
from meshwright.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_json

__all__ = [
    "Batch",
    "Corpus",
    "Loader",
    "Packed",
    "Position",
    "Progress",
    "Tokenizer",
    "load_tokenizer",
    "prepare",
    "tokenizer_from_json",
]
