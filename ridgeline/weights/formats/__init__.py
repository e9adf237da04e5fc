"""Files of other projects, read byte by byte with the standard library alone: nothing in them can run."""
