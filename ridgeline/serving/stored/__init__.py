"""Files that clients uploaded, and batches: records and contents in a folder that survives the server."""
