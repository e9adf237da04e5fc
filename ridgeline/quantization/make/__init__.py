"""Methods that make quantized weights from given ones."""
