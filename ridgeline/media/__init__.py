"""Pictures, video and sound: from a client's bytes to pixels, frames and samples. Free of torch."""
