"""The formats that come with anybit; importing this package registers them."""

from anybit.formats import (
    codebook,
    integer,
    iquant,
    kquant,
    liquid,
    microscaling,
    minifloat,
    sparse,
    table4,
    trellis,
)

__all__ = [
    "codebook",
    "integer",
    "iquant",
    "kquant",
    "liquid",
    "microscaling",
    "minifloat",
    "sparse",
    "table4",
    "trellis",
]
