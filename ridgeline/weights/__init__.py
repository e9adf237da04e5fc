"""A model's weights: found, read, checked, decoded, carried to the device, and converted to other files.

folder → formats/ (bytes of a file, without torch) → checkpoint, dequantize → loader, transfer. convert/ stands above.
"""
