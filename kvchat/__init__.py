"""kvchat answers questions about whole documents with a local model whose keys and values are kept in 2, 3 or 4 bits."""

__version__ = "0.1.0"
