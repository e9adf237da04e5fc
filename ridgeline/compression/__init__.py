"""Making of quantized models: a folder of 16-bit weights in, a folder of fewer bits out, which vLLM and transformers
load as well as we do.

In the order of the work: `schemes` says what may be asked for, `calibration` reads a text, `walk` goes through the
layers, `folding` moves factors between them, `rounding` applies the methods of `quantization/make`, `budget` chooses
bits, `writers` and `folder` write.
"""
