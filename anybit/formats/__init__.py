"""The formats that come with anybit; importing this package registers them."""

from anybit.formats import codebook, integer, liquid, minifloat, sparse

__all__ = ["codebook", "integer", "liquid", "minifloat", "sparse"]
