"""Number formats: what they are (``catalog``, no torch) and what they do to a tensor (``quantizer``)."""
