"""The sizes of what models of sound read, as Whisper has them."""

RATE, FRAME, HOP = 16_000, 400, 160  # samples a second, of a frame, and from one frame to the next
