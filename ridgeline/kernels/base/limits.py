"""Numbers on which ops and their callers agree."""

MAX_STOP_IDS = 64  # width of the stop table on the device, the model's own EOS ids included
MAX_LOGIT_BIAS = 1024  # width of the bias table on the device
NULL_BLOCK = 0  # the block of no token, which every table may name
