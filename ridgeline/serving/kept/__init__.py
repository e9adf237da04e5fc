"""The room for answers that are kept, so that clients can ask for them again and go on from them."""
